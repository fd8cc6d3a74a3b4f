"""The gate: how many policy calls are in flight at once, and whose turn it is.

Episodes in play may be many more than the requests that a server, or this process's event loop, can take at a time. What waits here waits in
the order of priority and of the groups, so that groups get whole one after the other; in the server's own queue it would wait in the order of
arrival, and every group would end late. How many are right belongs to `_steering`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

from art_gym.errors import UsageError
from art_gym.rollout._arguments import check_counts
from art_gym.rollout._steering import AskLoad, Seen, Servers, Steering

Order = tuple[int, ...]
"""Whose turn it is: the smallest first."""

_TICK_SECONDS = 0.02
_WINDOW_SECONDS = 0.25
_LOAD_SECONDS = 1.0

_ABANDONED = 64
"""Waiters that gave up and are kept in the queue, beside as many as wait there: taking each out at once would cost a search."""


class RequestGate:
    """Lets a bounded number of policy calls through at a time.

    One gate may serve several runners of an event loop, such as a training's and an evaluation's, whose `priority` then decides who goes first.
    Gates of several processes that ask the same servers come to equal shares of them.

    Args:
        limit: The most requests in flight. None: as many as the servers compute without queueing much and without putting running ones back,
            by what the agents' `server_load` tells, and as the event loop handles without delay; it is found out by trying more while there
            is need.

    Raises:
        UsageError: The limit is less than 1.
    """

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None:
            check_counts(limit=limit)
        self._steering = Steering() if limit is None else None
        self._limit = int(self._steering.limit) if self._steering else limit or 0
        self._tickets = itertools.count()
        self._arrivals = itertools.count()
        self._answered = 0
        self._binding = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin()

    def _begin(self) -> None:
        """Hold nothing: what follows belongs to one event loop, and ends with it."""
        self._in_flight = 0
        self._waiting = 0
        self._needed = False
        self._queue: list[tuple[Order, int, asyncio.Future[None]]] = []
        self._servers: list[Servers] = []
        self._users = 0
        self._watching = asyncio.Lock()

    @property
    def adaptive(self) -> bool:
        """Whether the limit is found out."""
        return self._steering is not None

    @property
    def limit(self) -> int:
        """The most requests in flight now."""
        return self._limit

    @property
    def in_flight(self) -> int:
        """Requests that were let through and haven't been answered."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Requests that wait to be let through."""
        return self._waiting

    def ticket(self) -> int:
        """Return a number greater than all before: the place of a group among those of every rollout that uses the gate."""
        return next(self._tickets)

    async def enter(self, order: Order) -> None:
        """Wait until the request may be sent; `leave` must follow.

        Raises:
            UsageError: The gate is in use in another event loop.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._bind(loop)
        if self._in_flight < self._limit and not self._waiting:
            self._in_flight += 1
            return
        self._needed = True
        future = loop.create_future()
        heapq.heappush(self._queue, (order, next(self._arrivals), future))
        self._waiting += 1
        # There may be room beside waiters that were cancelled and haven't run since.
        self._admit()
        try:
            await future
        except BaseException:
            # What a closed loop left behind is collected some day: the gate counts it no more.
            if loop is self._loop and not loop.is_closed():
                if future.done() and not future.cancelled():
                    self.leave()
                else:
                    future.cancel()
                    self._give_up()
            raise

    def leave(self) -> None:
        """Tell that the request was answered, or given up."""
        # Not below 0: what a closed loop left behind may leave when another one has begun.
        self._in_flight = max(0, self._in_flight - 1)
        self._answered += 1
        if self._waiting:
            self._admit()

    def _admit(self) -> None:
        while self._queue and self._in_flight < self._limit:
            future = heapq.heappop(self._queue)[2]
            if not future.done():
                self._waiting -= 1
                self._in_flight += 1
                future.set_result(None)

    def _give_up(self) -> None:
        self._waiting -= 1
        if len(self._queue) > 2 * self._waiting + _ABANDONED:
            self._queue = [entry for entry in self._queue if not entry[2].done()]
            heapq.heapify(self._queue)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._binding:
            if self._loop is loop:
                return
            if self._loop is not None and not self._loop.is_closed() and (self._in_flight or self._waiting or self._users):
                raise UsageError(
                    f"{self!r} is in use in another event loop; give the runners of each event loop a gate of their own: RequestGate()"
                )
            self._begin()
            self._loop = loop

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep other event loops out, even while nothing is in flight."""
        self._bind(asyncio.get_running_loop())
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def steer(self, server_load: AskLoad | None) -> None:
        """Find out how many requests are right, until cancelled. Each runner does so, for its own servers.

        Args:
            server_load: What the agent tells of its servers; None if it tells nothing.

        Raises:
            UsageError: The gate is in use in another event loop.
        """
        with self._in_use():
            if self._steering is None:
                await asyncio.get_running_loop().create_future()
                return
            async with asyncio.TaskGroup() as tasks:
                if server_load is not None:
                    tasks.create_task(self._ask(server_load))
                # There is but one event loop to watch, by the first of them and then by the next.
                async with self._watching:
                    while True:
                        await self._watch(self._steering)

    async def _ask(self, server_load: AskLoad) -> None:
        servers = Servers(server_load)
        self._servers.append(servers)
        try:
            while True:
                servers.take(await servers.look(), self._answered)
                await asyncio.sleep(_LOAD_SECONDS)
        finally:
            self._servers.remove(servers)

    async def _watch(self, steering: Steering) -> None:
        """For a while, see how late the event loop is, how much of the time it computes, and how many requests are in flight."""
        clock = asyncio.get_running_loop().time
        begin, computed = clock(), thread_time()
        late, peak = 0.0, self._in_flight
        while (before := clock()) - begin < _WINDOW_SECONDS:
            await asyncio.sleep(_TICK_SECONDS)
            late = max(late, clock() - before - _TICK_SECONDS)
            peak = max(peak, self._in_flight)
        busy = (thread_time() - computed) / (clock() - begin)
        steering.go_on(self._servers, Seen(self._in_flight, peak, self._answered, self._needed, late, busy))
        self._limit = int(steering.limit)
        self._needed = self._waiting > 0
        self._admit()

    def __repr__(self) -> str:
        return f"RequestGate({'adaptive, ' if self.adaptive else ''}limit={self._limit}, in_flight={self._in_flight})"
