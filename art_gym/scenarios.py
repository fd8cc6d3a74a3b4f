"""Scenarios: the starting points of episodes, in disjoint splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One starting point of an episode: `env.reset(seed=scenario.seed, options=scenario.options)`.

    Attributes:
        id: Unique within the environment, and the same in every process.
        seed: The seed passed to `reset`.
        options: JSON-serialisable options passed to `reset`.
    """

    id: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "seed": self.seed, "options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        return cls(id=data["id"], seed=data["seed"], options=dict(data["options"]))
