"""`art-gym eval`: an agent by name, a set of scenarios, and the outcome on the screen and on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from art_gym.cli import preflight
from art_gym.cli.config import EngineSection
from art_gym.cli.evaluation import Evaluation, evaluate
from art_gym.cli.files import write_text
from art_gym.cli.run_folder import check_writable
from art_gym.errors import EpisodeError, UsageError
from art_gym.rollout import Agent, show_progress
from art_gym.scenarios import Split
from art_gym.store import EpisodeStore

if TYPE_CHECKING:
    from art_gym.engine import ControlledServer

RESULT = "evaluation.json"
LOG = "engine.log"
JOURNAL = "eval"

_WITHOUT_EFFECT = ("concurrency", "port")
"""Settings that say how it is played and change nothing of the outcome, so that a resumed evaluation may have others."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is played, by whom, and how; saved with the result."""

    env_id: str
    agent: str | None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    base_url: str | None = None
    split: Split = "test"
    n: int = 200
    concurrency: int = 32
    temperature: float = 1.0
    max_tokens: int = 64
    max_model_len: int = 2048
    port: int = 0


def run(settings: Settings, *, api_key: str | None, out: Path | None, resume: bool, as_json: bool) -> None:
    """Play, report, and keep the outcome in `out` if that is given.

    Raises:
        UsageError: It can't be done as asked, such as with more scenarios than there are; nothing was started.
        EngineError: The engine could not be started, or died.
        EpisodeError: Every episode failed, so that there is no result.
    """
    scenarios = preflight.take_scenarios(settings.env_id, settings.env_kwargs, settings.split, settings.n, way_out="ask for fewer with --n")
    if resume and not out:
        raise UsageError("--resume goes on with the evaluation in --out FOLDER; give both")
    if out:
        _check_folder(out, settings, resume=resume)
    with _agent(settings, api_key=api_key, log=out / LOG if out else None) as (agent, engine):
        if out:
            out.mkdir(parents=True, exist_ok=True)
            _save(out, settings, None)
        with ExitStack() as stack:
            journal = stack.enter_context(EpisodeStore(out)).journal(JOURNAL) if out else None
            progress = stack.enter_context(show_progress(settings.env_id, len(scenarios)))
            result = evaluate(
                settings.env_id,
                agent,
                scenarios,
                env_kwargs=settings.env_kwargs,
                concurrency=settings.concurrency,
                journal=journal,
                resume=resume,
                progress=progress,
                engine_check=engine.check if engine else None,
            )
    if out:
        _save(out, settings, result)
    if sum(result.failures.values()) == result.n:
        raise EpisodeError(f"all {result.n} episodes failed; the first: {result.first_failure}")
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else summary(result))


def summary(result: Evaluation) -> str:
    """Write the outcome for a reader."""
    failures = ", ".join(f"{count} ({kind})" for kind, count in result.failures.items())
    lines = {
        "environment": result.env_id,
        "agent": result.agent,
        "success": str(result),
        "mean reward": f"{result.mean_reward:.3f}",
        "mean turns": f"{result.mean_turns:.1f}",
        "invalid calls": str(result.invalid_calls),
        "truncated": str(result.truncated),
        "failed": f"{failures}; the first: {result.first_failure}" if failures else "0",
        "seconds": f"{result.seconds:.0f}",
    }
    return "\n".join(f"{name:<14} {value}" for name, value in lines.items())


def _check_folder(out: Path, settings: Settings, *, resume: bool) -> None:
    check_writable(out, option="--out")
    saved = out / RESULT
    if resume:
        if not saved.is_file():
            raise UsageError(f"there is no evaluation to resume in {out}; leave --resume out to start one there")
        before = _saved_settings(saved)
        now = _plain(settings)
        if differing := [key for key in now if key not in _WITHOUT_EFFECT and now[key] != before.get(key)]:
            raise UsageError(f"the evaluation in {out} has other settings than you ask for: {', '.join(differing)}; give another --out")
    # A log alone is left where the engine could not be started.
    elif out.exists() and any(entry.name != LOG for entry in out.iterdir()):
        raise UsageError(f"{out} is not empty; give another --out, or --resume to go on with the evaluation in it")


def _saved_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError):
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{path} is damaged, so that the evaluation can't be gone on with; give another --out")
    return settings


def _save(out: Path, settings: Settings, result: Evaluation | None) -> None:
    data = {"settings": _plain(settings), "result": result.to_dict() if result else None}
    write_text(out / RESULT, json.dumps(data, indent=2) + "\n")


def _plain(settings: Settings) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return data


@contextmanager
def _agent(settings: Settings, *, api_key: str | None, log: Path | None) -> Iterator[tuple[Agent, ControlledServer | None]]:
    """Give the agent, and the engine behind it if there is one, which is stopped at the end."""
    match settings.agent:
        case None:
            raise UsageError("who plays? give --model NAME, --base-url URL, or --agent random")
        case "chat":
            with _engine(settings, api_key=api_key, log=log) as engine:
                yield (
                    _agents().ChatAgent(
                        engine.base_url,
                        engine.model,
                        temperature=settings.temperature,
                        max_tokens=settings.max_tokens,
                        api_key=api_key,
                        # Of a server that runs already it isn't known whether it is a vLLM.
                        exact_tokens=settings.base_url is None,
                        name=settings.model,
                    ),
                    engine,
                )
        case "random":
            yield _agents().RandomAgent(), None
        case "warm-start":
            yield _agents().ScriptedAgent(import_module("art_gym_agents.warmstart").script_for(settings.env_id), name="warm-start"), None
        case name if ":" in name:
            yield _agents().ScriptedAgent(_function(name), name=name), None
        case name:
            raise UsageError(f"unknown agent {name!r}; it is chat, random, warm-start, or MODULE:FUNCTION, a script of your own")


@contextmanager
def _engine(settings: Settings, *, api_key: str | None, log: Path | None) -> Iterator[ControlledServer]:
    from art_gym.engine import AttachedEngine, Engine

    if settings.base_url:
        with AttachedEngine(settings.base_url, settings.model, api_key=api_key) as attached:
            yield attached
        return
    if not settings.model:
        raise UsageError("which model plays? give --model NAME, or the --base-url of a server that runs")
    section = EngineSection(port=settings.port, max_model_len=settings.max_model_len)
    config = preflight.engine_config(section, folder=Path(settings.model), dtype="auto", max_num_seqs=settings.concurrency)
    preflight.check_launch(config)
    config = config.model_copy(update={"model": str(preflight.resolve_model(settings.model, _tell)), "served_name": settings.model})
    with Engine(config, log=log, progress=_tell) as engine:
        yield engine


def _agents() -> Any:
    # By name, since the framework imports none of the packages built on it.
    return import_module("art_gym_agents")


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    expected = "expected MODULE:FUNCTION, a function of the turn's state"
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--agent {name}: {error}; {expected}") from None
    except Exception as error:  # The user's module may raise anything, and so may a name that can be none.
        raise UsageError(f"--agent {name}: {type(error).__name__}: {error}; {expected}") from error
    if not callable(found):
        raise UsageError(f"--agent {name}: {name!r} is a {type(found).__name__}; {expected}")
    return found


def _tell(line: str) -> None:
    typer.echo(line, err=True)
