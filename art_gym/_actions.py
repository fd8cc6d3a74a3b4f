"""Reading what a model wrote, without trusting any of it.

An action may be anything that came back from an endpoint. This module turns it into text and calls, gives every call an id, and notes what is
wrong where something is; it never raises. The text and the ids can be written as UTF-8. What a call means is decided by `art_gym.tools`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_ECHO = 60
"""Characters of the model's own words that an error text repeats."""


class WrittenCall(NamedTuple):
    """One tool call as written: `problem` is empty, or says why it can't be one."""

    id: str
    name: str = ""
    arguments: Any = None
    problem: str = ""


class WrittenAction(NamedTuple):
    """An assistant message as written: `problem` is empty, or says why it isn't one."""

    text: str = ""
    calls: Sequence[WrittenCall] = ()
    problem: str = ""


def read_action(action: Any) -> WrittenAction:
    """Read an assistant message; a message object of the OpenAI SDK works too.

    >>> read_action({"tool_calls": [{"function": {"name": "look"}}]}).calls
    [WrittenCall(id='call_0', name='look', arguments=None, problem='')]
    >>> read_action({"role": "user", "content": "hi"}).problem
    "the message's role must be 'assistant'"
    """
    message = message_of(action)
    if message is None:
        return WrittenAction(problem="the action must be an assistant message")
    if message.get("role", "assistant") != "assistant":
        return WrittenAction(problem="the message's role must be 'assistant'")
    text = text_of(message.get("content"))
    if not text.isascii():
        text = printable(text)
    written = message.get("tool_calls")
    if written is None:
        return WrittenAction(text)
    if not isinstance(written, list | tuple):
        return WrittenAction(text, problem="tool_calls must be a list of calls")
    calls = [_read_call(call) for call in written]
    for call in calls:
        if not call.id or not call.id.isascii():
            return WrittenAction(text, _with_ids(calls))
    return WrittenAction(text, calls)


def message_of(action: Any) -> Mapping[Any, Any] | None:
    """Return the action as a mapping, whether it is one or a message object of the OpenAI SDK; None if it is neither."""
    if _is_mapping(action):
        return action  # type: ignore[no-any-return]  # JSON
    try:
        message = action.model_dump()
    except Exception:  # noqa: BLE001  no such method, a class instead of an object, a broken object: no message, whatever the reason
        return None
    return message if _is_mapping(message) else None


def text_of(content: Any) -> str:
    """Return the text of a message's content, whether it is a string or a list of content parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [part.get("text") for part in content if _is_mapping(part)]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def printable(text: str) -> str:
    """Replace what UTF-8 can't carry (unpaired surrogates), so that any endpoint takes it back."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def echo(text: str) -> str:
    """Quote the text for an error message, cut to a length worth reading."""
    text = printable(text[: MAX_ECHO + 1])
    return f"'{text}'" if len(text) <= MAX_ECHO else f"'{text[:MAX_ECHO]}…'"


def _is_mapping(value: Any) -> bool:
    # Asking the abstract class costs ten times as much, and this is asked several times in every step.
    return type(value) is dict or isinstance(value, Mapping)


def _read_call(call: Any) -> WrittenCall:
    """Read one call; its id is empty if it has none."""
    if not _is_mapping(call):
        return WrittenCall("", problem="a tool call must be an object with 'id', 'type' and 'function'")
    id_ = call.get("id")
    if not isinstance(id_, str):
        id_ = ""
    if call.get("type", "function") not in ("function", None):
        return WrittenCall(id_, problem="a tool call's type must be 'function'")
    function = call.get("function")
    if not _is_mapping(function):
        return WrittenCall(id_, problem="a tool call's 'function' must be an object with 'name' and 'arguments'")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return WrittenCall(id_, problem="the call names no tool")
    return WrittenCall(id_, name, function.get("arguments"))


def _with_ids(calls: Sequence[WrittenCall]) -> list[WrittenCall]:
    """Give an id of their own to those calls that have none, or one that UTF-8 can't carry."""
    taken = {call.id for call in calls}
    named = []
    for index, call in enumerate(calls):
        id_ = printable(call.id) or f"call_{index}"
        while id_ != call.id and id_ in taken:
            id_ += "_"
        taken.add(id_)
        named.append(call._replace(id=id_))
    return named
