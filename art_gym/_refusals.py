"""Why a call that a model wrote isn't executed, in the words that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_gym._actions import WrittenCall, printable
from art_gym._toolbox import names_of, unknown_tool
from art_gym.errors import ToolError
from art_gym.tools import Tool


class RefusedError(Exception):
    """A call that isn't executed; the text is its answer."""


def checked(call: WrittenCall, tools: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """Return the tool that a call is for, and the call's arguments.

    Raises:
        RefusedError: It is no call, there is no such tool, or the arguments don't fit.
    """
    if call.problem:
        raise RefusedError(f"{call.problem}; {names_of(tools)}")
    tool = tools.get(call.name)
    if tool is None:
        raise RefusedError(unknown_tool(call.name, tools))
    try:
        return tool, tool.parse(call.arguments)
    except ToolError as error:
        raise RefusedError(printable(str(error))) from None


def check_count(index: int, limit: int | None) -> None:
    """Check that a call of a message is among those that may be executed.

    Raises:
        RefusedError: It isn't.
    """
    if limit is not None and index >= limit:
        raise RefusedError(f"not executed: a message may hold {limit} tool call{'s'[: limit != 1]} at most")
