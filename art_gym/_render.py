"""How a transcript reads on a screen: as lines of a role and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from art_gym._actions import message_of, printable, text_of

Line: TypeAlias = tuple[str, str]
"""A role, and what it says."""

_STYLES = {"system": "dim", "developer": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def lines_of(messages: Iterable[Any]) -> Iterator[Line]:
    """Yield the lines of messages: what each says, and each of its calls. A model may have written anything, so nothing is taken for granted.

    >>> list(lines_of([{"role": "user", "content": "Guess."}]))
    [('user', 'Guess.')]
    """
    for action in messages:
        message = message_of(action)
        if message is None:
            continue
        role = _words(message.get("role", "assistant"))
        calls = message.get("tool_calls")
        calls = calls if isinstance(calls, list | tuple) else []
        text = text_of(message.get("content"))
        if text or not calls:
            yield role, printable(text)
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                yield role, f"{_words(function.get('name'))}({_words(function.get('arguments') or '')})"
            else:
                yield role, "(a call that can't be read)"


def render_text(lines: Iterable[Line]) -> str:
    """Write the lines as text.

    >>> print(render_text([("user", "Guess.")]))
    user: Guess.
    """
    return "\n".join(f"{role}: {text}" for role, text in lines)


def print_lines(lines: Iterable[Line]) -> None:
    """Print the lines to the terminal, coloured by role."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for role, text in lines:
        console.print(Text(f"{role}: ", style="bold").append(text, style=_STYLES.get(role, "")))


def _words(value: Any) -> str:
    try:
        return printable(str(value))
    except (RecursionError, ValueError):  # nested too deeply, or a number of more digits than Python writes out
        return "(too much to show)"
