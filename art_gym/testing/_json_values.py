"""Strategies for JSON values that conform to a schema: the schemas that `art_gym._schema` checks, among them all that pydantic generates.

Each keyword is drawn as directly as it can be; what can't be drawn directly (`not`, `oneOf`, a pattern with a length) is filtered. Whatever
comes out is checked against the whole schema once more, so that no value is ever wrong.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC
from re import _parser  # type: ignore[attr-defined]  # no public parser exists; hypothesis reads the same one
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from art_gym._schema import Schema, conforms, pattern, resolve

Values = SearchStrategy[Any]

_DEEP = 3
"""Levels of references and containers below which only what must be there is drawn, so that recursive schemas come to an end."""

_FIRST = (3, 3, 12)
"""Of the words to try so many at the front are tried more often."""

_LONG = 100
"""Characters of a text at most, unless the schema asks for more."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$defs"})

_KINDS: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}

ANYTHING: Values = st.recursive(
    st.none() | st.booleans() | st.integers(-100, 100) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
"""Small JSON values of every kind."""


def json_values(schema: Schema, root: Mapping[str, Any] | None = None, *, words: Sequence[str] = ()) -> Values:
    """Build a strategy for the JSON values that conform to a schema.

    Values lean to the small, the shallow and the edges of what is allowed; they shrink to the simplest that conforms. Texts have up to 100
    characters, or as many as the schema asks for at least.

    Args:
        schema: JSON schema, draft 2020-12 as pydantic writes it: not `if`, `dependent…`, `unevaluated…` or references out of the document.
        root: The document in which `$ref`s are looked up; the schema itself by default.
        words: Texts (and, read from them, integers) that are worth a try where any text would do, the most promising first.

    Raises:
        hypothesis.errors.Unsatisfiable: When drawn from: the schema allows no value, or is too hard to hit.
    """
    document = root if root is not None else schema if isinstance(schema, Mapping) else {}
    return _Maker(document, words).values(schema, 0).filter(lambda value: conforms(value, schema, document))


class _Maker:
    def __init__(self, root: Mapping[str, Any], words: Sequence[str]) -> None:
        self._root = root
        self._words = list(words)
        self._numbers = sorted({int(word) for word in self._words if re.fullmatch(r"-?[0-9]{1,9}", word)})
        self._references: dict[tuple[str, int], Values] = {}

    def values(self, schema: Schema, depth: int) -> Values:
        if isinstance(schema, bool):
            return ANYTHING if schema else st.nothing()
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref" and key not in _ANNOTATIONS}
            return self._merged(rest, schema, depth) if rest else self._reference(schema["$ref"], depth)
        if "const" in schema:
            return self._fixed([schema["const"]])
        if "enum" in schema:
            return self._fixed([option for option in schema["enum"] if conforms(option, schema, self._root)])
        if "allOf" in schema:
            merged: dict[str, Any] = {key: value for key, value in schema.items() if key != "allOf"}
            for part in schema["allOf"]:
                merged = _both(merged, self._plain(part))
            return self.values(merged, depth)
        if "not" in schema:
            rest = {key: value for key, value in schema.items() if key != "not"}
            return self.values(rest, depth).filter(lambda value: not conforms(value, schema["not"], self._root))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self._branches(schema, key, depth)
        kinds = schema.get("type", _implied_kind(schema))
        if isinstance(kinds, list):
            return st.one_of([self.values({**schema, "type": kind}, depth) for kind in kinds])
        return self._by_kind[kinds](self, schema, depth)

    def _reference(self, reference: str, depth: int) -> Values:
        key = reference, min(depth + 1, _DEEP + 1)
        if key not in self._references:
            self._references[key] = st.deferred(lambda: self.values(resolve(reference, self._root), key[1]))
        return self._references[key]

    def _merged(self, rest: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> Values:
        return self.values(_both(rest, self._plain({"$ref": schema["$ref"]})), depth + 1)

    def _plain(self, schema: Schema) -> Mapping[str, Any]:
        """The schema without a reference at its top."""
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        while "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref" and key not in _ANNOTATIONS}
            schema = _both(rest, resolve(schema["$ref"], self._root))
        return schema

    def _branches(self, schema: Mapping[str, Any], key: str, depth: int) -> Values:
        rest = {name: value for name, value in schema.items() if name != key and name not in _ANNOTATIONS}
        branches = schema[key]
        if depth > _DEEP:
            least = min(map(_weight, branches))
            branches = [branch for branch in branches if _weight(branch) == least]
        options = st.one_of([self.values(_both(rest, self._plain(branch)) if rest else branch, depth) for branch in branches])
        return options.filter(lambda value: conforms(value, schema, self._root)) if key == "oneOf" else options

    def _fixed(self, options: list[Any]) -> Values:
        return st.sampled_from(options).map(copy.deepcopy) if options else st.nothing()

    def _integer(self, schema: Mapping[str, Any], depth: int) -> Values:
        low, high = _bounds(schema)
        first = None if low is None else math.floor(low) + 1 if low == schema.get("exclusiveMinimum") else math.ceil(low)
        last = None if high is None else math.ceil(high) - 1 if high == schema.get("exclusiveMaximum") else math.floor(high)
        step = schema.get("multipleOf", 1)
        if step != 1 and float(step).is_integer():
            step = int(step)
            least, most = None if first is None else -(-first // step), None if last is None else last // step
            return st.nothing() if _crossed(least, most) else st.integers(least, most).map(lambda count: count * step)
        if _crossed(first, last):
            return st.nothing()
        options = [st.integers(first, last)]
        if first is None or last is None:  # without a limit most of Hypothesis's integers are huge
            start = first if first is not None else -100 if last is None else last - 100
            options.insert(0, st.integers(start, start + 200 if last is None else last))
        known = [number for number in self._numbers if conforms(number, schema, self._root)]
        return st.one_of([*options, st.sampled_from(known)] if known else options)

    def _number(self, schema: Mapping[str, Any], depth: int) -> Values:
        low, high = _bounds(schema)
        if "multipleOf" in schema:
            step = schema["multipleOf"]
            least, most = None if low is None else math.ceil(low / step), None if high is None else math.floor(high / step)
            if _crossed(least, most):
                return st.nothing()
            return st.integers(least, most).map(lambda count: float(f"{count * step:.12g}")).filter(lambda v: conforms(v, schema, self._root))
        whole = self._integer(schema, depth)
        inexact = st.floats(
            None if low is None else float(low), None if high is None else float(high), allow_nan=False, allow_infinity=False
        ).filter(lambda value: conforms(value, schema, self._root))
        return inexact if whole.is_empty else whole | inexact

    def _string(self, schema: Mapping[str, Any], depth: int) -> Values:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        longest = max(least, _LONG) if most is None else min(most, max(least, _LONG))
        if "pattern" in schema:
            longest = max(longest, _shortest_match(schema["pattern"]))
            texts = st.from_regex(pattern(schema["pattern"]), alphabet=st.characters(codec="utf-8"))
            # In Python "$" also matches before a last newline, elsewhere it doesn't.
            matched = texts.map(lambda text: text.removesuffix("\n")) if schema["pattern"].endswith("$") else texts
            return matched.filter(lambda value: len(value) <= longest and conforms(value, schema, self._root))
        made = _FORMATS.get(schema.get("format", ""))
        if made is not None:
            return made.filter(lambda value: conforms(value, schema, self._root))
        if _crossed(least, most):
            return st.nothing()
        letters = st.text("abcdefghij0123456789 ", min_size=least, max_size=min(longest, max(least, 8)))
        known = [word for word in self._words if conforms(word, schema, self._root)]
        options = [letters, st.text(min_size=least, max_size=longest)]
        return st.one_of([*options, *(st.sampled_from(known[:count]) for count in (*_FIRST, None) if known)])

    def _array(self, schema: Mapping[str, Any], depth: int) -> Values:
        first = [self.values(part, depth + 1) for part in schema.get("prefixItems", ())]
        rest = schema.get("items", not first)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if depth >= _DEEP:
            most = max(least, 0)
        if _crossed(least, most):
            return st.nothing()
        if not first:
            items = self.values(rest, depth + 1)
            key = _identity if schema.get("uniqueItems") else None
            return st.lists(items, min_size=least, max_size=least + 5 if most is None else min(most, least + 10), unique_by=key)
        shortest, longest = min(least, len(first)), len(first) if most is None else min(most, len(first))
        lengths = range(longest, shortest - 1, -1) if least < len(first) else [len(first)]
        starts = st.one_of([st.tuples(*first[:length]).map(list) for length in lengths])
        spare = max(least - len(first), 0)
        room = spare + 3 if most is None else max(most - len(first), 0)
        if rest is not False and room:
            others = st.lists(self.values(rest, depth + 1), min_size=spare, max_size=min(room, spare + 5))
            full = st.tuples(st.tuples(*first), others).map(lambda parts: [*parts[0], *parts[1]])
            starts = full if spare else starts | full
        return starts.filter(lambda value: conforms(value, schema, self._root))

    def _object(self, schema: Mapping[str, Any], depth: int) -> Values:
        properties = {name: part for name, part in schema.get("properties", {}).items() if part is not False}
        others = schema.get("additionalProperties", "unsaid")
        required = {name: self.values(properties.get(name, others if others != "unsaid" else True), depth + 1) for name in _required(schema)}
        free = [name for name in properties if name not in required] if depth < _DEEP else []
        optional = {name: self.values(properties[name], depth + 1) for name in free}
        named = st.fixed_dictionaries(required, optional=optional)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", math.inf)
        wanted = int(max(least - len(required), 0))
        room = int(min(most - len(required), wanted + 3))
        if depth >= _DEEP:
            room = min(room, wanted)
        entries = [
            st.tuples(self.values({"type": "string", "pattern": text}, depth + 1), self.values(part, depth + 1))
            for text, part in schema.get("patternProperties", {}).items()
        ]
        if (others == "unsaid" and wanted and not entries) or (others != "unsaid" and others is not False):
            names = self.values({"type": "string", **schema.get("propertyNames", {})}, depth + 1)
            entries.append(st.tuples(names, self.values(True if others == "unsaid" else others, depth + 1)))
        if room > 0 and entries:
            added = st.lists(st.one_of(entries), min_size=wanted if not optional else 0, max_size=room, unique_by=lambda entry: str(entry[0]))
            named = st.tuples(added.map(dict), named).map(lambda parts: {**parts[0], **parts[1]})
        return named.filter(lambda value: conforms(value, schema, self._root))

    _by_kind: Mapping[str, Callable[[_Maker, Mapping[str, Any], int], Values]] = {
        "null": lambda maker, schema, depth: st.none(),
        "boolean": lambda maker, schema, depth: st.booleans(),
        "integer": _integer,
        "number": _number,
        "string": _string,
        "array": _array,
        "object": _object,
        "anything": lambda maker, schema, depth: ANYTHING,
    }


def _shortest_match(text: str) -> float:
    """A number of characters in which a match of the pattern finds room."""
    if "(?=" in text:  # what must lie ahead counts for nothing in the width
        return math.inf
    return int(_parser.parse(pattern(text).pattern).getwidth()[0])


def _implied_kind(schema: Mapping[str, Any]) -> str:
    return next((kind for kind, keys in _KINDS.items() if any(key in schema for key in keys)), "anything")


def _required(schema: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(schema.get("required", ())))


def _weight(schema: Schema) -> int:
    """How likely a schema is to lead deeper: scalars least, references most."""
    if isinstance(schema, bool):
        return 0
    if any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf")):
        return 2
    return 1 if schema.get("type") in ("array", "object") else 0


def _both(left: Mapping[str, Any], right: Schema) -> dict[str, Any]:
    """One schema that asks for what two ask for."""
    if isinstance(right, bool):
        return dict(left) if right else {"not": {}}
    both: dict[str, Any] = {**left, **right}
    for key in left.keys() & right.keys():
        one, other = left[key], right[key]
        if key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            both[key] = max(one, other)
        elif key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            both[key] = min(one, other)
        elif key == "required":
            both[key] = list(dict.fromkeys([*one, *other]))
        elif key in ("properties", "patternProperties", "$defs"):
            both[key] = {
                **one,
                **other,
                **{name: _both(one[name], other[name]) for name in one.keys() & other.keys() if one[name] != other[name]},
            }
        elif key == "enum":
            both[key] = [option for option in one if option in other]
        elif key in ("anyOf", "oneOf") and one != other:
            both[key] = one
            both["allOf"] = [*both.get("allOf", ()), {key: other}]
    return both


def _bounds(schema: Mapping[str, Any]) -> tuple[float | None, float | None]:
    low = max((schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema), default=None)
    high = min((schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema), default=None)
    return low, high


def _crossed(least: float | None, most: float | None) -> bool:
    return least is not None and most is not None and least > most


def _identity(value: Any) -> str:
    """Equal for values that JSON schema takes for equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return {key: _whole(item) for key, item in value.items()} if isinstance(value, dict) else value


_NAMES = st.text("abcdefghij", min_size=1, max_size=8)
_ADDRESSES = st.ip_addresses(v=4).map(str)
_ADDRESSES6 = st.ip_addresses(v=6).map(str)
_UUIDS = st.uuids().map(str)

_FORMATS: dict[str, Values] = {
    "date": st.dates().map(lambda day: day.isoformat()),
    "date-time": st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.isoformat().replace("+00:00", "Z")),
    "time": st.times().map(lambda time: time.isoformat()),
    "duration": st.integers(0, 10**6).map(lambda seconds: f"PT{seconds}S"),
    "uuid": _UUIDS,
    **{f"uuid{version}": st.uuids(version=version).map(str) for version in (1, 3, 4, 5)},
    "email": _NAMES.map(lambda name: f"{name}@example.com"),
    "uri": _NAMES.map(lambda name: f"https://example.com/{name}"),
    "ipv4": _ADDRESSES,
    "ipv6": _ADDRESSES6,
    "ipvanyaddress": _ADDRESSES | _ADDRESSES6,
    "ipv4network": _ADDRESSES.map(lambda address: f"{address}/32"),
    "ipv6network": _ADDRESSES6.map(lambda address: f"{address}/128"),
    "ipvanynetwork": _ADDRESSES.map(lambda address: f"{address}/32"),
    "ipv4interface": _ADDRESSES.map(lambda address: f"{address}/24"),
    "ipv6interface": _ADDRESSES6.map(lambda address: f"{address}/64"),
    "ipvanyinterface": _ADDRESSES.map(lambda address: f"{address}/24"),
    "json-string": ANYTHING.map(json.dumps),
    "regex": _NAMES,
}
