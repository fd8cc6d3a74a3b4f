"""Running one call of an environment: sync or async, with or without a deadline.

What a call raises comes out as it is, but for what would steer those who pass it on: StopIteration ends a generator, CancelledError cancels a
task. From a call these are bugs like any other, and become a RuntimeError with the original as its cause.

A deadline holds even for code that blocks: the call runs in a daemon thread, which is left behind when its time is up. Async tools run in one
loop per process when the environment is stepped synchronously, so that what they open in one call still lives in the next.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from art_gym.errors import ToolError, ToolTimeout

T = TypeVar("T")

_NEVER_AWAITABLE = frozenset({str, type(None), int, float, bool, dict, list, tuple})
"""What nearly every tool returns; to ask `inspect` costs as much as the rest of a call."""


@dataclass(slots=True)
class Call:
    """A call that an environment wants made: `function()` takes no arguments and may be async; `timeout` is in seconds."""

    function: Callable[[], Any]
    what: str
    timeout: float | None = None


def drive(transition: Generator[Call, Any, T]) -> T:
    """Run a generator that yields the calls it needs made to its end; it is sent their results, and a `ToolError` is thrown into it.

    Raises:
        Exception: Whatever else a call raises, and what the generator does.
    """
    try:
        wanted = next(transition)
        while True:
            try:
                outcome = run(wanted)
            except ToolError as error:
                wanted = transition.throw(error)
            else:
                wanted = transition.send(outcome)
    except StopIteration as end:
        return cast("T", end.value)
    finally:
        transition.close()


async def drive_async(transition: Generator[Call, Any, T], *, inline: bool) -> T:
    """`drive` without blocking the running loop; `inline` as for `run_async`."""
    try:
        wanted = next(transition)
        while True:
            try:
                outcome = await run_async(wanted, inline=inline)
            except ToolError as error:
                wanted = transition.throw(error)
            else:
                wanted = transition.send(outcome)
    except StopIteration as end:
        return cast("T", end.value)
    finally:
        transition.close()


def run(call: Call) -> Any:
    """Make the call and wait for its result.

    Raises:
        ToolTimeout: The call took longer than its timeout.
        RuntimeError: The call raised StopIteration or CancelledError.
    """
    if call.timeout is None:
        return _settle(call)
    future = _in_loop(call.function()) if _is_async(call.function) else _in_thread(lambda: _settle(call))
    concurrent.futures.wait([future], call.timeout)
    if not future.done():
        future.cancel()
        raise _timeout(call)
    return _result(call, future)


async def run_async(call: Call, *, inline: bool) -> Any:
    """Make the call without blocking the running loop; `inline` makes sync calls in place, which is right for those that return at once.

    Raises:
        ToolTimeout: The call took longer than its timeout.
        RuntimeError: The call raised StopIteration or CancelledError.
    """
    waiting: asyncio.Future[Any]
    if _is_async(call.function):
        waiting = asyncio.ensure_future(call.function())
    elif inline and call.timeout is None:
        result = run_here(call)
        if not _is_awaitable(result):
            return result
        waiting = asyncio.ensure_future(result)
    else:
        waiting = asyncio.wrap_future(_in_thread(lambda: _settle(call)))
    try:
        done, _ = await asyncio.wait({waiting}, timeout=call.timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if not done:
        waiting.cancel()
        raise _timeout(call)
    return _result(call, waiting)


def _timeout(call: Call) -> ToolTimeout:
    return ToolTimeout(f"{call.what} ran past its time limit of {call.timeout:g} s", timeout=call.timeout)


def _is_async(function: Any) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function)


def _settle(call: Call) -> Any:
    """Return the call's result itself, or what it comes to if it is awaitable; block this thread until then."""
    result = run_here(call)
    return _result(call, _in_loop(result)) if _is_awaitable(result) else result


def _is_awaitable(result: Any) -> bool:
    return type(result) not in _NEVER_AWAITABLE and inspect.isawaitable(result)


def run_here(call: Call) -> Any:
    """Make the call in place and return what it returns, awaitable or not; the timeout isn't looked at.

    Raises:
        RuntimeError: The call raised StopIteration or CancelledError.
    """
    try:
        return call.function()
    except StopIteration as error:
        raise RuntimeError(f"{call.what} raised StopIteration: an iterator had run out; give next() a default, or catch it") from error
    except asyncio.CancelledError as error:
        raise _cancelled(call) from error


def _result(call: Call, future: concurrent.futures.Future[Any] | asyncio.Future[Any]) -> Any:
    """Return the result of a future that is done, or of one in another thread; nobody here has cancelled it."""
    try:
        return future.result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        raise _cancelled(call) from error


def _cancelled(call: Call) -> RuntimeError:
    return RuntimeError(
        f"{call.what} was cancelled, and not by the one who waits for it: what it awaited was cancelled, or it cancelled itself"
    )


def _in_thread(function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001  handed over to whoever waits
            future.set_exception(error)

    threading.Thread(target=work, name="art_gym-tool", daemon=True).start()
    return future


def _in_loop(awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _process_loop.get())


class _ProcessLoop:
    """The process's event loop, started when it is first asked for."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.forget()

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="art_gym-loop", daemon=True).start()
            return self._loop

    def forget(self) -> None:
        """Start anew: a forked child inherits no threads, and perhaps a lock that one of them held."""
        self._lock = threading.Lock()
        self._loop = None


_process_loop = _ProcessLoop()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_loop.forget)
