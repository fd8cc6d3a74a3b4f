"""One rollout: which episode is played when, in what place, and when all of it stops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium

from art_gym.episodes import Episode, EpisodeGroup, Failure
from art_gym.errors import EngineError, UsageError
from art_gym.rollout._arguments import check_scenario
from art_gym.rollout._collector import rarer_collections
from art_gym.rollout._hosts import Host
from art_gym.rollout._play import Branch, Play, Seat, branch_path
from art_gym.rollout._recorder import Recorder
from art_gym.rollout._threads import DaemonThread
from art_gym.rollout._turnstile import Turnstile
from art_gym.rollout.failures import FailureCount
from art_gym.rollout.isolation import host_factory
from art_gym.rollout.progress import Progress
from art_gym.scenarios import Scenario

if TYPE_CHECKING:
    from art_gym.rollout.runner import Runner

T = TypeVar("T")

ENGINE_CHECK_SECONDS = 2.0
"""How often the engine is looked at while episodes are played."""

MOST_BRANCHES = 256
"""Episodes that may branch off in one group; a rule that says yes at every turn would never end."""


def episodes_ahead(concurrency: int) -> int:
    """How many episodes may be played beyond the group that is waited for: enough for every place to stay busy while a slow one lasts.

    Those that have ended are held in memory until their group's turn comes.
    """
    return max(2 * concurrency, min(8 * concurrency, 1024))


@dataclass(slots=True)
class _Group:
    """A group in play.

    Attributes:
        index: Its place among the rollout's groups.
        scenario: Where its episodes start.
        size: How many of them are to finish.
        missing: How many haven't ended, or been started.
        ended: Those that have.
        tasks: Of those in play.
        cut: Whether enough have finished, and those in play are cut.
        whole: Set when all have ended.
    """

    index: int
    scenario: Scenario
    size: int
    missing: int
    ended: list[Episode] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    branches: int = 0
    cut: bool = False
    whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def put(self, episode: Episode) -> None:
        self.ended.append(episode)
        self._end(1)

    def skip(self, count: int) -> None:
        """Do without so many that haven't been started."""
        if count:
            self._end(count)

    def grow(self, count: int) -> None:
        self.branches += count
        self.missing += count

    def _end(self, count: int) -> None:
        self.missing -= count
        if not self.missing:
            self.whole.set_result(None)

    def enough(self) -> bool:
        return sum(episode.failure is None and episode.parent is None for episode in self.ended) >= self.size

    def result(self) -> EpisodeGroup:
        return EpisodeGroup(self.scenario, sorted(self.ended, key=lambda episode: (episode.member, branch_path(episode))))


class Rollout:
    """One call of `Runner.run`.

    Args:
        runner: What is played, how.
        recorder: Keeps the episodes.
        recorded: Episodes of an earlier attempt, by id.
        progress: Told of each episode as it ends.
    """

    def __init__(self, runner: Runner, recorder: Recorder, recorded: Mapping[str, Episode], progress: Progress | None) -> None:
        self._runner = runner
        self._recorder = recorder
        self._recorded = recorded
        self._progress = progress
        self._failures = FailureCount(runner.max_failure_rate)
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[Exception] = loop.create_future()
        self._open: asyncio.Queue[_Group | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(runner.concurrency)
        self._turnstile = Turnstile()
        self._ahead = asyncio.Semaphore(math.ceil(episodes_ahead(runner.concurrency) / runner.group_size) + 1)
        self._hosts = host_factory(runner.isolation, runner.making)
        self._idle: list[Host] = []
        self._playing: set[asyncio.Task[None]] = set()
        self._cut: list[Episode] = []
        self._engine = DaemonThread("art_gym engine check")

    async def groups(self, scenarios: Iterable[Scenario]) -> AsyncGenerator[EpisodeGroup, None]:
        """Play, and yield the groups in order."""
        tasks: list[asyncio.Task[None]] = []
        collections = rarer_collections()
        collections.__enter__()
        try:
            await self._make_first()
            tasks += [self._start(self._feed, scenarios), self._start(self._runner.gate.steer, getattr(self._runner.agent, "load", None))]
            if self._runner.engine_check is not None:
                tasks.append(self._start(self._watch_engine))
            while (group := await self._next()) is not None:
                await self._or_stop(group.whole)
                yield group.result()
                self._ahead.release()
            self._failures.check()
        finally:
            self._stop.cancel()
            tasks += self._playing
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                await asyncio.gather(*(self._recorder.record(episode) for episode in self._cut))
            finally:
                collections.__exit__(None, None, None)
                await asyncio.gather(*(host.close() for host in self._idle))
                await self._hosts.close()
                self._engine.stop()
                await self._recorder.close()

    async def _next(self) -> _Group | None:
        """Return the group that is to be yielded next, whole or not; None at the end."""
        # Without waiting if possible, so that groups that were whole before the rollout had to stop are still yielded.
        return await self._or_stop(self._open.get()) if self._open.empty() else self._open.get_nowait()

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await function(*args)
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
        host = self._hosts.new()
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
        if instant and self._runner.isolation == "auto":
            await host.close()
            self._hosts = host_factory("loop", self._runner.making)
        else:
            self._idle.append(host)

    # ------------------------------------------------------------- what is played

    async def _feed(self, scenarios: Iterable[Scenario]) -> None:
        """Open a group for each scenario, and start its episodes as places get free."""
        most = self._runner.group_size + self._runner.oversample
        for index, scenario in enumerate(scenarios):
            if self._stop.done():
                return
            check_scenario(scenario)
            await self._ahead.acquire()
            group = _Group(index, scenario, self._runner.group_size, most)
            self._open.put_nowait(group)
            missing = list(self._known(group, most))
            for position, episode in enumerate(missing):
                if group.cut or group.enough():
                    group.skip(len(missing) - position)
                    break
                self._recorder.check(scenario)
                await self._slots.acquire()
                if self._stop.done():
                    return
                self._play(group, episode)
                # One at a time, or the first policy calls of thousands of episodes would be made in one turn of the event loop.
                await asyncio.sleep(0)
        self._open.put_nowait(None)

    def _known(self, group: _Group, most: int) -> Iterable[Episode]:
        """Put the group's episodes that needn't be played again, and give those that must be."""
        roots = [self._episode(group, member) for member in range(most)]
        known = [self._take(group, root) for root in roots]
        finished = [episode for episode in known if episode is not None and episode.failure is None]
        if len(finished) >= group.size and not self._runner.branch:
            # Those that were cut then, or failed, have no part in it now.
            for episode in known:
                if episode is not None:
                    self._put(group, episode)
            group.skip(known.count(None))
            return []
        for episode in finished:
            self._put_tree(group, episode)
        return [root for root, episode in zip(roots, known, strict=True) if episode is None or episode.failure is not None]

    def _put_tree(self, group: _Group, episode: Episode) -> None:
        """Put a known episode and what branched off it; branches that are missing are played from where they began."""
        group.grow(len(episode.branches))
        for number, turn in enumerate(episode.branches):
            child = self._child(episode, number, turn)
            known = self._take(group, child)
            if known is not None and known.failure is None:
                self._put_tree(group, known)
            else:
                self._play_later(group, child, _place(episode, turn))
        self._put(group, episode)

    def _take(self, group: _Group, wanted: Episode) -> Episode | None:
        known = self._recorded.get(wanted.id)
        scenario = group.scenario
        if known is not None and (known.scenario.id, known.scenario.seed) != (scenario.id, scenario.seed):
            raise UsageError(
                f"the journal's episode {known.id!r} played scenario {known.scenario.id!r}, and this rollout has {scenario.id!r} "
                "there; resume with the same scenarios, or use another label or run folder"
            )
        return known

    def _episode(self, group: _Group, member: int) -> Episode:
        return Episode(id=self._recorder.episode_id(group.index, member), env_id="", scenario=group.scenario, member=member)

    def _child(self, parent: Episode, number: int, turn: int) -> Episode:
        return Episode(
            id=f"{parent.id}~{number}",
            env_id=parent.env_id,
            scenario=parent.scenario,
            member=parent.member,
            parent=parent.id,
            shared_turns=turn,
        )

    # ------------------------------------------------------------- how it is played

    def _play(self, group: _Group, episode: Episode, start: Branch | None = None) -> None:
        """Play an episode, for which a slot was acquired."""
        self._keep(self._play_one, group, episode, start).add_done_callback(lambda _: self._slots.release())

    def _play_later(self, group: _Group, episode: Episode, start: Branch) -> None:
        """Play an episode as soon as there is a slot."""

        async def waiting() -> None:
            await self._slots.acquire()
            self._play(group, episode, start)

        self._keep(waiting)

    def _keep(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> asyncio.Task[None]:
        task = self._start(function, *args)
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)
        return task

    async def _play_one(self, group: _Group, episode: Episode, start: Branch | None) -> None:
        if group.cut:
            group.skip(1)
            return
        task = asyncio.current_task()
        assert task is not None
        runner = self._runner
        seat = Seat(self._idle.pop() if self._idle else self._hosts.new())
        order = (runner.priority, group.index, episode.member)
        play = Play(
            episode,
            seat,
            runner.agent,
            runner.limits,
            runner.gate,
            self._turnstile,
            order,
            runner.branch,
            partial(self._grow, group, episode),
            start,
        )
        group.tasks.add(task)
        try:
            await play.run()
        except asyncio.CancelledError:
            if not group.cut or self._stop.done() or task.uncancel() > 0:
                self._idle.append(seat.host)
                episode.failure = self._why_cut()
                self._cut.append(episode)
                raise
            episode.failure = Failure("cancelled", f"cut, since {group.size} episodes of its group had finished")
        except BaseException:
            self._idle.append(seat.host)
            raise
        finally:
            group.tasks.discard(task)
        if seat.busy or (episode.failure is not None and episode.failure.kind in ("environment", "tool_timeout")):
            seat.host.abandon()
        else:
            self._idle.append(seat.host)
        await self._finish(group, episode)

    def _grow(self, group: _Group, parent: Episode, branch: Branch, count: int) -> None:
        if group.branches + count > MOST_BRANCHES:
            raise UsageError(
                f"more than {MOST_BRANCHES} episodes would branch off in the group of scenario {group.scenario.id!r}; let branch return 0 for "
                "most turns, such as for those of branches (episode.parent)"
            )
        group.grow(count)
        for number in range(len(parent.branches), len(parent.branches) + count):
            child = self._child(parent, number, len(branch.turns))
            self._play_later(group, child, branch)
        parent.branches += [len(branch.turns)] * count

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
            return
        self._put(group, episode)
        if self._runner.oversample and not group.cut and group.enough():
            group.cut = True
            for task in group.tasks:
                task.cancel()

    def _put(self, group: _Group, episode: Episode) -> None:
        group.put(episode)
        if self._progress is not None:
            self._progress.on_episode(episode)
        self._failures.add(episode)

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


def _place(episode: Episode, turn: int) -> Branch:
    """Give the place before a turn of an episode that is known from its record only."""
    observation = episode.turns[turn].observation if turn < len(episode.turns) else episode.final_observation
    before = replace(episode, turns=episode.turns[:turn], final_observation=observation)
    return Branch(before.turns, tuple(observation), before.messages, {}, None)


def _is_instant(env: gymnasium.Env[Any, Any]) -> bool:
    return getattr(env.unwrapped, "instant", False) is True
