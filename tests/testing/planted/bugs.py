"""The list of planted bugs."""

from __future__ import annotations

from typing import Any

import gymnasium

PLANTED: dict[type[gymnasium.Env[Any, Any]], set[str]] = {}
"""Class → names of the invariants under which its bug may be reported."""


def bug(*invariants: str):
    """Enter a class in `PLANTED`."""

    def enter(cls):
        PLANTED[cls] = set(invariants)
        return cls

    return enter
