"""What a model wrote, as data that can be shown, counted and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from art_gym._actions import message_of, printable, read_action
from art_gym.messages import AssistantMessage

_UNWRITABLE = (TypeError, ValueError, RecursionError)
"""Keys that are no text, an object that holds itself or is nested too deep, an integer of thousands of digits."""


def wire_form(action: Any) -> AssistantMessage:
    """Return the action as a message of the observation space, with the ids by which its calls were answered, whatever the model wrote.

    >>> wire_form({"tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]})["tool_calls"]
    [{'id': 'call_0', 'type': 'function', 'function': {'name': 'look', 'arguments': '{"at": 1}'}}]
    """
    action = _plain(action)
    written = read_action(action)
    silent = isinstance(action, Mapping) and action.get("content") is None
    message: AssistantMessage = {"role": "assistant", "content": None if silent else printable(written.text)}
    if written.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": printable(call.name), "arguments": _text(call.arguments)}}
            for call in written.calls
        ]
    return message


def json_form(action: Any) -> Any:
    """Return the action as JSON data that an environment answers as it answers the action itself.

    Only for arguments that hold other objects than JSON has, which no model can write, the answer may be in other words.

    >>> json_form("no message at all")
    'no message at all'
    """
    action = _plain(action)
    if isinstance(action, Mapping) and isinstance(calls := action.get("tool_calls"), list | tuple):
        action = {**action, "tool_calls": [_json_call(call) for call in calls]}
    try:
        return json.loads(json.dumps(action, allow_nan=False, default=_stand_in))
    except _UNWRITABLE:
        return wire_form(action)


def _plain(action: Any) -> Any:
    """Return a message object of the OpenAI SDK as the dictionary it stands for, and anything else as it is."""
    message = message_of(action)
    return action if message is None else message


def _stand_in(value: Any) -> Any:
    """Return what stands for an object that JSON doesn't know: a number, which is as wrong wherever a message has text, an object or a list."""
    return dict(value) if isinstance(value, Mapping) else 0


def _json_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(arguments := function.get("arguments"), str | None):
        return call
    return {**call, "function": {**function, "arguments": _json_arguments(arguments)}}


def _json_arguments(arguments: Any) -> Any:
    """Return arguments that the endpoint has read already as JSON data; with NaN in them, as the text that an environment reads them from."""
    try:
        text = json.dumps(arguments)
    except _UNWRITABLE:
        return 0
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return text if isinstance(arguments, Mapping) else 0
    return json.loads(text)


def _text(arguments: Any) -> str:
    """Return a call's arguments as text: as the model wrote them, or as JSON where the endpoint has read them already."""
    if arguments is None:
        return ""
    # By way of their JSON form, so that an action and its recorded form are shown in the same words.
    written = arguments if isinstance(arguments, str) else _json_arguments(arguments)
    return printable(written if isinstance(written, str) else json.dumps(written, ensure_ascii=False))
