"""Infos that aren't JSON, or of other types from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np

from .bugs import bug
from .correct import Counter


@bug("info types")
class MixedTypes(Counter):
    """An entry of the info is an int, and later a float."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "score": self.count / 2 if self.count % 2 else self.count // 2}


@bug("info types")
class MixedTypesBetweenEpisodes(Counter):
    """An entry of the info is an int in one episode and a text in another."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "goal": self.goal if self.goal < 10 else str(self.goal)}


@bug("info")
class InfoNone(Counter):
    """An entry of the info is None until it is known."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "word": self.words[-1] if self.words else None}


@bug("info")
class InfoNotJson(Counter):
    """An entry of the info has no JSON form."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {**info, "goal": np.int64(self.goal)}


@bug("info mutated", "observation aliased")
class SharedInfo(Counter):
    """One info object for all steps, written to again at each."""

    def start(self) -> str:
        self.log: list[int] = []
        return super().start()

    def step(self, action):
        *rest, info = super().step(action)
        self.log.append(self.count)
        return *rest, {**info, "log": self.log}
