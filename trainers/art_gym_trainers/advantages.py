"""Group-relative advantages: how much better an episode was than the others of its scenario."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from art_gym.episodes import EpisodeGroup

AdvantageScale = Literal["group_std", "none"]


def group_advantages(rewards: Sequence[float], scale: AdvantageScale = "group_std", epsilon: float = 1e-4) -> list[float]:
    """Each reward minus the group's mean, by default divided by its standard deviation.

    A_i = (R_i - mean(R)) / (std(R) + epsilon), with the sample standard deviation (n - 1): GRPO, arXiv 2402.03300, eq. 3, and TRL's epsilon.
    With `scale="none"` only the mean is taken off: Dr. GRPO, arXiv 2503.20783.

    A group of one, or of equal rewards, tells nothing: all advantages are 0.

    >>> group_advantages([1.0, 0.0], scale="none")
    [0.5, -0.5]
    >>> group_advantages([0.3, 0.3, 0.3])
    [0.0, 0.0, 0.0]

    Raises:
        ValueError: A reward is NaN or infinite.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}; rewards must be finite")
    if len(rewards) < 2 or max(rewards) - min(rewards) < 1e-9:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + epsilon) for value in centred]


def episode_advantages(group: EpisodeGroup, scale: AdvantageScale = "group_std") -> dict[str, float]:
    """The advantage of each finished episode of a group, by episode id. Failed episodes neither get one nor count in the baseline."""
    finished = group.finished
    advantages = group_advantages([episode.reward for episode in finished], scale)
    return {episode.id: advantage for episode, advantage in zip(finished, advantages, strict=True)}
