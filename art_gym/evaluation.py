"""Measuring a policy: k episodes of each of a set of scenarios are played, and the outcomes are counted.

Failed episodes (the endpoint broke, a tool hung) count as not successful, so that a failing set-up can't look good; they are counted by kind,
and stay out of the means of rewards and turns. How sure a figure is comes from `art_gym.statistics`, and how two agents compare from
`art_gym.comparison`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, closing
from itertools import islice
from typing import Any

from art_gym._outcomes import Evaluation, ScenarioOutcome, Spread, Tokens
from art_gym._tally import Tally
from art_gym.errors import UsageError
from art_gym.registration import make
from art_gym.rollout import Agent, Progress, Runner
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
    "finished_ids",
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
    seed: int = 0,
    env_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    turn_timeout: float = TURN_TIMEOUT,
    tool_timeout: float = 30.0,
    episode_timeout: float = EPISODE_TIMEOUT,
    max_failure_rate: float = 1.0,
    journal: Journal | None = None,
    resume: bool = False,
    progress: Progress | None = None,
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
        seed: Of the bootstrap; it has nothing to do with what is played.
        env_kwargs: Arguments of the environment.
        concurrency: The most episodes in play at once.
        turn_timeout: Seconds that one policy call may take.
        tool_timeout: Seconds that one step of the environment may take.
        episode_timeout: Seconds that an episode may take.
        max_failure_rate: The share of failed episodes beyond which the evaluation is given up.
        journal: Where the episodes are kept as they end; they are not kept if not given.
        resume: Play only what the journal doesn't hold yet.
        progress: Told of each episode as it ends.
        engine_check: Raises `EngineError` when the engine is dead.

    Raises:
        EngineError: The engine died.
        TooManyFailures: More episodes failed than may.
        UsageError: Unknown environment or model, fewer scenarios than asked for, or a journal that already holds other episodes.
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
        engine_check=engine_check,
    )
    if scenarios is None:
        scenarios = first_scenarios(env_id, env_kwargs or {}, split, DEFAULT_N if n is None else n)
    tally = Tally(k, kept=finished_ids(journal) if journal is not None and resume else ())

    async def played() -> None:
        try:
            async with aclosing(runner.run(scenarios, journal=journal, resume=resume, progress=progress)) as groups:
                async for group in groups:
                    tally.add(group)
        finally:
            await agent.close()

    started = time.monotonic()
    run_blocking(played())
    return tally.evaluation(env_id=env_id, agent=agent.name, seconds=time.monotonic() - started, seed=seed)


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


def finished_ids(journal: Journal) -> set[str]:
    """The ids of the episodes that a resumed rollout needn't play again."""
    ids: set[str] = set()
    for episode in journal.read():
        if episode.failure is None:
            ids.add(episode.id)
        else:
            ids.discard(episode.id)
    return ids


def is_played(journal: Journal, scenarios: int, k: int) -> bool:
    """Whether a resumed evaluation of so many scenarios has nothing left to play."""
    finished = finished_ids(journal)
    # As the runner names them.
    return all(f"{journal.label}/{index}/{member}" in finished for index in range(scenarios) for member in range(k))
