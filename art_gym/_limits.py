"""Limits that JSON schema has no keyword for: on dates, times and durations, on the digits of a decimal, on the scheme of a URL.

A schema states them twice. Keywords of its own carry them to where values are drawn (`art_gym._formats`, `art_gym._sampling`): `formatMinimum`,
`formatExclusiveMinimum`, `formatMaximum` and `formatExclusiveMaximum`, as the validator Ajv has them; `formatNow` ("past" or "future");
`maxDigits`; `uriSchemes`. And the description says them in words, for models know no such keywords.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

from pydantic_core import to_jsonable_python

_TOLD = "$told"
"""While a schema is being made: words for its description, which a field's own description would replace."""

_BOUNDS = {"ge": "formatMinimum", "gt": "formatExclusiveMinimum", "le": "formatMaximum", "lt": "formatExclusiveMaximum"}
_MOMENTS = {"ge": "Not before {}.", "gt": "After {}.", "le": "Not after {}.", "lt": "Before {}."}
_DURATIONS = {"ge": "At least {}.", "gt": "More than {}.", "le": "At most {}.", "lt": "Less than {}."}
_ZONES = {"aware": "With a time zone.", "naive": "Without a time zone."}


def limit_time(described: dict[str, Any], core: Mapping[str, Any]) -> dict[str, Any]:
    """Add the limits of a date, time or duration, as a pydantic core schema has them."""
    words = _DURATIONS if described["format"] == "duration" else _MOMENTS
    told = []
    for key, keyword in _BOUNDS.items():
        if core.get(key) is not None:
            described[keyword] = to_jsonable_python(core[key])
            told.append(words[key].format(described[keyword]))
    if core.get("now_op"):
        described["formatNow"] = core["now_op"]
        told.append(f"In the {core['now_op']}.")
    if core.get("tz_constraint") in _ZONES:
        told.append(_ZONES[core["tz_constraint"]])
    return _with_words(described, told)


def limit_digits(described: dict[str, Any], digits: int | None, places: int | None) -> dict[str, Any]:
    """Add the limits on a decimal's digits: how many in all, and how many after the point."""
    told = []
    if digits is not None:
        told.append(f"At most {_count(digits, 'digit')} in all.")
        if places is None:
            described["maxDigits"] = digits
        whole = digits - (places or 0)
        top = float(Decimal(10) ** whole - Decimal(10) ** -(places or 0))
        if "exclusiveMaximum" not in described or described["exclusiveMaximum"] > top:
            described["maximum"] = min(described.get("maximum", math.inf), top)
        if "exclusiveMinimum" not in described or described["exclusiveMinimum"] < -top:
            described["minimum"] = max(described.get("minimum", -math.inf), -top)
    if places is not None:
        told.append(f"At most {_count(places, 'digit')} after the point.")
        described.setdefault("multipleOf", 10.0**-places)
    return _with_words(described, told)


def limit_schemes(described: dict[str, Any], schemes: Iterable[str] | None) -> dict[str, Any]:
    """Add the schemes that a URL may have."""
    schemes = [*(schemes or ())]
    if not schemes:
        return described
    described["uriSchemes"] = schemes
    return _with_words(described, [f"Starts with {' or '.join(f'{scheme}://' for scheme in schemes)}."])


def with_limits_told(schema: Any) -> Any:
    """Return a schema whose descriptions, in all its parts, tell the limits, and which can be written as JSON.

    Defaults that JSON has no form for, infinities and NaN, are left out.
    """
    if not isinstance(schema, Mapping):
        return schema
    written: dict[str, Any] = {}
    for key, part in schema.items():
        if key in ("properties", "patternProperties", "$defs"):
            written[key] = {name: with_limits_told(item) for name, item in part.items()}
        elif key in ("items", "additionalProperties", "propertyNames", "contentSchema", "not"):
            written[key] = with_limits_told(part)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            written[key] = [with_limits_told(item) for item in part]
        elif not (key == _TOLD or (key == "default" and not _is_finite(part))):
            written[key] = part
    if _TOLD in schema:
        written["description"] = " ".join([*([schema["description"]] if schema.get("description") else []), *schema[_TOLD]])
    return written


def _with_words(described: dict[str, Any], told: list[str]) -> dict[str, Any]:
    return {**described, _TOLD: told} if told else described


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))
