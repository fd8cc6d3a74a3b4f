"""An episode's figures: rewards and metrics, which are finite numbers, alone and added up, and the limits on what is counted."""

from __future__ import annotations

import math
from numbers import Integral


def finite(what: str, value: float) -> float:
    """Return the value as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It isn't finite.
    """
    try:
        number = float(None if isinstance(value, str | bytes) else value)  # text is refused, and not read as a number
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, not {value!r:.60}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}")
    return number


def check_limit(what: str, value: int | None) -> None:
    """Check a limit on what is counted.

    Raises:
        TypeError: It is neither a whole number of at least 0 nor None.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 0):
        raise TypeError(f"{what} must be a whole number of at least 0, or None for no limit, not {value!r:.60}")


def with_reward(rewards: dict[str, float], name: str, value: float) -> dict[str, float]:
    """Return the components of an action's reward with a value added to one of them; the given ones stay as they are.

    Raises:
        TypeError: The value is no number.
        ValueError: The value isn't finite, or the components no longer add up to a finite number.
    """
    what = f"reward {name!r}"
    rewards = {**rewards, name: finite(what, rewards.get(name, 0.0) + finite(what, value))}
    try:
        math.fsum(rewards.values())
    except OverflowError:
        raise ValueError(f"{what}: this action's rewards must add up to a finite number, not {rewards}") from None
    return rewards
