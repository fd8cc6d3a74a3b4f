"""Scenarios: the starting points of episodes, in disjoint splits; and how the rows of a data set become some."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        """Return the scenario as JSON data, as JSON as its options are."""
        return {"id": self.id, "seed": self.seed, "options": dict(self.options)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scenario:
        """Make the scenario that `to_dict` wrote.

        Raises:
            KeyError: Its id, seed or options are missing.
        """
        return cls(id=data["id"], seed=data["seed"], options=dict(data["options"]))


def from_rows(
    rows: Iterable[Mapping[str, Any]],
    split: Split,
    *,
    id: str | Callable[[Mapping[str, Any]], str] | None = None,
    fractions: Sequence[float] = (0.8, 0.1, 0.1),
    seed: int = 0,
) -> Iterator[Scenario]:
    """Yield those rows of a data set that belong to a split, as scenarios whose options are the row.

    A row's split and seed follow from its id alone: they are the same in every process, whatever the order of the rows and however many there
    are, so that a data set may grow without a row moving from one split into another.

    >>> rows = [{"question": f"{n} + {n}", "answer": 2 * n} for n in range(100)]
    >>> sum(len([*from_rows(rows, split)]) for split in SPLITS)
    100

    Args:
        rows: JSON mappings, each a task.
        split: "train", "validation" or "test".
        id: The key under which a row has its id, a text or whole number; or a function that returns a row's id. By default a row is known by
            its content, and a row that is there twice is two scenarios of one split.
        fractions: Shares of the splits, in the order train, validation, test; they add up to 1. Met on average, as each row is drawn by itself.
        seed: Another one gives the rows other splits and seeds.

    Raises:
        ValueError: There is no such split; the fractions aren't shares; or, once iteration comes to it, two rows have one id.
        TypeError: Once iteration comes to it: a row is no JSON mapping, or has no id.
    """
    if split not in SPLITS:
        raise ValueError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if len(fractions) != len(SPLITS) or min(fractions) < 0 or not math.isclose(math.fsum(fractions), 1, abs_tol=1e-9):
        raise ValueError(f"fractions must be three shares (train, validation, test) that add up to 1, not {fractions!r}")
    return _from_rows(rows, split, id, tuple(itertools.accumulate(fractions)), seed)


def _from_rows(
    rows: Iterable[Mapping[str, Any]],
    split: Split,
    id: str | Callable[[Mapping[str, Any]], str] | None,
    bounds: tuple[float, ...],
    seed: int,
) -> Iterator[Scenario]:
    counts: dict[str, int] = {}
    for index, row in enumerate(rows):
        options = json.loads(_json_of(row, index))
        name = _content_id(options) if id is None else _given_id(row, id, index)
        counts[name] = count = counts.get(name, 0) + 1
        if count > 1 and id is not None:
            raise ValueError(f"row {index} has the id {name!r}, as an earlier one has: ids must be unique (without id=, content counts)")
        digest = hashlib.sha256(f"{seed}:{name}".encode("utf-8", "surrogatepass")).digest()
        if _split_at(int.from_bytes(digest[:8]) / 2**64, bounds) == split:
            # 31 bits: what every generator takes as a seed.
            episode_seed = (int.from_bytes(digest[8:12]) + count - 1) % 2**31
            yield Scenario(name if count == 1 else f"{name}-{count}", episode_seed, options)


def _split_at(position: float, bounds: tuple[float, ...]) -> Split:
    """The split that a position from 0 to 1 falls into; `bounds` are where the splits end."""
    last = next(index for index, bound in enumerate(bounds) if bound == bounds[-1])  # the last one with a share, if rounding leaves a gap
    return SPLITS[next((index for index, bound in enumerate(bounds) if position < bound), last)]


def _json_of(row: Any, index: int) -> str:
    if not isinstance(row, Mapping):
        raise TypeError(f"row {index} must be a mapping, not {type(row).__name__}: it becomes the options of a reset")
    if not all(isinstance(key, str) for key in row):
        raise TypeError(f"row {index} has a key that is no text: it must be a JSON mapping")
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"row {index} must be a JSON mapping: {error}") from error


def _content_id(options: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]


def _given_id(row: Mapping[str, Any], id: str | Callable[[Mapping[str, Any]], str], index: int) -> str:
    value = id(row) if callable(id) else row.get(id)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        where = "what id= returned" if callable(id) else f"its {id!r}"
        raise TypeError(f"row {index} has no id: {where} must be text or a whole number, not {value!r:.60}")
    return str(value)
