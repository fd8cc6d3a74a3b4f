"""Rollouts: a user's function plays an episode of each scenario, several times and many at once.

A function that raises leaves a failed episode behind, with what it raised, and disturbs no other. Plain functions run in threads of their own,
coroutine functions in the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from art_gym.errors import UsageError
from art_gym.gateway._client_errors import GatewayError
from art_gym.gateway._client_requests import figure
from art_gym.rollout._threads import DaemonThread
from art_gym.scenarios import Scenario

if TYPE_CHECKING:
    from art_gym.gateway.client import AsyncClient, AsyncClientEpisode, Client, ClientEpisode

_log = logging.getLogger(__name__)

_HOPELESS = (0, 401, 403)
"""No answer, or no way in."""

Function = Callable[[Any, Any], Any]
"""Takes a scenario and an episode; returns the reward, a mapping of `finish`'s arguments, or None where it finished the episode itself."""


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that was played.

    Attributes:
        id: The episode's.
        group: Its group's name.
        scenario: What it was played of, as given.
        reward: Its return; None if it failed, or was left without one.
        failure: What went wrong; None if nothing did.
        error: The exception that it failed with.
    """

    id: str
    group: str
    scenario: Any
    reward: float | None = None
    failure: str | None = None
    error: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class PlayedGroup:
    """Episodes of one scenario, in the order in which they began."""

    name: str
    scenario: Any
    episodes: list[Played]

    @property
    def finished(self) -> list[Played]:
        """Those that didn't fail."""
        return [episode for episode in self.episodes if episode.failure is None]

    @property
    def failed(self) -> list[Played]:
        """Those that did."""
        return [episode for episode in self.episodes if episode.failure is not None]

    @property
    def rewards(self) -> list[float]:
        """The returns of those that didn't fail."""
        return [episode.reward for episode in self.finished if episode.reward is not None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How scenarios are played; see `Client.gather`."""

    group_size: int
    concurrency: int
    timeout: float | None
    metadata: Mapping[str, Any] | None
    on_episode: Callable[[Played], None] | None

    def check(self, function: Any) -> None:
        """See that it can be.

        Raises:
            UsageError: It can't.
        """
        if not callable(function):
            raise UsageError(f"a rollout must be a function of a scenario and an episode, not {function!r:.100}")
        for name in ("group_size", "concurrency"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} is {value!r:.100}; it must be a whole number of 1 or more")
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout is {self.timeout!r:.100}; it must be a number of seconds above 0, or None")


async def gather(sync: Client, client: AsyncClient, function: Function, scenarios: Iterable[Any], settings: Settings) -> list[PlayedGroup]:
    """Play `group_size` episodes of each scenario. Both clients stand for the same gateway.

    Raises:
        UsageError: It can't be played as asked.
        GatewayError: The gateway refused to begin an episode, or can't be reached; what was in play is failed.
    """
    settings.check(function)
    function = getattr(function, "function", function)
    run = uuid.uuid4().hex[:8]
    groups = [PlayedGroup(f"{_label(scenario, index)}-{run}", scenario, []) for index, scenario in enumerate(scenarios)]
    limit = asyncio.Semaphore(settings.concurrency)
    threads: list[DaemonThread] = []

    async def one(group: PlayedGroup) -> Played:
        async with limit:
            if _is_async(function):
                played = await _play_async(client, function, group, settings)
            else:
                played = await _play_in_thread(sync, function, group, settings, threads)
        if settings.on_episode is not None:
            settings.on_episode(played)
        return played

    try:
        async with asyncio.TaskGroup() as tasks:
            playing = [[tasks.create_task(one(group)) for _ in range(settings.group_size)] for group in groups]
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from None
    finally:
        for thread in threads:
            thread.stop()
    for group, members in zip(groups, playing, strict=True):
        group.episodes = [task.result() for task in members]
    return groups


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _label(scenario: Any, index: int) -> str:
    """A group's name: the scenario's own, or else its place."""
    named = scenario.id if isinstance(scenario, Scenario) else scenario.get("id") if isinstance(scenario, Mapping) else None
    return str(named)[:100] if isinstance(named, str | int) and named != "" else f"scenario-{index}"


async def _play_async(client: AsyncClient, function: Function, group: PlayedGroup, settings: Settings) -> Played:
    episode: AsyncClientEpisode | None = None
    try:
        async with client.episode(group.name, group.scenario, settings.metadata) as episode, asyncio.timeout(settings.timeout):
            values = _values(await function(group.scenario, episode), episode)
            if values is not None:
                await episode.finish(**values)
    except Exception as error:  # noqa: BLE001  whatever a rollout raises belongs to its episode
        return _failed(episode, group, error, settings.timeout)
    return Played(episode.id, group.name, group.scenario, episode.reward, episode.failure)


async def _play_in_thread(client: Client, function: Function, group: PlayedGroup, settings: Settings, threads: list[DaemonThread]) -> Played:
    handle = await asyncio.to_thread(client.episode, group.name, group.scenario, settings.metadata)

    def play() -> None:
        with handle:
            values = _values(function(group.scenario, handle), handle)
            if values is not None:
                handle.finish(**values)

    thread = threads.pop() if threads else DaemonThread("art_gym rollout")
    try:
        async with asyncio.timeout(settings.timeout):
            await thread.run(play)
    except TimeoutError as error:
        late = TimeoutError(f"the rollout did not end within {settings.timeout:g} s") if settings.timeout else error
        # What it runs can't be stopped; a thread that was left is not used again.
        thread.stop()
        await asyncio.to_thread(_fail, handle, late)
        return _failed(handle, group, late, None)
    except asyncio.CancelledError:
        thread.stop()
        await asyncio.to_thread(_fail, handle, RuntimeError("the rollouts were stopped"))
        raise
    except Exception as error:  # noqa: BLE001  whatever a rollout raises belongs to its episode
        threads.append(thread)
        return _failed(handle, group, error, None)
    threads.append(thread)
    return Played(handle.id, group.name, group.scenario, handle.reward, handle.failure)


def _fail(handle: ClientEpisode, error: BaseException) -> None:
    try:
        handle.fail(error)
    except GatewayError as refused:
        _log.warning("episode %s could not be finished as failed: %s", handle.id, refused)


def _failed(episode: ClientEpisode | AsyncClientEpisode | None, group: PlayedGroup, error: Exception, timeout: float | None) -> Played:
    if episode is None or (isinstance(error, GatewayError) and error.status in _HOPELESS):
        # Where no episode can begin or end, there is nothing to go on with.
        raise error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) and timeout and not str(error):
        text = f"the rollout did not end within {timeout:g} s"
    _log.warning("episode %s (group %s) failed: %s", episode.id, group.name, text)
    return Played(episode.id, group.name, group.scenario, None, text, error)


def _values(returned: Any, episode: ClientEpisode | AsyncClientEpisode) -> dict[str, Any] | None:
    """What a rollout's return value says of its episode.

    Raises:
        UsageError: It says nothing that can be used.
    """
    if episode.is_finished:
        return None
    if returned is None:
        raise UsageError("the rollout returned no reward and didn't finish its episode: return a number, or call episode.finish(reward=…)")
    if isinstance(returned, Mapping):
        if unknown := set(returned) - {"reward", "rewards", "metrics"}:
            raise UsageError(f"the rollout returned {sorted(map(str, unknown))[0]!r}; a mapping may have reward, rewards and metrics")
        return dict(returned)
    return {"reward": figure("the reward that the rollout returned", returned)}
