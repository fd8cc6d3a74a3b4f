"""How a transcript reads on a screen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from art_gym._actions import printable, text_of
from art_gym.messages import Message

_STYLES = {"system": "dim", "developer": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def render_text(messages: Iterable[Message]) -> str:
    """Write the messages as text, one or more lines each.

    >>> print(render_text([{"role": "user", "content": "Guess."}]))
    user: Guess.
    """
    return "\n".join(f"{role}: {text}" for message in messages for role, text in _lines(message))


def print_messages(messages: Iterable[Message]) -> None:
    """Print the messages to the terminal, coloured by role."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for message in messages:
        for role, text in _lines(message):
            console.print(Text(f"{role}: ", style="bold").append(text, style=_STYLES.get(role, "")))


def _lines(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(role, text) of what a message says and of each of its calls; a model may have written anything, so nothing is taken for granted."""
    role = printable(str(message.get("role", "assistant")))
    calls = message.get("tool_calls")
    calls = calls if isinstance(calls, list | tuple) else []
    text = text_of(message.get("content"))
    if text or not calls:
        yield role, printable(text)
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield role, printable(f"{function.get('name')}({function.get('arguments') or ''})")
        else:
            yield role, "(a call that can't be read)"
