"""`art-gym eval`: agents by name, a set of scenarios, and the outcome on the screen and on disk."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from art_gym.cli import _eval_report, preflight
from art_gym.cli._eval_agents import Entrant, entrant, tell
from art_gym.cli._eval_settings import LOG, RESULT, AgentSetting, Settings, parse_agents, saved_result, with_journals
from art_gym.cli.files import write_text
from art_gym.comparison import Comparison
from art_gym.errors import EpisodeError, UsageError
from art_gym.evaluation import EPISODE_TIMEOUT, TURN_TIMEOUT, Evaluation, evaluate, is_played
from art_gym.rollout import Agent, Progress, Reply, TurnState, show_progress
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore

__all__ = ["Settings", "parse_agents", "run"]

REPORT = "evaluation.md"
PICTURE = "evaluation.png"

_A_WEEK = 7 * 24 * 3600.0
"""The time that a person has for an episode."""


def run(settings: Settings, *, api_key: str | None, out: Path | None, resume: bool, as_json: bool) -> None:
    """Play, report, and keep the outcome in `out` if that is given.

    Raises:
        UsageError: It can't be done as asked, such as with more scenarios than there are; nothing was started.
        EngineError: An engine could not be started, or died.
        EpisodeError: Every episode of an agent failed, so that there is no result for it.
    """
    scenarios = preflight.take_scenarios(settings.env_id, settings.env_kwargs, settings.split, settings.n, way_out="ask for fewer with --n")
    settings = with_journals(settings, out, resume=resume)
    before = saved_result(out) if out and resume else None
    with ExitStack() as stack:
        playing = _Playing(settings, scenarios, out, stack.enter_context(EpisodeStore(out)) if out else None, resume)
        entrants = {agent: playing.entrant(agent, api_key) for agent in settings.agents}
        for who in entrants.values():
            who.check()
        earlier = _earlier(before)
        evaluations: list[Evaluation] = []
        for agent, who in entrants.items():
            try:
                evaluations.append(playing.play(agent, who, earlier=earlier.pop(agent.name, None)))
            except UsageError as error:
                if not who.human or not isinstance(error, import_module("art_gym_agents.human").PlayerLeft):
                    raise
                tell(f"{error}; " + (f"--resume goes on with the evaluation in {out}" if out else "with --out FOLDER one can go on later"))
                return
            if out:
                _save(out, settings, Comparison.of([*evaluations, *earlier.values()], seed=settings.seed))
    result = Comparison.of(evaluations, seed=settings.seed)
    if out:
        write_text(out / REPORT, _eval_report.markdown(result, settings))
        if why := _eval_report.draw(result, out / PICTURE):
            tell(why)
    fruitless = [evaluation for evaluation in evaluations if evaluation.failed == evaluation.n]
    if len(fruitless) < len(evaluations):
        typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else _eval_report.summary(result))
    if fruitless:
        first, whose = fruitless[0], f" of {fruitless[0].agent}" if len(evaluations) > 1 else ""
        raise EpisodeError(f"all {first.n} episodes{whose} failed; the first: {first.first_failure}")


@dataclass(frozen=True, slots=True)
class _Playing:
    """One call of the command."""

    settings: Settings
    scenarios: list[Scenario]
    out: Path | None
    store: EpisodeStore | None
    resume: bool

    def entrant(self, agent: AgentSetting, api_key: str | None) -> Entrant:
        """Find out who plays; one who has nothing left to play needs no engine."""
        if self.store and self.resume and is_played(self.store.journal(agent.journal), len(self.scenarios), self.settings.k):
            return Entrant(lambda: None, lambda log: nullcontext((_Done(agent.name), None)))
        return entrant(agent, self.settings, api_key=api_key)

    def play(self, agent: AgentSetting, who: Entrant, *, earlier: Evaluation | None) -> Evaluation:
        settings, journal = self.settings, self.store.journal(agent.journal) if self.store else None
        with who.open(self.out / LOG if self.out else None) as (player, engine), self._progress(agent, who) as progress:
            if self.out and not (self.out / RESULT).exists():
                self.out.mkdir(parents=True, exist_ok=True)
                _save(self.out, settings, None)
            result = evaluate(
                settings.env_id,
                player,
                self.scenarios,
                k=settings.k,
                seed=settings.seed,
                env_kwargs=settings.env_kwargs,
                concurrency=1 if who.human else settings.concurrency,
                max_failure_rate=settings.max_failure_rate,
                journal=journal,
                resume=self.resume,
                progress=progress,
                engine_check=engine.check if engine else None,
                turn_timeout=_A_WEEK if who.human else TURN_TIMEOUT,
                episode_timeout=_A_WEEK if who.human else EPISODE_TIMEOUT,
            )
        # Whose speed it was is known from when it was played.
        if earlier and isinstance(player, _Done):
            return replace(result, seconds=earlier.seconds, tokens=earlier.tokens)
        return result

    def _progress(self, agent: AgentSetting, who: Entrant) -> AbstractContextManager[Progress | None]:
        if who.human:
            return nullcontext()  # The terminal is the player's.
        title = f"{self.settings.env_id}, {agent.name}" if len(self.settings.agents) > 1 else self.settings.env_id
        return show_progress(title, len(self.scenarios) * self.settings.k)


class _Done(Agent):
    """Stands for an agent whose every episode is in the journal."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def act(self, state: TurnState) -> Reply:
        raise AssertionError("there is nothing left to play")

    async def close(self) -> None:
        pass


def _earlier(result: dict[str, Any] | None) -> dict[str, Evaluation]:
    """What a folder's result says of each agent, if it says anything that can be read; the episodes are what counts."""
    try:
        return {evaluation.agent: evaluation for evaluation in Comparison.from_dict(result or {}).evaluations}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _save(out: Path, settings: Settings, result: Comparison | None) -> None:
    data = {"settings": settings.to_dict(), "result": result.to_dict() if result else None}
    write_text(out / RESULT, json.dumps(data, indent=2) + "\n")
