"""The runner: plays many episodes at once, and hands them out as groups in the order of their scenarios.

This module owns which episode is played when, how many at once, what is recorded, and when a rollout stops. How one episode is played, and what
its failures mean, belongs to `_play`; where environments live to `_hosts`; the policy to the agent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

import gymnasium

from art_gym.episodes import Episode, EpisodeGroup, Failure
from art_gym.errors import EngineError, UsageError
from art_gym.rollout._arguments import check_agent, check_counts, check_env, check_run, check_scenario, check_seconds
from art_gym.rollout._hosts import Host, InlineHost, ThreadHost
from art_gym.rollout._play import Limits, play
from art_gym.rollout._recorder import Recorder
from art_gym.rollout._threads import DaemonThread, Outcome, outcome_of
from art_gym.rollout.agent import Agent
from art_gym.rollout.progress import Progress
from art_gym.scenarios import Scenario
from art_gym.store import Journal

T = TypeVar("T")

ENGINE_CHECK_SECONDS = 2.0
"""How often the engine is looked at while episodes are played."""


class Runner:
    """Plays episodes of one environment with one agent.

    An episode can fail without touching the others; it is kept with its `failure`, and the group's `finished` leaves it out. Only an engine
    that died and an error that the user must act on stop the whole rollout.

    Environments whose tools return at once (`ToolEnv.instant`) are stepped in the event loop; every other instance gets a thread of its own,
    and one that is stuck past its time is left behind and replaced.

    Args:
        env: The environment's id, or a function that makes one.
        agent: The policy. The runner doesn't close it, except at the end of `collect`.
        env_kwargs: Arguments of the environment, with an id only.
        concurrency: The most episodes in play at once.
        group_size: Episodes of each scenario.
        turn_timeout: Seconds that one policy call may take; past it the episode fails with kind `policy`.
        tool_timeout: Seconds that one step may take; past it the episode fails with kind `tool_timeout`.
        episode_timeout: Seconds that an episode may take; past it the episode fails with the kind of what it was waiting for.
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
        group_size: int = 1,
        turn_timeout: float = 60.0,
        tool_timeout: float = 30.0,
        episode_timeout: float = 600.0,
        engine_check: Callable[[], None] | None = None,
    ) -> None:
        check_env(env, env_kwargs)
        check_agent(agent)
        check_counts(concurrency=concurrency, group_size=group_size)
        check_seconds(turn_timeout=turn_timeout, tool_timeout=tool_timeout, episode_timeout=episode_timeout)
        if engine_check is not None and not callable(engine_check):
            raise UsageError(f"engine_check is {engine_check!r:.100}; it must be a function that raises EngineError when the engine is dead")
        self.env = env
        self.agent = agent
        self.env_kwargs = dict(env_kwargs or {})
        self.concurrency = concurrency
        self.group_size = group_size
        self.limits = Limits(turn=turn_timeout, step=tool_timeout, episode=episode_timeout)
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

        Scenarios are taken as they are needed, so that they may be endless: at most two rounds of episodes are played ahead of the group that
        the caller is waiting for. Leaving the loop early cancels what is in play; `contextlib.aclosing` makes that happen at once rather than
        when the generator is collected.

        Args:
            scenarios: Where the episodes start.
            journal: Each episode is on disk there as soon as it ends, and before its group is yielded.
            resume: Take episodes that the journal already holds from there, and play only the missing and the failed ones. The scenarios must
                be the same as before. Without it the journal must be empty.
            progress: Told of each episode as it ends.

        Raises:
            EngineError: The engine died. What was in play is recorded as failed, with kind `engine`.
            UsageError: Unknown environment, model or key; what is no scenario; a journal of another rollout, or one that can't be written.
        """
        check_run(scenarios, journal, progress)
        rollout = _Rollout(self, Recorder(journal), _recorded(journal, resume), progress)
        async with aclosing(rollout.groups(scenarios)) as groups:
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
            UsageError: As for `run`.
        """

        async def collected() -> list[EpisodeGroup]:
            try:
                return [group async for group in self.run(scenarios, journal=journal, resume=resume, progress=progress)]
            finally:
                await self.agent.close()

        return _run(collected())

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make a new instance of the environment."""
        if callable(self.env):
            return self.env()
        from art_gym.registration import make

        return make(self.env, **self.env_kwargs)


def _recorded(journal: Journal | None, resume: bool) -> dict[str, Episode]:
    """Episodes that needn't be played again, by id."""
    if journal is None:
        return {}
    if resume:
        return {id: episode for id, episode in journal.latest().items() if episode.failure is None}
    if next(journal.read(), None) is not None:
        raise UsageError(f"{journal.path} already holds episodes; resume that rollout, or use another label or run folder")
    return {}


@dataclass(slots=True)
class _Group:
    """A group in play."""

    scenario: Scenario
    episodes: list[Episode | None]
    whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, episode: Episode) -> None:
        self.episodes[episode.member] = episode
        if all(self.episodes):
            self.whole.set_result(None)


class _Rollout:
    """One call of `Runner.run`."""

    def __init__(self, runner: Runner, recorder: Recorder, recorded: dict[str, Episode], progress: Progress | None) -> None:
        self._runner = runner
        self._recorder = recorder
        self._recorded = recorded
        self._progress = progress
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[Exception] = loop.create_future()
        self._jobs: asyncio.Queue[tuple[_Group, Episode]] = asyncio.Queue()
        self._open: asyncio.Queue[_Group | None] = asyncio.Queue()
        # Enough for every place to stay busy while the oldest group waits for a slow episode.
        self._ahead = asyncio.Semaphore(2 * math.ceil(runner.concurrency / runner.group_size) + 1)
        self._new_host: Callable[[], Host] = lambda: ThreadHost(runner.make)
        self._idle: list[Host] = []
        self._cut: list[Episode] = []
        self._engine = DaemonThread("art_gym engine check")

    async def groups(self, scenarios: Iterable[Scenario]) -> AsyncGenerator[EpisodeGroup, None]:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._make_first()
            tasks += [self._start(self._feed(scenarios)), *(self._start(self._work()) for _ in range(self._runner.concurrency))]
            if self._runner.engine_check is not None:
                tasks.append(self._start(self._watch_engine()))
            while (group := await self._next()) is not None:
                await self._or_stop(group.whole)
                yield EpisodeGroup(group.scenario, [episode for episode in group.episodes if episode is not None])
                self._ahead.release()
        finally:
            self._stop.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await asyncio.gather(*(self._recorder.record(episode) for episode in self._cut))
            finally:
                await asyncio.gather(*(host.close() for host in self._idle))
                self._engine.stop()
                await self._recorder.close()

    async def _next(self) -> _Group | None:
        """Return the group that is to be yielded next, whole or not; None at the end."""
        # Without waiting if possible, so that groups that were whole before the rollout had to stop are still yielded.
        return await self._or_stop(self._open.get()) if self._open.empty() else self._open.get_nowait()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:  # noqa: BLE001  # raised again where the caller waits
                self._fail(error)
            except BaseException as error:
                # Or the caller would wait for ever for what this task was to do.
                self._fail(RuntimeError(f"the rollout was ended by {error!r}"))
                raise

        return asyncio.create_task(guarded())

    def _fail(self, error: Exception) -> None:
        if not self._stop.done():
            self._stop.set_result(error)

    async def _or_stop(self, awaitable: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Return what the awaitable gives, unless the rollout has to stop first."""
        future = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait((future, self._stop), return_when=asyncio.FIRST_COMPLETED)
            if future.done():
                return future.result()
            raise self._stop.result()
        finally:
            future.cancel()

    async def _make_first(self) -> None:
        """Make one environment, to see whether it is instant, and whether the user's id and arguments are right."""
        host = self._new_host()
        try:
            instant = await host.call(_is_instant, timeout=self._runner.limits.episode)
        except UsageError:
            await host.close()
            raise
        except Exception:  # noqa: BLE001  # every episode will meet it too, and record it
            host.abandon()
            return
        except BaseException:
            host.abandon()
            raise
        if instant:
            await host.close()
            self._new_host = lambda: InlineHost(self._runner.make)
        else:
            self._idle.append(host)

    async def _feed(self, scenarios: Iterable[Scenario]) -> None:
        size = self._runner.group_size
        for index, scenario in enumerate(scenarios):
            check_scenario(scenario)
            await self._ahead.acquire()
            group = _Group(scenario, [None] * size)
            for member in range(size):
                episode = Episode(id=self._recorder.episode_id(index, member), env_id="", scenario=scenario, member=member)
                known = self._recorded.pop(episode.id, None)
                if known is None:
                    self._recorder.check(scenario)
                    self._jobs.put_nowait((group, episode))
                elif (known.scenario.id, known.scenario.seed) == (scenario.id, scenario.seed):
                    self._put(group, known)
                else:
                    raise UsageError(
                        f"the journal's episode {known.id!r} played scenario {known.scenario.id!r}, and this rollout has {scenario.id!r} "
                        "there; resume with the same scenarios, or use another label or run folder"
                    )
            self._open.put_nowait(group)
        self._open.put_nowait(None)

    async def _work(self) -> None:
        """Play one episode after the other."""
        while not self._stop.done():
            group, episode = await self._jobs.get()
            host = self._idle.pop() if self._idle else self._new_host()
            try:
                await play(episode, host, self._runner.agent, self._runner.limits)
            except BaseException as error:
                self._idle.append(host)
                if isinstance(error, asyncio.CancelledError):
                    episode.failure = self._why_cut()
                    self._cut.append(episode)
                raise
            if episode.failure is not None and episode.failure.kind in ("environment", "tool_timeout"):
                host.abandon()
            else:
                self._idle.append(host)
            await self._finish(group, episode)

    async def _finish(self, group: _Group, episode: Episode) -> None:
        failure = episode.failure
        if failure is not None and failure.kind in ("policy", "engine"):
            try:
                error = await self._engine_error()
            except asyncio.CancelledError:
                self._cut.append(episode)
                raise
            if error is not None:
                episode.failure = failure = Failure("engine", f"{error}\n(seen as: {failure.message})")
        await self._recorder.record(episode)
        if failure is not None and failure.kind == "engine":
            self._fail(EngineError(failure.message))
        else:
            self._put(group, episode)

    def _put(self, group: _Group, episode: Episode) -> None:
        group.put(episode)
        if self._progress is not None:
            self._progress.on_episode(episode)

    def _why_cut(self) -> Failure:
        error = self._stop.result() if self._stop.done() and not self._stop.cancelled() else None
        if isinstance(error, EngineError):
            return Failure("engine", str(error))
        return Failure("cancelled", "the rollout was left before the episode ended" if error is None else f"the rollout stopped: {error}")

    async def _watch_engine(self) -> None:
        """Notice a dead engine even while every episode waits for it."""
        while True:
            await asyncio.sleep(ENGINE_CHECK_SECONDS)
            if error := await self._engine_error():
                raise error

    async def _engine_error(self) -> EngineError | None:
        if self._runner.engine_check is None:
            return None
        try:
            await self._engine.run(self._runner.engine_check)
        except EngineError as error:
            return error
        return None


def _is_instant(env: gymnasium.Env[Any, Any]) -> bool:
    return getattr(env.unwrapped, "instant", False) is True


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end: in this thread, or in another one if this one's event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    outcomes: list[Outcome[T]] = []

    def target() -> None:
        with asyncio.Runner(loop_factory=lambda: loop):
            outcomes.append(outcome_of(loop.run_until_complete, task))

    thread = Thread(target=target, name="art_gym rollout", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return outcomes[0].unwrap()
