"""Numbers that are written as text: like those written as numbers, they are refused beyond what a tool can reckon with, wherever they stand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import BaseModel, Field, Json

from art_gym import Tool, ToolEnv, ToolError, call, tool

NINES = "9" * 400


class Number(BaseModel):
    value: int | float
    top: float = math.inf


class Open(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, int]


@dataclass(slots=True)
class Span:
    start: int
    stop: float = math.inf


class Pair(NamedTuple):
    left: float
    right: int


def make(annotation: Any) -> Tool:
    def use(x): ...  # type: ignore[no-untyped-def]

    return Tool.from_function(use, annotations={"x": annotation})


@pytest.mark.parametrize(
    ("annotation", "written", "where"),
    [
        *((kind, number, "x") for kind in (int, float, int | None, int | float, Literal[1, 2] | int) for number in (NINES, f"-{NINES}")),
        (int, "9" * 309, "x"),
        (int, f"1_{'0' * 400}", "x"),
        (int, f" {NINES}.0 ", "x"),
        (Annotated[int, Field(ge=1)], NINES, "x"),
        (Annotated[int | None, Field(ge=1)], NINES, "x"),
        (float, "1e400", "x"),
        (float, "nan", "x"),
        (Json[int], NINES, "x"),
        (Decimal, NINES, "x"),
        (Decimal, "1e999999999", "x"),
        (Decimal, "NaN", "x"),
        (list[int], ["1", NINES], "x[1]"),
        (set[int], [NINES], "x[0]"),
        (tuple[int, float], [1, "inf"], "x[1]"),
        (dict[str, int], {"a": NINES}, "x.a"),
        (dict[int, int], {NINES: 1}, "x"),
        (Number, {"value": NINES}, "x.value"),
        (list[Number], [{"value": "inf"}], "x[0].value"),
        (Number, {"value": 1, "top": "Infinity"}, "x.top"),
        (Open, {"other": NINES}, "x.other"),
        (Span, {"start": NINES}, "x.start"),
        (Span, {"start": 1, "stop": "-inf"}, "x.stop"),
        (Pair, ["nan", 1], "x[0]"),
    ],
    ids=str,
)
def test_a_number_beyond_the_floats_is_refused(annotation: Any, written: Any, where: str) -> None:
    arguments = json.dumps({"x": written})
    with pytest.raises(ToolError) as caught:
        make(annotation).parse(arguments)
    assert str(caught.value).startswith(f"invalid arguments: '{where}")
    assert "\n" not in str(caught.value)
    assert "finite" in str(caught.value) or "should be" in str(caught.value)
    with pytest.raises(ToolError):
        make(annotation).parse({"x": written})


def test_thousands_of_digits_are_refused() -> None:
    for digits in (4_301, 100_000):
        with pytest.raises(ToolError, match="'x' "):
            make(int).parse({"x": "9" * digits})


@pytest.mark.parametrize(
    ("annotation", "written", "value"),
    [
        (int, "9" * 308, int("9" * 308)),
        (float, "1e308", 1e308),
        (str, NINES, NINES),
        (Decimal, "1e307", Decimal("1e307")),
        (Decimal, "1e-400", Decimal("1e-400")),
        (list[str], [NINES], [NINES]),
        (int | str, NINES, NINES),
        (Number, {"value": 1}, Number(value=1)),
        (Span, {"start": 1}, Span(1)),
    ],
    ids=str,
)
def test_whatever_is_no_such_number_is_taken(annotation: Any, written: Any, value: Any) -> None:
    assert make(annotation).parse({"x": written}) == {"x": value}


def test_a_default_may_be_infinite_and_is_not_shown() -> None:
    def use(n: Number, x: float = math.inf) -> None: ...

    derived = Tool.from_function(use)
    assert derived.parse('{"n": {"value": 1}}') == {"n": Number(value=1), "x": math.inf}
    json.dumps(derived.schema, allow_nan=False)
    assert derived.parameters["required"] == ["n"]


def test_the_model_is_told() -> None:
    class Adder(ToolEnv):
        @tool
        def half(self, x: int) -> str:
            return str(x / 2)

    env = Adder()
    env.reset()
    observation, *_, info = env.step(call("half", x=NINES))
    assert observation[0]["content"] == "invalid arguments: 'x' should be a finite number of at most 308 digits"
    assert info["invalid_calls"] == 1
