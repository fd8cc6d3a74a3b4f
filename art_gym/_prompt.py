"""What an episode opens with: the system message and the first messages of the user, read from what an author gives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from art_gym import _calls
from art_gym._actions import printable
from art_gym.messages import Message
from art_gym.spaces import is_message


def system_messages(env: Any) -> list[Message]:
    """Return the environment's `instructions` as a system message; no message where they are empty.

    Raises:
        TypeError: They are neither text, a template, nor a method that returns one; or the template names a method.
        ValueError: The template can't be read.
        AttributeError: The template names what the environment doesn't have.
    """
    where = f"{type(env).__name__}.instructions"
    instructions = env.instructions
    if callable(instructions):
        instructions = _calls.run_here(_calls.Call(instructions, where))
    if isinstance(instructions, Template):
        instructions = _filled(instructions, env, where)
    if not isinstance(instructions, str | None):
        raise TypeError(f"{where} must be text or a string.Template, not {kind(instructions)}")
    return [{"role": "system", "content": printable(instructions)}] if instructions else []


def first_messages(env: Any) -> list[Message]:
    """Call the environment's `start`, and return what it returns as messages.

    Raises:
        TypeError: It can't be read as such.
    """
    where = f"{type(env).__name__}.start"
    opening = _calls.run_here(_calls.Call(env.start, where))
    if opening is None:
        return []
    if isinstance(opening, str):
        return [{"role": "user", "content": printable(opening)}]
    if isinstance(opening, Mapping):
        raise TypeError(f"{where} returned one message, not a list of messages: put it in a list")
    if not isinstance(opening, Sequence):
        raise TypeError(f"{where} must return text, a list of messages or None, not {kind(opening)}")
    for index, message in enumerate(opening):
        if not is_message(message):
            raise TypeError(
                f"{where}: message {index} ({printable(repr(message))}) is no chat message: it must be a dictionary with a 'role' (system, "
                "developer, user, assistant or tool) and a 'content' (text or a list of content parts; for a tool, also a 'tool_call_id')"
            )
    return [_printed(message) for message in opening]


def _printed(part: Any) -> Any:
    """Return a copy of a message, or of a part of one, in which any text can be written as UTF-8."""
    if isinstance(part, str):
        return printable(part)
    if isinstance(part, dict):
        return {_printed(key): _printed(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_printed(value) for value in part]
    return copy.deepcopy(part)


def kind(value: Any) -> str:
    """Name the type of a value that should have been another."""
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
    return type(value).__name__


def _filled(template: Template, env: Any, where: str) -> str:
    if not template.is_valid():
        raise ValueError(f"{where} is no valid string.Template: a name follows each '$', and a dollar sign itself is written '$$'")
    values = {}
    for name in template.get_identifiers():
        try:
            values[name] = getattr(env, name)
        except AttributeError as error:
            raise AttributeError(
                f"{where} names ${name}, and {type(env).__name__} has no attribute {name!r}: set it in __init__ or start, "
                "or write '$$' for a dollar sign"
            ) from error
        if callable(values[name]):
            raise TypeError(f"{where} names ${name}, which is a method: set an attribute to what it returns, or make it a property")
    return template.substitute(values)
