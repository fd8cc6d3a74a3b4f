"""Environments in processes: hosts whose environment lives in a worker.

The fork server and its workers are `_processes`' to start, watch and end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from art_gym._steps import reset_env
from art_gym.errors import EnvironmentDied, UsageError
from art_gym.rollout import _hosts
from art_gym.rollout._fork_server import pack_payload
from art_gym.rollout._hosts import Host, HostTimeoutError, Make
from art_gym.rollout._packing import pack_call, pack_make, unpack_outcome
from art_gym.rollout._processes import Server, Worker, ending

if TYPE_CHECKING:
    from art_gym.rollout.isolation import Processes

T = TypeVar("T")


class ProcessHosts:
    """Makes hosts whose environments live in processes, and owns the fork server behind them."""

    def __init__(self, settings: Processes, make: Make) -> None:
        if not sys.platform.startswith("linux"):
            raise UsageError("environments in processes need Linux; use isolation='thread' here")
        self._settings = settings
        self._payload = pack_payload(settings, pack_make(make))
        self._server: Server | None = None
        self._closed = False

    def new(self) -> Host:
        return ProcessHost(self)

    async def start(self) -> Worker:
        """Return a new worker, once a fork server is up. Nothing is begun before that, so that nothing is left where the wait ends early."""
        while not self._closed:
            if self._server is None or self._server.ended.done():
                self._server = Server(self._payload)
            server = self._server
            await asyncio.wait((server.up,))
            if not server.gone:
                return server.start(self._settings)
            await asyncio.wait((server.ended,))
            if not server.up.result() and not self._closed:
                raise EnvironmentDied(f"the process that imports what the environment needs {ending(server.ended.result())}")
        raise EnvironmentDied("the rollout is over")

    async def close(self) -> None:
        """End the workers, and the server with whatever is left of them; at once if cancelled."""
        self._closed = True
        if self._server is None:
            return
        try:
            if workers := self._server.workers:
                for worker in workers:
                    worker.end(_hosts.CLOSE_SECONDS)
                await asyncio.wait([worker.exit for worker in workers], timeout=_hosts.CLOSE_SECONDS)
        finally:
            await self._server.close()


class ProcessHost:
    """An environment in a process of its own, which starts at the first call, and again for the next episode when it has died."""

    def __init__(self, hosts: ProcessHosts) -> None:
        self._hosts = hosts
        self._worker: Worker | None = None

    async def call(self, function: Callable[..., T], *args: Any, timeout: float) -> T:
        request = pack_call(function, args)
        try:
            async with asyncio.timeout(timeout):
                worker = await self._running(begins=function is reset_env)
                reply = await worker.ask(request)
        except TimeoutError:
            raise HostTimeoutError from None
        if reply is None:
            raise await worker.death()
        return cast("T", unpack_outcome(reply))

    def abandon(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(0.0 if worker.busy else _hosts.CLOSE_SECONDS)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        worker.end(_hosts.CLOSE_SECONDS)
        try:
            await asyncio.wait((worker.exit,))
        finally:
            worker.kill()

    async def _running(self, *, begins: bool) -> Worker:
        if self._worker is None or (begins and self._worker.over):
            self.abandon()
            self._worker = await self._hosts.start()
        return self._worker
