"""JSON schema in the small: whether a JSON value conforms to a schema, and how two values compare.

It covers what pydantic generates (draft 2020-12 without `if`, `dependent…` and `unevaluated…`). Formats are not checked, as the draft says; nor
are patterns that Python can't read.
The validator that counts is pydantic's, in `art_gym.tools`; this one lets spaces work with plain schemas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from art_gym._regex import pattern as pattern  # noqa: PLC0414  part of what this module offers

Schema = Mapping[str, Any] | bool

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer())),
    "number": lambda value: not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def conforms(value: Any, schema: Schema, root: Mapping[str, Any]) -> bool:
    """Whether the JSON value conforms to the schema; `$ref`s are looked up in `root`.

    >>> conforms(3, {"type": "integer", "maximum": 5}, {})
    True
    """
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and not conforms(value, resolve(schema["$ref"], root), root):
        return False
    kinds = schema.get("type")
    if kinds is not None and not any(_TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "const" in schema and not same(value, schema["const"]):
        return False
    if "enum" in schema and not any(same(value, option) for option in schema["enum"]):
        return False
    if not all(conforms(value, part, root) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(conforms(value, part, root) for part in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(conforms(value, part, root) for part in schema["oneOf"]) != 1:
        return False
    if "not" in schema and conforms(value, schema["not"], root):
        return False
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, int | float):
        return _number_conforms(value, schema)
    if isinstance(value, str):
        return _string_conforms(value, schema)
    if isinstance(value, list):
        return _array_conforms(value, schema, root)
    return isinstance(value, dict) and _object_conforms(value, schema, root)


def resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema that a reference within the document ("#/$defs/Name") points to.

    Raises:
        ValueError: It points nowhere, or outside the document.
    """
    if not reference.startswith("#"):
        raise ValueError(f"a schema may only refer to itself, not to {reference!r}")
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")  # noqa: PLW2901
        if not isinstance(target, Mapping) or step not in target:
            raise ValueError(f"the schema has no {reference!r}")
        target = target[step]
    return target  # type: ignore[no-any-return]  # JSON


def same(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    return bool(left == right)


def unique(values: Sequence[Any]) -> bool:
    """Whether no two of the JSON values are equal."""
    return not any(same(value, other) for index, value in enumerate(values) for other in values[:index])


def matches(value: str, text: str) -> bool:
    """Whether the pattern `text` is found in the value; a pattern that Python can't read is found in any."""
    try:
        return pattern(text).search(value) is not None
    except ValueError:
        return True


def is_multiple(value: float, step: float) -> bool:
    """Whether the number is a multiple of the step, allowing for the rounding of decimal fractions such as 0.1."""
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        ratio = value / step
        return math.isclose(ratio, round(ratio), rel_tol=1e-12, abs_tol=1e-9)
    except OverflowError:  # an integer, or the ratio, is beyond the floats
        exact = Fraction(value) / Fraction(step)
        return abs(exact - round(exact)) <= max(abs(exact) / 10**12, Fraction(1, 10**9))


def _number_conforms(value: float, schema: Mapping[str, Any]) -> bool:
    return (
        value >= schema.get("minimum", value)
        and value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and ("multipleOf" not in schema or is_multiple(value, schema["multipleOf"]))
    )


def _string_conforms(value: str, schema: Mapping[str, Any]) -> bool:
    return (
        len(value) >= schema.get("minLength", 0)
        and len(value) <= schema.get("maxLength", len(value))
        and ("pattern" not in schema or matches(value, schema["pattern"]))
    )


def _array_conforms(value: list[Any], schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return False
    first = schema.get("prefixItems", ())
    rest = schema.get("items", True)
    if not all(conforms(item, part, root) for item, part in zip(value, first, strict=False)):
        return False
    if rest is not True and not all(conforms(item, rest, root) for item in value[len(first) :]):
        return False
    return not schema.get("uniqueItems") or unique(value)


def _object_conforms(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
        return False
    if any(name not in value for name in schema.get("required", ())):
        return False
    properties = schema.get("properties", {})
    by_pattern = schema.get("patternProperties", {})
    others = schema.get("additionalProperties", True)
    names = schema.get("propertyNames", True)
    for name, item in value.items():
        parts = [properties[name]] if name in properties else []
        parts += [part for text, part in by_pattern.items() if matches(name, text)]
        if not all(conforms(item, part, root) for part in parts or [others]) or not conforms(name, names, root):
            return False
    return True
