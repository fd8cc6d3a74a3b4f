"""Making a walk that breaks something smaller by leaving out parts of it, as long as it still does.

Hypothesis has shrunk what it could in its time; this makes sure that no action, call or argument of the walk is superfluous, and it is all the
shrinking there is for what Hypothesis can't replay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from art_gym.testing._outcomes import Walk

Breaks = Callable[[Walk], bool]


def simplified(walk: Walk, breaks: Breaks, seconds: float, plain: Sequence[Any] = ()) -> Walk:
    """Leave out actions, and then parts of those that are left.

    Args:
        walk: A walk that breaks something.
        breaks: Whether another does, too.
        seconds: How long to go on.
        plain: Simple actions, one of which may do what takes several of the walk's: end the episode, say.

    Returns:
        A walk that breaks: the given one itself if nothing can go.
    """
    until = time.perf_counter() + seconds

    def still_breaks(candidate: Walk) -> bool:
        return time.perf_counter() < until and breaks(candidate)

    walk = _cut_short(_shortened(walk, still_breaks), still_breaks, plain)
    index = 0
    while index < len(walk.actions):
        for simpler in _simpler(walk.actions[index]):
            candidate = Walk(walk.seed, walk.options, [*walk.actions[:index], simpler, *walk.actions[index + 1 :]])
            if still_breaks(candidate):
                walk = candidate
                break
        else:
            index += 1
    return walk


def _shortened(walk: Walk, breaks: Breaks) -> Walk:
    size = max(len(walk.actions) // 2, 1)
    while size and walk.actions:
        count, start = len(walk.actions), 0
        while start < len(walk.actions):
            shorter = Walk(walk.seed, walk.options, [*walk.actions[:start], *walk.actions[start + size :]])
            if breaks(shorter):
                walk = shorter
            else:
                start += size
        # Once something has gone, single ones that had to stay before may go.
        if size > 1 or len(walk.actions) == count:
            size //= 2
    return walk


def _cut_short(walk: Walk, breaks: Breaks, plain: Sequence[Any]) -> Walk:
    """Look whether one plain action can stand for several of the walk's in a row, as many as possible."""
    count = len(walk.actions)
    for length in range(count, 1, -1):
        for start in range(count - length + 1):
            for action in plain:
                shorter = Walk(walk.seed, walk.options, [*walk.actions[:start], action, *walk.actions[start + length :]])
                if breaks(shorter):
                    return _shortened(shorter, breaks)
    return walk


def _simpler(action: Any) -> Iterator[Any]:
    """Actions with less in them than this one, each strictly simpler, so that simplifying comes to an end."""
    if not isinstance(action, dict):
        return
    text, calls = action.get("content"), action.get("tool_calls")
    if isinstance(text, str):
        yield from ({**action, "content": simpler} for simpler in _simpler_values(text))
    if not isinstance(calls, list):
        return
    if text is not None:
        yield {**action, "content": None}
    if len(calls) > 1:
        for index in range(len(calls)):
            yield {**action, "tool_calls": calls[:index] + calls[index + 1 :]}
    for index, call in enumerate(calls):
        for simpler in _simpler_calls(call, f"call_{index}"):
            yield {**action, "tool_calls": [*calls[:index], simpler, *calls[index + 1 :]]}


def _simpler_calls(call: Any, plain_id: str) -> Iterator[Any]:
    if not isinstance(call, dict):
        return
    if isinstance(call.get("id"), str) and call["id"] and call["id"] != plain_id:
        yield {**call, "id": plain_id}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    try:
        arguments = json.loads(function["arguments"])
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return
    if isinstance(arguments, dict) and written == function["arguments"]:
        for simpler in _simpler_entries(arguments):
            yield {**call, "function": {**function, "arguments": json.dumps(simpler, ensure_ascii=False)}}


def _simpler_entries(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in value:
        yield {name: item for name, item in value.items() if name != key}
    for key, item in value.items():
        for simpler in _simpler_values(item):
            yield {**value, key: simpler}


def _simpler_values(value: Any) -> Iterator[Any]:
    """Values of the same kind that are nearer to nothing."""
    if isinstance(value, str) and value:
        yield ""
        if len(value) > 1:
            yield from (value[: len(value) // 2], value[len(value) // 2 :], value[1:], value[:-1])
    elif isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int) and value:
        yield 0
        if abs(value) > 1:
            sign = 1 if value > 0 else -1
            yield from dict.fromkeys((1, sign * (abs(value) // 2), value - sign))
    elif isinstance(value, float) and value:
        yield 0.0
        if not value.is_integer():
            yield float(int(value))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value[:index] + value[index + 1 :]
            for simpler in _simpler_values(item):
                yield [*value[:index], simpler, *value[index + 1 :]]
    elif isinstance(value, dict):
        yield from _simpler_entries(value)
