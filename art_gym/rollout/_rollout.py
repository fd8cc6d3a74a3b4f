"""One rollout: which episode is played when, in what place, and when all of it stops."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium

from art_gym._steps import env_id
from art_gym.episodes import Episode, EpisodeGroup, Failure
from art_gym.errors import EngineError, UsageError
from art_gym.rollout._arguments import check_scenario
from art_gym.rollout._collector import rarer_collections
from art_gym.rollout._group import Group
from art_gym.rollout._hosts import Host
from art_gym.rollout._play import Branch, Play, Seat
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

ENGINE_ANSWER_SECONDS = 60.0
"""How long a look at the engine may take; beyond it the engine counts as dead."""

MOST_BRANCHES = 256
"""Episodes that may branch off in one group; a rule that says yes at every turn would never end."""


def episodes_ahead(concurrency: int) -> int:
    """How many episodes may be played beyond the group that is waited for: enough for every place to stay busy while a slow one lasts.

    Those that have ended are held in memory until their group's turn comes.
    """
    return max(2 * concurrency, min(8 * concurrency, 1024))


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
        self._open: asyncio.Queue[Group | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(runner.concurrency)
        self._turnstile = Turnstile()
        self._held = 0
        self._most_held = episodes_ahead(runner.concurrency) + runner.group_size + runner.oversample
        self._room = asyncio.Event()
        self._hosts = host_factory(runner.isolation, runner.making)
        self._env_id = ""
        self._descendants: defaultdict[str, list[str]] = defaultdict(list)
        for id in recorded:
            root, branched, _ = id.partition("~")
            if branched:
                self._descendants[root].append(id)
        self._idle: list[Host] = []
        self._playing: set[asyncio.Task[None]] = set()
        self._cut: list[Episode] = []
        self._engine = DaemonThread("art_gym engine check")

    async def groups(self, scenarios: Iterable[Scenario]) -> AsyncGenerator[EpisodeGroup, None]:
        """Play, and yield the groups in order."""
        tasks: list[asyncio.Task[None]] = []
        try:
            with rarer_collections():
                await self._make_first()
                tasks += [
                    self._start(self._feed, scenarios),
                    self._start(self._runner.gate.steer, getattr(self._runner.agent, "server_load", None)),
                ]
                if self._runner.engine_check is not None:
                    tasks.append(self._start(self._watch_engine))
                while (group := await self._next()) is not None:
                    await self._or_stop(group.whole)
                    yield group.result()
                    self._held -= group.held
                    self._room.set()
                self._failures.check()
        finally:
            await _to_its_end(self._close(tasks))

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        """Stop what is in play, record it, and give back all that the rollout holds; each even where another failed."""
        self._stop.cancel()
        tasks += self._playing
        for task in tasks:
            task.cancel()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._recorder.close)
            stack.callback(self._engine.stop)
            stack.push_async_callback(self._hosts.close)
            stack.push_async_callback(self._close_idle)
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(self._recorder.record(episode) for episode in self._cut))

    async def _close_idle(self) -> None:
        """Close the hosts, all at once: each may take its time."""
        for closed in await asyncio.gather(*(host.close() for host in self._idle), return_exceptions=True):
            if isinstance(closed, BaseException):
                raise closed

    async def _next(self) -> Group | None:
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
            instant, self._env_id = await host.call(_traits, timeout=self._runner.limits.episode)
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
        runner = self._runner
        most = runner.group_size + runner.oversample
        for index, scenario in enumerate(scenarios):
            check_scenario(scenario)
            while self._held and self._held + most > self._most_held:
                self._room.clear()
                await self._room.wait()
            if self._stop.done():
                return
            group = Group(index, runner.gate.ticket(), scenario, runner.group_size, most)
            self._held += most
            self._open.put_nowait(group)
            missing = await self._known(group)
            for position, episode in enumerate(missing):
                self._recorder.check(scenario)
                await self._slots.acquire()
                if self._stop.done():
                    return
                if group.cut:
                    self._slots.release()
                    group.skip(len(missing) - position)
                    break
                self._play(group, episode)
                # One at a time, or the first policy calls of thousands of episodes would be made in one turn of the event loop.
                await asyncio.sleep(0)
        self._open.put_nowait(None)

    async def _known(self, group: Group) -> list[Episode]:
        """Put the group's episodes that needn't be played again, and return those that must be, with all that branches off them."""
        missing = []
        for root in [self._episode(group, member) for member in range(group.missing)]:
            if (tree := self._tree(group, root)) is None:
                missing.append(root)
                continue
            group.finished += 1
            self._grow_by(group, len(tree) - 1)
            for episode in tree:
                self._put(group, episode)
        if group.finished >= group.size:
            # The others were cut then, or failed.
            for root in missing:
                if (known := self._take(group, root)) is None:
                    group.skip(1)
                else:
                    self._put(group, known)
            return []
        for root in missing:
            await self._supersede(root)
        return missing

    def _tree(self, group: Group, root: Episode) -> list[Episode] | None:
        """Return a known episode and all that branched off it; None unless all of them have finished.

        What the agent remembered at a branch isn't recorded, so that one alone can't be played from there.
        """
        known = self._take(group, root)
        if known is None or known.failure is not None:
            return None
        tree = [known]
        for number, turn in enumerate(known.branches):
            if (branch := self._tree(group, self._child(known, number, turn))) is None:
                return None
            tree += branch
        return tree

    async def _supersede(self, root: Episode) -> None:
        """Record that what branched off an episode has no parent any more, since that is played again."""
        for id in self._descendants.get(root.id, ()):
            known = self._recorded[id]
            if known.failure is None:
                failure = Failure("cancelled", "superseded, since the episode that it branched off is played again")
                await self._recorder.record(replace(known, tools=[], turns=[], final_observation=[], metrics={}, branches=[], failure=failure))

    def _take(self, group: Group, wanted: Episode) -> Episode | None:
        known = self._recorded.get(wanted.id)
        if known is None:
            return None
        other = "or use another label or run folder"
        if known.env_id and self._env_id and known.env_id != self._env_id:
            played = f"was played in {known.env_id!r}, and this rollout plays {self._env_id!r}"
            raise UsageError(f"the journal's episode {known.id!r} {played}; resume in the same, {other}")
        before, now = known.scenario.to_dict(), json.loads(json.dumps(group.scenario.to_dict()))
        if before != now:
            what = next(name for name in now if before.get(name) != now[name])
            raise UsageError(
                f"the journal's episode {known.id!r} played scenario {known.scenario.id!r}, and this rollout has {group.scenario.id!r} there "
                f"(another {what}); resume with the same scenarios, {other}"
            )
        return known

    def _episode(self, group: Group, member: int) -> Episode:
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

    def _play(self, group: Group, episode: Episode, start: Branch | None = None) -> None:
        """Play an episode, for which a slot was acquired."""
        self._keep(self._play_one, group, episode, start).add_done_callback(lambda _: self._slots.release())

    def _play_later(self, group: Group, episode: Episode, start: Branch) -> None:
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

    async def _play_one(self, group: Group, episode: Episode, start: Branch | None) -> None:
        if group.cut:
            group.skip(1)
            return
        task = asyncio.current_task()
        assert task is not None
        runner = self._runner
        seat = Seat(self._idle.pop() if self._idle else self._hosts.new())
        order = (runner.priority, group.ticket, episode.member)
        grow = partial(self._grow, group, episode)
        play = Play(episode, seat, runner.agent, runner.limits, runner.gate, self._turnstile, order, runner.branch, grow, start)
        group.tasks.add(task)
        try:
            await play.run()
        except asyncio.CancelledError:
            if not group.cut or self._stop.done() or task.uncancel() > 0:
                self._idle.append(seat.host)
                episode.failure = self._why_cut()
                self._cut.append(episode)
                raise
        except BaseException:
            self._idle.append(seat.host)
            raise
        finally:
            group.tasks.discard(task)
        if group.cut:
            episode.failure = Failure("cancelled", f"cut, since {group.size} episodes of its group had finished")
        elif episode.failure is None and episode.parent is None:
            group.finished += 1
            if runner.oversample and group.finished == group.size:
                group.close()
        if seat.busy or (episode.failure is not None and episode.failure.kind in ("environment", "tool_timeout")):
            seat.host.abandon()
        else:
            self._idle.append(seat.host)
        await self._finish(group, episode)

    def _grow(self, group: Group, parent: Episode, branch: Branch, count: int) -> None:
        """Let episodes branch off one in play."""
        if group.branches + count > MOST_BRANCHES:
            raise UsageError(
                f"more than {MOST_BRANCHES} episodes would branch off in the group of scenario {group.scenario.id!r}; let branch return 0 for "
                "most turns, such as for those of branches (episode.parent)"
            )
        self._grow_by(group, count)
        for number in range(len(parent.branches), len(parent.branches) + count):
            self._play_later(group, self._child(parent, number, len(branch.turns)), branch)
        parent.branches += [len(branch.turns)] * count

    def _grow_by(self, group: Group, count: int) -> None:
        group.grow(count)
        self._held += count

    async def _finish(self, group: Group, episode: Episode) -> None:
        """Record an episode, and put it into its group."""
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
            self._tell(episode)
            self._fail(EngineError(failure.message))
        else:
            self._put(group, episode)

    def _put(self, group: Group, episode: Episode) -> None:
        group.put(episode)
        self._tell(episode)
        self._failures.add(episode)

    def _tell(self, episode: Episode) -> None:
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
            async with asyncio.timeout(ENGINE_ANSWER_SECONDS):
                await self._engine.run(self._runner.engine_check)
        except EngineError as error:
            return error
        except TimeoutError:
            return EngineError(f"the engine check gave no answer within {ENGINE_ANSWER_SECONDS:g} s")
        return None


async def _to_its_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Await the coroutine to its end even if the caller is cancelled meanwhile, once or more often, and is so after it."""
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001  raised below, with what was to be given back given back
            break
    if cancelled is not None:
        raise cancelled
    task.result()


def _traits(env: gymnasium.Env[Any, Any]) -> tuple[bool, str]:
    """Whether the environment is instant, and its id."""
    return getattr(env.unwrapped, "instant", False) is True, env_id(env)
