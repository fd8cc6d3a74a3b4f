"""Nulls that stand for what isn't given: in OpenAI's strict mode a model must write every argument, and has nothing else to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pydantic

from art_gym._arguments import path_of
from art_gym._schema import resolve


def drop_nulls(error: pydantic.ValidationError, values: dict[str, Any], parameters: Mapping[str, Any]) -> bool:
    """Delete from the values the nulls that validation refuses and that stand for what isn't given: those of optional properties.

    Args:
        error: What validation said of the values.
        values: The arguments of a call. They are changed.
        parameters: The plain schema that they were validated against, not its strict form.

    Returns:
        Whether there was one.
    """
    dropped = False
    for detail in error.errors(include_url=False, include_context=False):
        path = path_of(detail["loc"], values, detail["type"])
        if detail["input"] is None and path and _is_optional(path, parameters):
            holder: Any = values
            for step in path[:-1]:
                holder = holder[step]
            # Two members of a union may have refused the same one.
            dropped = holder.pop(path[-1], dropped) is None or dropped
    return dropped


def _is_optional(path: Sequence[int | str], parameters: Mapping[str, Any]) -> bool:
    """Whether the path leads to a property that some schema on the way names, and doesn't require."""
    schemas = [*_members([parameters], parameters)]
    for step in path[:-1]:
        schemas = [*_members((_child(schema, step) for schema in schemas), parameters)]
    name = path[-1]
    return any(name in schema.get("properties", {}) and name not in schema.get("required", ()) for schema in schemas)


def _members(schemas: Iterable[Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas, and those that they refer to or are made of, each once."""
    seen: set[int] = set()
    left = [*schemas]
    while left:
        schema = left.pop()
        if isinstance(schema, Mapping) and id(schema) not in seen:
            seen.add(id(schema))
            left += [part for kind in ("anyOf", "oneOf", "allOf") for part in schema.get(kind, ())]
            left += [resolve(schema["$ref"], root)] if "$ref" in schema else []
            yield schema


def _child(schema: Mapping[str, Any], step: int | str) -> Any:
    """The schema of one item of what the schema describes."""
    if isinstance(step, str):
        return schema.get("properties", {}).get(step, schema.get("additionalProperties"))
    first = schema.get("prefixItems", ())
    return first[step] if step < len(first) else schema.get("items")
