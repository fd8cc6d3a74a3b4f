"""How often a key may ask."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MOST_KNOWN = 20_000


class RateLimit:
    """A bucket for each key: full it holds a minute's requests, and it fills evenly.

    Args:
        per_minute: How many requests.
        clock: Seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rate, self._clock = float(per_minute), per_minute / 60.0, clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, key: str) -> float:
        """Take one request from a key's bucket; returns 0, or in how many seconds there will be one."""
        now = self._clock()
        left, since = self._buckets.get(key, (self._most, now))
        left = min(self._most, left + (now - since) * self._rate)
        if left < 1.0:
            self._buckets[key] = (left, now)
            return (1.0 - left) / self._rate
        if key not in self._buckets and len(self._buckets) >= _MOST_KNOWN:
            self._forget(now)
        self._buckets[key] = (left - 1.0, now)
        return 0.0

    def _forget(self, now: float) -> None:
        """Drop the buckets that are full again; if there are none, the oldest half, so that strangers can't fill the memory."""
        self._buckets = {key: one for key, one in self._buckets.items() if one[0] + (now - one[1]) * self._rate < self._most}
        if len(self._buckets) >= _MOST_KNOWN:
            newest = sorted(self._buckets.items(), key=lambda item: item[1][1])[len(self._buckets) // 2 :]
            self._buckets = dict(newest)


def retry_after(seconds: float) -> dict[str, str]:
    """The header that tells when to come back."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
