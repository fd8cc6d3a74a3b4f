"""Alarms: figures of a batch that tell of a run going wrong, each with a limit that warns, one that stops the run, and what to do.

They look at the rows of `metrics.jsonl` and at nothing else. A figure that a batch doesn't have raises none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Beyond which a figure raises its alarm; None for never.

    Attributes:
        warn: The run goes on and says so.
        stop: The run ends after the batch's checkpoint.
    """

    warn: float | None
    stop: float | None = None


@dataclass(frozen=True, slots=True)
class Alarm:
    """A figure beyond its limit.

    Attributes:
        name: Of the alarm, as in `ALARMS`.
        value: The figure.
        limit: What it passed.
        stops: Whether the run ends for it.
        message: What the figure is, the limit, and what to do.
    """

    name: str
    value: float
    limit: float
    stops: bool
    message: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What an alarm looks at: `figure(row, first)`, the batch's row and the run's first with a gradient."""

    figure: Callable[[Row, Row], float | None]
    what: str
    do: str
    below: bool = False
    digits: str = ".4g"


def _of(key: str) -> Callable[[Row, Row], float | None]:
    return lambda row, first: row.get(key)


def _entropy_share(row: Row, first: Row) -> float | None:
    begin, now = first.get("entropy"), row.get("entropy")
    return now / begin if begin and now is not None else None


_RULES: dict[str, _Rule] = {
    "logprob_difference": _Rule(
        _of("logprob_difference"),
        "sampler and trainer differ by {value} nats a token on average",
        "which biases the gradients: set engine.dtype and model.dtype to float32, or lower grpo.learning_rate",
    ),
    "kl_sampler": _Rule(
        _of("kl_sampler"),
        "the policy moved {value} nats a token away from the one that played the batch",
        "so that its episodes say little about it: lower grpo.learning_rate or grpo.steps_per_batch",
    ),
    "entropy": _Rule(
        _of("entropy"),
        "the policy's entropy is {value} nats a token",
        "so that a group's episodes are all alike and teach nothing: go back to an earlier checkpoint, and raise rollout.temperature or lower "
        "grpo.learning_rate",
        below=True,
    ),
    "entropy_share": _Rule(
        _entropy_share,
        "the policy's entropy fell to {value} of the first batch's",
        "and it may be settling on one way to play: watch the success on held-out scenarios (evaluation.every), and lower grpo.learning_rate",
        below=True,
        digits=".1%",
    ),
    "invalid_call_rate": _Rule(
        _of("invalid_call_rate"),
        "{value} of the tool calls were refused",
        "so that the episodes teach the call format rather than the task: read some in episodes/, set engine.tool_parser to the model's own "
        "format, or lengthen warm_start.steps",
        digits=".1%",
    ),
    "fork_rate": _Rule(
        _of("fork_rate"),
        "{value} of the token sequences began in mid-episode",
        "each computed anew: see fork_causes in metrics.jsonl; a chat template that drops earlier reasoning is the usual cause",
        digits=".1%",
    ),
    "not_finite": _Rule(
        _of("not_finite"),
        "{value} of the batch's optimiser steps had a loss or gradient that is no finite number",
        "which leaves the policy broken: remove this batch's checkpoint to keep the one before as the newest, and start anew with a lower "
        "grpo.learning_rate or with model.dtype float32",
        digits=".0f",
    ),
}

ALARMS: tuple[str, ...] = tuple(_RULES)
"""The alarms by name."""

BELOW: frozenset[str] = frozenset(name for name, rule in _RULES.items() if rule.below)
"""Those that a low figure raises; a high one raises the others."""


def check(row: Row, first: Row, limits: Mapping[str, Limits]) -> list[Alarm]:
    """The alarms that a batch raises, in the order of `ALARMS`.

    >>> [alarm] = check({"fork_rate": 0.5}, {}, {"fork_rate": Limits(warn=0.25)})
    >>> alarm.message.partition(",")[0]
    'fork_rate: 50.0% of the token sequences began in mid-episode (limit 25.0%)'

    Args:
        row: The batch's, as in `metrics.jsonl`.
        first: That of the run's first batch which had a gradient; the batch's own if it is the first.
        limits: By alarm; one that isn't there raises none.
    """
    alarms = []
    for name, rule in _RULES.items():
        value = rule.figure(row, first)
        if name not in limits or value is None or math.isnan(value):
            continue
        for limit, stops in ((limits[name].stop, True), (limits[name].warn, False)):
            if limit is not None and (value < limit if rule.below else value > limit):
                what = rule.what.format(value=format(value, rule.digits))
                message = f"{name}: {what} (limit {format(limit, rule.digits)}), {rule.do}"
                alarms.append(Alarm(name, value, limit, stops, message))
                break
    return alarms


def not_finite(*figures: list[float]) -> int:
    """How many optimiser steps had a figure that is NaN or infinite; each list holds one figure, step by step.

    >>> not_finite([1.0, float("nan"), 2.0], [0.5, 0.5, float("inf")])
    2
    """
    return len({step for values in figures for step, value in enumerate(values) if not math.isfinite(value)})
