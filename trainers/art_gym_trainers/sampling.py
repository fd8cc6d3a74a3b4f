"""Dynamic sampling: scenarios are played until a batch has its number of groups that tell something."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from art_gym.episodes import EpisodeGroup

Play = Callable[[int, int], list[EpisodeGroup]]
"""Plays scenarios: how many of the batch's were played before, and how many are to be played now."""


@dataclass(slots=True)
class SampledBatch:
    """What was played for a batch.

    Attributes:
        groups: Those up to the one that filled the batch, in the order of their scenarios; also the ones among them that tell nothing.
        surplus: Those after it, which are not trained on.
        rounds: How many times scenarios were played.
    """

    groups: list[EpisodeGroup] = field(default_factory=list)
    surplus: list[EpisodeGroup] = field(default_factory=list)
    rounds: int = 0

    @property
    def played(self) -> list[EpisodeGroup]:
        """All groups, in the order of their scenarios."""
        return [*self.groups, *self.surplus]


def sample_batch(play: Play, size: int, useful: Callable[[EpisodeGroup], bool], *, max_rounds: int = 1) -> SampledBatch:
    """Play `size` scenarios, and in further rounds as many as it probably takes until `size` groups are useful.

    DAPO, arXiv 2503.14476, section 3.2: groups that are all right or all wrong have no gradient, and a batch without others in their place is
    smaller and its gradient noisier. A round after the first plays as many scenarios as groups are still missing, divided by the share that was
    useful so far, and at most `size`. After `max_rounds` the batch is what it is.

    Args:
        play: Plays the scenarios and returns their groups in order.
        size: Groups of a whole batch.
        useful: Whether a group counts.
        max_rounds: With 1 nothing is played beyond the first `size` scenarios.
    """
    batch = SampledBatch()
    found = 0
    while batch.rounds < max_rounds and found < size:
        played = len(batch.groups)
        count = min(size, math.ceil((size - found) * played / found)) if found else size
        for group in play(played, count):
            if found == size:
                batch.surplus.append(group)
                continue
            batch.groups.append(group)
            found += useful(group)
        batch.rounds += 1
    return batch
