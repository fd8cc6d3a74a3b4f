"""An episode's figures, rewards and metrics: finite numbers, alone and added up."""

from __future__ import annotations

import math


def finite(what: str, value: float) -> float:
    """Return the value as a float.

    Raises:
        ValueError: It isn't finite.
    """
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}")
    return number


def with_reward(rewards: dict[str, float], name: str, value: float) -> dict[str, float]:
    """Return the components of an action's reward with a value added to one of them; the given ones stay as they are.

    Raises:
        ValueError: The value isn't finite, or the components no longer add up to a finite number.
    """
    what = f"reward {name!r}"
    rewards = {**rewards, name: finite(what, rewards.get(name, 0.0) + finite(what, value))}
    try:
        math.fsum(rewards.values())
    except OverflowError:
        raise ValueError(f"{what}: this action's rewards must add up to a finite number, not {rewards}") from None
    return rewards
