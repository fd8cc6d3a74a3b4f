"""OpenAI's strict mode: the form of a tool's schema that it takes.

Strict mode constrains what a model can write to the schema, and takes a part of JSON schema only (OpenAI's guide "Structured model outputs",
section "Supported schemas"): every object is closed, all its properties are required, there is no default, and few limits are known. So an
optional property becomes one that may be null, and null stands for "not given" (`art_gym._nulls` reads it so). Validation stays what it was: it
still checks the limits that the strict form can only mention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from art_gym._schema import Schema, conforms, resolve
from art_gym.errors import UsageError
from art_gym.messages import ToolSchema

MAX_PROPERTIES = 5000
MAX_NESTING = 10
MAX_ENUM_VALUES = 1000
MAX_CHARACTERS = 120_000

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_LIMITS = {
    "string": ("pattern",),
    "number": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "integer": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "array": ("minItems", "maxItems"),
    "boolean": (),
    "null": (),
}
_MENTIONED = {
    "minLength": "Minimum length: {}.",
    "maxLength": "Maximum length: {}.",
    "uniqueItems": "No item twice.",
    "format": "Format: {}.",
    "contentMediaType": "Content: {}.",
}
"""Limits that strict mode doesn't know; the description has them, and validation checks them."""

_UNKNOWN = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains")


def strict_schema(schema: ToolSchema) -> ToolSchema:
    """Return the form of a tool's schema that OpenAI's strict mode takes; the given one stays as it is.

    A parameter that has a default becomes one that may be null, and `Tool.parse` takes null as "not given". Limits that strict mode doesn't
    know (lengths of text, unique items, most formats, the order of a tuple's types) go into the description; validation goes on checking them.

    >>> from art_gym import Tool
    >>> def find(word: str, limit: int = 3) -> str:
    ...     '''Find mails.'''
    >>> function = strict_schema(Tool.from_function(find).schema)["function"]
    >>> function["strict"], function["parameters"]["required"]
    (True, ['word', 'limit'])
    >>> function["parameters"]["properties"]["limit"]
    {'anyOf': [{'type': 'integer'}, {'type': 'null'}], 'description': 'Null for the default, 3.'}

    Raises:
        UsageError: A parameter can't be written so: a mapping with free keys, or one that takes anything; or there is too much of it; or it is
            no tool's schema at all.
    """
    function: dict[str, Any] = {**_function(schema)}
    root = function.get("parameters") or {"type": "object", "properties": {}}
    writer = _Writer(root)
    try:
        if not isinstance(root, Mapping) or root.get("type") != "object":
            raise _UnfitError("", "the parameters must be an object")
        parameters = writer.write(root, "")
        if writer.definitions:
            parameters["$defs"] = writer.definitions
        _check_size(parameters)
    except _UnfitError as error:
        where = f"parameter '{error.path}' {error}" if error.path else str(error)
        raise UsageError(f"tool '{function['name']}' has no form in strict mode: {where}") from None
    return {"type": "function", "function": {**function, "strict": True, "parameters": parameters}}  # type: ignore[typeddict-item]


def _function(schema: Any) -> Mapping[str, Any]:
    """Return what a tool's schema says of its function.

    Raises:
        UsageError: It is no tool's schema.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            "a tool's schema has the form {'type': 'function', 'function': {'name': …, 'parameters': …}}, as Tool.schema and env.tools "
            f"give it, not {schema!r:.100}"
        )
    return function


class _UnfitError(Exception):
    """A part of a schema that strict mode can't express; the text goes on from "parameter 'path'"."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(problem)
        self.path = path


class _Writer:
    """Writes the parts of one schema in strict form, and collects the definitions that they refer to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.definitions: dict[str, Any] = {}

    def write(self, schema: Any, path: str) -> dict[str, Any]:
        """Write one part; `path` leads to it from the parameters.

        Raises:
            _UnfitError: It can't be written.
        """
        if not isinstance(schema, Mapping):
            raise _UnfitError(path, "takes anything: give it a type")
        _check_form(schema, path)
        unknown = [key for key in _UNKNOWN if key in schema]
        if unknown:
            raise _UnfitError(path, f"is limited by '{unknown[0]}', which strict mode doesn't know: take another type")
        if len(schema.get("allOf", ())) == 1:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            return self.write({**schema["allOf"][0], **rest}, path)
        if "allOf" in schema:
            raise _UnfitError(path, "must fit several schemas at once, which strict mode doesn't know: take another type")
        return _described(self._write_kind(schema, path), _description(schema))

    def _write_kind(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        if "$ref" in schema:
            return {"$ref": self._define(schema["$ref"], path)}
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return {"anyOf": [self.write(branch, path) for branch in schema[choice]]}
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if options is not None:
            return _write_options(options, path)
        kind = schema.get("type")
        if isinstance(kind, list):
            return {"anyOf": [self._write_kind({**schema, "type": each}, path) for each in kind]}
        if kind == "object":
            return self._write_object(schema, path)
        if kind == "array":
            return {"type": "array", "items": self._write_items(schema, path), **_kept(schema, "array")}
        if kind not in _LIMITS:
            raise _UnfitError(path, "takes anything: give it a type")
        written = {"type": kind, **_kept(schema, kind)}
        if schema.get("format") in _FORMATS:
            written["format"] = schema["format"]
        return written

    def _define(self, reference: str, path: str) -> str:
        """Write the definition that is referred to, once."""
        if reference == "#":
            return reference
        prefix, _, name = reference.rpartition("/")
        if prefix != "#/$defs":
            raise _UnfitError(path, f"refers to {reference!r}: only definitions ('#/$defs/…') can be referred to")
        if name not in self.definitions:
            try:
                definition = resolve(reference, self.root)
            except ValueError as error:
                raise _UnfitError(path, f"can't be read: {error}") from None
            self.definitions[name] = {}  # it may refer to itself
            self.definitions[name] = self.write(definition, path)
        return reference

    def _write_object(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        if "patternProperties" in schema or ("properties" not in schema and schema.get("additionalProperties", True) is not False):
            raise _UnfitError(path, "is a mapping with free keys: take a list of pairs, or a model that names its fields")
        written: dict[str, Any] = {}
        for name, part in schema.get("properties", {}).items():
            written[name] = self.write(part, f"{path}.{name}" if path else name)
            if name not in schema.get("required", ()):
                written[name] = _nullable(written[name], part, self.root)
        return {"type": "object", "properties": written, "required": [*written], "additionalProperties": False}

    def _write_items(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        first, rest = schema.get("prefixItems", ()), schema.get("items")
        parts = [*first] if rest is False or (first and rest is None) else [*first, rest]
        if parts == [None]:
            if schema.get("maxItems") == 0:
                return {"type": "null"}
            raise _UnfitError(path, "is a list of anything: give its items a type")
        written: list[dict[str, Any]] = []
        for part in parts:
            item = self.write(part, f"{path}[]")
            if item not in written:
                written.append(item)
        return written[0] if len(written) == 1 else {"anyOf": written}


_FORMS: dict[type, tuple[str, ...]] = {
    Mapping: ("properties", "patternProperties", "$defs"),
    list: ("required", "anyOf", "oneOf", "allOf", "prefixItems", "enum"),
    str: ("$ref", "description", "format", "pattern"),
}
"""What keywords hold, by its type."""


def _check_form(schema: Mapping[str, Any], path: str) -> None:
    """Check that the keywords of one schema hold what they should.

    Raises:
        _UnfitError: One doesn't.
    """
    for form, keys in _FORMS.items():
        for key in keys:
            if key in schema and not isinstance(schema[key], form):
                raise _UnfitError(path, f"can't be read: its {key!r} is of type {type(schema[key]).__name__!r}")
    kind = schema.get("type")
    if kind is not None and not isinstance(kind, str) and not (isinstance(kind, list) and all(isinstance(each, str) for each in kind)):
        raise _UnfitError(path, f"can't be read: its 'type' is {kind!r:.50}")


def _write_options(options: list[Any], path: str) -> dict[str, Any]:
    """Write the values of an enumeration: each type by itself, since strict mode wants every value's type named."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    by_kind: dict[str, list[Any]] = {}
    for option in options:
        if type(option) not in names:
            raise _UnfitError(path, f"may be {json.dumps(option)}, and in strict mode an option is text, a number, true, false or null")
        by_kind.setdefault(names[type(option)], []).append(option)
    parts: list[dict[str, Any]] = [{"type": kind} if kind == "null" else {"type": kind, "enum": values} for kind, values in by_kind.items()]
    return parts[0] if len(parts) == 1 else {"anyOf": parts}


def _nullable(written: dict[str, Any], plain: Schema, root: Mapping[str, Any]) -> dict[str, Any]:
    """Let a property be null too, which stands for "not given"."""
    description = written.get("description", "")
    if not conforms(None, plain, root):
        default = plain.get("default") if isinstance(plain, Mapping) else None
        told = "Null if not given." if default is None else f"Null for the default, {json.dumps(default, ensure_ascii=False)}."
        description = f"{description} {told}".strip()
        bare = {key: value for key, value in written.items() if key != "description"}
        written = {"anyOf": [*bare.get("anyOf", [bare]), {"type": "null"}]}
    return _described(written, description)


def _described(written: dict[str, Any], description: str) -> dict[str, Any]:
    if not description:
        return written
    if "$ref" in written:  # nothing may stand beside a reference
        written = {"anyOf": [written]}
    return {**written, "description": description}


def _description(schema: Mapping[str, Any]) -> str:
    """The schema's description, and after it the limits that strict mode doesn't know."""
    told = [str(schema["description"])] if schema.get("description") else []
    for key, text in _MENTIONED.items():
        if schema.get(key) and not (key == "format" and schema[key] in _FORMATS):
            told.append(text.format(schema[key]))
    items = [_name(part) for part in schema.get("prefixItems", ())]
    if len(set(items)) > 1:
        told.append(f"The items in order: {', '.join(items)}.")
    return " ".join(told)


def _name(schema: Any) -> str:
    """A word for what a schema admits."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(option) for option in schema.get("enum", [schema.get("const")]))
    return " or ".join(_name(part) for part in schema.get("anyOf", ())) or str(schema.get("type", "value"))


def _kept(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {key: schema[key] for key in _LIMITS[kind] if key in schema}


def _check_size(parameters: Mapping[str, Any]) -> None:
    """Check the limits on the size of a whole schema.

    Raises:
        _UnfitError: It is too large.
    """
    properties = options = characters = 0
    for part, nesting, path in _parts(parameters, 0, ""):
        names, values = part.get("properties", {}), part.get("enum", ())
        properties += len(names)
        options += len(values)
        characters += sum(map(len, names)) + sum(len(value) for value in values if isinstance(value, str))
        if nesting > MAX_NESTING:
            raise _UnfitError(path, f"is an object more than {MAX_NESTING} levels deep: take a flatter type")
    characters += sum(map(len, parameters.get("$defs", {})))
    sizes = (("properties", properties, MAX_PROPERTIES), ("options", options, MAX_ENUM_VALUES), ("characters", characters, MAX_CHARACTERS))
    for what, size, limit in sizes:
        if size > limit:
            raise _UnfitError("", f"it has {size} {what} in its names and options, and {limit} are allowed: take simpler types")


def _parts(schema: Mapping[str, Any], nesting: int, path: str) -> Iterator[tuple[Mapping[str, Any], int, str]]:
    """Yield every schema in the schema, how many objects it is nested in, itself included, and where it is."""
    nesting += schema.get("type") == "object"
    yield schema, nesting, path
    for name, part in schema.get("properties", {}).items():
        yield from _parts(part, nesting, f"{path}.{name}" if path else name)
    for part in schema.get("anyOf", ()):
        yield from _parts(part, nesting, path)
    if "items" in schema:
        yield from _parts(schema["items"], nesting, f"{path}[]")
    for name, part in schema.get("$defs", {}).items():
        yield from _parts(part, 0, name)
