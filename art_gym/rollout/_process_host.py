"""Environments in processes: hosts whose environment lives in a worker, as seen from the event loop.

The loop itself reads and writes each worker's connection; no thread waits for one. What happens in the other processes is `_fork_server`'s and
`_worker`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from art_gym._steps import reset_env
from art_gym.errors import EnvironmentDied, UsageError
from art_gym.rollout import _hosts
from art_gym.rollout._fork_server import KILL, ORDER, START, command, pack_payload
from art_gym.rollout._hosts import Host, HostTimeoutError, Make
from art_gym.rollout._packing import pack_call, pack_make, too_much_memory, unpack_outcome
from art_gym.rollout._worker import HEADER, framed

if TYPE_CHECKING:
    from art_gym.rollout.isolation import Processes

T = TypeVar("T")

KILL_SECONDS = 5.0
"""How long a process that was killed may take to be gone."""

TAIL_BYTES = 4000
"""How much of a worker's last output an error shows."""

_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


class ProcessHosts:
    """Makes hosts whose environments live in processes, and owns the fork server behind them."""

    def __init__(self, settings: Processes, make: Make) -> None:
        if not sys.platform.startswith("linux"):
            raise UsageError("environments in processes need Linux; use isolation='thread' here")
        self._settings = settings
        self._payload = pack_payload(settings, pack_make(make))
        self._server: _Server | None = None
        self._workers: set[_Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def new(self) -> Host:
        return ProcessHost(self)

    async def start(self) -> _Worker:
        """Start a worker, and a fork server before it if none runs."""
        while (server := self._server) is None or server.gone:
            self._server = _Server(self._payload)
            if server is not None:
                await server.close()
        worker = await server.start(self._settings)
        self._workers.add(worker)
        worker.exit.add_done_callback(lambda _: self._workers.discard(worker))
        return worker

    async def end(self, worker: _Worker, grace: float) -> None:
        """Have the environment closed and the process end, and kill it if that takes longer than the grace."""
        self._workers.discard(worker)
        await worker.end(grace)

    def end_later(self, worker: _Worker, grace: float) -> None:
        """End a worker while nobody waits for it."""
        task = asyncio.create_task(self.end(worker, grace))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        await asyncio.gather(*(self.end(worker, _hosts.CLOSE_SECONDS) for worker in self._workers))
        server, self._server = self._server, None
        if server is not None:
            await server.close()


class ProcessHost:
    """An environment in a process of its own, which starts at the first call, and again for the next episode when it has died."""

    def __init__(self, hosts: ProcessHosts) -> None:
        self._hosts = hosts
        self._worker: _Worker | None = None

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
            self._hosts.end_later(worker, 0.0 if worker.busy else _hosts.CLOSE_SECONDS)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._hosts.end(worker, _hosts.CLOSE_SECONDS)

    async def _running(self, *, begins: bool) -> _Worker:
        if self._worker is None or (begins and self._worker.over):
            self._worker = await self._hosts.start()
        return self._worker


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a worker ended: its exit code (negative for a signal), if known, and what the fork server has to say."""

    status: int | None
    note: str = ""


class _Worker:
    """A worker and the connection to it. It answers in the order in which it is asked."""

    def __init__(self, server: _Server, key: int, settings: Processes, connection: socket.socket, output: int) -> None:
        self._server = server
        self._key = key
        self._settings = settings
        self._connection = connection
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._tail = b""
        self._waiting: deque[asyncio.Future[bytes | None]] = deque()
        self._lost = False
        self._closed = False
        self.exit: asyncio.Future[_Exit] = self._loop.create_future()
        self.exit.add_done_callback(lambda _: self.close())
        connection.setblocking(False)
        os.set_blocking(output, False)
        self._loop.add_reader(connection, self._read)
        self._loop.add_reader(output, self._read_output)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def over(self) -> bool:
        return self._lost or self.exit.done()

    async def ask(self, request: bytes) -> bytes | None:
        """Return the worker's answer; None if there won't be one, since it has died."""
        if self.over:
            return None
        answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self._waiting.append(answer)
        with suppress(ConnectionError):  # it has died, and the reader will see that
            await self._send(framed(request))
        return await answer

    async def death(self) -> Exception:
        """Return what is to be said of a worker that no longer answers."""
        await asyncio.wait((self.exit,), timeout=1.0)
        if not self.exit.done():
            await self._server.order(KILL, self._key)
            return EnvironmentDied("the environment closed the connection of its own process")
        return self._told(self.exit.result())

    async def end(self, grace: float) -> None:
        if grace and not self.over:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(grace):
                    await self._send(framed(b""))
            await asyncio.wait((self.exit,), timeout=grace)
            if not self.exit.done():
                _log.warning("an environment is still busy %g s after it was to close; its process is killed", grace)
        if not self.exit.done():
            await self._server.order(KILL, self._key)
            await asyncio.wait((self.exit,), timeout=KILL_SECONDS)
        self.close()

    def close(self) -> None:
        """Read what is left to be read, and let go of the connection."""
        if self._closed:
            return
        self._closed = True
        while self._read():
            pass
        self._read_output()
        self._lose()
        self._loop.remove_reader(self._connection)
        self._loop.remove_reader(self._output)
        self._connection.close()
        os.close(self._output)

    async def _send(self, data: bytes) -> None:
        try:
            sent = self._connection.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            await self._loop.sock_sendall(self._connection, data[sent:])

    def _read(self) -> bool:
        """Read what there is; return whether there may be more."""
        try:
            data = self._connection.recv(_CHUNK)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if data:
            self._received += data
            self._resolve()
            return True
        self._loop.remove_reader(self._connection)
        self._lose()
        return False

    def _resolve(self) -> None:
        start = HEADER.size
        while len(self._received) >= start and len(self._received) >= (end := start + HEADER.unpack_from(self._received)[0]):
            content = bytes(self._received[start:end])
            del self._received[:end]
            if not (answer := self._waiting.popleft()).done():
                answer.set_result(content)

    def _lose(self) -> None:
        self._lost = True
        for answer in self._waiting:
            if not answer.done():
                answer.set_result(None)
        self._waiting.clear()

    def _read_output(self) -> None:
        """Pass the worker's output on, and keep its end."""
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if sys.stderr is not None:
            sys.stderr.write(data.decode(errors="replace"))

    def _told(self, exit: _Exit) -> Exception:
        status, cpu_seconds = exit.status, self._settings.cpu_seconds
        error: Exception
        if exit.note == "memory":
            error = MemoryError(f"{too_much_memory(self._settings.memory or 0)}, and was killed")
        elif status is None:
            error = EnvironmentDied(f"the environment's process is gone: {exit.note}")
        elif status == -signal.SIGPROF and cpu_seconds is not None:
            error = EnvironmentDied(f"the environment used more than {cpu_seconds:g} s of processor time in one episode")
        elif status < 0:
            error = EnvironmentDied(f"the environment's process died of signal {-status} ({_cause(-status)})")
        else:
            error = EnvironmentDied(f"the environment's process ended with exit code {status}")
        if tail := self._tail.decode(errors="replace").strip():
            error.args = (f"{error}; its last output:\n{tail}",)
        return error


def _cause(number: int) -> str:
    if number == signal.SIGKILL:
        return "SIGKILL: out of memory?"
    return next((known.name for known in signal.Signals if known == number), "a real-time signal")


class _Server:
    """The fork server, as seen from the process that started it."""

    def __init__(self, payload: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count()
        self._workers: dict[int, _Worker] = {}
        self.gone = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("art_gym environment"), "wb") as file:
            file.write(payload)
            file.flush()
            descriptors = (theirs.fileno(), file.fileno())
            self._process = subprocess.Popen(
                command("serve_forks", *descriptors),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # it ends when this process does, and not by a key at the terminal
            )
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._read)

    async def start(self, settings: Processes) -> _Worker:
        key = next(self._keys)
        ours, theirs = socket.socketpair()
        output, inlet = os.pipe()
        worker = self._workers[key] = _Worker(self, key, settings, ours, output)
        try:
            await self.order(START, key, (theirs.fileno(), inlet))
        except BaseException:
            self._ended(key, _Exit(None, "it was never started"))
            raise
        finally:
            theirs.close()
            os.close(inlet)
        return worker

    async def order(self, kind: bytes, key: int, descriptors: tuple[int, ...] = ()) -> None:
        while not self.gone:
            try:
                socket.send_fds(self._control, [ORDER.pack(kind, key)], descriptors)
                return
            except BlockingIOError:  # it is importing, or busy with other orders
                await asyncio.sleep(0.01)
            except ConnectionError:
                self._lose()

    async def close(self) -> None:
        """End the server, which kills what is left."""
        self._lose()
        give_up = self._loop.time() + KILL_SECONDS
        while self._process.poll() is None and self._loop.time() < give_up:  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0.002)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while not self.gone:
                try:
                    packet = self._control.recv(_CHUNK)
                except ConnectionError:
                    packet = b""
                if packet:
                    key, status, note = json.loads(packet)
                    self._ended(key, _Exit(status, note))
                else:
                    self._lose()

    def _ended(self, key: int, exit: _Exit) -> None:
        if worker := self._workers.pop(key, None):
            worker.exit.set_result(exit)

    def _lose(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for key in [*self._workers]:
            self._ended(key, _Exit(None, "what started it has ended"))
