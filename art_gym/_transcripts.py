"""What is new in an observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from art_gym.messages import Message

M = TypeVar("M", bound=Message)


def new_messages(observation: Sequence[M], previous: Sequence[M]) -> list[M]:
    """Return the messages after the action: all of them, or the last ones where the observation repeats the whole transcript.

    >>> opening = [{"role": "user", "content": "Go on."}]
    >>> answer = {"role": "user", "content": "Good."}
    >>> new_messages([*opening, {"role": "assistant", "content": "Hm."}, answer], opening) == [answer] == new_messages([answer], opening)
    True

    Args:
        observation: What a step returned.
        previous: The observation before that step.
    """
    shown = len(previous)
    # A transcript goes on with the action; that is looked at first, as it costs less than to compare all that was shown.
    repeats = len(observation) > shown and observation[shown].get("role") == "assistant" and list(observation[:shown]) == list(previous)
    return list(observation[shown + 1 :] if repeats else observation)
