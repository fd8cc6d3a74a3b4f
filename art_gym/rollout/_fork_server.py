"""The fork server: a process between the runner's and the workers, which starts them, watches them, and lets none outlive the runner.

It imports what environments need once, so that a worker is a fork of it and ready within milliseconds. It runs nothing of an environment
itself. Each packet on its control socket is an order: start a worker, whose ends of a connection and of a pipe for output come with it, or kill
one. The first packet back says that the imports are done, each other one how a worker ended. When the control socket closes or the runner's
process ends, in any way, it kills everything left and ends.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from art_gym.rollout import _kernel
from art_gym.rollout._packing import unpack_make
from art_gym.rollout._worker import serve

if TYPE_CHECKING:
    from art_gym.rollout._hosts import Make
    from art_gym.rollout.isolation import Processes

ORDER = struct.Struct("<cQ")
START, KILL = b"s", b"k"
UP = b"up"
"""The first packet back."""

WATCH_SECONDS = 0.2
"""How often the memory of the workers is looked at, where it is limited."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from art_gym.rollout._fork_server import {main}; {main}(*map(int, sys.argv[2:]))"
)


def command(main: str, *descriptors: int) -> list[str]:
    """Return the command that runs a function of this module in a new interpreter that finds the same modules."""
    return [sys.executable, "-c", _BOOT.format(main=main), json.dumps([*map(str, sys.path)]), *map(str, descriptors)]


def pack_payload(settings: Processes, make: bytes) -> bytes:
    return pickle.dumps((settings, make))


def serve_forks(control: int, payload: int) -> None:
    """Run the fork server, on inherited descriptors."""
    # An import that never ends must not keep it alive; once there are workers, it must live long enough to end them.
    _kernel.die_with(os.getppid())
    server = _ForkServer(socket.socket(fileno=control), payload)
    _kernel.die_alone()
    server.serve()
    # At once, and without what modules of environments have left to be done at exit.
    os._exit(0)


def serve_calls(connection: int, payload: int) -> None:
    """Run a worker in an interpreter of its own, on inherited descriptors."""
    settings, packed = _read_payload(payload)
    os.close(payload)
    _be_worker(socket.socket(fileno=connection), packed, None, settings)


@dataclass(slots=True)
class _Child:
    key: int
    pid: int
    pidfd: int
    overgrown: bool = False


class _ForkServer:
    def __init__(self, control: socket.socket, payload: int) -> None:
        self._control = control
        self._payload = payload
        self._settings, self._packed = _read_payload(payload)
        self._make: Make | None = None
        self._children: dict[int, _Child] = {}  # by key
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        # A process that the runner's has forked may hold the other end of the socket after its death.
        self._selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ)
        _kernel.adopt_orphans()
        if self._settings.start_method == "forkserver":
            self._preload()
        self._own_memory = _kernel.memory_taken(os.getpid())
        self._own_children = set(_kernel.children(os.getpid()))  # of modules that were imported

    def serve(self) -> None:
        try:
            self._control.send(UP)
            self._serve()
        except ConnectionError:  # nobody gives orders any more
            pass
        finally:
            self._end_all()

    def _serve(self) -> None:
        while True:
            watched = self._settings.memory is not None and self._children
            for key, _ in self._selector.select(WATCH_SECONDS if watched else None):
                if key.data is not None:
                    self._end(key.data)
                elif key.fileobj is not self._control or not self._obey():
                    return
            if watched:
                self._watch_memory()

    def _preload(self) -> None:
        """Load what makes environments before it is needed; what goes wrong goes wrong again in the worker, which can tell."""
        with suppress(Exception, SystemExit):
            self._make = unpack_make(self._packed)
            getattr(self._make, "preload", lambda: None)()
        # Objects that no collection looks at stay in pages that all workers share.
        gc.collect()
        gc.freeze()

    def _obey(self) -> bool:
        """Carry out an order; returns False when nobody gives any more."""
        order, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 2, socket.MSG_CMSG_CLOEXEC)
        if not order:
            return False
        kind, key = ORDER.unpack(order)
        if kind == START:
            try:
                if len(descriptors) < 2:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                self._start(key, *descriptors)
            except OSError as error:
                self._tell(key, None, f"it can't be started: {error}")
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        elif child := self._children.get(key):
            _kill(child)
        return True

    def _start(self, key: int, connection: int, output: int) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(server, connection, output)
        try:
            child = _Child(key, pid, os.pidfd_open(pid))
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[key] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _become_worker(self, server: int, connection: int, output: int) -> NoReturn:
        try:
            # A session of its own, so that everything it starts can be killed with it, and no key at a terminal reaches it.
            os.setsid()
            _kernel.die_with(server)
            _kernel.adopt_orphans()
            for number in (1, 2):
                os.dup2(output, number)
            os.close(output)
            if self._settings.start_method == "spawn":
                for descriptor in (connection, self._payload):
                    os.set_inheritable(descriptor, True)
                os.execv(sys.executable, command("serve_calls", connection, self._payload))
            self._control.close()
            os.close(self._payload)
            self._selector.close()
            for child in self._children.values():
                os.close(child.pidfd)
            _be_worker(socket.socket(fileno=connection), self._packed, self._make, self._settings)
        except BaseException:  # noqa: BLE001  # this is a copy of the server, and must not go on as one
            traceback.print_exc()
        finally:
            os._exit(1)

    def _end(self, child: _Child) -> None:
        """Say how a worker ended, and end what it left behind."""
        # Before it is reaped, so that its group can't be another's yet.
        _kill(child)
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.key]
        self._kill_orphans()
        self._tell(child.key, os.waitstatus_to_exitcode(status), "memory" if child.overgrown else "")

    def _end_all(self) -> None:
        for child in self._children.values():
            _kill(child)
        for child in self._children.values():
            os.waitpid(child.pid, 0)
        self._children.clear()
        self._own_children.clear()
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what dead workers have started: whose parent has died is this process's child, unless a worker above it lives."""
        give_up = time.monotonic() + 5.0
        known = self._own_children | {child.pid for child in self._children.values()}
        while (orphans := set(_kernel.children(os.getpid())) - known) and time.monotonic() < give_up:
            for pid in orphans:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _watch_memory(self) -> None:
        limit = self._settings.memory
        assert limit is not None
        for child in self._children.values():
            taken = sum(map(_kernel.memory_taken, (child.pid, *_kernel.descendants(child.pid))))
            if taken - self._own_memory > limit:
                child.overgrown = True
                _kill(child)

    def _tell(self, key: int, status: int | None, note: str) -> None:
        with suppress(OSError):
            self._control.send(json.dumps([key, status, note]).encode())


def _kill(child: _Child) -> None:
    for kill in (os.kill, os.killpg):
        # It may be dead, or not have a group of its own yet.
        with suppress(OSError):
            kill(child.pid, signal.SIGKILL)


def _be_worker(connection: socket.socket, packed: bytes, make: Make | None, settings: Processes) -> NoReturn:
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # forks would all draw the same from the global generator
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file, as the interpreter opened it
    with suppress(BrokenPipeError, ConnectionError):  # nobody is left to answer to
        serve(connection, make or (lambda: unpack_make(packed)()), settings)  # noqa: PLW0108  # what it raises is an answer
    sys.stdout.flush()
    # Without what a fork has inherited to be done at exit.
    os._exit(0)


def _read_payload(descriptor: int) -> tuple[Processes, bytes]:
    # Opened anew, since inherited descriptors share a position.
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return pickle.load(file)  # type: ignore[no-any-return]  # as `pack_payload` made it
