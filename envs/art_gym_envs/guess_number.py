"""GuessNumber: find a hidden number from higher/lower hints."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from art_gym import ToolEnv, tool
from art_gym_envs._options import check_integer


class GuessNumber(ToolEnv):
    """Find a hidden number from higher/lower hints.

    Reward 1 for the right guess. With 16 numbers, halving the range always finds it within 5 guesses.

    Args:
        low: The lowest number it can be.
        high: The highest number it can be.
        max_turns: Messages after which the episode is truncated.
    """

    instant = True
    reward_range = (0.0, 1.0)

    def __init__(self, low: int = 1, high: int = 16, max_turns: int = 5, render_mode: str | None = None) -> None:
        check_integer("low", low)
        check_integer("high", high)
        check_integer("max_turns", max_turns, 1)
        if low > high:
            raise ValueError(f"low must not be above high, got low={low} and high={high}")
        super().__init__(render_mode=render_mode)
        self.low, self.high, self.max_turns = low, high, max_turns
        self.constrain("guess", number=Annotated[int, Field(ge=low, le=high)])

    def instructions(self) -> str:
        return f"Find the secret number from {self.low} to {self.high} by calling guess."

    def start(self) -> str:
        self.secret = int(self.np_random.integers(self.low, self.high + 1))
        self.metric("success", 0.0)
        return "Make your first guess."

    @tool
    def guess(self, number: int) -> str:
        """Guess the number."""
        if number == self.secret:
            self.finish(reward=1.0, success=True)
            return "Correct."
        return "Higher." if number < self.secret else "Lower."

    def on_text(self, text: str) -> str:
        return "Call guess."
