"""A call's arguments: reading them as strict JSON, and telling a model what is wrong with them in words it can act on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import pydantic

from art_gym._actions import echo, printable
from art_gym.errors import ToolError

_MAX_PROBLEMS = 3


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Read a call's arguments as strict JSON: one object, no NaN or Infinity, no key twice.

    >>> read_arguments("")
    {}

    Raises:
        ToolError: The text says what is wrong.
    """
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        try:
            arguments = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError):
            raise ToolError("arguments must be a JSON object") from None
    if not isinstance(arguments, str):
        raise ToolError("arguments must be an object, written as JSON text")
    if not arguments.strip():
        return {}
    try:
        if not arguments.isascii():
            arguments.encode()
        values = _DECODER.decode(arguments)
        if "\\u" in arguments:  # only an escape can still bring in an unpaired surrogate
            json.dumps(values, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ToolError(f"arguments are not valid JSON: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise ToolError("arguments are not valid JSON: they hold an unpaired surrogate, which is no character") from None
    except RecursionError:
        raise ToolError("arguments are nested too deeply") from None
    except ValueError:
        raise ToolError("arguments are not valid JSON: a number has too many digits") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ToolError(f"arguments must be an object, not {_kind(values)}")
    return values


def explain(error: pydantic.ValidationError, values: dict[str, Any], names: Collection[str]) -> str:
    """Say what is wrong with the values and what would be right; `names` are those that the tool takes."""
    problems: list[str] = []
    for detail in error.errors(include_url=False, include_context=False):
        problem = _problem(detail["type"], detail["msg"], _path(detail["loc"], values, detail["type"]), detail["input"])
        if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
            problem += f"; the arguments are: {', '.join(names)}" if names else "; this tool takes no arguments"
        if problem not in problems:
            problems.append(problem)
    more = len(problems) - _MAX_PROBLEMS
    return "invalid arguments: " + "; ".join(problems[:_MAX_PROBLEMS]) + (f" (and {more} more)" if more > 0 else "")


def _refuse_constant(text: str) -> NoReturn:
    raise ToolError(f"{text} is not a JSON number: give a finite one")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ToolError(f"the number {text[:20]} is out of range")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ToolError(f"{echo(next(name for name in names if names.count(name) > 1))} is given more than once")
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _path(location: tuple[int | str, ...], values: Any, kind: str) -> str:
    """Where in the arguments a problem is; pydantic's own steps, such as the branch of a union, are left out."""
    path = ""
    for index, step in enumerate(location):
        last = index == len(location) - 1
        known = step in values if isinstance(values, dict) else isinstance(values, list) and isinstance(step, int) and step < len(values)
        if known:
            values = values[step]
        elif not (last and kind.startswith("missing")):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


_EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type", "dict_type"), "an object"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    "decimal_type": "a number",
    "time_delta_type": "a duration such as 90 (seconds) or 'PT1M30S'",
    "uuid_type": "a string that holds a UUID",
    "url_type": "a string that holds a URL",
}
"""What a value should be, where pydantic's own words name Python types."""

_PYTHON_CONSTANTS = {"None": "null", "True": "true", "False": "false"}


def _problem(kind: str, message: str, path: str, value: Any) -> str:
    where = echo(path) if path else "the value"
    if kind.startswith("missing"):
        return f"{where} is required"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is not an argument"
    message = printable(message).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in _EXPECTED:
        message = f"should be {_EXPECTED[kind]}"
    elif kind == "literal_error":
        message = re.sub(r"\b(None|True|False)\b", lambda match: _PYTHON_CONSTANTS[match[0]], message)
    # "Input should be", "String should have", "List should have"…: the name of the argument is the better subject.
    should = re.fullmatch(r"(?:[A-Z]\w* )?(should .*)", message, re.DOTALL)
    return f"{where} {should[1] if should else f'is not valid: {message}'}, got {_brief(value)}"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "something else")


def _brief(value: Any) -> str:
    if isinstance(value, str):
        return echo(value)
    return json.dumps(value) if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 10**20) else _kind(value)
