"""A tool's result, as the model is told it."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic_core import PydanticSerializationError, to_jsonable_python

from art_gym._actions import printable


def result_content(tool_name: str, result: Any) -> str | list[dict[str, Any]]:
    """Return what the model is told of a tool's result: text as it is, content parts as they are, anything else as JSON; None is "ok".

    >>> result_content("add", 5), result_content("look", {"exits": ["north"]})
    ('5', '{"exits": ["north"]}')

    Raises:
        TypeError: The result has no JSON form: a bug of the environment.
    """
    if isinstance(result, str):
        return printable(result)
    if result is None:
        return "ok"
    try:
        plain = to_jsonable_python(_ordered(result), inf_nan_mode="constants")
        text = printable(json.dumps(plain, ensure_ascii=False))
        are_parts = isinstance(result, list) and result and all(_is_content_part(part) for part in plain)
        return cast("list[dict[str, Any]]", json.loads(text)) if are_parts else text
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"tool '{tool_name}' returned {type(result).__name__}, which has no JSON form: {error}") from error


def _is_content_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "image_url", "input_audio", "file")


def _ordered(value: Any) -> Any:
    """Sort the sets in the value: their own order differs between processes."""
    if isinstance(value, set | frozenset):
        return sorted((_ordered(item) for item in value), key=lambda item: json.dumps(to_jsonable_python(item), sort_keys=True))
    if type(value) is dict:
        return {key: _ordered(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_ordered(item) for item in value]
    return value
