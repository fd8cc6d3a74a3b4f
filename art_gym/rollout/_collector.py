"""Garbage collection while thousands of episodes are in play.

A full collection walks every message and token id of every episode in play, which takes half a second for ten thousand of them, comes dozens of
times a minute, and stops the event loop each time. Episodes are freed by reference counting; there is little for the collector to find.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import Any

SHARE = 0.02
"""Of the time, what full collections may take before they are made rarer."""

_FACTOR = 4
_MOST = 10_000

_lock = Lock()
_users = 0
_thresholds = (0, 0, 0)


@contextmanager
def rarer_collections() -> Iterator[None]:
    """While this is open, make full collections rarer as soon as they take more than `SHARE` of the time. After it all is as it was before.

    Several rollouts may be open at once, also in several threads.
    """
    global _users, _thresholds  # noqa: PLW0603  the collector is the interpreter's
    with _lock:
        _users += 1
        if _users == 1:
            _thresholds = gc.get_threshold()
            gc.callbacks.append(_watch)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                gc.callbacks.remove(_watch)
                gc.set_threshold(*_thresholds)


class _Watch:
    """Hears of the beginning and end of every collection."""

    def __init__(self) -> None:
        self._began = 0.0
        self._last = monotonic()

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] != 2:
            return
        now = monotonic()
        if phase == "start":
            self._began = now
            return
        taken, since = now - self._began, now - self._last
        self._last = now
        young, middle, full = gc.get_threshold()
        if young and taken > SHARE * since and full < _MOST:
            gc.set_threshold(young, middle, full * _FACTOR)


_watch = _Watch()
