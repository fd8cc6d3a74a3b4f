"""How many steps a second an environment takes without a model: `ToolEnv` beside its peers, on one core.

Each contender runs in a process of its own, and in turn, round by round, so that whatever else the machine does meets all of them. The peers
are installed from their packages, each into a virtual environment of its own under `--peers-dir`; without that option only art_gym runs.

What a step does differs, and the table says how: ours reads a tool call's JSON, checks it against the schema and answers it with its id; the
peers search a text for a number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HARNESS = """
import importlib.metadata, json, os, sys, time

if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
SETUP
seconds, steps = float(sys.argv[1]), 0
for _ in range(2_000):
    step()
begin = time.perf_counter()
while time.perf_counter() - begin < seconds:
    for _ in range(500):
        step()
    steps += 500
print(json.dumps({"rate": steps / (time.perf_counter() - begin), "version": importlib.metadata.version("PACKAGE")}))
"""

OURS = """
from art_gym import call
from art_gym_envs import GuessNumber

env = GuessNumber(max_turns=MAX_TURNS)
env.reset(seed=0)
action = call("guess", number=1 if env.secret != 1 else 2)
"""

ONE_EPISODE = """
def step():
    env.step(action)
"""

EPISODES = """
def step():
    _, _, terminated, truncated, _ = env.step(action)
    if terminated or truncated:
        env.reset()
"""

GEM = r"""
from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

env = GuessTheNumberEnv(min_number=1, max_number=16, max_turns=10**9)
env.reset(seed=0)
action = r"\boxed{%d}" % (1 if env.game_number != 1 else 2)
"""

SKYRL = """
import skyrl_gym
from omegaconf import DictConfig

extras = {"reward_spec": {"ground_truth": "42"}, "max_turns": 10**9}
env = skyrl_gym.make("gsm8k_multi_turn", env_config=DictConfig({}), extras=extras)
env.init([{"role": "user", "content": "6 * 7?"}])
action = "#### 41"
"""

TEXTARENA = """
import textarena

env = textarena.make("GuessTheNumber-v0")
env.reset(num_players=1, seed=0)
env.get_observation()
guesses = 0

def step():
    global guesses
    guesses += 1
    done, _ = env.step(action=f"[{guesses}]")
    if done or guesses == 5:
        env.reset(num_players=1)
        guesses = 0
    env.get_observation()
"""


@dataclass(frozen=True)
class Contender:
    """A package, and the program that defines `step()` for one of its environments."""

    name: str
    package: str
    does: str
    setup: str
    peer: bool = True

    @property
    def program(self) -> str:
        return HARNESS.replace("SETUP", self.setup).replace("PACKAGE", self.package)


CONTENDERS = (
    Contender(
        "art_gym GuessNumber",
        "art-gym",
        "a tool call's JSON, its schema, its answer by id",
        OURS.replace("MAX_TURNS", "10**9") + ONE_EPISODE,
        peer=False,
    ),
    Contender(
        "art_gym GuessNumber, 5 turns",
        "art-gym",
        "the same, and a reset every 5 steps",
        OURS.replace("MAX_TURNS", "5") + EPISODES,
        peer=False,
    ),
    Contender("GEM GuessTheNumber", "gem-llm", "a pattern for the last boxed number", GEM + ONE_EPISODE),
    Contender("skyrl-gym gsm8k_multi_turn", "skyrl-gym", "a pattern for the number after ####", SKYRL + ONE_EPISODE),
    Contender("TextArena GuessTheNumber, 5 turns", "textarena", "a pattern for a number in brackets; a reset every 5 steps", TEXTARENA),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, help="where the peers' virtual environments are, or are made (about 700 MB)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each contender runs (default 7)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each run takes (default 1)")
    options = parser.parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        parser.error("--rounds must be at least 1, and --seconds more than 0")
    interpreters = {
        contender: _interpreter(contender, options.peers_dir) for contender in CONTENDERS if options.peers_dir or not contender.peer
    }
    rates: dict[Contender, list[float]] = {contender: [] for contender in interpreters}
    versions = {}
    for number in range(options.rounds):
        for contender, interpreter in interpreters.items():
            measured = _run(interpreter, contender, options.seconds)
            rates[contender].append(measured["rate"])
            versions[contender] = measured["version"]
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print(_table(rates, versions))


def _interpreter(contender: Contender, folder: Path | None) -> Path:
    """Return the interpreter that has the contender's package; a peer's is made if it isn't there yet."""
    if folder is None or not contender.peer:
        return Path(sys.executable)
    home = folder / contender.package
    interpreter = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not (home / "installed").exists():
        print(f"installing {contender.package} into {home}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", contender.package], check=True)
        (home / "installed").touch()
    return interpreter


def _run(interpreter: Path, contender: Contender, seconds: float) -> dict[str, float]:
    run = subprocess.run([interpreter, "-c", contender.program, str(seconds)], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{contender.name} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]  # what the harness prints


def _table(rates: dict[Contender, list[float]], versions: dict[Contender, float]) -> str:
    first = statistics.median(next(iter(rates.values())))
    lines = [
        "| environment | version | a step reads | steps/s, median | lowest–highest | µs a step | against the first |",
        "|---|---|---|---|---|---|---|",
    ]
    for contender, measured in rates.items():
        rate = statistics.median(measured)
        spread = f"{min(measured):,.0f}–{max(measured):,.0f}"
        lines.append(
            f"| {contender.name} | {versions[contender]} | {contender.does} | {rate:,.0f} | {spread} | {1e6 / rate:.2f} | {rate / first:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
