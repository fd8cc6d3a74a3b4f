"""`art-gym eval`: agents by name, a set of scenarios, and the outcome on the screen and on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from art_gym._evaluation_journal import Header, header_of
from art_gym._files import write_text
from art_gym.cli import _eval_report, preflight
from art_gym.cli._eval_agents import Entrant, asked, entrant, tell
from art_gym.cli._eval_settings import LOG, RESULT, AgentSetting, Settings, parse_agents, saved_result, with_journals
from art_gym.comparison import Comparison
from art_gym.errors import ArtGymError, EpisodeError
from art_gym.evaluation import EPISODE_TIMEOUT, TURN_TIMEOUT, Evaluation, evaluate, is_played
from art_gym.rollout import Agent, Progress, Reply, TurnState, show_progress
from art_gym.store import EpisodeStore, Journal

__all__ = ["Settings", "parse_agents", "run"]

REPORT = "evaluation.md"
PICTURE = "evaluation.png"

_A_WEEK = 7 * 24 * 3600.0
"""The time that a person has for an episode."""


def run(settings: Settings, *, api_key: str | None, out: Path | None, resume: bool, as_json: bool) -> None:
    """Play, report, and keep the outcome in `out` if that is given.

    Raises:
        UsageError: It can't be done as asked, such as with more scenarios than there are, or as another agent than the one whose episodes are
            there; nothing was started.
        EngineError: An engine could not be started, or died; the other agents played all the same, and are reported.
        TooManyFailures: More episodes of an agent failed than may; likewise.
        EpisodeError: Every episode of an agent failed, so that there is no result for it; likewise.
    """
    preflight.take_scenarios(settings.env_id, settings.env_kwargs, settings.split, settings.n, way_out="ask for fewer with --n")
    settings = with_journals(settings, out, resume=resume)
    before = saved_result(out) if out and resume else None
    with ExitStack() as stack:
        playing = _Playing(settings, out, stack.enter_context(EpisodeStore(out)) if out else None, resume)
        players = [(agent, *playing.check(agent, api_key)) for agent in settings.agents]
        earlier = _earlier(before)
        evaluations: list[Evaluation] = []
        unfinished: dict[str, ArtGymError] = {}
        for agent, who, played_by in players:
            known = earlier.pop(agent.name, None)
            try:
                evaluations.append(playing.play(agent, who, played_by, earlier=known))
            except KeyboardInterrupt:
                if out and (out / RESULT).exists():
                    tell(f"what ended is kept; --resume goes on with the evaluation in {out}")
                raise
            except ArtGymError as error:
                if who.human and isinstance(error, import_module("art_gym_agents.human").PlayerLeft):
                    tell(f"{error}; " + (f"--resume goes on with the evaluation in {out}" if out else "with --out FOLDER one can go on later"))
                    return
                unfinished[agent.name] = error
                if len(players) > 1:
                    tell(f"{agent.name} came to no end: {error}")
            # An engine that could not be started leaves no evaluation behind: the same command may be tried again.
            if out and (evaluations or (out / RESULT).exists()):
                _save(out, settings, _compared([*evaluations, *earlier.values()], unfinished, settings))
    result = _compared(evaluations, unfinished, settings)
    if out and evaluations:
        write_text(out / REPORT, _eval_report.markdown(result, settings))
        if why := _eval_report.draw(result, out / PICTURE):
            tell(why)
    fruitless = [evaluation for evaluation in evaluations if evaluation.failed == evaluation.n]
    if len(fruitless) < len(evaluations):
        typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else _eval_report.summary(result))
    _raise_for(fruitless, unfinished, several=len(settings.agents) > 1)


def _compared(evaluations: Sequence[Evaluation], unfinished: Mapping[str, ArtGymError], settings: Settings) -> Comparison:
    return Comparison.of(evaluations, seed=settings.seed, unfinished={name: str(error) for name, error in unfinished.items()})


def _raise_for(fruitless: Sequence[Evaluation], unfinished: Mapping[str, ArtGymError], *, several: bool) -> None:
    """Raise what kept an agent from having a result."""
    for name, error in unfinished.items():
        if several:
            # The rest of it, such as a log's tail, was told when it happened.
            raise EpisodeError(f"{name} came to no end and has no result: {str(error).splitlines()[0]}")
        raise error
    if fruitless:
        first, whose = fruitless[0], f" of {fruitless[0].agent}" if several else ""
        raise EpisodeError(f"all {first.n} episodes{whose} failed; the first: {first.first_failure}")


@dataclass(frozen=True, slots=True)
class _Playing:
    """One call of the command."""

    settings: Settings
    out: Path | None
    store: EpisodeStore | None
    resume: bool

    def check(self, agent: AgentSetting, api_key: str | None) -> tuple[Entrant, dict[str, Any]]:
        """Find out who plays, and what is known of that; one who has nothing left to play needs no engine.

        Raises:
            UsageError: It can't play, or another one's episodes are there.
        """
        settings, facts = self.settings, asked(agent, self.settings)
        journal = self.store.journal(agent.journal) if self.store and self.resume else None
        before = None if journal is None else header_of(journal)
        # What was asked can be told apart without looking for the model.
        self._check_same(agent, facts, before, journal)
        if journal is not None and is_played(journal, settings.n, settings.k, keep_failures=settings.keep_failures):
            return Entrant(dict, lambda log: nullcontext((_Done(agent.name), None))), facts
        who = entrant(agent, settings, api_key=api_key, step=before.played_by.get("step") if before else None)
        facts.update(who.check())
        self._check_same(agent, facts, before, journal)
        return who, facts

    def _check_same(self, agent: AgentSetting, facts: Mapping[str, Any], before: Header | None, journal: Journal | None) -> None:
        if before is not None and journal is not None:
            settings = self.settings
            now = Header.of(agent.name, settings.env_id, settings.env_kwargs, settings.split, played_by=facts, concurrency=settings.concurrency)
            now.check(before, journal)

    def play(self, agent: AgentSetting, who: Entrant, played_by: Mapping[str, Any], *, earlier: Evaluation | None) -> Evaluation:
        settings, journal = self.settings, self.store.journal(agent.journal) if self.store else None
        with who.open(self.out / LOG if self.out else None) as (player, engine), self._progress(agent, who) as progress:
            if self.out and not (self.out / RESULT).exists():
                self.out.mkdir(parents=True, exist_ok=True)
                _save(self.out, settings, None)
            result = evaluate(
                settings.env_id,
                player,
                split=settings.split,
                n=settings.n,
                k=settings.k,
                env_kwargs=settings.env_kwargs,
                concurrency=1 if who.human else settings.concurrency,
                max_failure_rate=settings.max_failure_rate,
                isolation=settings.isolation,
                journal=journal,
                resume=self.resume,
                keep_failures=settings.keep_failures,
                progress=progress,
                played_by=played_by,
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
        return show_progress(title, self.settings.n * self.settings.k)


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
