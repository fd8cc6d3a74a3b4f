"""The gate: how many policy calls are in flight at once, and whose turn it is.

Episodes in play may be many more than the requests that a server, or this process's event loop, can take at a time. What waits here waits in
the order of priority and of the groups, so that groups get whole one after the other; in the server's own queue it would wait in the order of
arrival, and every group would end late.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections.abc import Awaitable, Callable
from time import thread_time
from typing import TYPE_CHECKING

from art_gym.rollout._arguments import check_counts

if TYPE_CHECKING:
    from art_gym.rollout.agent import ServerLoad

_log = logging.getLogger(__name__)

Order = tuple[int, ...]
"""Whose turn it is: the smallest first."""

LEAST = 4
"""Requests that an adaptive gate always lets through, whatever a server holds back."""

_LEAST_FOR_LOOP = 64
"""Requests that any event loop handles without delay."""

_FIRST = 128
_TICK_SECONDS = 0.02
_WINDOW_SECONDS = 0.25
_LOAD_SECONDS = 1.0
_LATE_SECONDS = 0.02

_BUSY = 0.7
"""Share of its time that the event loop's thread computes when it is late by its own doing. Otherwise it waits for a processor that others
use, such as a server on the same machine, and fewer requests would only slow that down."""

_QUEUE_SHARE, _QUEUE_LEAST = 0.25, 4
"""What may wait at a server, beside what runs there: enough for a place that gets free to be filled at once."""


class RequestGate:
    """Lets a bounded number of policy calls through at a time.

    One gate may serve several runners of an event loop, such as a training's and an evaluation's, whose `priority` then decides who goes first.

    Args:
        limit: The most requests in flight. None: as many as the server computes without queueing much, by what the agent's `load` tells, and
            as the event loop handles without delay; it is found out by trying more while there is need (as TCP does, RFC 5681: fast up to
            where it was once too much, slowly beyond).

    Raises:
        UsageError: The limit is less than 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None:
            check_counts(limit=limit)
        self.adaptive = limit is None
        self._limit = _FIRST if limit is None else limit
        self._threshold = math.inf
        self._in_flight = 0
        self._queue: list[tuple[Order, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._was_full = False
        self._steering = asyncio.Lock()

    @property
    def limit(self) -> int:
        """The most requests in flight now."""
        return self._limit

    @property
    def in_flight(self) -> int:
        """Requests that were let through and haven't been answered."""
        return self._in_flight

    async def enter(self, order: Order, timeout: float) -> None:
        """Wait until the request may be sent; `leave` must follow.

        Raises:
            TimeoutError: It wasn't let through within so many seconds.
        """
        if self._in_flight < self._limit and not self._queue:
            self._in_flight += 1
            return
        self._was_full = True
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (order, next(self._arrivals), future))
        try:
            async with asyncio.timeout(timeout):
                await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Tell that the request was answered, or given up."""
        self._in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._in_flight < self._limit:
            future = heapq.heappop(self._queue)[2]
            if not future.done():
                self._in_flight += 1
                future.set_result(None)

    async def steer(self, load: Callable[[], Awaitable[ServerLoad | None]] | None) -> None:
        """Find out how many requests are right, until cancelled.

        Args:
            load: What the agent tells of its servers; None if it tells nothing.
        """
        if not self.adaptive:
            return
        async with self._steering, asyncio.TaskGroup() as tasks:
            if load is not None:
                tasks.create_task(self._heed(load))
            while True:
                late, busy, peak = await self._watch_loop()
                if late > _LATE_SECONDS and busy > _BUSY:
                    self._lower(int(0.8 * peak), _LEAST_FOR_LOOP)
                elif self._was_full:
                    self._raise()
                self._was_full = bool(self._queue)

    async def _watch_loop(self) -> tuple[float, float, int]:
        """For a while, see by how many seconds the event loop is late, which share of the time it computes, and the most requests in flight."""
        clock = asyncio.get_running_loop().time
        begin, computed = clock(), thread_time()
        late, peak = 0.0, self._in_flight
        while (before := clock()) - begin < _WINDOW_SECONDS:
            await asyncio.sleep(_TICK_SECONDS)
            late = max(late, clock() - before - _TICK_SECONDS)
            peak = max(peak, self._in_flight)
        return late, (thread_time() - computed) / (clock() - begin), peak

    async def _heed(self, load: Callable[[], Awaitable[ServerLoad | None]]) -> None:
        """Ask the servers what they compute and what they hold back."""
        while True:
            await asyncio.sleep(_LOAD_SECONDS)
            try:
                found = await load()
            except Exception:  # noqa: BLE001  the agent is the user's; the rollout goes on without what it would have told
                _log.exception("the agent's load() raised; how busy the servers are isn't known")
                return
            if found is None:
                continue
            queue = max(_QUEUE_LEAST, int(_QUEUE_SHARE * found.running))
            if found.waiting > queue:
                self._lower(self._in_flight - (found.waiting - queue), LEAST)

    def _lower(self, limit: int, least: int) -> None:
        if (lower := max(limit, least)) < self._limit:
            self._limit = self._threshold = lower

    def _raise(self) -> None:
        fast = self._limit < self._threshold
        self._limit += max(1, int((0.5 if fast else 0.02) * self._limit))
        self._admit()

    def __repr__(self) -> str:
        return f"RequestGate({'adaptive, ' if self.adaptive else ''}limit={self._limit}, in_flight={self._in_flight})"
