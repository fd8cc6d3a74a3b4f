"""Hosts: where an environment instance lives while the runner plays it.

A host makes its environment on the first call, runs functions on it, and closes it. The hosts of this module live in this process: in the event
loop, for environments that declare themselves instant, or in a thread of their own, and always in the same one, since much of what environments
hold (database connections, browsers) may only be used in the thread that opened it. Processes and Ray's actors are `_process_host`'s and
`_ray_host`'s; `isolation` chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import gymnasium

from art_gym.errors import UsageError
from art_gym.rollout._threads import DaemonThread, Outcome

T = TypeVar("T")
Make = Callable[[], gymnasium.Env[Any, Any]]

CLOSE_SECONDS = 5.0
"""How long the end of a rollout waits for an environment to close."""

_held: WeakValueDictionary[int, gymnasium.Env[Any, Any]] = WeakValueDictionary()
"""The environments that are in a host, by identity: two episodes at once would mix in one instance."""

_log = logging.getLogger(__name__)


class HostTimeoutError(Exception):
    """The function did not return in time. A class of its own, as environments may raise TimeoutError themselves."""


class Host(Protocol):
    """One environment instance and the place where it lives."""

    async def call(self, function: Callable[..., T], *args: Any, timeout: float) -> T:
        """Return `function(environment, *args)`, or raise what it raises, or `HostTimeoutError`. After a timeout the host must be abandoned."""
        ...

    def abandon(self) -> None:
        """Close the environment as soon as it returns, and wait for nothing."""
        ...

    async def close(self) -> None:
        """Close the environment, and wait a bounded time for it."""
        ...


class HostFactory(Protocol):
    """Makes hosts of one kind, and owns what they share."""

    def new(self) -> Host:
        """Return a host without an environment yet."""
        ...

    async def close(self) -> None:
        """End what the hosts share, and with it any host that is still there."""
        ...


class LocalHosts:
    """Makes hosts in this process, which share nothing."""

    def __init__(self, kind: type[InlineHost] | type[ThreadHost], make: Make) -> None:
        self._kind = kind
        self._make = make

    def new(self) -> Host:
        return self._kind(self._make)

    async def close(self) -> None:
        pass


class InlineHost:
    """An environment in the event loop."""

    def __init__(self, make: Make) -> None:
        self._slot = Slot(make)

    async def call(self, function: Callable[..., T], *args: Any, timeout: float) -> T:
        try:
            return self._slot.call(function, args)
        except BaseException as error:
            if isinstance(error, Exception | KeyboardInterrupt):
                raise
            # Such as the SystemExit of a library that gives up, which would end the whole rollout.
            raise RuntimeError(f"raised {error!r}") from error

    def abandon(self) -> None:
        self._slot.close()

    async def close(self) -> None:
        self._slot.close()


class ThreadHost:
    """An environment in a thread of its own."""

    def __init__(self, make: Make) -> None:
        self._slot = Slot(make)
        self._thread = DaemonThread("art_gym environment")

    async def call(self, function: Callable[..., T], *args: Any, timeout: float) -> T:
        future: asyncio.Future[Outcome[T]] = self._thread.submit(self._slot.call, function, args)
        await asyncio.wait((future,), timeout=timeout)
        if not future.done():
            raise HostTimeoutError
        return future.result().unwrap()

    def abandon(self) -> None:
        self._thread.submit(self._slot.close)
        self._thread.stop()

    async def close(self) -> None:
        future = self._thread.submit(self._slot.close)
        await asyncio.wait((future,), timeout=CLOSE_SECONDS)
        if not self._thread.stop(join=1.0 if future.done() else 0.0):
            _log.warning("an environment is still busy %g s after the end of the rollout; its thread is left behind", CLOSE_SECONDS)


class Slot:
    """The environment itself, made when it is first needed. Used in one thread only, in this process or in another."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._env: gymnasium.Env[Any, Any] | None = None

    def call(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        if self._env is None:
            self._env = self._made()
        result: T = function(self._env, *args)
        return result

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001  # nothing depends on it any more
                _log.exception("an environment raised in close()")
            finally:
                _held.pop(id(env), None)

    def _made(self) -> gymnasium.Env[Any, Any]:
        env: Any = self._make()
        if not isinstance(env, gymnasium.Env):
            raise UsageError(f"the function that makes the environment returned {env!r:.100}; it must return a gymnasium.Env")
        if _held.get(id(env)) is env:
            raise UsageError(f"the function that makes the environment returned {env} again while it is played; make a new one each time")
        _held[id(env)] = env
        return env
