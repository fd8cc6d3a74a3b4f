"""Running one call of an environment: sync or async, with or without a deadline.

What a call raises comes out as it is, but for what would steer those who pass it on: StopIteration ends a generator, CancelledError cancels a
task, SystemExit ends a loop or the program. From a call these are bugs like any other, and whatever isn't an Exception becomes a RuntimeError
with the original as its cause. Only an interrupt of the main thread goes through.

A deadline holds even for code that blocks: the call runs in a daemon thread, which is left behind when its time is up. Async tools run in one
loop per process when the environment is stepped synchronously or the tool has a deadline, so that what they open in one call still lives in the
next. That loop is left behind too, and the next call gets a new one, when a deadline has passed and something in the loop blocks it. A tool
that runs in it may step another environment, and so block it; the async tools of that one run in a loop of the next level.

What is left behind goes on all the same, and may change the environment that it belongs to: `Underway` tells whether it still does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from art_gym.errors import ToolError, ToolTimeout

T = TypeVar("T")

_NEVER_AWAITABLE = frozenset({str, type(None), int, float, bool, dict, list, tuple})
"""What nearly every tool returns; to ask `inspect` costs as much as the rest of a call."""

_ANSWER_SECONDS = 0.1
"""How long the process's loop may take to answer before it counts as blocked."""


class Underway:
    """The calls of one environment that don't run in who waits for them, and so may go on when nobody waits any more.

    A copy has none: what goes on changes the original.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Callable[[], bool]]] = []

    def add(self, what: str, runs: Callable[[], bool]) -> None:
        self._calls = [*(call for call in self._calls if call[1]()), (what, runs)]

    def left(self) -> str | None:
        """Name a call that still runs, after a moment for one that was told to stop; None if there is none."""
        give_up = time.monotonic() + _ANSWER_SECONDS
        while (name := next((what for what, runs in self._calls if runs()), None)) is not None and time.monotonic() < give_up:
            time.sleep(_ANSWER_SECONDS / 50)
        return name

    def __deepcopy__(self, memo: dict[int, Any]) -> Underway:
        return Underway()

    def __reduce__(self) -> tuple[Any, ...]:
        return Underway, ()


@dataclass(slots=True)
class Call:
    """A call that an environment wants made.

    Attributes:
        function: Takes no arguments, and may be async.
        what: Names it in errors.
        timeout: In seconds; None for no limit.
        underway: Where it is taken down while it runs elsewhere; None if nobody will ask.
    """

    function: Callable[[], Any]
    what: str
    timeout: float | None = None
    underway: Underway | None = None

    def runs_elsewhere(self, runs: Callable[[], bool]) -> None:
        """Take down that a part of it is started in a thread or a loop; `runs` says whether it isn't over."""
        if self.underway is not None:
            self.underway.add(self.what, runs)


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
        RuntimeError: The call raised StopIteration, or what isn't an Exception.
    """
    if call.timeout is None:
        return _settle(call)
    loop = _free_loop.get()
    future = _in_loop(call, run_here(call)) if _is_async(call.function) else _in_thread(lambda: _settle(call), call)
    concurrent.futures.wait([future], call.timeout)
    if not future.done():
        future.cancel()
        loop.leave_if_blocked()
        raise _timeout(call)
    return _result(call, future)


async def run_async(call: Call, *, inline: bool) -> Any:
    """Make the call without blocking the running loop; `inline` makes sync calls in place, which is right for those that return at once.

    Async calls run on the running loop, but those with a timeout in the process's own, so that the deadline holds even if they block.

    Raises:
        ToolTimeout: The call took longer than its timeout.
        RuntimeError: The call raised StopIteration, or what isn't an Exception.
    """
    waiting: asyncio.Future[Any]
    if _is_async(call.function):
        awaitable = run_here(call)
        waiting = _in_this_loop(call, awaitable) if call.timeout is None else asyncio.wrap_future(_in_loop(call, awaitable))
    elif inline and call.timeout is None:
        result = run_here(call)
        if not _is_awaitable(result):
            return result
        waiting = _in_this_loop(call, result)
    else:
        waiting = asyncio.wrap_future(_in_thread(lambda: _settle(call), call))
    try:
        done, _ = await asyncio.wait({waiting}, timeout=call.timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        # What it does when it is cancelled belongs to this step, and not to what comes after it.
        await asyncio.wait({waiting}, timeout=_ANSWER_SECONDS)
        raise
    if not done:
        waiting.cancel()
        await asyncio.wrap_future(_in_thread(_free_loop.get().leave_if_blocked))
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
    return _result(call, _in_loop(call, result)) if _is_awaitable(result) else result


def _is_awaitable(result: Any) -> bool:
    return type(result) not in _NEVER_AWAITABLE and inspect.isawaitable(result)


def run_here(call: Call) -> Any:
    """Make the call in place and return what it returns, awaitable or not; the timeout isn't looked at.

    Raises:
        RuntimeError: The call raised StopIteration, or what isn't an Exception.
    """
    try:
        return call.function()
    except StopIteration as error:
        raise RuntimeError(f"{call.what} raised StopIteration: an iterator had run out; give next() a default, or catch it") from error
    except asyncio.CancelledError as error:
        raise _cancelled(call) from error
    except Exception:
        raise
    except BaseException as error:
        if _is_interrupt(error):
            raise
        raise _exited(call, error) from error


async def _awaited(call: Call, awaitable: Awaitable[Any]) -> Any:
    """Await what the call returned. What would end the loop that runs this is a bug of the call."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise  # the last two may come from whoever runs this; `_result` knows
    except BaseException as error:
        if _is_interrupt(error):
            raise
        raise _exited(call, error) from error


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def _result(call: Call, future: concurrent.futures.Future[Any] | asyncio.Future[Any]) -> Any:
    """Return the result of a future that is done, or of one in another thread; nobody here has cancelled it."""
    try:
        return future.result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError) as error:
        raise _cancelled(call) from error
    except GeneratorExit as error:
        raise _exited(call, error) from error


def _cancelled(call: Call) -> RuntimeError:
    return RuntimeError(
        f"{call.what} was cancelled, and not by the one who waits for it: what it awaited was cancelled, or it cancelled itself"
    )


def _exited(call: Call, error: BaseException) -> RuntimeError:
    return RuntimeError(f"{call.what} raised {error!r}, which would end more than this call: catch it there, or raise an Exception")


def _in_thread(function: Callable[[], Any], call: Call | None = None) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    if call is not None:
        call.runs_elsewhere(lambda: not future.done())
    context = contextvars.copy_context()

    def work() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001  handed over to whoever waits
            future.set_exception(error)

    threading.Thread(target=work, name="art_gym-tool", daemon=True).start()
    return future


def _in_loop(call: Call, awaitable: Awaitable[Any]) -> concurrent.futures.Future[Any]:
    served = _free_loop.get().get()

    async def awaited() -> Any:
        _free_loop.set(served.next)  # for this task, and what it starts
        return await _awaited(call, awaitable)

    coroutine = awaited()
    call.runs_elsewhere(partial(_is_open, coroutine))
    return asyncio.run_coroutine_threadsafe(coroutine, served.loop)


def _in_this_loop(call: Call, awaitable: Awaitable[Any]) -> asyncio.Future[Any]:
    coroutine = _awaited(call, awaitable)
    call.runs_elsewhere(partial(_is_open, coroutine))
    return asyncio.ensure_future(coroutine)


def _is_open(coroutine: Coroutine[Any, Any, Any]) -> bool:
    # A future that was cancelled is done at once, and what it stands for goes on until it notices.
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CLOSED


class _ServedLoop:
    """An event loop that runs in a daemon thread of its own, whatever happens in it.

    Attributes:
        loop: The loop.
        next: Where what runs in this loop, and perhaps blocks it, has its own async calls run.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.next = _SharedLoop()
        self.thread = threading.Thread(target=self._serve, name="art_gym-loop", daemon=True)
        self._over = False
        self.thread.start()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.loop.is_closed()

    def answers(self) -> bool:
        """Whether the loop gets round to something new within a short time."""
        answered = threading.Event()
        try:
            self.loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return False  # closed a moment ago
        return answered.wait(_ANSWER_SECONDS)

    def retire(self) -> None:
        """Close the loop as soon as nothing runs in it any more."""
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    def _serve(self) -> None:
        while not (self._over or self.loop.is_closed()):
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task that a tool started: the other tools go on
                self.loop.call_exception_handler({"message": f"raised in the loop of the async tools: {error!r}", "exception": error})
        self.loop.close()

    async def _end(self) -> None:
        await asyncio.sleep(_ANSWER_SECONDS)  # for who was given the loop a moment ago
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._over = True
        self.loop.stop()


class _SharedLoop:
    """An event loop for all calls of one level, started when it is first asked for, and again when it has ended or was left behind."""

    def __init__(self) -> None:
        self._served: _ServedLoop | None = None
        self.forget()

    def get(self) -> _ServedLoop:
        with self._lock:
            if self._served is None or not self._served.alive:
                self._served = _ServedLoop()
            return self._served

    def leave_if_blocked(self) -> None:
        """Let the next call have a new loop if something blocks this one; what runs in this one goes on when it can."""
        served = self._served
        if served is None or not served.alive or served.answers():
            return
        with self._lock:
            if self._served is served:
                self._served = None
                served.retire()

    def forget(self) -> None:
        """Start anew: a forked child inherits no threads, and perhaps a lock that one of them held."""
        self._lock = threading.Lock()
        self._served = None


_process_loop = _SharedLoop()
_free_loop: contextvars.ContextVar[_SharedLoop] = contextvars.ContextVar("art_gym_free_loop", default=_process_loop)
"""The loop of which it is sure that whoever makes a call doesn't run in it."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_loop.forget)
