"""Which of several servers takes a request: by prefix affinity, by load, and by which of them live.

Servers that hold the same model differ in what their prefix caches hold, so that the episodes of a group and the turns of an episode should
meet the same one. Each key has its own order of replicas (rendezvous hashing: Thaler and Ravishankar, 1998), the same in every process, and
takes the first with room (consistent hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350). When one dies, only its
own keys move.

This module knows of no network: the client tells it how requests ended.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Sequence

BOUND = 1.25
"""How far over the mean load a replica may go before a key moves on."""

TRIPS = 3
"""Failures in a row, with no answer between them, that take a replica out."""

_FIRST_PROBE, _LONGEST_PROBE = 0.5, 10.0


class Replica:
    """One server.

    Attributes:
        url: Its base URL.
        in_flight: Requests that are with it now.
        alive: Whether it takes requests.
        rests_until: When it takes requests again, having asked for a pause.
        probe_at: When it may be asked whether it is back, if it isn't alive.
        metrics_at: When its metrics may be asked for again, having none.
    """

    __slots__ = ("_failures", "_probes", "alive", "in_flight", "metrics_at", "probe_at", "rests_until", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.alive = True
        self.rests_until = self.probe_at = self.metrics_at = 0.0
        self._failures = self._probes = 0

    def __repr__(self) -> str:
        return f"Replica({self.url!r}, in_flight={self.in_flight}, alive={self.alive})"

    def answered(self) -> None:
        """It took a request, or refused one for that request's own sake."""
        self._failures = self._probes = 0
        self._revive()

    def failed(self, now: float) -> None:
        """It did not answer, or only that it can't."""
        self._failures += 1
        if self._failures >= TRIPS:
            self.take_out(now)

    def take_out(self, now: float) -> None:
        """Give it no requests until a probe finds it well."""
        if self.alive:
            self.alive = False
            self._wait_for_probe(now)

    def rest(self, until: float) -> None:
        """It asked for a pause."""
        self.rests_until = max(self.rests_until, until)

    def probed(self, well: bool, now: float) -> None:
        """It was asked whether it is back. Until a request proves it, the next failures are waited for longer."""
        if well:
            self._failures = 0
            self._revive()
        elif not self.alive:
            self._wait_for_probe(now)

    def _revive(self) -> None:
        if not self.alive:
            self.alive, self.probe_at = True, 0.0

    def _wait_for_probe(self, now: float) -> None:
        self.probe_at = now + min(_FIRST_PROBE * 2 ** min(self._probes, 10), _LONGEST_PROBE)
        self._probes += 1


class Replicas:
    """Servers of the same model.

    Args:
        urls: At least one.
        clock: Seconds; monotonic.
    """

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.all = [Replica(url) for url in urls]
        self._clock = clock

    def choose(self, key: str, home: str | None = None) -> Replica:
        """Return the replica that takes a request of this key.

        Args:
            key: What shares a prefix has the same.
            home: The URL that took the key's requests so far. It keeps them while it has room, though it isn't the first in order.
        """
        if len(self.all) == 1:
            return self.all[0]
        found = self.other(key, (), home)
        if found is None:
            # None can take it, so that the one that is likeliest to be back is tried: waiting for a probe could only take longer.
            found = min(self.all, key=lambda replica: (not replica.alive, max(replica.rests_until, replica.probe_at)))
        return found

    def other(self, key: str, tried: Collection[Replica], home: str | None = None) -> Replica | None:
        """Return a replica that can take a request at once and isn't among those tried; None if there is none."""
        now = self._clock()
        ready = [replica for replica in self.all if replica.alive and replica.rests_until <= now and replica not in tried]
        if len(ready) < 2:
            return ready[0] if ready else None
        bound = math.ceil(BOUND * (sum(replica.in_flight for replica in ready) + 1) / len(ready))
        free = [replica for replica in ready if replica.in_flight < bound]
        for replica in free:
            if replica.url == home:
                return replica
        return max(free, key=lambda replica: _score(key, replica.url))

    def next_ready(self) -> float:
        """Seconds until one takes requests: of those that live, if any does."""
        living = [replica for replica in self.all if replica.alive] or self.all
        return max(0.0, min(replica.rests_until for replica in living) - self._clock())

    def to_probe(self) -> list[Replica]:
        """Return those that are out and may be asked whether they are back; each is given once until the answer is known."""
        now = self._clock()
        due = [replica for replica in self.all if not replica.alive and replica.probe_at <= now]
        for replica in due:
            replica.probe_at = math.inf
        return due


def _score(key: str, url: str) -> bytes:
    # Not `hash`, which differs between processes. A key may hold what a model wrote, half of a surrogate pair included.
    return hashlib.blake2b(f"{key}\n{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
