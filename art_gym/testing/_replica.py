"""A second interpreter that plays the same walks: with another hash seed, another time zone and another clock.

Each request is answered by a fork of it that ends afterwards, so that the interpreter itself never plays: whatever classes and modules keep for
the life of a process is as it was when they were imported. Where there is no `fork` it plays itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO

from art_gym.testing._clock import CLOCK
from art_gym.testing._factory import Factory, Unshippable, load
from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk
from art_gym.testing._walk import WalkChecker, fresh_texts
from art_gym.testing._watch import Broken

_SECONDS = 120.0
"""How long an answer may take."""

_BOOTSTRAP = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from art_gym.testing._replica import serve
serve()
"""

_serving = False


class NoReplica(Exception):
    """There is no other interpreter to play in; the text says why."""


def is_replica() -> bool:
    """Whether this interpreter is one that plays for another."""
    return _serving


class Replica:
    """The other interpreter, as this one sees it."""

    def __init__(self, factory: Factory, *, hash_seed: int) -> None:
        """Start it; it gets ready in the background.

        Raises:
            NoReplica: What makes the environment can't be sent there.
        """
        try:
            shipped = factory.shipped()
        except Unshippable as error:
            raise NoReplica(str(error)) from error
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        self._ready = False
        try:
            self._send([entry or os.getcwd() for entry in sys.path])
            self._send(shipped)
        except OSError as error:
            self.close()
            raise NoReplica(f"the other interpreter ended at its start: {error}") from error

    def texts(self, walks: Sequence[Walk], ignored: str | None, *, other_clock: bool = True) -> list[list[str]]:
        """Play the walks one after the other, each in a new environment, and return their outcomes as text.

        Args:
            walks: What to play, in one process in which nothing else has been played.
            ignored: Key of the info to leave out.
            other_clock: At another time, in another time zone.

        Raises:
            NoReplica: It couldn't.
        """
        answer: list[list[str]] = self._ask(("texts", list(walks), ignored, other_clock))
        return answer

    def check(self, walk: Walk) -> tuple[str, str] | None:
        """Check a walk in a process in which nothing has been played; the invariant that is broken and the problem, None if all hold.

        Raises:
            NoReplica: It couldn't.
        """
        answer: tuple[str, str] | None = self._ask(("check", walk))
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _ask(self, request: Any) -> Any:
        if not self._ready:
            self._receive("loading the environment")
            self._ready = True
        try:
            self._send(request)
        except OSError as error:
            raise NoReplica(f"the other interpreter has ended: {error}") from error
        return self._receive("playing")

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None  # Popen was given PIPE
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def _receive(self, doing: str) -> Any:
        assert self._process.stdout is not None  # Popen was given PIPE
        timer = threading.Timer(_SECONDS, self._process.kill)
        timer.start()
        try:
            status, answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            raise NoReplica(f"the other interpreter ended, or took more than {_SECONDS:g} s, while {doing}") from None
        finally:
            timer.cancel()
        if status != "ok":
            raise NoReplica(f"{doing} failed in the other interpreter: {answer}")
        return answer


def serve() -> None:
    """Be the other interpreter: answer requests on standard input until it ends."""
    global _serving  # noqa: PLW0603  the process is one or isn't
    _serving = True
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stdout.fileno())
    with contextlib.suppress(EOFError):
        shipped = pickle.load(requests)
        CLOCK.install()
        try:
            factory = load(shipped)
        except BaseException as error:  # noqa: BLE001  a module that is imported may raise anything, and exit
            _answer(answers, ("failed", f"{type(error).__name__}: {error}"))
            return
        _answer(answers, ("ok", None))
        while True:
            request = pickle.load(requests)
            _answer(answers, _in_fork(partial(_respond, factory, request)))


def _respond(factory: Factory, request: Any) -> Any:
    if request[0] == "texts":
        _, walks, ignored, other_clock = request
        with CLOCK.shifted() if other_clock else contextlib.nullcontext():
            return [fresh_texts(factory, walk, ignored) for walk in walks]
    with contextlib.closing(factory()) as probe:
        layers = Layers(probe)
    found = WalkChecker(factory, layers).check(request[1])
    return (found.invariant, found.problem) if isinstance(found, Broken) else None


def _in_fork(work: Callable[[], Any]) -> tuple[str, Any]:
    if not hasattr(os, "fork"):
        return _tried(work)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(round(_SECONDS))  # should the environment hang: nobody else ends this process
        with os.fdopen(writing, "wb") as pipe:
            _answer(pipe, _tried(work))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else ("failed", "the process that played ended before its time")


def _tried(work: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "ok", work()
    except BaseException as error:  # noqa: BLE001  told to the interpreter that asked
        return "failed", f"{type(error).__name__}: {error}"


def _answer(pipe: BinaryIO, answer: tuple[str, Any]) -> None:
    pickle.dump(answer, pipe)
    pipe.flush()
