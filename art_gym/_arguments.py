"""A call's arguments: reading them as strict JSON, and telling a model what is wrong with them in words it can act on."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn

import pydantic

from art_gym._actions import echo, printable
from art_gym.errors import ToolError

MAX_DEPTH = 100
"""Levels to which arguments may be nested: far beyond any use, and far within what Python's and pydantic's recursion can stand."""

_MAX_PROBLEMS = 3
_BLANK = " \t\n\r"


def read_arguments(arguments: Any) -> dict[str, Any]:
    """Read a call's arguments as strict JSON: one object, no NaN or Infinity, no key twice.

    >>> read_arguments("")
    {}

    Raises:
        ToolError: The text says what is wrong.
    """
    text = arguments if isinstance(arguments, str) else _as_text(arguments)
    if not text.strip():
        return {}
    try:
        if not text.isascii():
            text.encode()
        values = _decode(text)
        if "\\u" in text:  # only an escape can still bring in an unpaired surrogate
            json.dumps(values, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ToolError(f"arguments are not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise ToolError("arguments are not valid JSON: they hold an unpaired surrogate, which is no character") from None
    except RecursionError:
        raise _too_deep() from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ToolError(f"arguments must be an object, not {_kind(values)}")
    if len(text) > 2 * MAX_DEPTH and text.count("{") + text.count("[") > MAX_DEPTH and _is_deeper(values, MAX_DEPTH):
        raise _too_deep()
    return values


def explain(error: pydantic.ValidationError, values: dict[str, Any], names: Collection[str]) -> str:
    """Say what is wrong with the values and what would be right; `names` are those that the tool takes."""
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        path = path_of(detail["loc"], values, detail["type"])
        # After conversion pydantic gives the value that it has made, such as a timedelta.
        written = detail["input"] if _is_json(detail["input"]) else _at(path, values)
        problem = _problem(detail["type"], detail["msg"], _where(path), written, detail.get("ctx", {}))
        if detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
            problem += f"; the arguments are: {', '.join(names)}" if names else "; this tool takes no arguments"
        if problem not in problems:
            problems.append(problem)
    more = len(problems) - _MAX_PROBLEMS
    return "invalid arguments: " + "; ".join(problems[:_MAX_PROBLEMS]) + (f" (and {more} more)" if more > 0 else "")


def path_of(location: tuple[int | str, ...], values: Any, kind: str) -> list[int | str]:
    """Where in the values a problem of validation is; pydantic's own steps, such as the branch of a union, are left out.

    Args:
        location: Where pydantic says that it is.
        values: The arguments that were validated.
        kind: The problem's type, as pydantic names it.
    """
    path: list[int | str] = []
    for index, step in enumerate(location):
        known = step in values if isinstance(values, dict) else isinstance(values, list) and isinstance(step, int) and step < len(values)
        if known:
            values = values[step]
        elif not (index == len(location) - 1 and kind.startswith("missing")):
            continue
        path.append(step)
    return path


def refuse_beyond_floats(values: Mapping[str, Any], given: Collection[str], path: Sequence[int | str] = ()) -> None:
    """Refuse numbers beyond the floats, infinities and NaN that were written as text; those written as numbers are refused when they are read.

    Args:
        values: Validated values.
        given: The names of those that were given; the others are defaults, which may be infinite.
        path: Where they are in the arguments.

    Raises:
        ToolError: There is one, also within lists, mappings, models and dataclasses.
    """
    for name in given:
        value = values.get(name)
        if type(value) is not str and value is not None:
            _refuse_beyond_floats(value, [*path, name])


def _refuse_beyond_floats(value: Any, path: Sequence[int | str]) -> None:
    if isinstance(value, int):
        if value.bit_length() > sys.float_info.max_exp:
            raise _beyond_floats(path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _beyond_floats(path)
    elif isinstance(value, Decimal):
        if not value.is_finite() or value.adjusted() >= sys.float_info.max_10_exp:
            raise _beyond_floats(path)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_beyond_floats(key, path)
            _refuse_beyond_floats(item, [*path, str(key)])
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for index, item in enumerate(value):
            if type(item) is not str:
                _refuse_beyond_floats(item, [*path, index])
    elif isinstance(value, pydantic.BaseModel):
        refuse_beyond_floats({**value.__dict__, **(value.__pydantic_extra__ or {})}, value.model_fields_set, path)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        refuse_beyond_floats(fields, [name for name, item in fields.items() if item is not defaults[name]], path)


def _beyond_floats(path: Sequence[int | str]) -> ToolError:
    return ToolError(f"invalid arguments: {_where(path)} should be a finite number of at most {sys.float_info.max_10_exp} digits")


def _as_text(arguments: Any) -> str:
    """Write arguments that an endpoint has already read as JSON text again, so that they are checked like any others.

    Raises:
        ToolError: They have no such form.
    """
    if arguments is None:
        return ""
    if not isinstance(arguments, Mapping):
        raise ToolError("arguments must be an object, written as JSON text")
    try:
        return json.dumps(dict(arguments))
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError) as error:
        if "digits" in str(error):  # Python writes no integer that is longer than `sys.get_int_max_str_digits`
            raise ToolError("a number is out of range") from None
        raise ToolError("arguments must be a JSON object") from None


def _decode(text: str) -> Any:
    """Read the text as one JSON value; what `json.JSONDecoder.decode` does, in half its time.

    Raises:
        ValueError: It isn't one.
    """
    decoder = _DECODER if len(text) <= sys.float_info.max_10_exp else _LONG_DECODER
    values, end = decoder.raw_decode(text, len(text) - len(text.lstrip(_BLANK)))
    if end < len(text) and (rest := text[end:].lstrip(_BLANK)):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(rest))
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise ToolError(f"{text} is not a JSON number: give a finite one")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ToolError(f"the number {text[:20]} is out of range")
    return number


def _within_floats(text: str) -> int:
    """Read an integer; one beyond the floats is refused, for few tools could reckon with it."""
    if len(text) > sys.float_info.max_10_exp:
        _finite(text)
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ToolError(f"{echo(name)} is given more than once")
            seen.add(name)
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
_LONG_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_within_floats, object_pairs_hook=_unique)
"""For texts that are long enough to hold an integer beyond the floats; the other one is faster."""


def _too_deep() -> ToolError:
    return ToolError(f"arguments are nested too deeply: {MAX_DEPTH} levels at most")


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value))


_EXPECTED = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dataclass_type", "dict_type"), "an object"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    "decimal_type": "a number",
    "time_delta_type": "a duration such as 90 (seconds) or 'PT1M30S'",
    "uuid_type": "a string that holds a UUID",
    "path_type": "a string that holds a path",
    "zoneinfo_str": "the name of a time zone such as 'Europe/Paris'",
    "url_type": "a string that holds a URL",
}
"""What a value should be, where pydantic's own words name Python types."""

_PYTHON_CONSTANTS = {"None": "null", "True": "true", "False": "false"}


def _problem(kind: str, message: str, where: str, value: Any, context: Mapping[str, Any]) -> str:
    if kind.startswith("missing"):
        return f"{where} is required"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where} is not an argument"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _tag_problem(where, value, context)
    message = printable(message).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in _EXPECTED:
        message = f"should be {_EXPECTED[kind]}"
    elif kind == "literal_error":
        message = re.sub(r"<\w+\.\w+: (.*?)>", r"\1", message)  # members of an enum
        message = re.sub(r"\b(None|True|False)\b", lambda match: _PYTHON_CONSTANTS[match[0]], message)
    # "Input should be", "String should have", "List should have"…: the name of the argument is the better subject.
    should = re.fullmatch(r"(?:[A-Z]\w* )?(should .*)", message, re.DOTALL)
    return f"{where} {should[1] if should else f'is not valid: {message}'}, got {_brief(value)}"


def _tag_problem(where: str, value: Any, context: Mapping[str, Any]) -> str:
    """What is wrong with the field that tells the members of a union apart; pydantic calls it the discriminator."""
    tag = str(context.get("discriminator", "")).strip("'")
    if "expected_tags" not in context:
        return f"{where} needs {echo(tag)}, which says what kind of object it is"
    given = value.get(tag) if isinstance(value, dict) else None
    return f"{where} should have as {echo(tag)} one of {context['expected_tags']}, got {_brief(given)}"


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)


def _at(path: Sequence[int | str], values: Any) -> Any:
    for step in path:
        values = values[step]
    return values


def _where(path: Sequence[int | str]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return echo(text.removeprefix(".")) if path else "the value"


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "something else")


def _brief(value: Any) -> str:
    if isinstance(value, str):
        return echo(value)
    return json.dumps(value) if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 10**20) else _kind(value)
