"""Running one call of an environment: sync or async, with or without a deadline.

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from art_gym.errors import ToolTimeout


@dataclass(frozen=True, slots=True)
class Call:
    """A call that an environment wants made: `function()` takes no arguments and may be async; `timeout` is in seconds."""

    function: Callable[[], Any]
    what: str
    timeout: float | None = None


def run(call: Call) -> Any:
    """Make the call and wait for its result.

    Raises:
        ToolTimeout: The call took longer than its timeout.
    """
    if call.timeout is None:
        return _settle(call.function())
    future = _in_loop(call.function()) if _is_async(call.function) else _in_thread(lambda: _settle(call.function()))
    concurrent.futures.wait([future], call.timeout)
    if not future.done():
        future.cancel()
        raise _timeout(call)
    return future.result()


async def run_async(call: Call, *, inline: bool) -> Any:
    """Make the call without blocking the running loop; `inline` makes sync calls in place, which is right for those that return at once.

    Raises:
        ToolTimeout: The call took longer than its timeout.
    """
    waiting: asyncio.Future[Any]
    if _is_async(call.function):
        waiting = asyncio.ensure_future(call.function())
    elif inline and call.timeout is None:
        result = call.function()
        if not inspect.isawaitable(result):
            return result
        waiting = asyncio.ensure_future(result)
    else:
        waiting = asyncio.wrap_future(_in_thread(lambda: _settle(call.function())))
    try:
        done, _ = await asyncio.wait({waiting}, timeout=call.timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if not done:
        waiting.cancel()
        raise _timeout(call)
    return waiting.result()


def _timeout(call: Call) -> ToolTimeout:
    return ToolTimeout(f"{call.what} ran past its time limit of {call.timeout:g} s", timeout=call.timeout)


def _is_async(function: Any) -> bool:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return inspect.iscoroutinefunction(function)


def _settle(result: Any) -> Any:
    """Return the result itself, or what it comes to if it is awaitable; block this thread until then."""
    return _in_loop(result).result() if inspect.isawaitable(result) else result


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

    return asyncio.run_coroutine_threadsafe(wait(), _loop(os.getpid()))


@lru_cache(maxsize=1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the process's loop; a forked child inherits no threads, so it starts its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"art_gym-loop-{pid}", daemon=True).start()
    return loop
