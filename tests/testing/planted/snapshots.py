"""Snapshots that aren't exact, and rendering that isn't only looking."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from art_gym import tool

from .bugs import bug
from .correct import Counter


@bug("snapshot")
class ForgetfulSnapshot(Counter):
    """The snapshot leaves a field out."""

    def snapshot(self):
        state = super().snapshot()
        del state["words"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore({**state, "words": getattr(self, "words", [])})


@bug("snapshot")
class ShallowSnapshot(Counter):
    """The snapshot shares a list with the episode that goes on."""

    def snapshot(self):
        return {**super().snapshot(), "words": self.words}


@bug("snapshot")
class SnapshotDraws(Counter):
    """Taking a snapshot draws a random number."""

    def snapshot(self):
        self.np_random.random()
        return super().snapshot()

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        return f"The count is {int(self.np_random.integers(1000)) + amount}."


@bug("render")
class RenderAdvances(Counter):
    """Rendering counts."""

    def render(self):
        self.count += 1
        return super().render()
