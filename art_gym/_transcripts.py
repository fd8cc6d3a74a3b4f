"""What is new in an observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from art_gym._actions import printable, read_action
from art_gym.messages import Message

M = TypeVar("M", bound=Message)


def new_messages(observation: Sequence[M], previous: Sequence[M], action: Any = None) -> list[M]:
    """Return the messages after the action: all of them, or the last ones where the observation repeats the whole transcript.

    >>> opening = [{"role": "user", "content": "Go on."}]
    >>> answer = {"role": "user", "content": "Good."}
    >>> new_messages([*opening, {"role": "assistant", "content": "Hm."}, answer], opening) == [answer] == new_messages([answer], opening)
    True

    Args:
        observation: What a step returned.
        previous: The observation before that step.
        action: What the step was given, if it's known. After an observation without messages, only this tells a transcript from an answer in
            which the assistant speaks first.
    """
    shown = len(previous)
    # A transcript goes on with the action; that is looked at first, as it costs less than to compare all that was shown.
    repeats = len(observation) > shown and observation[shown].get("role") == "assistant" and list(observation[:shown]) == list(previous)
    if repeats and not shown and action is not None:
        repeats = _written(observation[0]) == _written(action)
    return list(observation[shown + 1 :] if repeats else observation)


def _written(action: Any) -> tuple[str, list[str]]:
    """Return what a transcript shows of an action as it was: its text and the names of its calls."""
    text, calls, _ = read_action(action)
    return text, [printable(call.name) for call in calls]
