"""Which scenarios a run plays: the first of a split, and for practice those of the train split in an order of the seed's own."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, cast

import numpy as np

from art_gym.registration import make
from art_gym.scenarios import Scenario, Split

if TYPE_CHECKING:
    from art_gym.cli.config import RunConfig
    from art_gym.env import ToolEnv

_POOL = 10_000
"""A run practises on so many scenarios of the train split, or on all where there are fewer."""


class Practice:
    """The scenarios that a run practises on, numbered.

    The split is read when scenarios are first asked for.

    Args:
        config: The run's.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pool: list[Scenario] = []

    def take(self, first: int, count: int) -> list[Scenario]:
        """Scenarios number `first` and following of the seed's own order; begun again in another order where it ends."""
        if not self._pool:
            self._pool = first_scenarios(self._config, "train", _POOL)
        size = len(self._pool)
        chosen = []
        for number in range(first, first + count):
            lap, place = divmod(number, size)
            order = np.random.default_rng([self._config.seed, lap]).permutation(size)
            chosen.append(self._pool[order[place]])
        return chosen


def first_scenarios(config: RunConfig, split: Split, most: int) -> list[Scenario]:
    """The first scenarios of a split of the run's environment, at most so many."""
    env = make(config.env.id, **config.env.kwargs)
    try:
        return list(islice(cast("ToolEnv", env.unwrapped).scenarios(split), most))
    finally:
        env.close()
