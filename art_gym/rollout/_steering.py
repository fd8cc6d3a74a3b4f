"""Steering: how many requests at once are right, by what the servers tell and by how late the event loop is.

Several gates, also of several processes, may ask the same servers without knowing of each other. As senders on one line do (F. Kelly,
A. Maulloo and D. Tan, Rate control for communication networks, 1998), each adds the same number in a round, and takes off its own requests
times the servers' price. They come to rest where both are equal, and so at equal shares. A round is what a round trip is there: the time in
which as many requests are answered as are in flight.

This module decides; who looks, and when, is `gate`'s matter.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from numbers import Real

from art_gym.rollout._cancelling import ends_the_task
from art_gym.rollout.agent import ServerLoad

_log = logging.getLogger(__name__)

AskLoad = Callable[[], Awaitable[ServerLoad | None]]
"""An agent's `server_load`."""

FIRST = 128
"""Requests that are let through before anything is known."""

LEAST_FOR_LOOP = 64
"""Requests that any event loop handles without delay."""

ANSWER_SECONDS = 2.0
"""What isn't told within that is too old to go by."""

_LATE_SECONDS = 0.02

_BUSY = 0.7
"""Share of its time that the event loop's thread computes when it is late by its own doing. Otherwise it waits for a processor that others
use, such as a server on the same machine, and fewer requests would only slow that down."""

_FAST = 1.5
"""How many times as many are tried at a time while nothing hints at too many."""

_SLOW, _SLOW_LEAST = 1 / 16, 2
"""How many more are tried in a round otherwise, as a share of what the servers run. As many wait there for each gate in the end, so that a
place that gets free is filled at once."""

_CACHE_PLENTY, _CACHE_FULL = 0.5, 0.95
"""Use of the cache up to which many more are tried, and beyond which each request has a price: requests grow while they run."""

_LATELY = 0.8
"""What a look at preemptions weighs beside the next one: some seconds count."""


_LARGEST = 2.0**63
"""What is beyond is no count."""


class Servers:
    """The servers of one agent, as it tells of them.

    Attributes:
        told: Whether the agent ever told how busy they are, or failed to. Otherwise it doesn't know such things, and isn't waited for.
        load: How busy they are; None if that isn't known now.
        price: What each request there costs the others, 0 to 1.
        fresh: Whether the limit hasn't been set by this load yet.
    """

    def __init__(self, ask: AskLoad) -> None:
        self._ask = ask
        self._warned = False
        self._before: tuple[int, int] | None = None
        self._preempted = self._answered = 0.0
        self.told = False
        self.load: ServerLoad | None = None
        self.price = 0.0
        self.fresh = False

    @property
    def unclear(self) -> bool:
        """Whether it can't be said if they would take more: they aren't known now, or they are paused, as for new weights."""
        return self.load is None or (self.load.waiting > 0 and not self.load.running)

    async def look(self) -> ServerLoad | None:
        """Ask the agent; None if it doesn't know, fails, or takes too long. The last two are warned of once."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                load = await self._ask()
            if load is not None:
                _check(load)
        except BaseException as error:
            if ends_the_task(error):
                raise
            # The rollout goes on without what it would have told.
            self.told = True
            if not self._warned:
                self._warned = True
                _log.warning("the agent's server_load() failed (%r); it is asked again, and no more requests are tried until it tells", error)
            return None
        return load

    def take(self, load: ServerLoad | None, answered: int) -> None:
        """Go by a load from now on, by when so many requests had ever been answered."""
        self.load, self.fresh = load, load is not None
        if load is None:
            return
        self.told = True
        preemptions, before = self._before or (load.preemptions, answered)
        self._before = load.preemptions, answered
        # Fewer than before: a server was replaced, which counts from 0 again.
        self._preempted = _LATELY * self._preempted + max(0, load.preemptions - preemptions)
        self._answered = _LATELY * self._answered + answered - before
        queued = load.waiting / max(1, load.running + load.waiting)
        again = self._preempted / max(1.0, self._preempted + self._answered)
        self.price = min(1.0, queued + again + max(0.0, load.cache_usage - _CACHE_FULL))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a gate saw of itself and of its event loop in a while.

    Attributes:
        in_flight: Requests that are in flight.
        peak: The most that were.
        answered: How many were ever answered.
        needed: Whether some had to wait at the gate.
        late: By how many seconds the event loop was late.
        busy: Which share of the time its thread computed.
    """

    in_flight: int
    peak: int
    answered: int
    needed: bool
    late: float = 0.0
    busy: float = 0.0


class Steering:
    """The most requests in flight, as it is found out.

    Attributes:
        limit: That number.
    """

    def __init__(self) -> None:
        self.limit = float(FIRST)
        self._bearable = math.inf
        self._answered = 0

    def go_on(self, servers: Collection[Servers], seen: Seen) -> None:
        """Fewer requests where the event loop is late or the servers' price is high; more where some are needed and nobody minds."""
        if seen.late > _LATE_SECONDS and seen.busy > _BUSY:
            if (lower := max(0.8 * seen.peak, LEAST_FOR_LOOP)) < self.limit:
                self.limit = self._bearable = lower
            return
        told = [one for one in servers if one.told]
        known = [one for one in told if one.load is not None]
        if not all(one.fresh for one in known):
            return
        answered, self._answered = seen.answered - self._answered, seen.answered
        for one in known:
            one.fresh = False
        loads = [(one.load, one.price) for one in known if one.load is not None and one.load.running]
        rounds = min(1.0, answered / max(1, seen.in_flight))
        step = max(_SLOW_LEAST, _SLOW * max((load.running for load, _ in loads), default=self.limit))
        # Not more than are there, where others of its requests are at other servers.
        cost = max((price * min(seen.in_flight, load.running + load.waiting) for load, price in loads), default=0.0)
        if cost > step:
            self.limit = max(1.0, min(self.limit, seen.in_flight + (step - cost) * rounds))
        elif seen.needed and seen.in_flight <= self.limit and not any(one.unclear for one in told) and bool(told) == bool(loads):
            if self.limit < self._bearable and cost < step / 2 and all(load.cache_usage < _CACHE_PLENTY for load, _ in loads):
                self.limit = min(_FAST * self.limit, self._bearable)
            else:
                self.limit += (step - cost) * rounds


def _check(load: object) -> None:
    """Raise what says why that isn't a load."""
    if not isinstance(load, ServerLoad):
        raise TypeError(f"it must return a ServerLoad or None, not {load!r:.100}")
    for name in ("running", "waiting", "cache_usage", "preemptions"):
        value = getattr(load, name)
        if not isinstance(value, Real) or not 0 <= float(value) < _LARGEST:
            raise ValueError(f"{name} must be a number of at least 0, not {value!r:.100}")
