"""Measuring a policy: k episodes of each of a set of scenarios are played, and the outcomes are counted.

A success is what the environment's metric "success" says, else a positive return. Failed episodes (the endpoint broke, a tool hung) count as
not successful, so that a failing set-up can't look good; they are counted by kind, and stay out of the means of rewards and turns. Who played
what is kept beside the journal by `art_gym._evaluation_journal`. How sure a figure is comes from `art_gym.statistics`, and how two agents
compare from `art_gym.comparison`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

from art_gym._evaluation_journal import EvaluationJournal, Header, attempts
from art_gym._outcomes import Evaluation, ScenarioOutcome, Spread, Tokens
from art_gym._tally import Tally
from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.registration import make
from art_gym.rollout import Agent, Isolation, Progress, Runner
from art_gym.rollout._arguments import check_run
from art_gym.rollout._blocking import run_blocking
from art_gym.scenarios import Scenario, Split
from art_gym.store import Journal

__all__ = [
    "DEFAULT_N",
    "EPISODE_TIMEOUT",
    "TURN_TIMEOUT",
    "Evaluation",
    "ScenarioOutcome",
    "Spread",
    "Tokens",
    "evaluate",
    "first_scenarios",
    "is_played",
]

DEFAULT_N = 200
"""How many scenarios are played where nothing says otherwise."""

TURN_TIMEOUT, EPISODE_TIMEOUT = 60.0, 600.0
"""Seconds that a policy call and an episode may take where nothing says otherwise."""


def evaluate(
    env_id: str,
    agent: Agent,
    scenarios: Iterable[Scenario] | None = None,
    *,
    split: Split = "test",
    n: int | None = None,
    k: int = 1,
    env_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    turn_timeout: float = TURN_TIMEOUT,
    tool_timeout: float = 30.0,
    episode_timeout: float = EPISODE_TIMEOUT,
    max_failure_rate: float = 1.0,
    isolation: Isolation = "auto",
    journal: Journal | None = None,
    resume: bool = False,
    keep_failures: bool = False,
    progress: Progress | None = None,
    played_by: Mapping[str, Any] | None = None,
    engine_check: Callable[[], None] | None = None,
) -> Evaluation:
    """Play k episodes of each scenario and count the outcomes. Episodes are counted as they end and not kept, except in the journal.

    Args:
        env_id: The environment's registered id.
        agent: Who plays. Its connections are closed at the end.
        scenarios: Finitely many; by default the first `n` of `split`.
        split: Whose scenarios are played where none are given.
        n: How many of the split; 200 if not given.
        k: Episodes of each scenario.
        env_kwargs: Arguments of the environment.
        concurrency: The most episodes in play at once.
        turn_timeout: Seconds that one policy call may take.
        tool_timeout: Seconds that one step of the environment may take.
        episode_timeout: Seconds that an episode may take.
        max_failure_rate: The share of failed episodes beyond which the evaluation is given up.
        isolation: Where environments live, as for `Runner`.
        journal: Where the episodes are kept as they end; they are not kept if not given.
        resume: Play only what the journal doesn't hold yet, and again what failed.
        keep_failures: With `resume`, let failed episodes stand; those that were interrupted are played all the same.
        progress: Told of each episode as it ends.
        played_by: What else is known of the agent, such as {"model": "qwen", "step": 10}, as JSON data; noted in the result and beside the
            journal.
        engine_check: Raises `EngineError` when the engine is dead.

    Raises:
        EngineError: The engine died.
        TooManyFailures: More episodes failed than may.
        UsageError: Unknown environment or model, fewer scenarios than asked for, or a journal that already holds other episodes: of another
            agent (its name, or what is known of it), environment, arguments, split or scenarios.
    """
    if scenarios is not None and n is not None:
        raise UsageError("n is how many scenarios of the split are played; give n, or scenarios of your own")
    runner = Runner(
        env_id,
        agent,
        env_kwargs=env_kwargs,
        concurrency=concurrency,
        group_size=k,
        turn_timeout=turn_timeout,
        tool_timeout=tool_timeout,
        episode_timeout=episode_timeout,
        max_failure_rate=max_failure_rate,
        isolation=isolation,
        engine_check=engine_check,
    )
    given = scenarios is not None
    check_run(() if scenarios is None else scenarios, journal, progress)
    if scenarios is None:
        scenarios = first_scenarios(env_id, env_kwargs or {}, split, DEFAULT_N if n is None else n)
    header = Header.of(agent.name, env_id, env_kwargs, None if given else split, played_by=played_by, concurrency=concurrency)
    kept = None if journal is None else EvaluationJournal(journal, header, resume=resume, keep_failures=keep_failures)
    tally = Tally(k) if kept is None else Tally(k, kept=kept.ended, replaced=kept.replaced)
    told = progress if kept is None else _Restoring(kept, progress)

    async def played() -> None:
        try:
            async with aclosing(runner.run(scenarios, journal=kept, resume=resume, progress=told)) as groups:
                async for group in groups:
                    tally.add(group)
        finally:
            await agent.close()

    started = time.monotonic()
    run_blocking(played())
    played_as = header if kept is None else kept.header
    return tally.evaluation(
        env_id=env_id,
        agent=agent.name,
        seconds=time.monotonic() - started,
        split=played_as.split,
        env_kwargs=played_as.env_kwargs,
        played_by=played_as.played_by,
        concurrency=tuple(played_as.concurrency),
    )


class _Restoring:
    """Gives an episode whose failure stands its failure again before anybody is told of it, or counts it."""

    def __init__(self, journal: EvaluationJournal, progress: Progress | None) -> None:
        self._journal, self._progress = journal, progress

    def on_episode(self, episode: Episode) -> None:
        self._journal.restore(episode)
        if self._progress is not None:
            self._progress.on_episode(episode)


def first_scenarios(env_id: str, env_kwargs: Mapping[str, Any], split: Split, n: int) -> list[Scenario]:
    """Take the first `n` scenarios of a split.

    Raises:
        UsageError: There are fewer, or none at all; or the environment can't be made.
    """
    with closing(make(env_id, **env_kwargs)) as env:
        declared = getattr(env.unwrapped, "scenarios", None)
        if not callable(declared):
            raise UsageError(f"{env_id} has no scenarios of its own; give scenarios=[Scenario(…), …]")
        # Their number is no argument of `scenarios`, which may be endless.
        taken = list(islice(declared(split), n))
    if len(taken) < n:
        raise UsageError(f"{env_id} has only {len(taken)} scenarios in its {split} split, not {n}; ask for fewer")
    return taken


def is_played(journal: Journal, scenarios: int, k: int, *, keep_failures: bool = False) -> bool:
    """Whether a resumed evaluation of so many scenarios has nothing left to play."""
    ended, _ = attempts(journal, keep_failures=keep_failures)
    # As the runner names them.
    return all(f"{journal.label}/{index}/{member}" in ended for index in range(scenarios) for member in range(k))
