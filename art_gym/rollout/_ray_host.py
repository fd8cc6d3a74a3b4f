"""Environments in actors of a Ray cluster: hosts as seen from the event loop, and the actor that holds an environment.

What travels is packed by `_packing`, as between processes, so that an actor's errors are the same as a process's. Ray decides on which node an
actor lives and what becomes of its output.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from art_gym._steps import reset_env
from art_gym.errors import EnvironmentDied, MissingExtra, UsageError
from art_gym.rollout import _hosts
from art_gym.rollout._hosts import Host, HostTimeoutError, Make, Slot
from art_gym.rollout._kernel import limit_memory
from art_gym.rollout._packing import pack_call, pack_make, pack_outcome, unpack_call, unpack_make, unpack_outcome
from art_gym.rollout._threads import DaemonThread

if TYPE_CHECKING:
    from art_gym.rollout.isolation import Ray

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RayHosts:
    """Makes hosts whose environments live in actors, and owns the connection to the cluster if it made it."""

    def __init__(self, settings: Ray, make: Make) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingExtra("isolation='ray'", extra="ray", package="ray")
        self._settings = settings
        self._packed = pack_make(make)
        # Ray has the processes of a local cluster die with the thread that started them, so that this one must last.
        self._thread = DaemonThread("art_gym ray")
        self._class: asyncio.Future[Any] | None = None
        self._connected = False
        self._hosts: WeakSet[RayHost] = WeakSet()
        self._ending: set[asyncio.Task[None]] = set()

    def new(self) -> Host:
        host = RayHost(self)
        self._hosts.add(host)
        return host

    async def start(self) -> Any:
        """Return a new actor, once the cluster is there."""
        if self._class is None or (self._class.done() and self._class.exception()):
            self._class = asyncio.ensure_future(self._thread.run(self._connect))
        actor_class = await asyncio.shield(self._class)
        return actor_class.remote(self._packed, self._settings.memory)

    def end_later(self, actor: Any, grace: float) -> None:
        """End an actor while nobody waits for it."""
        task = asyncio.create_task(_end(actor, grace))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        self._class = None
        try:
            await asyncio.gather(*self._ending, *(host.close() for host in self._hosts))
        finally:
            # After a connection that is still being made, in the thread that makes it.
            left = self._thread.submit(self._disconnect)
            try:
                await asyncio.wait((left,), timeout=_hosts.CLOSE_SECONDS)
            finally:
                if not self._thread.stop(join=1.0 if left.done() else 0.0):
                    _log.warning("the Ray cluster is still busy %g s after the end of the rollout, and is left to itself", _hosts.CLOSE_SECONDS)

    def _disconnect(self) -> None:
        if self._connected:
            import ray

            ray.shutdown()
            self._connected = False

    def _connect(self) -> Any:
        import ray

        settings = self._settings
        if not ray.is_initialized():
            try:
                _reach(settings.address)
                ray.init(address=settings.address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError) as error:
                raise UsageError(f"no Ray cluster at {settings.address!r}: {' '.join(str(error).split())}") from error
            self._connected = True
        options: dict[str, Any] = {"num_cpus": settings.num_cpus}
        if settings.memory is not None:
            options["memory"] = settings.memory
        if settings.runtime_env is not None:
            options["runtime_env"] = dict(settings.runtime_env)
        return ray.remote(**options)(_Actor)


class RayHost:
    """An environment in an actor of its own, which starts at the first call, and again for the next episode when it has died."""

    def __init__(self, hosts: RayHosts) -> None:
        self._hosts = hosts
        self._actor: Any = None
        self._died = False
        self._asked: asyncio.Future[bytes | Exception] | None = None

    async def call(self, function: Callable[..., T], *args: Any, timeout: float) -> T:
        request = pack_call(function, args)
        try:
            async with asyncio.timeout(timeout):
                if self._actor is None or (self._died and function is reset_env):
                    self._actor, self._died = await self._hosts.start(), False
                self._asked = asyncio.ensure_future(_answer(self._actor.call.remote(request)))
                # Shielded, since whether it is still at work is to be seen after a timeout.
                answer = await asyncio.shield(self._asked)
        except TimeoutError:
            raise HostTimeoutError from None
        if isinstance(answer, Exception):
            self._died = True
            raise EnvironmentDied(f"the environment's process died: {_told(answer)}") from answer
        return cast("T", unpack_outcome(answer))

    def abandon(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            busy = self._asked is not None and not self._asked.done()
            self._hosts.end_later(actor, 0.0 if busy else _hosts.CLOSE_SECONDS)

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            await _end(actor, _hosts.CLOSE_SECONDS)


class _Actor:
    """Holds one environment and answers calls on it, in an actor's process."""

    def __init__(self, packed: bytes, memory: int | None) -> None:
        if memory is not None:
            limit_memory(memory)
        self._memory = memory
        self._slot = Slot(lambda: unpack_make(packed)())  # noqa: PLW0108  # when it is needed, so that what it raises is an answer, too

    def call(self, request: bytes) -> bytes:
        def answered() -> Any:
            function, args = unpack_call(request)
            return self._slot.call(function, args)

        return pack_outcome(answered, self._memory)

    def close(self) -> bytes:
        self._slot.close()
        return b""


async def _answer(reference: Any) -> bytes | Exception:
    """Return what the actor answered, or why there is no answer."""
    from ray.exceptions import RayError

    try:
        return cast("bytes", await reference)
    except RayError as error:
        return error


async def _end(actor: Any, grace: float) -> None:
    """Have the environment closed, and kill its actor, with or without that after the grace."""
    import ray

    try:
        if grace:
            closed = asyncio.ensure_future(_answer(actor.close.remote()))
            await asyncio.wait((closed,), timeout=grace)
            if not closed.done():
                _log.warning("an environment is still busy %g s after it was to close; its actor is killed", grace)
    finally:
        ray.kill(actor)


def _reach(address: str | None) -> None:
    """See that somebody listens at the address of a cluster, since Ray tries for minutes.

    Raises:
        OSError: Nobody does.
    """
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()


def _told(error: Exception) -> str:
    """Return what Ray says in a line, without the list of what may have caused it."""
    reason = str(error).partition("The actor is dead because ")[2] or str(error)
    return " ".join(reason.partition("Some common causes")[0].split())
