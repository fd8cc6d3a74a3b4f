"""Spaces of chat messages and of tool calls, as Gymnasium spaces.

They hold plain JSON schema, so they pickle, compare and travel between processes. How Gymnasium's vector environments batch them is registered
by `art_gym._vector`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import Space

from art_gym._arguments import read_arguments
from art_gym._sampling import sample
from art_gym._schema import Schema, conforms, same
from art_gym.errors import ToolError
from art_gym.messages import AssistantMessage, Message, Observation

_ROLES = ("system", "developer", "user", "assistant", "tool")
_WORDS = ("yes", "no", "left", "right", "open", "the", "red", "door", "and", "then")


class ChatSpace(Space[Observation]):
    """All tuples of chat messages: what `ToolEnv` returns as observations.

    >>> ({"role": "user", "content": "hi"},) in ChatSpace()
    True
    """

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Observation:
        """Draw a short random exchange of system, user and assistant messages; there is nothing to mask.

        Raises:
            ValueError: A mask or probabilities were given.
        """
        if mask is not None or probability is not None:
            raise ValueError("ChatSpace has no finite set of choices: sample takes neither mask nor probability")
        roles = ("system", "user", "assistant")
        return tuple(
            cast("Message", {"role": roles[int(self.np_random.integers(3))], "content": _phrase(self.np_random)})
            for _ in range(int(self.np_random.integers(1, 4)))
        )

    def contains(self, x: Any) -> bool:
        return isinstance(x, tuple) and all(is_message(message) for message in x)

    def to_jsonable(self, sample_n: Iterable[Observation]) -> list[list[Message]]:
        return [list(copy.deepcopy(observation)) for observation in sample_n]

    def from_jsonable(self, sample_n: list[list[Message]]) -> list[Observation]:
        return [tuple(copy.deepcopy(messages)) for messages in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChatSpace)

    def __hash__(self) -> int:
        return hash(ChatSpace)

    def __repr__(self) -> str:
        return "ChatSpace()"


class ToolCallSpace(Space[AssistantMessage]):
    """All assistant messages whose tool calls fit the tools: text, calls, or both.

    >>> space = ToolCallSpace({"guess": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}})
    >>> space.sample()["tool_calls"][0]["function"]["name"]
    'guess'

    Attributes:
        tools: Tool name → JSON schema of its parameters. Not to be changed.
    """

    def __init__(self, tools: Mapping[str, Schema], seed: int | np.random.Generator | None = None) -> None:
        """Take the tools, in the order in which masks name them.

        Raises:
            TypeError: They are no mapping from names to schemas.
        """
        if not isinstance(tools, Mapping) or not all(
            isinstance(name, str) and isinstance(part, Mapping | bool) for name, part in tools.items()
        ):
            raise TypeError(f"ToolCallSpace takes a mapping from each tool's name to the JSON schema of its parameters, not {tools!r:.100}")
        self.tools: dict[str, Any] = copy.deepcopy(dict(tools))
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> AssistantMessage:
        """Draw one call of a random tool with random arguments that conform to its schema; a text where no tool is allowed.

        Args:
            mask: Which tools are allowed: an array of 0 and 1 in the order of `tools`, or a mapping from name to whether (absent: not).
            probability: How likely each tool is, in the same two forms; adds up to 1. Not together with a mask.

        Raises:
            ValueError: The mask or the probabilities don't fit the tools, or a schema allows no value.
        """
        weights = self._weights(mask, probability)
        if not weights.any():
            return {"role": "assistant", "content": _phrase(self.np_random)}
        name = list(self.tools)[int(self.np_random.choice(len(weights), p=weights / weights.sum()))]
        arguments = sample(self.tools[name], self.tools[name], self.np_random)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return cast(
            "AssistantMessage",
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]},
        )

    def _weights(self, mask: Any | None, probability: Any | None) -> np.ndarray[Any, np.dtype[np.float64]]:
        if mask is not None and probability is not None:
            raise ValueError("sample takes a mask or probabilities, not both")
        given = mask if mask is not None else probability
        if given is None:
            return np.ones(len(self.tools))
        if isinstance(given, Mapping):
            unknown = set(given) - set(self.tools)
            if unknown:
                raise ValueError(
                    f"the mask names unknown tools: {', '.join(sorted(map(str, unknown)))}; the tools are: {', '.join(self.tools)}"
                )
            given = [given.get(name, 0) for name in self.tools]
        try:
            weights = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"expected one number for each of the {len(self.tools)} tools, got {given!r:.100}") from None
        if weights.shape != (len(self.tools),):
            raise ValueError(f"expected one entry for each of the {len(self.tools)} tools, got shape {weights.shape}")
        if mask is not None and not np.isin(weights, (0, 1)).all():
            raise ValueError(f"a mask holds 0 and 1 only, got {weights.tolist()}")
        if probability is not None and not (np.isfinite(weights).all() and (weights >= 0).all() and np.isclose(weights.sum(), 1)):
            raise ValueError(f"probabilities are at least 0 and add up to 1, got {weights.tolist()}")
        return weights

    def contains(self, x: Any) -> bool:
        if not is_message(x) or x["role"] != "assistant":
            return False
        calls = x.get("tool_calls") or ()
        return len({call["id"] for call in calls}) == len(calls) and all(self._fits(call["function"]) for call in calls)

    def _fits(self, function: Mapping[str, Any]) -> bool:
        schema = self.tools.get(function["name"])
        if schema is None:
            return False
        try:
            return conforms(read_arguments(function["arguments"]), schema, schema)
        except (ToolError, RecursionError):
            return False

    def to_jsonable(self, sample_n: Iterable[AssistantMessage]) -> list[AssistantMessage]:
        return copy.deepcopy(list(sample_n))

    def from_jsonable(self, sample_n: list[AssistantMessage]) -> list[AssistantMessage]:
        return copy.deepcopy(sample_n)

    def __eq__(self, other: object) -> bool:
        # Order counts: masks go by it.
        return isinstance(other, ToolCallSpace) and list(self.tools) == list(other.tools) and same(self.tools, other.tools)

    def __hash__(self) -> int:
        return hash(tuple(self.tools))

    def __repr__(self) -> str:
        return f"ToolCallSpace({self.tools!r})"


def is_message(message: Any) -> bool:
    """Whether this is a chat message in OpenAI wire form."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if not (isinstance(content, str) or _are_parts(content) or (role == "assistant" and content is None)):
        return False
    if role == "tool" and not (isinstance(message.get("tool_call_id"), str) and message["tool_call_id"]):
        return False
    if calls is None:
        return True
    return role == "assistant" and isinstance(calls, list) and all(_is_call(call) for call in calls)


def _is_call(call: Any) -> bool:
    if not isinstance(call, dict) or call.get("type") != "function" or not isinstance(call.get("id"), str) or not call["id"]:
        return False
    function = call.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str)


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)


def _phrase(rng: np.random.Generator, words: Sequence[str] = _WORDS) -> str:
    return " ".join(words[int(index)] for index in rng.integers(len(words), size=int(rng.integers(1, 6))))
