"""Rewards and flags."""

from __future__ import annotations

import math

import numpy as np

from .bugs import bug
from .correct import Counter


@bug("reward")
class RewardNaN(Counter):
    """The reward is no number when the count is large."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, math.nan if self.count > 15 else reward, terminated, truncated, info


@bug("reward range")
class RewardOutOfRange(Counter):
    """The reward passes the range that is promised."""

    def on_invalid(self, problem: str) -> None:
        self.reward("invalid", -0.6)


@bug("reward components")
class RewardNotSum(Counter):
    """The components don't add up to the reward."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, min(1.0, reward + 0.1 * (info["tool_errors"] > 0)), terminated, truncated, info


@bug("reward")
class RewardBool(Counter):
    """The reward is a bool."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, terminated if terminated else reward, terminated, truncated, info


@bug("flags")
class BothFlags(Counter):
    """An episode that ends on its last turn is both terminated and truncated."""

    max_turns = 3

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.turn >= 3, info


@bug("flags")
class NumpyFlag(Counter):
    """A flag is of NumPy's bool."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), truncated, info
