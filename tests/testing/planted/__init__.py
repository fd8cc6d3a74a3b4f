"""Environments with one bug each, which `check_transitions` must find and name; and correct ones, which it must not.

`PLANTED` maps each class to the names of the invariants under which its bug may be reported. Most bugs need particular actions to show. All
classes are attributes of the package.
"""

from __future__ import annotations

from . import answers, clocks, episodes, infos, observations, randomness, rewards, snapshots, state  # noqa: F401  each enters its classes
from .bugs import PLANTED
from .correct import CORRECT

__all__ = ["CORRECT", "PLANTED"]

globals().update({cls.__name__: cls for cls in (*CORRECT, *PLANTED)})
