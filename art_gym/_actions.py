"""Reading what a model wrote, without trusting any of it.

An action may be anything that came back from an endpoint. This module turns it into text and calls, gives every call an id, and notes what is
wrong where something is; it never raises. What a call means is decided by `art_gym.tools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_ECHO = 60
"""Characters of the model's own words that an error text repeats."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One tool call as written: `problem` is empty, or says why it can't be one."""

    id: str
    name: str = ""
    arguments: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class WrittenAction:
    """An assistant message as written: `problem` is empty, or says why it isn't one."""

    text: str = ""
    calls: list[WrittenCall] = field(default_factory=list)
    problem: str = ""


def read_action(action: Any) -> WrittenAction:
    """Read an assistant message; a message object of the OpenAI SDK works too.

    >>> read_action({"tool_calls": [{"function": {"name": "look"}}]}).calls
    [WrittenCall(id='call_0', name='look', arguments=None, problem='')]
    >>> read_action({"role": "user", "content": "hi"}).problem
    "the message's role must be 'assistant'"
    """
    if not isinstance(action, Mapping):
        dump = getattr(action, "model_dump", None)
        action = dump() if callable(dump) else action
    if not isinstance(action, Mapping):
        return WrittenAction(problem="the action must be an assistant message")
    if action.get("role", "assistant") != "assistant":
        return WrittenAction(problem="the message's role must be 'assistant'")
    text = text_of(action.get("content"))
    written = action.get("tool_calls")
    if written is None:
        return WrittenAction(text)
    if not isinstance(written, list | tuple):
        return WrittenAction(text, problem="tool_calls must be a list of calls")
    taken = {id_ for call in written if (id_ := _given_id(call))}
    return WrittenAction(text, [_read_call(call, index, taken) for index, call in enumerate(written)])


def text_of(content: Any) -> str:
    """Return the text of a message's content, whether it is a string or a list of content parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def printable(text: str) -> str:
    """Replace what UTF-8 can't carry (unpaired surrogates), so that any endpoint takes it back."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def echo(text: str) -> str:
    """Quote the text for an error message, cut to a length worth reading."""
    text = printable(text)
    return f"'{text}'" if len(text) <= MAX_ECHO else f"'{text[:MAX_ECHO]}…'"


def _given_id(call: Any) -> str:
    id_ = call.get("id") if isinstance(call, Mapping) else None
    return id_ if isinstance(id_, str) else ""


def _read_call(call: Any, index: int, taken: set[str]) -> WrittenCall:
    id_ = _given_id(call)
    if not id_:
        id_ = f"call_{index}"
        while id_ in taken:
            id_ += "_"
        taken.add(id_)
    if not isinstance(call, Mapping):
        return WrittenCall(id_, problem="a tool call must be an object with 'id', 'type' and 'function'")
    if call.get("type", "function") not in ("function", None):
        return WrittenCall(id_, problem="a tool call's type must be 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        return WrittenCall(id_, problem="a tool call's 'function' must be an object with 'name' and 'arguments'")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return WrittenCall(id_, problem="the call names no tool")
    return WrittenCall(id_, name, function.get("arguments"))
