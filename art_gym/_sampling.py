"""Random JSON values that conform to a schema, all from one generator.

Made for the schemas that pydantic generates. Every value is checked before it is returned, so a schema that is too hard to hit gives an error
and never a wrong value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from art_gym._draws import Rng, between, word
from art_gym._formats import random_text
from art_gym._regex import random_match
from art_gym._schema import Schema, conforms, is_multiple, resolve, same

_TRIES = 200
_SOFT_DEPTH = 4
_HARD_DEPTH = 40
_SPAN = 100


def sample(schema: Schema, root: Mapping[str, Any], rng: Rng, depth: int = 0) -> Any:
    """Draw a random JSON value that conforms to the schema; `$ref`s are looked up in `root`. Small values and shallow ones are the rule.

    Raises:
        ValueError: No value was found: the schema allows none, or is too hard to hit at random.
    """
    if depth > _HARD_DEPTH:
        raise ValueError("the schema refers to itself without an end")
    for _ in range(_TRIES if not depth else 20):
        value = _draw(schema, root, rng, depth)
        if conforms(value, schema, root):
            return value
    raise ValueError(f"no value found that conforms to the schema {schema!r}")


def _draw(schema: Schema, root: Mapping[str, Any], rng: Rng, depth: int) -> Any:
    if isinstance(schema, bool):
        return _anything(rng)
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _draw({**resolve(schema["$ref"], root), **rest}, root, rng, depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    if "allOf" in schema:
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            merged = _merge(merged, part, root)
        return _draw(merged, root, rng, depth)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            rest = {name: value for name, value in schema.items() if name != key}
            branch = _branch(schema[key], root, rng, depth)
            return _draw(_merge(rest, branch, root), root, rng, depth)
    kinds = schema.get("type", _implied_type(schema))
    kind = kinds if isinstance(kinds, str) else kinds[int(rng.integers(len(kinds)))]
    return _BY_TYPE[kind](schema, root, rng, depth)


def _merge(left: Mapping[str, Any], right: Schema, root: Mapping[str, Any]) -> dict[str, Any]:
    """Both schemas at once, as far as their keywords don't meet; the check at the end catches the rest."""
    if isinstance(right, bool):
        return dict(left)
    if "$ref" in right:
        right = {**resolve(right["$ref"], root), **{key: value for key, value in right.items() if key != "$ref"}}
    merged = {**left, **right}
    if "properties" in left and "properties" in right:
        merged["properties"] = {**left["properties"], **right["properties"]}
    if "required" in left and "required" in right:
        merged["required"] = [*left["required"], *right["required"]]
    return merged


def _branch(branches: list[Schema], root: Mapping[str, Any], rng: Rng, depth: int) -> Schema:
    if depth >= _SOFT_DEPTH:
        branches = sorted(branches, key=_weight)[:1]
    return branches[int(rng.integers(len(branches)))]


def _weight(schema: Schema) -> int:
    """How likely a schema is to lead deeper: scalars least, references most."""
    if isinstance(schema, bool):
        return 0
    if "$ref" in schema or "anyOf" in schema or "oneOf" in schema:
        return 2
    return 1 if schema.get("type") in ("array", "object") else 0


def _implied_type(schema: Mapping[str, Any]) -> str:
    for kind, keys in {
        "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties"),
        "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        "string": ("minLength", "maxLength", "pattern", "format"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }.items():
        if any(key in schema for key in keys):
            return kind
    return "anything"


def _anything(rng: Rng) -> Any:
    return [None, True, int(rng.integers(_SPAN)), word(rng, 1, 6)][int(rng.integers(4))]


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Lowest and highest value, inclusive or not; a missing one is put a fixed span away from the other."""
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=None)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=None)
    # A multiple of a large step must lie within the span.
    span = max(_SPAN, 10 * abs(schema.get("multipleOf", 1)))
    if low is None:
        low = -span if high is None else high - span
    return low, low + span if high is None else high


def _integer(schema: Mapping[str, Any], root: Mapping[str, Any], rng: Rng, depth: int) -> int:
    low, high = _bounds(schema)
    first, last = math.ceil(low), math.floor(high)
    if first == schema.get("exclusiveMinimum"):
        first += 1
    if last == schema.get("exclusiveMaximum"):
        last -= 1
    step = schema.get("multipleOf", 1)
    if isinstance(step, int) or float(step).is_integer():
        step = int(step)
        first, last = -(-first // step), last // step
        return between(rng, first, last) * step
    return between(rng, first, last)


def _number(schema: Mapping[str, Any], root: Mapping[str, Any], rng: Rng, depth: int) -> float:
    low, high = _bounds(schema)
    if "maxDigits" in schema:
        return _of_few_digits(schema, low, high, rng)
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        value = between(rng, math.ceil(low / step), math.floor(high / step)) * step
        rounded = float(f"{value:.12g}")
        return rounded if is_multiple(rounded, step) else value
    value = low + float(rng.random()) * (high - low)
    # Few digits read better; near a narrow range's bounds they might fall outside it.
    rounded = round(value, 2)
    return rounded if low < rounded < high else float(value)


def _of_few_digits(schema: Mapping[str, Any], low: float, high: float, rng: Rng) -> float:
    """Draw a number of at most `maxDigits` digits in all, of which at most two are after the point."""
    places = int(rng.integers(min(schema["maxDigits"], 2) + 1))
    scale = 10**places
    most = 10 ** schema["maxDigits"] - 1
    drawn = between(rng, max(math.ceil(low * scale), -most), min(math.floor(high * scale), most))
    step = schema.get("multipleOf")
    return drawn / scale if step is None else float(round(drawn / scale / step) * step)


def _string(schema: Mapping[str, Any], root: Mapping[str, Any], rng: Rng, depth: int) -> str:
    if "pattern" in schema:
        return random_match(schema["pattern"], rng, schema.get("minLength", 0), schema.get("maxLength", math.inf))
    if schema.get("contentMediaType") == "application/json" and "contentSchema" in schema:
        return json.dumps(sample(schema["contentSchema"], root, rng, depth + 1))
    made = random_text(schema, rng)
    if made is not None:
        return made
    low = schema.get("minLength", 0)
    high = schema.get("maxLength", max(low, 1) + 7)
    return word(rng, max(low, min(1, high)), min(high, max(low, 1) + 7))


def _array(schema: Mapping[str, Any], root: Mapping[str, Any], rng: Rng, depth: int) -> list[Any]:
    first = schema.get("prefixItems", [])
    rest = schema.get("items", True)
    low = schema.get("minItems", len(first))
    spare = 0 if depth >= _SOFT_DEPTH else 3
    high = max(low, min(schema.get("maxItems", low + spare), low + spare))
    length = between(rng, low, high)
    items: list[Any] = []
    for index in range(length):
        part = first[index] if index < len(first) else rest
        if part is False:
            break
        item = sample(part, root, rng, depth + 1)
        if schema.get("uniqueItems"):
            for _ in range(_TRIES):
                if not any(same(item, other) for other in items):
                    break
                item = sample(part, root, rng, depth + 1)
            else:
                if len(items) >= schema.get("minItems", 0):
                    break
        items.append(item)
    return items


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], rng: Rng, depth: int) -> dict[str, Any]:
    required = set(schema.get("required", ()))
    values: dict[str, Any] = {}
    for name, part in schema.get("properties", {}).items():
        if name in required or (depth < _SOFT_DEPTH and rng.random() < 0.5):
            values[name] = sample(part, root, rng, depth + 1)
    for name in sorted(required - values.keys()):
        values[name] = sample(schema.get("additionalProperties", True), root, rng, depth + 1)
    by_pattern = list(schema.get("patternProperties", {}).items())
    others = schema.get("additionalProperties", False)
    least = schema.get("minProperties", 0)
    wanted = max(least - len(values), 0 if depth >= _SOFT_DEPTH else int(rng.integers(3)))
    wanted = min(wanted, schema.get("maxProperties", len(values) + wanted) - len(values))
    for _ in range(wanted):
        if by_pattern:
            text, part = by_pattern[int(rng.integers(len(by_pattern)))]
            values[random_match(text, rng)] = sample(part, root, rng, depth + 1)
        elif others is not False:
            name = sample({"type": "string", **schema.get("propertyNames", {})}, root, rng, depth + 1)
            values[name] = sample(others, root, rng, depth + 1)
    return values


_BY_TYPE: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any], Rng, int], Any]] = {
    "null": lambda schema, root, rng, depth: None,
    "boolean": lambda schema, root, rng, depth: bool(rng.integers(2)),
    "integer": _integer,
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
    "anything": lambda schema, root, rng, depth: _anything(rng),
}
