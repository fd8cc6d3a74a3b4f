"""What an environment gave, as text: kept, compared, and carried between processes.

An outcome is frozen as canonical JSON the moment it is returned, so that a later change to the returned objects can be seen, and two outcomes
are equal if their texts are.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from art_gym._actions import printable

RESET_FIELDS = ("observation", "info")
STEP_FIELDS = ("observation", "reward", "terminated", "truncated", "info")

_BRIEF = 200
_UNCHANGING = frozenset({str, int, float, bool, bytes})


@dataclass(frozen=True, slots=True)
class Walk:
    """What is played: where it starts and what is done.

    When an episode ends, `reset()` without a seed starts the next, and the rest of the actions goes on there.
    """

    seed: int
    options: Mapping[str, Any]
    actions: Sequence[Any]

    def reset_arguments(self) -> dict[str, Any]:
        return {"seed": self.seed, "options": copied(dict(self.options)) or None}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a reset or a step returned or raised.

    Attributes:
        values: The returned objects themselves, for those who look at their identity.
        text: The returned objects as they were when they were returned; equal texts are equal outcomes.
        over: Whether the episode has ended.
        error: What was raised, else None.
    """

    values: tuple[Any, ...]
    text: str
    over: bool = False
    error: BaseException | None = None


def do_reset(env: gymnasium.Env[Any, Any], walk: Walk, ignored: str | None = None) -> Outcome:
    """Reset to the walk's start; what is raised becomes part of the outcome."""
    return _do(lambda: env.reset(**walk.reset_arguments()), ignored)


def do_reset_unseeded(env: gymnasium.Env[Any, Any], walk: Walk, ignored: str | None = None) -> Outcome:
    """Reset to whatever episode comes next."""
    return _do(lambda: env.reset(options=walk.reset_arguments()["options"]), ignored)


def do_step(env: gymnasium.Env[Any, Any], action: Any, ignored: str | None = None) -> Outcome:
    """Take a step with the action itself; what is raised becomes part of the outcome."""
    return _do(lambda: env.step(action), ignored)


def play(env: gymnasium.Env[Any, Any], walk: Walk, ignored: str | None = None) -> list[Outcome]:
    """Play the walk, and return the outcomes of its resets and steps, in their order; an exception ends it."""
    outcomes = [do_reset(env, walk, ignored)]
    for action in walk.actions:
        if outcomes[-1].over and outcomes[-1].error is None:
            outcomes.append(do_reset_unseeded(env, walk, ignored))
        if outcomes[-1].error is not None:
            break
        outcomes.append(do_step(env, copied(action), ignored))
    return outcomes


def copied(value: Any) -> Any:
    """Copy the value; for what JSON has, much faster than `copy.deepcopy`."""
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([copied(item) for item in value])
    return value if value is None or type(value) in _UNCHANGING else copy.deepcopy(value)


def frozen(value: Any) -> str:
    """Write the value as canonical text: equal for equal values of equal types, without addresses and orders that mean nothing."""
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):  # keys that don't sort, or a value that holds itself
        return _without_addresses(repr(value))


def difference(expected: str, actual: str) -> str:
    """Say where two outcomes' texts first differ: "reward was 0.5, and now is 0.25"."""
    try:
        one, other = json.loads(expected), json.loads(actual)
    except ValueError:
        return f"it was {brief(expected)}, and now is {brief(actual)}"
    if isinstance(other, dict) and "raised" in other:
        return f"it raised {other['raised']}"
    if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
        return f"it was {brief(one)}, and now is {brief(other)}"
    fields = RESET_FIELDS if len(one) == len(RESET_FIELDS) else STEP_FIELDS
    for field, left, right in zip(fields, one, other, strict=False):
        if json.dumps(left) != json.dumps(right):
            path, left, right = _descend(field, left, right)  # noqa: PLW2901
            return f"{path} was {left}, and now is {right}"
    return "they differ in type"


def compare_texts(expected: Sequence[str], actual: Sequence[str]) -> str:
    """Say where two plays of one walk first differ: "at step 2: reward was …"; "" if they don't."""
    steps = 0
    for one, other in zip(expected, actual, strict=False):
        is_reset = one.startswith("[") and len(json.loads(one)) == len(RESET_FIELDS)
        steps += not is_reset
        if one != other:
            place = f"step {steps}" if not is_reset else f"the reset after step {steps}" if steps else "reset"
            return f"at {place}: {difference(one, other)}"
    return "" if len(expected) == len(actual) else f"after step {steps}, where one play ended"


def brief(value: Any) -> str:
    """The value as a message shows it, cut to a length worth reading."""
    text = printable(repr(value))
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"


def _do(function: Any, ignored: str | None) -> Outcome:
    try:
        values = tuple(function())
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever an environment raises is an outcome
        return Outcome((), json.dumps({"raised": f"{type(error).__name__}: {_without_addresses(str(error))}"}), True, error)
    shown = values
    if ignored is not None and isinstance(values[-1], dict) and ignored in values[-1]:
        shown = (*values[:-1], {key: value for key, value in values[-1].items() if key != ignored})
    return Outcome(values, frozen(shown), len(values) == len(STEP_FIELDS) and bool(values[2] or values[3]))


def _descend(path: str, left: Any, right: Any) -> tuple[str, str, str]:
    if isinstance(left, list) and isinstance(right, list):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            if json.dumps(one) != json.dumps(other):
                return _descend(f"{path}[{index}]", one, other)
        if len(left) != len(right):
            return path, f"{len(left)} long", f"{len(right)} long"
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            if key not in left or key not in right:
                return f"{path}[{key!r}]", brief(left[key]) if key in left else "not there", brief(right[key]) if key in right else "not there"
            if json.dumps(left[key]) != json.dumps(right[key]):
                return _descend(f"{path}[{key!r}]", left[key], right[key])
    return path, brief(left), brief(right)


def _plain(value: Any) -> Any:
    """Give what JSON doesn't know a form of its own."""
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), value.tolist()]
    if isinstance(value, np.generic):
        return [type(value).__name__, value.item()]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(frozen(item) for item in value)]
    return [type(value).__name__, _without_addresses(repr(value))]


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


_ENCODER = json.JSONEncoder(sort_keys=True, default=_plain)
