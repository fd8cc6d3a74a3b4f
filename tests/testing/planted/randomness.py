"""Randomness, and orders, from elsewhere than `np_random`."""

from __future__ import annotations

import random
from typing import Annotated

import numpy as np
from pydantic import Field

from art_gym import tool

from .bugs import bug
from .correct import Counter


@bug("global random state", "determinism")
class GlobalRandom(Counter):
    """Draws from the module random."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish(reward=random.random())
        return "Stopped."


@bug("global random state", "determinism")
class GlobalNumpy(Counter):
    """Draws from numpy.random."""

    def start(self) -> str:
        return f"{super().start()} {np.random.randint(5)}"


@bug("global random state")
class SeedsGlobalRandom(Counter):
    """Seeds the module random: deterministic itself, and the whole process with it."""

    def start(self) -> str:
        random.seed(int(self.np_random.integers(100)))
        return super().start()


@bug("global random state", "determinism")
class HiddenGlobalRandom(Counter):
    """Draws from the module random, and puts its state back."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        state = random.getstate()
        text = f"Stopped: {random.random()}"
        random.setstate(state)
        self.finish()
        return text


@bug("determinism")
class OwnGenerator(Counter):
    """Draws from a generator of its own that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng()

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        return f"The count is {int(self.rng.integers(1000)) + amount}."


@bug("hash order", "wall clock")
class HashOrder(Counter):
    """Lists a set in its own order."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish()
        return ", ".join({"north", "south", "east", "west", "up", "down"})
