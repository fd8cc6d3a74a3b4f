"""What the runner costs beside a server: CPU per turn against plain loops and a peer, ten thousand episodes at once, and memory over many.

    python tests/benchmarks/rollout_overhead.py [--only cpu flight stream] [--verifiers-python PATH] [--vllm]

The server is scripted (`rollout/mock_server.py`), sends the token ids and logprobs that vLLM sends, and has a core of its own; the client has
another one. Every figure is of a process of its own. CPU is of the whole client process with all its threads, per turn: for art_gym the
validated call, the recorded turn and the journal on disk are in it. Contenders run in turn, round by round, so that whatever else the machine
does meets all of them; the table has medians. For verifiers name the interpreter of an environment that has it:

    python -m venv /tmp/verifiers && /tmp/verifiers/bin/pip install 'verifiers<0.4'

`--vllm` measures against a real server instead, with the bundled model on this machine's CPU (`rollout/real_server.py`).

Nothing fails when a target is missed: figures depend on the machine. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout.mock_server import MockServer

HERE = Path(__file__).parent
LATENCY = 0.5
MIB = 2**20

Row = tuple[str, str, str]
"""What is measured, the figure, and the target ("" where there is none)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="which parts (default: all)")
    parser.add_argument("--verifiers-python", type=Path, help="the interpreter of an environment that has verifiers")
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender runs (default 5)")
    parser.add_argument("--episodes", type=int, help="episodes of each run, rather than each part's own number")
    parser.add_argument("--vllm", action="store_true", help="measure against a real vLLM, and nothing else")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for name in ["vllm"] if options.vllm else options.only:
        part_rows, figures[name] = PARTS[name](options) if name in PARTS else vllm(options)
        rows += part_rows
    print("| measured | figure | target |\n| --- | ---: | ---: |")
    for what, figure, target in rows:
        print(f"| {what} | {figure} | {target} |")
    print(json.dumps(figures))


def cpu(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """CPU per turn of each contender."""
    interpreters = {name: Path(sys.executable) for name in ("art_gym", "aiohttp", "openai")}
    if options.verifiers_python:
        interpreters |= dict.fromkeys(("verifiers", "verifiers_saved"), options.verifiers_python)
    else:
        note("verifiers is left out: --verifiers-python names no interpreter")
    client, server = cores()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in interpreters}
    with MockServer(core=server) as mock:
        for number in range(options.rounds):
            for name, interpreter in interpreters.items():
                before = mock.stats()
                run = child("rollout.clients", name, mock.url, episodes=options.episodes or 256, core=client, interpreter=interpreter)
                after = mock.stats()
                run["server"] = (after["cpu"] - before["cpu"]) / (after["requests"] - before.get("requests", 0))
                runs[name].append(run)
            note(f"cpu: round {number + 1} of {options.rounds}")
    cost = {name: statistics.median(run["cpu"] / run["turns"] for run in of) for name, of in runs.items()}
    rate = {name: statistics.median(run["turns"] / run["wall"] for run in of) for name, of in runs.items()}
    spent = {name: statistics.median(run["server"] for run in of) for name, of in runs.items()}
    rows: list[Row] = []
    for name, of in runs.items():
        turns = f"{1e3 * cost[name]:.3f} ms, {rate[name]:,.0f} turns/s (server {1e3 * spent[name]:.3f} ms)"
        rows.append((f"CPU per turn, {name} {of[0]['version']}", turns, ""))
    targets = {"aiohttp": "at most 2", "openai": "at most 0.25", "verifiers": "at most 0.1", "verifiers_saved": ""}
    rows += [(f"art_gym over {name}", f"{cost['art_gym'] / cost[name]:.2f}", target) for name, target in targets.items() if name in cost]
    return rows, {"seconds_per_turn": cost, "turns_per_second": rate, "server_seconds_per_request": spent, "runs": runs}


def flight(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Very many episodes at once, at a latency of half a second."""
    client, server = cores()
    with MockServer(core=server, latency=LATENCY) as mock:
        run = child("rollout.loads", "flight", mock.url, episodes=options.episodes or 10_000, core=client)
        run["server"] = mock.stats()["cpu"]
    count = run["episodes"]
    lags = f"{1e3 * run['lag_p50']:.1f} / {1e3 * run['lag_p99']:.1f} / {1e3 * run['lag_max']:.1f} ms"
    rows = [
        (f"finished of {count:,} in flight at {LATENCY:g} s", f"{run['finished']:,} in {run['wall']:.1f} s", f"{count:,}"),
        ("event-loop lag p50 / p99 / max", lags, "p99 under 50 ms"),
        ("CPU per turn in flight", f"{1e3 * run['cpu'] / run['turns']:.3f} ms", ""),
        ("memory per episode in flight", f"{run['bytes_per_episode'] / 1024:.1f} KiB (peak {run['peak'] / MIB:.0f} MiB)", ""),
    ]
    return rows, run


def stream(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Very many short episodes one after the other, with a journal and without."""
    client, server = cores()
    rows: list[Row] = []
    figures = {}
    for journaled in (False, True):
        how = "with a journal" if journaled else "without a journal"
        with MockServer(core=server) as mock:
            flags = ["--journal"] if journaled else []
            run = child("rollout.loads", "stream", mock.url, *flags, episodes=options.episodes or 100_000, core=client)
        note(f"stream: {how}, {run['wall']:.0f} s")
        growth = f"{run['first_quarter'] / MIB:.1f} → {run['last_quarter'] / MIB:.1f} MiB (peak {run['peak'] / MIB:.1f})"
        rows.append((f"memory over {run['finished']:,} episodes {how}", growth, "flat"))
        figures[how] = run
    return rows, figures


def vllm(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Tokens a second through a real server, against a bare load generator's."""
    from rollout.real_server import compare

    runs = compare(rounds=options.rounds, episodes=options.episodes or 32, note=note)
    rates = {name: statistics.median(run["tokens"] / run["seconds"] for run in of) for name, of in runs.items()}
    rows = [(f"tokens/s, {name}", f"{rate:.1f}", "") for name, rate in rates.items()]
    rows.append(("runner over load generator", f"{rates['runner'] / rates['load generator']:.3f}", "at least 0.95"))
    return rows, {"tokens_per_second": rates, "runs": runs}


PARTS = {"cpu": cpu, "flight": flight, "stream": stream}


def cores() -> tuple[int | None, int | None]:
    """One core for the client and another one for the server, where there are two."""
    if not hasattr(os, "sched_getaffinity") or len(available := sorted(os.sched_getaffinity(0))) < 2:
        return None, None
    return available[0], available[1]


def child(module: str, *arguments: str, episodes: int, core: int | None, interpreter: Path = Path(sys.executable)) -> dict[str, Any]:
    """Run a module of this folder as a process, and return what it printed."""
    options: Iterable[str] = [f"--episodes={episodes}", *([f"--core={core}"] if core is not None else [])]
    command = [str(interpreter), "-m", module, *arguments, *options]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]  # what each prints


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
