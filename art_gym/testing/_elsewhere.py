"""Telling why another interpreter's episode is another one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from art_gym.testing._layers import Layers
from art_gym.testing._outcomes import Walk, compare_texts
from art_gym.testing._replica import NoReplica, Replica
from art_gym.testing._watch import Broken

_TICK = 1.1
"""Seconds after which a clock shows another second."""


def named(replica: Replica, walk: Walk, layers: Layers, problem: str, history: Sequence[Walk] = ()) -> Broken:
    """Name what makes the other process's episode another one: what was played before, its clock, or its hash seed.

    Args:
        replica: The other interpreter.
        walk: What gave something else there.
        layers: What is left out.
        problem: What differs.
        history: What was played here before; there each answer comes from a process in which nothing was.
    """
    with contextlib.suppress(NoReplica):
        here, again = replica.texts([walk, walk], layers.ignored, other_clock=False)
        began = time.monotonic()
        if here != again:
            return _memory(compare_texts(here, again))
        if replica.texts([walk], layers.ignored)[0] != here:
            return _clock(problem)
        *_, after = replica.texts([*history, walk], layers.ignored, other_clock=False)
        time.sleep(max(0.0, began + _TICK - time.monotonic()))
        if replica.texts([walk], layers.ignored, other_clock=False)[0] != here:
            return _clock(problem)
        if after != here:
            return _memory(f"{compare_texts(here, after)} once other episodes had been played")
    what = "the order of a set, or of what was made from it, reaches the outcome; sort it"
    return Broken("hash order", f"with another PYTHONHASHSEED the same seed and actions gave something else {problem}: {what}")


def clock_alone(replica: Replica, walk: Walk, layers: Layers) -> Broken | None:
    """Look whether another time is enough to make the walk's episode another one; None if it isn't, or nobody knows."""
    with contextlib.suppress(NoReplica):
        now, then = (replica.texts([walk], layers.ignored, other_clock=other)[0] for other in (False, True))
        if problem := compare_texts(now, then):
            return _clock(problem)
    return None


def _memory(problem: str) -> Broken:
    what = "the class or module remembers what was played"
    return Broken("shared state", f"in another process the same seed and actions gave something else {problem}: {what}")


def _clock(problem: str) -> Broken:
    return Broken(
        "wall clock",
        f"at another time, in another time zone, the same seed and actions gave something else {problem}; let np_random set the time",
    )
