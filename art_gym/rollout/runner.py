"""The runner: plays many episodes at once, and hands them out as groups in the order of their scenarios.

This module owns what a rollout is given and what it gives. Which episode is played when, and when a rollout stops, belongs to `_rollout`; how
one episode is played, and what its failures mean, to `_play`; where environments live to `_hosts`; the policy to the agent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any
from weakref import WeakSet

import gymnasium

from art_gym.episodes import Episode, EpisodeGroup
from art_gym.errors import UsageError
from art_gym.rollout._arguments import check_agent, check_counts, check_env, check_oversampling, check_priority, check_run, check_seconds
from art_gym.rollout._blocking import run_blocking
from art_gym.rollout._making import Making
from art_gym.rollout._play import Limits
from art_gym.rollout._recorder import Recorder
from art_gym.rollout._rollout import Rollout
from art_gym.rollout.agent import Agent, TurnState
from art_gym.rollout.failures import FailureCount, MaxFailureRate
from art_gym.rollout.gate import RequestGate
from art_gym.rollout.isolation import Isolation, check_isolation
from art_gym.rollout.progress import Progress
from art_gym.scenarios import Scenario
from art_gym.store import Journal


class Runner:
    """Plays episodes of one environment with one agent.

    An episode can fail without touching the others; it is kept with its `failure`, and the group's `finished` leaves it out. Only an engine
    that died and an error that the user must act on stop the whole rollout.

    Environments whose tools return at once (`ToolEnv.instant`) are stepped in the event loop; every other instance gets a thread of its own,
    and one that is stuck past its time is left behind and replaced. `isolation` puts each into a process or onto a Ray cluster, where it is
    killed.

    Args:
        env: The environment's id, or a function that makes one.
        agent: The policy. The runner doesn't close it, except at the end of `collect`.
        env_kwargs: Arguments of the environment, with an id only.
        concurrency: The most episodes in play at once.
        isolation: Where environments live: "auto" (in the loop if they are instant, else in threads), "loop", "thread", "process", "ray", or
            `Processes(…)` or `Ray(…)` with limits.
        group_size: Episodes of each scenario.
        oversample: Episodes of each scenario that are played beside those; when `group_size` of all have finished, the others are cut, and
            kept with a failure of kind "cancelled". So no group waits for its slowest episodes, at the price of fewer long ones in it.
        turn_timeout: Seconds that one policy call may take; past it the episode fails with kind `policy`.
        tool_timeout: Seconds that one step may take; past it the episode fails with kind `tool_timeout`.
        episode_timeout: Seconds that an episode may take; past it the episode fails with the kind of what it was waiting for.
        max_failure_rate: The share of episodes that may fail, or a mapping from kinds of failures to shares; beyond it the rollout ends. While
            it goes on, the share is taken of at least 20 episodes, and of so many that one is the share. Cancelled ones don't count.
        gate: Bounds the policy calls in flight: a number, or a gate that several runners share. None: a gate of its own that finds out how many
            the server and the event loop take.
        priority: Whose calls go first through a shared gate: the smallest number, such as 0 for an evaluation beside a training with 1.
        branch: Told of an episode and its state before each turn but an episode's first, it returns how many more episodes begin there, 0 for
            none (`art_gym.rollout.branch_at`). They join the group, share the turns so far, and may branch in turn.
        engine_check: Raises `EngineError` when the engine is dead, such as `Engine.check`. Called in a thread, every few seconds and after each
            failure of the policy.

    Raises:
        UsageError: An argument can't be right.
    """

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        agent: Agent,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        isolation: Isolation = "auto",
        group_size: int = 1,
        turn_timeout: float = 60.0,
        tool_timeout: float = 30.0,
        episode_timeout: float = 600.0,
        oversample: int = 0,
        max_failure_rate: MaxFailureRate = 1.0,
        gate: RequestGate | int | None = None,
        priority: int = 0,
        branch: Callable[[Episode, TurnState], int] | None = None,
        engine_check: Callable[[], None] | None = None,
    ) -> None:
        check_env(env, env_kwargs)
        check_isolation(isolation)
        check_agent(agent)
        check_counts(concurrency=concurrency, group_size=group_size)
        check_seconds(turn_timeout=turn_timeout, tool_timeout=tool_timeout, episode_timeout=episode_timeout)
        check_oversampling(oversample, branch)
        FailureCount(max_failure_rate)
        check_priority(priority)
        if engine_check is not None and not callable(engine_check):
            raise UsageError(f"engine_check is {engine_check!r:.100}; it must be a function that raises EngineError when the engine is dead")
        self.env = env
        self.agent = agent
        self.env_kwargs = dict(env_kwargs or {})
        self.making = Making(self.env, self.env_kwargs)
        self.concurrency = concurrency
        self.isolation = isolation
        self.group_size = group_size
        self.limits = Limits(turn=turn_timeout, step=tool_timeout, episode=episode_timeout)
        self.oversample = oversample
        self.max_failure_rate = max_failure_rate
        self.gate = gate if isinstance(gate, RequestGate) else RequestGate(gate)
        self.priority = priority
        self.branch = branch
        self.engine_check = engine_check

    async def run(
        self,
        scenarios: Iterable[Scenario],
        *,
        journal: Journal | None = None,
        resume: bool = False,
        progress: Progress | None = None,
    ) -> AsyncGenerator[EpisodeGroup, None]:
        """Play `group_size` episodes of each scenario, and yield the groups in the order of the scenarios.

        Scenarios are taken as they are needed, so that they may be endless: a bounded number of episodes is played ahead of the group that
        the caller is waiting for. Leaving the loop early cancels what is in play; `contextlib.aclosing` makes that happen at once rather than
        when the generator is collected.

        Args:
            scenarios: Where the episodes start. They are drawn in the event loop, which waits for each.
            journal: Each episode is on disk there as soon as it ends, and before its group is yielded.
            resume: Take episodes that the journal already holds from there, and play only the missing and the failed ones. The scenarios must
                be the same as before. Without it the journal must be empty.
            progress: Told of each episode as it ends.

        Raises:
            EngineError: The engine died. What was in play is recorded as failed, with kind `engine`.
            TooManyFailures: More episodes failed than may.
            UsageError: Unknown environment, model or key; what is no scenario; a journal of another rollout, or one that can't be written.
        """
        check_run(scenarios, journal, progress)
        with _recorded(journal, resume) as recorded:
            async with aclosing(Rollout(self, Recorder(journal), recorded, progress).groups(scenarios)) as groups:
                async for group in groups:
                    yield group

    def collect(
        self,
        scenarios: Iterable[Scenario],
        *,
        journal: Journal | None = None,
        resume: bool = False,
        progress: Progress | None = None,
    ) -> list[EpisodeGroup]:
        """Play all the scenarios and return their groups: `run` for code that isn't asynchronous.

        It works in any thread, and in one whose event loop is running (a notebook), which it blocks. The agent is closed at the end.

        Args:
            scenarios: Where the episodes start; not endless.
            journal: As for `run`.
            resume: As for `run`.
            progress: As for `run`.

        Returns:
            The groups, in the order of the scenarios.

        Raises:
            EngineError: The engine died; as for `run`.
            TooManyFailures: As for `run`.
            UsageError: As for `run`.
        """

        async def collected() -> list[EpisodeGroup]:
            try:
                return [group async for group in self.run(scenarios, journal=journal, resume=resume, progress=progress)]
            finally:
                await self.agent.close()

        return run_blocking(collected())

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make a new instance of the environment."""
        return self.making()


_in_use: WeakSet[Journal] = WeakSet()
"""Journals that a rollout of this process writes: two would give their episodes the same ids."""


@contextmanager
def _recorded(journal: Journal | None, resume: bool) -> Iterator[Mapping[str, Episode]]:
    """Give what an earlier attempt recorded, by id; an episode is read when it is asked for."""
    if journal is None:
        yield {}
        return
    if journal in _in_use:
        raise UsageError(f"another rollout writes to {journal.path}; wait for it, or use another label")
    _in_use.add(journal)
    try:
        with journal.index() as index:
            if index and not resume:
                raise UsageError(f"{journal.path} already holds episodes; resume that rollout, or use another label or run folder")
            yield index
    finally:
        _in_use.discard(journal)
