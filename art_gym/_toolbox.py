"""Which tools an environment has: those that its class marks, and those that it is given. And how they are named to those who look for one."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_gym._actions import echo
from art_gym.tools import PROPERTIES, Tool, ToolMark, getter_of, mark_of

_LONGEST_NAME = 64


def class_tools(cls: type) -> dict[str, Tool]:
    """Derive the tools of a class, by their names on the wire.

    Args:
        cls: A class with methods marked by `@tool`.

    Raises:
        TypeError: Two have one name, or one can't be described.
        NameError: An annotation names something that doesn't exist (yet).
    """
    tools: dict[str, Tool] = {}
    for attribute, marked in _marked(cls).items():
        tool = Tool.from_function(
            marked.function,
            name=marked.mark.name or attribute,
            timeout=marked.mark.timeout,
            owner=marked.owner,
            skip_first=marked.takes_self,
            attribute=attribute,
        )
        if tool.name in tools:
            raise TypeError(f"{cls.__name__} has two tools named {tool.name!r}: {tools[tool.name].attribute} and {attribute}")
        tools[tool.name] = tool
    return tools


def given_tools(env: Any, given: Sequence[Callable[..., Any] | Tool], own: Collection[str]) -> dict[str, Tool]:
    """Derive the tools of the functions that an environment is given, by their names on the wire.

    Args:
        env: The environment.
        given: Functions, other callables, and `Tool`s.
        own: The names of the tools that the environment's class has.

    Raises:
        TypeError: One is no function, can't be described, or has a name that another one has.
    """
    cls = type(env).__name__
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise TypeError(f"{cls}: tools must be a list of functions and Tools, not {type(given).__name__}")
    tools: dict[str, Tool] = {}
    for item in given:
        tool = item if isinstance(item, Tool) else _given_tool(cls, item)
        if tool.attribute and not hasattr(env, tool.attribute):
            raise TypeError(f"{cls}: tool {tool.name!r} is run by the environment's attribute {tool.attribute!r}, and there is none")
        if tool.name in own or tool.name in tools:
            where = "its class marks one, and tools= holds another" if tool.name in own else "tools= holds both"
            raise TypeError(f"{cls} has two tools named {tool.name!r}: {where}; Tool.from_function(…, name=…) gives one another name")
        tools[tool.name] = tool
    return tools


def refuse_hidden(cls: type, base: type, others: Collection[str]) -> None:
    """Refuse tools that would hide an attribute of the base class, or one of the others.

    Raises:
        TypeError: One would.
    """
    for attribute in _marked(cls):
        if hasattr(base, attribute) or attribute in others:
            raise TypeError(
                f"{cls.__name__}.{attribute}: a tool would hide the environment's own '{attribute}'; "
                f"give the method another name, and the model this one with @tool(name={json.dumps(attribute)})"
            )


def names_of(tools: Collection[str]) -> str:
    """Say which tools there are.

    >>> names_of(["add", "look"])
    'the tools are: add, look'
    """
    return f"the tools are: {', '.join(tools)}" if tools else "there are no tools"


def unknown_tool(name: str, tools: Collection[str]) -> str:
    """Say that there is no such tool, and which ones there are; the one that was perhaps meant comes first.

    >>> unknown_tool("jump", ["add", "look"])
    "unknown tool 'jump'; the tools are: add, look"
    >>> unknown_tool("functions.Looks", ["add", "look"])
    "unknown tool 'functions.Looks'; did you mean 'look'? The tools are: add, look"
    """
    near = _nearest(name, tools)
    told = names_of(tools)
    return f"unknown tool {echo(name)}; " + (f"did you mean '{near}'? {told[0].upper()}{told[1:]}" if near else told)


def _nearest(name: str, tools: Collection[str]) -> str | None:
    if len(name) > 2 * _LONGEST_NAME:
        return None
    folded = {tool.lower(): tool for tool in tools}
    # Models write namespaces before names: "functions.search".
    wanted = re.split(r"[.:/]", name.strip().lower())[-1]
    return next((folded[found] for found in difflib.get_close_matches(wanted, folded, n=1)), None)


def _given_tool(cls: str, function: Any) -> Tool:
    if inspect.isclass(function) or not callable(function):
        what = f"the class {function.__name__!r}" if inspect.isclass(function) else f"{function!r:.60}"
        raise TypeError(f"{cls}: {what} is no tool: tools= takes functions, objects that can be called, and Tool.from_function(…)")
    mark = mark_of(function)
    return Tool.from_function(function, name=mark.name, timeout=mark.timeout) if mark else Tool.from_function(function)


@dataclass(frozen=True, slots=True)
class _Marked:
    owner: type
    mark: ToolMark
    function: Callable[..., Any]
    takes_self: bool


def _marked(cls: type) -> dict[str, _Marked]:
    """Find the methods of a class that are marked as tools, by attribute, in the order of their definition, base classes first.

    Raises:
        TypeError: One is overridden by something that isn't marked, so that it isn't clear whether it still is a tool; or one can't be called
            as a tool: it has no `self`, or is a property or an async generator.
    """
    found: dict[str, _Marked] = {}
    for owner in reversed(cls.__mro__):
        for attribute, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            mark = mark_of(function) if callable(function) else None
            if isinstance(value, PROPERTIES) and mark_of(getter_of(value)):
                kind = type(value).__name__
                raise TypeError(f"{owner.__name__}.{attribute}: a tool is called and a {kind} is read: remove @{kind}")
            if mark is not None:
                _check_method(f"{owner.__name__}.{attribute}", value, function)
                found[attribute] = _Marked(owner, mark, function, not isinstance(value, staticmethod))
            elif attribute in found:
                if value is not None:
                    raise TypeError(
                        f"{owner.__name__}.{attribute} overrides a tool without being one: "
                        f"decorate it with @tool, or set {attribute} = None to drop the tool"
                    )
                del found[attribute]
    return found


def _check_method(where: str, value: Any, function: Callable[..., Any]) -> None:
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{where}: an async generator can't be a tool: collect what it yields in a list, and return that")
    if isinstance(value, staticmethod) or not inspect.isroutine(function):  # Python passes no self to an object that is called
        return
    parameters = list(inspect.signature(function).parameters.values())
    expected = "cls" if isinstance(value, classmethod) else "self"
    first = parameters[0] if parameters else None
    positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) and first.name.strip("_") == expected
    # "*args" takes it too, in a wrapper that doesn't say whose signature it has.
    if not positional and not (first is not None and first.kind is first.VAR_POSITIONAL):
        written = f"def {where.rpartition('.')[2]}({', '.join([expected, *(parameter.name for parameter in parameters)])})"
        raise TypeError(f"{where}: a tool's first parameter must be {expected!r}: write {written}, or put @staticmethod under @tool")
