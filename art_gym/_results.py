"""A tool's result, as the model is told it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from art_gym._actions import printable

_PARTS: dict[Any, type] = {"text": str, "image_url": dict, "input_audio": dict, "file": dict}
"""The kinds of content parts, and what a part of each kind holds under its kind's name."""

_ATOMS = frozenset({str, int, float, bool, type(None)})


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
        plain = to_jsonable_python(result if _is_plain(result) else _ordered(result, set()), inf_nan_mode="constants", fallback=_mapping)
        text = printable(json.dumps(plain, ensure_ascii=False))
        are_parts = isinstance(result, list) and result and all(_is_content_part(part) for part in plain)
        return cast("list[dict[str, Any]]", json.loads(text)) if are_parts else text
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"tool '{tool_name}' returned {type(result).__name__}, which has no JSON form: {error}") from error


def _is_content_part(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in _PARTS and isinstance(part.get(kind), _PARTS[kind])


def _mapping(value: Any) -> Any:
    """Write what pydantic doesn't know.

    Raises:
        TypeError: It is no mapping.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds {type(value).__name__}, an unknown type")


def _is_plain(value: Any) -> bool:
    """Whether the value is of JSON's own types all through, as most results are, so that there is nothing to sort."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is not dict and kind is not list:
        return False
    for item in value.values() if kind is dict else value:  # noqa: SIM110  half the time of `all`
        if type(item) not in _ATOMS and not _is_plain(item):
            return False
    return True


class _SortedSet(set[Any]):
    """A set with an order, which serialisers take for the set that it stands for."""

    def __init__(self, members: Iterable[Any], items: Iterable[Any] | None = None) -> None:
        super().__init__(members)
        self._items = [*(set.__iter__(self) if items is None else items)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class _SortedFrozenSet(frozenset[Any]):
    """A frozen set with an order."""

    _items: list[Any]

    def __new__(cls, members: Iterable[Any], items: Iterable[Any] | None = None) -> _SortedFrozenSet:
        new = super().__new__(cls, members)
        new._items = [*(frozenset.__iter__(new) if items is None else items)]
        return new

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _ordered(value: Any, above: set[int]) -> Any:
    """Sort the sets in the value: their own order differs between processes. What holds none is returned as it is, and nothing is changed.

    Args:
        value: Anything.
        above: The ids of what holds the value: a model may hold itself in a field that isn't written.
    """
    if type(value) in _ATOMS or id(value) in above:
        return value
    above.add(id(value))
    try:
        return _ordered_parts(value, above)
    finally:
        above.discard(id(value))


def _ordered_parts(value: Any, above: set[int]) -> Any:
    if isinstance(value, set | frozenset):
        items = sorted((_ordered(item, above) for item in value), key=_rank)
        return _SortedFrozenSet(value, items) if isinstance(value, frozenset) else _SortedSet(value, items)
    if isinstance(value, list | tuple | deque):
        items = [_ordered(item, above) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple):
            return tuple.__new__(type(value), items)
        return deque(items) if isinstance(value, deque) else items
    if type(value) is dict:
        changes = _changes(value, above)
        return {**value, **changes} if changes else value
    if isinstance(value, BaseModel):
        return _ordered_model(value, above)
    if isinstance(value, Mapping):
        changes = _changes(value, above)
        if changes:
            mapping = copy.copy(value) if isinstance(value, dict) else dict(value)
            mapping.update(changes)
            return mapping
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = _changes({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}, above)
        if changes:
            made = copy.copy(value)
            for name, item in changes.items():
                object.__setattr__(made, name, item)
            return made
    return value


def _ordered_model(value: BaseModel, above: set[int]) -> BaseModel:
    changes = _changes(value.__dict__, above)
    extra = _changes(value.__pydantic_extra__ or {}, above)
    if not changes and not extra:
        return value
    model = copy.copy(value)
    model.__dict__.update(changes)
    if model.__pydantic_extra__ is not None:
        model.__pydantic_extra__.update(extra)
    return model


def _changes(items: Mapping[Any, Any], above: set[int]) -> dict[Any, Any]:
    """Return those of the items that hold sets, with the sets sorted."""
    return {name: new for name, old in items.items() if (new := _ordered(old, above)) is not old}


def _rank(item: Any) -> str:
    """Return by what an item of a set is sorted: its JSON form, or where only a serialiser of the author's knows one, its `repr`."""
    try:
        return json.dumps(to_jsonable_python(item, fallback=repr), sort_keys=True)
    except (PydanticSerializationError, ValueError, TypeError):
        return repr(item)
