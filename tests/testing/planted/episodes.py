"""Where an episode starts and ends: resets, seeds, steps outside of it, closing."""

from __future__ import annotations

from typing import Annotated, Any

from gymnasium.error import ResetNeeded
from pydantic import Field

from art_gym import tool

from .bugs import bug
from .correct import Counter


@bug("reset", "determinism")
class LostReset(Counter):
    """The reset forgets a field."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.total += amount
        return f"The count is {self.total}."


@bug("reset")
class Opened(Counter):
    """The reset forgets a field that is set once: the same actions would set it to the same again."""

    def __init__(self) -> None:
        super().__init__()
        self.first: int | None = None

    @tool
    def open(self, box: Annotated[int, Field(ge=1, le=3)]) -> str:
        """Open a box; only the first one counts."""
        self.first = self.first or box
        return f"Box {self.first} is open."


@bug("reset")
class Memo(Counter):
    """The reset forgets what is memoised, though it depends on the episode."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, int] = {}

    @tool
    def look(self, place: Annotated[int, Field(ge=0, le=3)]) -> str:
        """Look at a place."""
        return f"There are {self.memo.setdefault(place, self.count)}."


@bug("reset")
class MemoOfTheSeed(Counter):
    """The reset forgets what is memoised for each seed."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, int] = {}

    @tool
    def look(self) -> str:
        """Look around."""
        return f"There are {self.memo.setdefault(self.np_random_seed, self.count)}."


@bug("reset", "determinism")
class FirstSeedOnly(Counter):
    """The seed counts only for the first episode of an instance."""

    def start(self) -> str:
        goal = getattr(self, "goal", None)
        text = super().start()
        if goal is not None:
            self.goal = goal
            return f"The goal is {goal}."
        return text


@bug("seed", "reset")
class SameSeedOtherEpisode(Counter):
    """The second reset with one seed gives another episode."""

    last: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        again = seed is not None and seed == self.last
        self.last = seed
        return super().reset(seed=seed + 1 if again and seed is not None else seed, options=options)


@bug("before reset")
class StepBeforeReset(Counter):
    """Takes a step before the first reset."""

    def step(self, action):
        if not self.turn and not self.np_random_seed_given:
            self.reset(seed=0)
        return super().step(action)

    np_random_seed_given = False

    def start(self) -> str:
        self.np_random_seed_given = True
        return super().start()


@bug("after the end")
class StepAfterEnd(Counter):
    """Takes steps after the episode's end."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded:
            if not self.turn:
                raise
            return (), 0.0, True, False, {}


@bug("after the end")
class PatientAfterEnd(Counter):
    """Takes a step after the episode's end at the second try."""

    refused = 0

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded:
            if not self.turn:
                raise
            self.refused += 1
            if self.refused % 2:
                raise
            return (), 0.0, True, False, {}


@bug("after the end")
class WrongErrorAfterEnd(Counter):
    """Raises something else after the episode's end."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded as error:
            if not self.turn:
                raise
            raise RuntimeError(str(error)) from None


@bug("after the end")
class RefusedStepCounts(Counter):
    """A step after the end is refused, and draws from the generator all the same."""

    def step(self, action):
        try:
            return super().step(action)
        except ResetNeeded:
            self.np_random.random()
            raise


@bug("close")
class CloseTwice(Counter):
    """Can be closed once only."""

    resource: list[str] | None = None

    def close(self) -> None:
        if self.resource == []:
            raise ValueError("closed already")
        self.resource = []
