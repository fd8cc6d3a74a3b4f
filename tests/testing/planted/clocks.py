"""Clocks that an episode looks at."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from time import gmtime
from typing import Annotated

from pydantic import Field

from art_gym import tool

from .bugs import bug
from .correct import Counter


@bug("wall clock", "determinism")
class WallClock(Counter):
    """Tells the time of the day."""

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        return f"Remembered at {datetime.now():%H:%M}."


@bug("wall clock", "determinism")
class Epoch(Counter):
    """What it does depends on the time in whole minutes."""

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += amount + int(time.time() // 60) % 7
        return f"The count is {self.count}."


@bug("wall clock", "determinism")
class UtcClock(Counter):
    """Tells the hour in UTC, which is the same in every time zone."""

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        return f"Remembered at {datetime.now(UTC):%H} o'clock."


@bug("wall clock", "determinism")
class BrokenDownTime(Counter):
    """Greets by the year, from a function that breaks the time down."""

    def start(self) -> str:
        return f"{super().start()} Welcome to {gmtime().tm_year}."


@bug("wall clock", "determinism")
class Weekend(Counter):
    """Is closed on some days of the week."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish()
        return "Closed." if date.today().weekday() >= 5 else "Stopped."


@bug("wall clock", "determinism")
class Uptime(Counter):
    """Tells for how many hours the machine has been running."""

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish()
        return f"Stopped after {int(time.monotonic() // 3600)} hours."
