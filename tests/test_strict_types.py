"""Types that are strict in pydantic's sense: arguments are JSON, so a strict date is written as text and a strict tuple as a list."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, Strict
from typing_extensions import TypedDict  # before Python 3.12

from art_gym import Tool, ToolCallSpace, ToolError


class Colour(enum.Enum):
    RED = "red"


class Inner(BaseModel):
    day: datetime.date


class Visit(BaseModel):
    model_config = ConfigDict(strict=True)

    day: datetime.date
    pair: tuple[int, str] = (1, "a")
    inner: Inner | None = None
    nights: int = 1


@pydantic.dataclasses.dataclass(config=ConfigDict(strict=True))
class Span:
    start: datetime.time
    colour: Colour = Colour.RED


class Point(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    at: datetime.datetime


@dataclass
class Plain:
    day: Annotated[datetime.date, Field(strict=True)]


class Lax(BaseModel):
    """With fields whose names are those of pydantic's own options."""

    strict: int
    default: Annotated[datetime.date, Strict()]


DAY = datetime.date(2024, 1, 1)

TYPES: dict[str, tuple[Any, Any, Any]] = {
    # name: annotation, a value as JSON, the value
    "date": (Annotated[datetime.date, Field(strict=True)], "2024-01-01", DAY),
    "optional date": (Annotated[datetime.date | None, Strict()], "2024-01-01", DAY),
    "list of dates": (list[Annotated[datetime.date, Strict()]], ["2024-01-01"], [DAY]),
    "date within limits": (Annotated[datetime.date, Field(strict=True, ge=DAY)], "2024-01-01", DAY),
    "datetime": (Annotated[datetime.datetime, Strict()], "2024-01-01T10:00:00", datetime.datetime(2024, 1, 1, 10)),
    "time": (Annotated[datetime.time, Strict()], "10:00:00", datetime.time(10)),
    "timedelta": (Annotated[datetime.timedelta, Strict()], "PT90S", datetime.timedelta(seconds=90)),
    "UUID": (Annotated[uuid.UUID, Strict()], str(uuid.UUID(int=7)), uuid.UUID(int=7)),
    "Decimal": (Annotated[Decimal, Strict()], 1.5, Decimal("1.5")),
    "enum": (Annotated[Colour, Strict()], "red", Colour.RED),
    "tuple": (Annotated[tuple[int, str], Strict()], [1, "a"], (1, "a")),
    "set": (Annotated[set[int], Strict()], [1, 2], {1, 2}),
    "frozenset": (Annotated[frozenset[int], Strict()], [1], frozenset({1})),
    "deque": (Annotated[collections.deque[int], Strict()], [1], collections.deque([1])),
    "dict": (Annotated[dict[str, int], Strict()], {"a": 1}, {"a": 1}),
    "int": (pydantic.StrictInt, 1, 1),
    "str": (pydantic.StrictStr, "1", "1"),
    "model": (Visit, {"day": "2024-01-01", "inner": {"day": "2024-01-01"}}, Visit(day=DAY, inner=Inner(day=DAY))),
    "list of models": (list[Visit], [{"day": "2024-01-01", "pair": [2, "b"]}], [Visit(day=DAY, pair=(2, "b"))]),
    "model made strict": (Annotated[Inner, Field(strict=True)], {"day": "2024-01-01"}, Inner(day=DAY)),
    "dataclass": (Span, {"start": "10:00:00", "colour": "red"}, Span(start=datetime.time(10))),
    "TypedDict": (Point, {"at": "2024-01-01T10:00:00"}, {"at": datetime.datetime(2024, 1, 1, 10)}),
    "field of a dataclass": (Plain, {"day": "2024-01-01"}, Plain(DAY)),
    "field of a model": (Lax, {"strict": "3", "default": "2024-01-01"}, Lax(strict=3, default=DAY)),
    "union": (Visit | Literal["none"], {"day": "2024-01-01"}, Visit(day=DAY)),
    "default": (Annotated[datetime.date, Field(strict=True, default=DAY)], "2024-01-01", DAY),
}

each = pytest.mark.parametrize("name", TYPES)


def make(annotation: Any) -> Tool:
    def use(x): ...  # type: ignore[no-untyped-def]

    return Tool.from_function(use, annotations={"x": annotation})


@each
def test_a_value_in_json_arrives_as_the_strict_type(name: str) -> None:
    annotation, written, value = TYPES[name]
    for arguments in (json.dumps({"x": written}), {"x": written}):
        assert make(annotation).parse(arguments) == {"x": value}


@each
def test_what_a_space_draws_is_what_the_tool_takes(name: str) -> None:
    derived = make(TYPES[name][0])
    space = ToolCallSpace({"use": derived.parameters}, seed=0)
    for _ in range(20):
        action: Any = space.sample()
        derived.parse(action["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(
    ("annotation", "written", "text"),
    [
        (pydantic.StrictInt, "1", "'x' should be a valid integer, got '1'"),
        (Visit, {"day": "2024-01-01", "nights": "2"}, "'x.nights' should be a valid integer, got '2'"),
        (Annotated[datetime.date, Strict()], 3, "'x' should be a valid date, got 3"),
        (Visit, {"day": "soon"}, "'x.day' should be a valid date in the format YYYY-MM-DD, input is too short, got 'soon'"),
        (Visit, [], "'x' should be an object, got a list"),
    ],
    ids=str,
)
def test_what_is_wrong_is_told_as_ever(annotation: Any, written: Any, text: str) -> None:
    with pytest.raises(ToolError) as caught:
        make(annotation).parse({"x": written})
    assert str(caught.value) == f"invalid arguments: {text}"


def test_null_still_stands_for_not_given() -> None:
    assert make(Visit).parse({"x": {"day": "2024-01-01", "nights": None}}) == {"x": Visit(day=DAY)}


def test_what_is_not_strict_is_converted_beside_what_is() -> None:
    def use(day: Annotated[datetime.date, Strict()], count: int = 0) -> None: ...

    assert Tool.from_function(use).parse({"day": "2024-01-01", "count": "2"}) == {"day": DAY, "count": 2}
