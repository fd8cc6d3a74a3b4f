"""What an evaluation is asked for: its settings, the agents' names, and whether the one in a folder can be gone on with."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from art_gym.cli.run_folder import check_writable
from art_gym.errors import UsageError
from art_gym.rollout.isolation import IsolationName
from art_gym.scenarios import Split

RESULT = "evaluation.json"
LOG = "engine.log"
JOURNAL = "eval"

PLAYED = ("env_id", "env_kwargs", "split", "n", "k")
"""Settings that say what is played, and must be the same on resume. How each agent is asked is kept with its episodes."""

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@+-]*)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AgentSetting:
    """One of those who play.

    Attributes:
        name: In reports; no other agent's.
        spec: What plays, as the user gave it.
        journal: The label of the journal that its episodes are in.
    """

    name: str
    spec: str
    journal: str = JOURNAL


@dataclass(frozen=True, slots=True)
class Settings:
    """What is played, by whom, and how; saved with the result."""

    env_id: str
    agents: Sequence[AgentSetting]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    base_url: str | None = None
    split: Split = "test"
    n: int = 200
    k: int = 1
    concurrency: int = 32
    temperature: float = 1.0
    max_tokens: int = 64
    max_model_len: int = 2048
    port: int = 0
    seed: int = 0
    max_failure_rate: float = 1.0
    isolation: IsolationName = "auto"
    keep_failures: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return data


def parse_agents(texts: Sequence[str], *, model: str | None, base_url: str | None) -> tuple[AgentSetting, ...]:
    """Read the `--agent` options, each SPEC or NAME=SPEC; without any, --model or --base-url says who plays.

    >>> [agent.name for agent in parse_agents(["random", "mine=my_scripts:play", "http://box:8000/v1#qwen"], model=None, base_url=None)]
    ['random', 'mine', 'qwen']

    Raises:
        UsageError: Nobody plays, two have the same name, or --model is given and nobody is to play it.
    """
    texts = texts or (["chat"] if model or base_url else [])
    if not texts:
        raise UsageError("who plays? give --model NAME, --base-url URL, or --agent random")
    agents = []
    for text in texts:
        named = _NAMED.fullmatch(text)
        name, spec = named.groups() if named else (None, text)
        agents.append(AgentSetting(name or _name_of(spec, model, base_url), spec))
    if (model or base_url) and not any(agent.spec == "chat" for agent in agents):
        given = "--model" if model else "--base-url"
        raise UsageError(f"{given} says what --agent chat is, and that doesn't play; add --agent chat, or leave {given} out")
    if twice := [name for name, count in Counter(agent.name for agent in agents).items() if count > 1]:
        raise UsageError(f"two agents have the name {twice[0]!r}; give one another name: --agent NAME={twice[0]}")
    return tuple(agents)


def _name_of(spec: str, model: str | None, base_url: str | None) -> str:
    if spec == "chat":
        return model or (urlsplit(base_url).netloc if base_url else "") or spec
    if "://" in spec:
        url = urlsplit(spec)
        return url.fragment or url.netloc or spec
    path = Path(spec).expanduser()
    if not path.is_dir():
        return spec
    path = path.resolve()
    return f"{path.parents[1].name}-{path.name}" if path.parent.name == "checkpoints" else path.name


def with_journals(settings: Settings, out: Path | None, *, resume: bool) -> Settings:
    """Check the folder that the evaluation is kept in, and give each agent its journal there.

    Returns:
        The settings, with the journals.

    Raises:
        UsageError: The folder can't be written, holds something else, or an evaluation with other settings.
    """
    if resume and not out:
        raise UsageError("--resume goes on with the evaluation in --out FOLDER; give both")
    before: dict[str, Any] = {}
    if out:
        if out.is_symlink() and not out.exists():
            raise UsageError(f"{out} is a link to {out.readlink()}, which isn't there; make that folder, or give another --out")
        check_writable(out, option="--out")
        if resume:
            before = _resumable(out, settings)
        # A log alone is left where the engine could not be started.
        elif out.exists() and any(entry.name != LOG for entry in out.iterdir()):
            raise UsageError(f"{out} is not empty; give another --out, or --resume to go on with the evaluation in it")
    journals: dict[str, str] = {agent["name"]: agent["journal"] for agent in before.get("agents", ())}
    for agent in settings.agents:
        if agent.name not in journals:
            journals[agent.name] = _label(agent.name, len(settings.agents), journals)
    return replace(settings, agents=tuple(replace(agent, journal=journals[agent.name]) for agent in settings.agents))


def _label(name: str, agents: int, taken: Mapping[str, str]) -> str:
    if agents == 1 and not taken:
        return JOURNAL
    wanted = f"{JOURNAL}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:80]}"
    numbered = (wanted, *(f"{wanted}-{number}" for number in range(2, agents + len(taken) + 2)))
    return next(label for label in numbered if label not in taken.values())


def _resumable(out: Path, settings: Settings) -> dict[str, Any]:
    path = out / RESULT
    if not path.is_file():
        raise UsageError(f"there is no evaluation to resume in {out}; leave --resume out to start one there")
    now = settings.to_dict()
    before: dict[str, Any] = _saved(path)["settings"]
    differing = [f"{key} was {before.get(key)!r:.100} and is {now[key]!r:.100}" for key in PLAYED if now[key] != before.get(key)]
    specs = {agent.name: agent.spec for agent in settings.agents}
    for name, spec in ((agent["name"], agent["spec"]) for agent in before["agents"]):
        if name not in specs:
            differing.append(f"agent {name!r} plays there and isn't given")
        elif specs[name] != spec:
            differing.append(f"agent {name!r} was {spec!r:.200} and is {specs[name]!r:.200}")
    if differing:
        raise UsageError(
            f"the evaluation in {out} has other settings than you ask for: {', '.join(differing)}; give the same, or another --out"
        )
    return before


def saved_result(out: Path) -> dict[str, Any] | None:
    """Read the result that a folder holds so far; None if there is none."""
    path = out / RESULT
    result: dict[str, Any] | None = _saved(path)["result"] if path.is_file() else None
    return result


def _saved(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "agent" in data["settings"]:
            raise UsageError(
                f"{path} was written by an earlier version of art_gym, which knew one agent only; play anew in another --out, or go on with "
                "the version that wrote it"
            )
        for agent in data["settings"]["agents"]:
            if not all(isinstance(agent[key], str) for key in ("name", "spec", "journal")):
                raise TypeError
        data.setdefault("result", None)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is damaged, so that the evaluation can't be gone on with; give another --out") from None
    return data
