"""The fork server and its workers, as seen from the event loop.

The loop itself reads and writes each worker's connection; no thread waits for one. Nothing here waits without a limit, whatever state the other
processes are in. What happens in them is `_fork_server`'s and `_worker`'s.
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from art_gym.errors import EnvironmentDied
from art_gym.rollout._fork_server import KILL, ORDER, START, UP, command
from art_gym.rollout._kernel import kill_tree
from art_gym.rollout._packing import too_much_memory
from art_gym.rollout._worker import HEADER, framed

if TYPE_CHECKING:
    from art_gym.rollout.isolation import Processes

KILL_SECONDS = 5.0
"""How long a process that is to be killed may take to be gone."""

TAIL_BYTES = 4000
"""How much of a worker's last output an error shows."""

_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


class Server:
    """The fork server, as seen from the process that started it. Whatever becomes of it, each of its workers has an exit in the end.

    Attributes:
        up: Done when it can start workers, with True, or with False when it has gone before that.
        gone: Whether it takes no more orders.
        ended: Done when its process has ended, with the exit code (negative for a signal).
    """

    def __init__(self, payload: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count()
        self._workers: dict[int, Worker] = {}
        self._orders: deque[_Order] = deque()
        self.up: asyncio.Future[bool] = self._loop.create_future()
        self.gone = False
        self.ended: asyncio.Future[int] = self._loop.create_future()
        with ExitStack() as stack:
            self._control, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            file = stack.enter_context(os.fdopen(os.memfd_create("art_gym environment"), "wb"))
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
            self._pidfd = os.pidfd_open(self._process.pid)
            self._control = socket.socket(fileno=self._control.detach())  # the stack closes the other one
        self._control.setblocking(False)
        self._loop.add_reader(self._control, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def workers(self) -> list[Worker]:
        """The workers that haven't ended."""
        return [*self._workers.values()]

    def start(self, settings: Processes) -> Worker:
        key = next(self._keys)
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            output, inlet = os.pipe()
            stack.pop_all()
        worker = self._workers[key] = Worker(self, key, settings, ours, output)
        self.order(START, key, theirs.detach(), inlet)
        return worker

    def order(self, kind: bytes, key: int, *descriptors: int) -> None:
        """Give an order, with descriptors that are the server's from here on. It waits here while the server is busy with others."""
        self._orders.append(_Order(kind, key, descriptors))
        self._send()

    def forget(self, key: int) -> None:
        """Take a worker that can't be ended as one that has."""
        self._ended(key, _Exit(None, "it can't be killed, or nobody tells that it was"))

    async def close(self) -> None:
        """End the server, which kills what is left, and do that for it if it doesn't in time. A cancellation waits for that, too."""
        if not self.up.done():
            kill_tree(self._process.pid)  # it may be importing for ever, and has nothing else to end
        self._lose()
        cancelled: asyncio.CancelledError | None = None
        give_up = self._loop.time() + KILL_SECONDS
        while not self.ended.done() and (left := give_up - self._loop.time()) > 0:
            try:
                await asyncio.wait((self.ended,), timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        if not self.ended.done():
            _log.warning("the process that starts the environments' processes did not end within %g s, and is killed", KILL_SECONDS)
            kill_tree(self._process.pid)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._reap()
        if cancelled is not None:
            raise cancelled

    def _send(self) -> None:
        while self._orders:
            order = self._orders[0]
            try:
                socket.send_fds(self._control, [ORDER.pack(order.kind, order.key)], order.descriptors)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._send)
                return
            except ConnectionError:
                self._fail()
                return
            except OSError as error:  # such as too many descriptors on their way
                self._ended(order.key, _Exit(None, f"it can't be started: {error}"))
            else:
                self._orders.popleft().close()
        self._loop.remove_writer(self._control)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while not self.gone:
                try:
                    packet = self._control.recv(_CHUNK)
                except ConnectionError:
                    packet = b""
                if packet == UP:
                    self.up.set_result(True)
                elif packet:
                    key, status, note = json.loads(packet)
                    self._ended(key, _Exit(status, note))
                else:
                    self._fail()

    def _ended(self, key: int, exit: _Exit) -> None:
        if worker := self._workers.pop(key, None):
            worker.ended(exit)
        for order in [order for order in self._orders if order.key == key]:
            self._orders.remove(order)
            order.close()

    def _fail(self) -> None:
        """See to it that a server that is of no use any more ends."""
        self._process.kill()
        self._lose()

    def _lose(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        if not self.up.done():
            self.up.set_result(False)
        for key in [*self._workers]:
            self._ended(key, _Exit(None, "what started it has ended"))

    def _reap(self) -> None:
        if self.ended.done():
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.poll()
        self.ended.set_result(-signal.SIGKILL if status is None else status)
        self._read()
        self._lose()


@dataclass(frozen=True, slots=True)
class _Exit:
    """How a worker ended: its exit code (negative for a signal), if known, and what the fork server has to say."""

    status: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Order:
    """What the fork server is to do, and the descriptors that go with it."""

    kind: bytes
    key: int
    descriptors: tuple[int, ...]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class Worker:
    """A worker and the connection to it. It answers in the order in which it is asked."""

    def __init__(self, server: Server, key: int, settings: Processes, connection: socket.socket, output: int) -> None:
        self._server = server
        self._key = key
        self._settings = settings
        self._connection = connection
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._received = bytearray()
        self._tail = b""
        self._waiting: deque[asyncio.Future[bytes | None]] = deque()
        self._lost = False
        self._killed = False
        self._timer: asyncio.TimerHandle | None = None
        self.exit: asyncio.Future[_Exit] = self._loop.create_future()
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
        self._send(request)
        return await answer

    async def death(self) -> Exception:
        """Return what is to be said of a worker that no longer answers."""
        await asyncio.wait((self.exit,), timeout=1.0)
        if not self.exit.done():
            self.kill()
            return EnvironmentDied("the environment closed the connection of its own process")
        return self._told(self.exit.result())

    def end(self, grace: float) -> None:
        """Have the environment closed and the process end, and kill it if that takes longer than the grace."""
        if not grace or self.over:
            self.kill()
        elif self._timer is None:
            self._at(grace, self._kill_late, grace)
            self._send(b"")

    def kill(self) -> None:
        """Have the process killed, if it hasn't ended."""
        if self.exit.done() or self._killed:
            return
        self._killed = True
        self._at(KILL_SECONDS, self._server.forget, self._key)
        self._server.order(KILL, self._key)

    def ended(self, exit: _Exit) -> None:
        """Read what is left to be read, let go of the connection, and tell."""
        if self._timer is not None:
            self._timer.cancel()
        while self._read():
            pass
        self._read_output()
        self._lose()
        self._loop.remove_writer(self._connection)
        self._loop.remove_reader(self._output)
        self._connection.close()
        os.close(self._output)
        self.exit.set_result(exit)

    def _at(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Set the one thing that is to happen if the process hasn't ended by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, function, *args)

    def _kill_late(self, grace: float) -> None:
        _log.warning("an environment is still busy %g s after it was to close; its process is killed", grace)
        self.kill()

    def _send(self, content: bytes) -> None:
        """Send a frame, whole, also when nobody waits for it any more: half of one would garble the next."""
        self._unsent += framed(content)
        self._write()

    def _write(self) -> None:
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:  # it has died, and the reader will see that
            self._unsent.clear()
        if self._unsent:
            self._loop.add_writer(self._connection, self._write)
        else:
            self._loop.remove_writer(self._connection)

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
        self._loop.remove_reader(self._connection)
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
            with suppress(OSError, ValueError):  # it may be closed
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
        else:
            error = EnvironmentDied(f"the environment's process {ending(status)}")
        if tail := self._tail.decode(errors="replace").strip():
            error.args = (f"{error}; its last output:\n{tail}",)
        return error


def ending(status: int) -> str:
    """Say how a process ended, by its exit code."""
    if status >= 0:
        return f"ended with exit code {status}"
    if status == -signal.SIGKILL:
        return "died of signal 9 (SIGKILL: out of memory?)"
    return f"died of signal {-status} ({next((known.name for known in signal.Signals if known == -status), 'a real-time signal')})"
