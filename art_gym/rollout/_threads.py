"""Threads for work that would block the event loop.

They are daemon threads of our own rather than the loop's default executor: the interpreter waits for the executor's threads when it exits,
so that one tool that never returns would keep the process alive for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Outcome(Generic[T]):
    """What a function returned or raised. Kept as a value, since a future can't carry every exception and warns about unread ones."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: T | None = None, error: BaseException | None = None) -> None:
        self._value = value
        self._error = error

    def unwrap(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # without an error the value is a T


def outcome_of(function: Callable[..., T], *args: Any) -> Outcome[T]:
    """Call the function. What isn't an `Exception`, such as the SystemExit of a library that gives up, must not end the whole rollout."""
    try:
        return Outcome(function(*args))
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to the caller, in another thread
        return Outcome(error=error)
    except BaseException as error:  # noqa: BLE001  # the same
        wrapped = RuntimeError(f"raised {error!r}")
        wrapped.__cause__ = error
        return Outcome(error=wrapped)


class DaemonThread:
    """One thread that runs functions in the order in which they were submitted. It starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, function: Callable[..., T], *args: Any) -> asyncio.Future[Outcome[T]]:
        """Run the function in the thread; the future belongs to the running loop, and is never failed."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome[T]] = loop.create_future()

        def resolve(outcome: Outcome[T]) -> None:
            if not future.done():
                future.set_result(outcome)

        def job() -> None:
            outcome = outcome_of(function, *args)
            # The loop may be gone by the time that a blocked function returns.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, outcome)

        if self._thread is None:
            self._thread = Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return future

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run the function in the thread, and return what it returns or raise what it raises."""
        return (await self.submit(function, *args)).unwrap()

    def stop(self, join: float = 0.0) -> bool:
        """End the thread after what was submitted; wait up to `join` seconds for it. Returns whether it has ended."""
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(join)
        return not self._thread.is_alive()


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
