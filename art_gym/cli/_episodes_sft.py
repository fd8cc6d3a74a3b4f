"""Conversations to fine-tune on: an episode in the form that chat templates and TRL's SFTTrainer take.

`prompt` is what is only read, and `completion`, from the first action on, what is learnt. The arguments of calls are objects: templates write
them as JSON themselves, and most fail or write them twice where they are texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from art_gym._actions import read_action
from art_gym._arguments import read_arguments
from art_gym.episodes import Episode
from art_gym.errors import ToolError
from art_gym.store import Head


class NoConversation(Exception):
    """The episode can't be learnt from; the message says what such episodes are or do."""


class Conversations:
    """Writes the episodes of one label, each turn to be learnt in one conversation only.

    A branch repeats the turns of the episode that it branched off. They are part of the completion of whichever episode of the tree is written
    first, whether that's where they were sampled or a branch of it, and of the prompt of the others.

    Args:
        heads: Those of all the label's episodes, from which the trees are known.
    """

    def __init__(self, heads: Iterable[Head]) -> None:
        self._begun = {head.id: (head.parent, head.shared_turns) for head in heads if head.parent is not None}
        self._written: dict[str, int] = {}

    def line(self, episode: Episode) -> bytes:
        """Return the episode as a line of JSON. It ends with the last action, after which there is nothing to learn.

        The tools are a JSON text, which TRL reads, as a data set would make one table of all their parameters.

        Raises:
            NoConversation: It is left out.
        """
        if episode.failure is not None or not episode.turns:
            # A failed episode breaks off where nobody meant it to.
            raise NoConversation("aren't finished")
        try:
            messages = [_told(message) for message in replace(episode, final_observation=[]).messages]
        except ToolError:
            raise NoConversation("have calls that aren't JSON objects") from None
        if not episode.turns[0].observation:
            raise NoConversation("begin without a message")
        first = self._first(episode)
        if first == len(episode.turns):
            raise NoConversation("are part of others")
        prompt = len(replace(episode, turns=episode.turns[:first], final_observation=episode.turns[first].observation).messages)
        line = json.dumps(
            {
                "prompt": messages[:prompt],
                "completion": messages[prompt:],
                "tools": json.dumps(episode.tools, ensure_ascii=False) if episode.tools else None,
            },
            ensure_ascii=False,
        )
        # A lone surrogate is no text to learn, and readers of JSON refuse it.
        return line.encode("utf-8", "replace") + b"\n"

    def _first(self, episode: Episode) -> int:
        """Find the first turn that no conversation has as its own yet, and note that all have one now."""
        owner, count = episode.id, len(episode.turns)
        while True:
            parent, shared = self._begun.get(owner, (None, 0))
            written = self._written.get(owner, 0)
            self._written[owner] = max(written, count)
            # Whoever wrote any of the owner's turns wrote all before them, too.
            if written > shared or parent is None:
                return min(written, count)
            owner, count = parent, min(shared, count)


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates take it: without keys that hold nothing, which some take for something.

    Raises:
        ToolError: A call isn't written as one, or its arguments aren't a JSON object.
    """
    told = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    # Where an assistant only calls, some templates need a text, and others write out what is no text.
    told = {"role": message.get("role"), "content": "", **told}
    if message.get("role") == "assistant" and message.get("tool_calls"):
        written = read_action(message)
        if problem := written.problem or next((call.problem for call in written.calls if call.problem), ""):
            raise ToolError(problem)
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": read_arguments(call.arguments)}}
            for call in written.calls
        ]
    return told
