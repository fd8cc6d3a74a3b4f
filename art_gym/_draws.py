"""What all samplers draw: integers of any size, and words."""

from __future__ import annotations

import numpy as np

Rng = np.random.Generator

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def between(rng: Rng, first: int, last: int) -> int:
    """Draw an integer in [first, last], of any size; the nearer bound where there is none, for the check to refuse."""
    if last <= first:
        return first
    return first + min(last - first, int(rng.random() * (last - first + 1)))


def word(rng: Rng, low: int, high: int) -> str:
    """Draw a word of `low` to `high` letters."""
    return "".join(_LETTERS[int(index)] for index in rng.integers(len(_LETTERS), size=between(rng, low, high)))
