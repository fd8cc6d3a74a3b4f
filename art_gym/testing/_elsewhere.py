"""Telling why another interpreter's episode is another one."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk
from art_gym.testing._replica import NoReplica, Replica
from art_gym.testing._watch import Broken

_TICK = 1.1
"""Seconds after which a clock shows another second."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a walk gave in the other process, and a time before that, of the monotonic clock."""

    walk: Walk
    texts: list[str]
    began: float


def named(replica: Replica, walk: Walk, layers: Layers, problem: str, seen: Elsewhere) -> Broken:
    """Name what makes the other process's episode another one: its clock, that nothing was played there before, or its hash seed."""
    with contextlib.suppress(NoReplica):
        here, again = replica.texts([walk, walk], layers.ignored, other_clock=False)
        if here != again:
            what = "the class or module remembers what was played"
            return Broken("shared state", f"in another process the same seed and actions gave something else {problem}: {what}")
        time.sleep(max(0.0, seen.began + _TICK - time.monotonic()))
        if replica.texts([walk], layers.ignored)[0] != here or replica.texts([seen.walk], layers.ignored)[0] != seen.texts:
            return _clock(problem)
    what = "the order of a set, or of what was made from it, reaches the outcome; sort it"
    return Broken("hash order", f"with another PYTHONHASHSEED the same seed and actions gave something else {problem}: {what}")


def _clock(problem: str) -> Broken:
    return Broken("wall clock", f"at another time of day the same seed and actions gave something else {problem}; let np_random set the time")
