"""Who plays in an evaluation: from the words of an `--agent` option to an agent, and the engine behind it if there is one.

An entrant is checked before anything is played, and opened when it is its turn, so that never two engines run at once.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from art_gym.cli import preflight
from art_gym.cli._eval_digests import digest_of
from art_gym.cli._eval_settings import AgentSetting, Settings
from art_gym.cli.config import EngineSection
from art_gym.errors import UsageError
from art_gym.rollout import Agent

if TYPE_CHECKING:
    from art_gym.engine import AttachedEngine, ControlledServer, EngineConfig

Opened = tuple[Agent, "ControlledServer | None"]

_WORDS = ("chat", "random", "warm-start", "human")
_KINDS = (
    "chat, random, warm-start, or MODULE:FUNCTION, a script of your own; or human, http://HOST:PORT/v1#MODEL, a model (an alias, OWNER/NAME or "
    "its folder), a run's folder, a checkpoint or an adapter"
)


@dataclass(frozen=True, slots=True)
class Entrant:
    """One who plays.

    Attributes:
        check: Looks whether it can play, and starts nothing; gives what it found out of who that is, such as the served model's name. Raises
            `UsageError` where it can't.
        open: Starts what it needs, which is stopped at the end; takes the engine's log file.
        human: Whether a person plays, who takes one episode at a time and all the time there is.
    """

    check: Callable[[], Mapping[str, Any]]
    open: Callable[[Path | None], AbstractContextManager[Opened]]
    human: bool = False


def asked(agent: AgentSetting, settings: Settings) -> dict[str, Any]:
    """What the user asked of an agent, as it is noted with its episodes: who it is, and how a chat model is sampled from."""
    spec = agent.spec
    if spec == "chat":
        spec = f"{settings.base_url}#{settings.model or ''}".rstrip("#") if settings.base_url else settings.model or spec
    remote = "://" in spec
    if spec in _WORDS or (":" in spec and not remote and not Path(spec).expanduser().is_dir()):
        return {"spec": spec}
    facts = {"spec": spec, "temperature": settings.temperature, "max_tokens": settings.max_tokens}
    return facts if remote else {**facts, "max_model_len": settings.max_model_len}


def entrant(agent: AgentSetting, settings: Settings, *, api_key: str | None, step: int | None = None) -> Entrant:
    """Find out who plays.

    Args:
        agent: Its name, and what the user said that it is.
        settings: The evaluation's.
        api_key: Sent to servers that run already.
        step: Which of a run's checkpoints it is; by default the one that is best now.

    Raises:
        UsageError: There is nobody of that kind.
    """
    spec = agent.spec
    if spec == "chat":
        if settings.base_url:
            return _attached(agent.name, settings.base_url, settings.model, settings, api_key)
        if not settings.model:
            raise UsageError("which model plays? give --model NAME, or the --base-url of a server that runs")
        folder = Path(settings.model).expanduser()
        return _folder(agent.name, folder, settings, step) if folder.is_dir() else _launched(agent.name, settings.model, settings)
    if spec == "random":
        return _at_hand(_agents().RandomAgent(name=agent.name))
    if spec == "warm-start":
        script = import_module("art_gym_agents.warmstart").script_for(settings.env_id)
        return _at_hand(_agents().ScriptedAgent(script, name=agent.name))
    if spec == "human":
        return _human(agent.name)
    if "://" in spec:
        url, _, model = spec.partition("#")
        return _attached(agent.name, url, model or None, settings, api_key)
    folder = Path(spec).expanduser()
    if folder.is_dir():
        return _folder(agent.name, folder, settings, step)
    if ":" in spec:
        return _at_hand(_agents().ScriptedAgent(_function(spec), name=agent.name))
    if spec in import_module("art_gym_trainers.models").ALIASES or ("/" in spec and not spec.startswith((".", "/", "~"))):
        return _launched(agent.name, spec, settings)
    if "/" in spec:
        raise UsageError(f"--agent {spec}: there is no such folder; give a model's, a run's, a checkpoint's or an adapter's")
    close = difflib.get_close_matches(spec, _WORDS, n=1)
    raise UsageError(f"unknown agent {spec!r}; it is {_KINDS}" + (f"; did you mean {close[0]!r}?" if close else ""))


def _at_hand(agent: Agent) -> Entrant:
    """An agent that needs nothing started."""

    @contextmanager
    def opened(log: Path | None) -> Iterator[Opened]:
        yield agent, None

    return Entrant(dict, opened)


def _human(name: str) -> Entrant:
    def check() -> dict[str, Any]:
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("--agent human asks on standard input, which is closed; run it in a terminal")
        return {}

    @contextmanager
    def opened(log: Path | None) -> Iterator[Opened]:
        from rich.console import Console

        # Standard output is for the result.
        yield import_module("art_gym_agents.human").HumanAgent(name=name, console=Console(stderr=True)), None

    return Entrant(check, opened, human=True)


def _attached(name: str, url: str, model: str | None, settings: Settings, api_key: str | None) -> Entrant:
    """A server that runs already."""
    served = model

    def engine() -> AttachedEngine:
        from art_gym.engine import AttachedEngine

        return AttachedEngine(url, served, api_key=api_key)

    def check() -> dict[str, Any]:
        nonlocal served
        server = engine().start()
        served = server.model
        return {"base_url": server.base_url, "model": served}

    @contextmanager
    def opened(log: Path | None) -> Iterator[Opened]:
        with engine() as server:
            # It isn't known whether it is a vLLM, which alone gives token ids.
            yield _chat(name, server, settings, exact_tokens=False, api_key=api_key), server

    return Entrant(check, opened)


def _launched(name: str, model: str, settings: Settings) -> Entrant:
    """A model that is served here."""

    def config(folder: Path) -> EngineConfig:
        section = EngineSection(port=settings.port, max_model_len=settings.max_model_len)
        return preflight.engine_config(section, folder=folder, dtype="auto", max_num_seqs=settings.concurrency)

    def check() -> dict[str, Any]:
        # Before the model, which may take a while to convert, and again with it, since only then its size is known.
        preflight.check_launch(config(Path(model)))
        folder = preflight.resolve_model(model, tell)
        preflight.check_launch(config(folder))
        return {"model": model, "digest": digest_of(folder)}

    @contextmanager
    def opened(log: Path | None) -> Iterator[Opened]:
        from art_gym.engine import Engine

        folder = preflight.resolve_model(model, tell)
        with Engine(config(folder).model_copy(update={"served_name": model}), log=log, progress=tell) as engine:
            yield _chat(name, engine, settings), engine

    return Entrant(check, opened)


def _folder(name: str, folder: Path, settings: Settings, step: int | None) -> Entrant:
    """What a folder holds: a model, or a policy that was trained."""
    from art_gym.cli import _eval_policies

    policy = _eval_policies.find(folder, step=step)
    if policy is None:
        return _launched(name, str(folder), settings)

    @contextmanager
    def opened(log: Path | None) -> Iterator[Opened]:
        with policy.served(settings, log=log, progress=tell) as engine:
            yield _chat(name, engine, settings), engine

    def check() -> dict[str, Any]:
        policy.check(settings, progress=tell)
        return policy.facts()

    return Entrant(check, opened)


def _chat(name: str, engine: ControlledServer, settings: Settings, *, exact_tokens: bool = True, api_key: str | None = None) -> Agent:
    agent: Agent = _agents().ChatAgent(
        engine.base_url,
        engine.model,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        api_key=api_key,
        exact_tokens=exact_tokens,
        name=name,
    )
    return agent


def tell(line: str) -> None:
    """Say what goes on."""
    typer.echo(line, err=True)


def _agents() -> Any:
    # By name, since the framework imports none of the packages built on it.
    return import_module("art_gym_agents")


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    expected = "expected MODULE:FUNCTION, a function of the turn's state"
    # As `python -m` does: the installed command has the folder of its own file there instead.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--agent {name}: {error}; {expected}") from None
    except Exception as error:  # The user's module may raise anything, and so may a name that can be none.
        raise UsageError(f"--agent {name}: {type(error).__name__}: {error}; {expected}") from error
    if not callable(found):
        raise UsageError(f"--agent {name}: {name!r} is a {type(found).__name__}; {expected}")
    return found
