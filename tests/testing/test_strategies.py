from __future__ import annotations

import copy
import enum
import json
import uuid
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Network
from typing import Annotated, Any, Literal

import gymnasium
import pytest
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter
from typing_extensions import TypedDict

from art_gym import Scenario, ToolCallSpace, ToolEnv, tool
from art_gym._schema import conforms
from art_gym.testing import actions, broken_actions, json_values, scenarios
from art_gym.testing.strategies import _NO_MESSAGES
from art_gym.tools import Tool

FEW = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
SPACE = ToolCallSpace(
    {
        "guess": {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["number"]},
        "look": {"type": "object", "properties": {}, "additionalProperties": False},
    }
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(BaseModel):
    """A tree."""

    value: Annotated[int, Field(ge=0, lt=10, multiple_of=3)]
    children: list[Node] = []
    parent: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=2, max_length=4)]


class Point(TypedDict):
    x: float
    y: float


TYPES: dict[str, Any] = {
    "bool": bool,
    "integer": int,
    "bounded integer": Annotated[int, Field(gt=3, le=5)],
    "multiple": Annotated[int, Field(multiple_of=7, ge=-20)],
    "number": float,
    "bounded number": Annotated[float, Field(gt=0, lt=1)],
    "decimal": Annotated[Decimal, Field(decimal_places=2, ge=0)],
    "text": str,
    "short text": Annotated[str, Field(min_length=2, max_length=3)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}\d{3}$")],
    "pattern and length": Annotated[str, Field(pattern=r"^a+$", max_length=4)],
    "literal": Literal["a", 1, True],
    "enum": Colour,
    "optional": int | None,
    "union": int | str | list[int],
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list": Annotated[list[int], Field(min_length=1, max_length=3)],
    "tuple": tuple[int, str, bool],
    "set": set[Literal["a", "b", "c"]],
    "dict": dict[str, int],
    "dict of patterns": dict[Annotated[str, Field(pattern="^x")], int],
    "bounded dict": Annotated[dict[str, int], Field(min_length=2, max_length=3)],
    "typed dict": Point,
    "recursive": Node,
    "recursive list": list[Node],
    "date": date,
    "moment": datetime,
    "time": time,
    "duration": timedelta,
    "uuid": uuid.UUID,
    "url": AnyUrl,
    "address": IPv4Address,
    "network": IPv6Network,
    "anything": Any,
}


@pytest.mark.parametrize("name", TYPES)
def test_values_conform_and_pydantic_takes_them(name):
    adapter = TypeAdapter(TYPES[name])
    schema = adapter.json_schema()

    @FEW
    @given(json_values(schema))
    def check(value: Any) -> None:
        assert conforms(value, schema, schema)
        assert json.loads(json.dumps(value, allow_nan=False)) == value
        adapter.validate_json(json.dumps(value))

    if name != "decimal":  # whose schema also allows text that pydantic then refuses; tools describe it as a number
        check()


def test_a_tools_own_schema_is_met_too():
    def take(price: Annotated[Decimal, Field(decimal_places=2, ge=0)], keys: dict[int, str], place: Node) -> None: ...

    taker = Tool.from_function(take)

    @FEW
    @given(json_values(taker.parameters))
    def check(value: Any) -> None:
        assert set(taker.parse(json.dumps(value))) == {"price", "keys", "place"}

    check()


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"const": {"a": [1]}},
        {"enum": [1, "a", None]},
        {"type": ["integer", "null"]},
        {"type": "integer", "not": {"enum": [0, 1]}},
        {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
        {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 1}}},
        {"type": "array", "items": {"type": "integer", "maximum": 3, "minimum": 0}, "uniqueItems": True, "minItems": 2},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}, "maxItems": 3},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 1},
        {"type": "object", "required": ["a"], "additionalProperties": {"type": "boolean"}},
        {"type": "object", "patternProperties": {"^a[0-9]$": {"type": "integer"}}, "additionalProperties": False, "minProperties": 2},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}, "minProperties": 1},
        {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1},
        {"minLength": 3},
    ],
    ids=str,
)
def test_each_keyword_is_kept(schema):
    @FEW
    @given(json_values(schema))
    def check(value: Any) -> None:
        assert conforms(value, schema, schema if isinstance(schema, dict) else {})

    check()


@pytest.mark.parametrize(
    "schema", [False, {"type": "integer", "minimum": 3, "maximum": 2}, {"enum": []}, {"type": "string", "minLength": 3, "maxLength": 1}]
)
def test_a_schema_that_allows_nothing_says_so(schema):
    @settings(max_examples=1, database=None)
    @given(json_values(schema))
    def check(value: Any) -> None: ...

    with pytest.raises(Unsatisfiable):
        check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "string"}, 100),
        ({"type": "string", "minLength": 90}, 100),
        ({"type": "string", "minLength": 150}, 150),
        ({"type": "string", "minLength": 3, "maxLength": 120}, 100),
        ({"type": "string", "maxLength": 5}, 5),
        ({"type": "string", "maxLength": 10**6}, 100),
        ({"type": "string", "pattern": "^a+$"}, 100),
        ({"type": "string", "pattern": "b"}, 100),
        ({"type": "string", "pattern": "^a+$", "maxLength": 7}, 7),
        ({"type": "string", "pattern": "^(a{30}b){5}$"}, 155),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, 100),
        ({"type": "object", "patternProperties": {"^x": True}, "additionalProperties": False, "minProperties": 1}, 100),
    ],
    ids=str,
)
def test_texts_are_no_longer_than_worth_a_try(schema, most):
    @settings(FEW, max_examples=150)
    @given(json_values(schema))
    def check(value: Any) -> None:
        longest = max(map(len, value), default=0) if isinstance(value, dict) else len(value)
        assert longest <= most
        target(float(longest))  # without a limit they would grow

    check()


def test_references_are_looked_up_in_the_document_given():
    @FEW
    @given(json_values({"$ref": "#/$defs/a"}, {"$defs": {"a": {"const": 3}}}))
    def check(value: Any) -> None:
        assert value == 3

    check()


def test_words_are_tried_as_texts_and_integers():
    seen: set[Any] = set()

    @settings(max_examples=200, database=None)
    @given(json_values({"type": "string"}, words=["B17", "123456"]), json_values({"type": "integer"}, words=["B17", "123456"]))
    def check(text: str, number: int) -> None:
        seen.update((text, number))

    check()
    assert {"B17", "123456", 123456} <= seen


def test_actions_are_in_the_space_and_of_every_shape():
    shapes = set()

    @settings(max_examples=300, database=None)
    @given(actions(SPACE))
    def check(action: Any) -> None:
        assert action in SPACE
        shapes.add((len(action.get("tool_calls") or ()) > 1, action.get("content") is not None, "tool_calls" in action))

    check()
    assert shapes == {
        (False, False, True), (True, False, True), (False, True, True), (True, True, True), (False, True, False), (False, False, False),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("space", [SPACE, ToolCallSpace({})], ids=["tools", "no tools"])
def test_actions_are_as_bare_as_models_write_them(space):
    empty = [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "assistant", "content": None, "tool_calls": []}]
    seen: list[Any] = []

    @settings(max_examples=500, database=None)
    @given(actions(space))
    def check(action: Any) -> None:
        assert action in space
        seen.append(copy.deepcopy(action))
        action.clear()  # the caller's to change

    check()
    assert [action for action in empty if action not in seen] == []
    assert any("\ud800" in (action.get("content") or "") for action in seen)
    assert any(action.get("content") == "" for action in seen)
    written = {call["function"]["arguments"] for action in seen for call in action.get("tool_calls", ()) if call["function"]["name"] == "look"}
    assert written == ({"{}", "", " ", "null"} if space.tools else set())


@pytest.mark.parametrize("action", _NO_MESSAGES, ids=repr)
def test_what_is_no_message_is_in_no_space(action):
    assert action not in SPACE
    assert action not in ToolCallSpace({})


def test_actions_carry_ids_of_several_styles():
    ids = set()

    @settings(max_examples=200, database=None)
    @given(actions(SPACE))
    def check(action: Any) -> None:
        ids.update(call["id"] for call in action.get("tool_calls", ()))

    check()
    assert {"call_0", "0", "chatcmpl-tool-0f"} <= ids


def test_where_there_are_no_tools_actions_are_texts():
    space = ToolCallSpace({})

    @FEW
    @given(actions(space))
    def check(action: Any) -> None:
        assert action in space
        assert not action.get("tool_calls")

    check()


@pytest.mark.slow
def test_broken_actions_are_outside_of_the_space_and_of_many_kinds():
    kinds = set()

    @settings(max_examples=500, database=None)
    @given(broken_actions(SPACE))
    def check(action: Any) -> None:
        assert action not in SPACE
        calls = action.get("tool_calls") if isinstance(action, dict) else None
        if not isinstance(action, dict):
            kinds.add("no message")
        elif action.get("role") != "assistant":
            kinds.add("role")
        elif not isinstance(calls, list):
            kinds.add("no calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(call, dict) or not isinstance(function, dict):
                kinds.add("no call")
            elif not call.get("id"):
                kinds.add("no id")
            elif function.get("name") not in ("guess", "look"):
                kinds.add("name")
            elif not isinstance(function.get("arguments"), str):
                kinds.add("arguments that are no text")
            else:
                kinds.add("arguments" if not _is_json(function["arguments"]) else "call")

    check()
    assert kinds == {
        "no message", "role", "no calls", "no call", "no id", "name", "arguments that are no text", "arguments", "call",
    }  # fmt: skip


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def test_a_broken_call_stands_among_well_formed_ones():
    mixed = set()

    @settings(max_examples=300, database=None)
    @given(broken_actions(SPACE))
    def check(action: Any) -> None:
        calls = action.get("tool_calls") if isinstance(action, dict) else None
        if isinstance(calls, list) and len(calls) > 1:
            fits = [{"role": "assistant", "content": None, "tool_calls": [call]} in SPACE for call in calls]
            mixed.add((any(fits), all(fits)))

    check()
    # All fit where only their ids are the same.
    assert {(True, False), (False, False), (True, True)} <= mixed


def test_what_is_drawn_is_the_callers_to_change():
    @settings(max_examples=200, database=None)
    @given(broken_actions(ToolCallSpace({})))
    def check(action: Any) -> None:
        before = copy.deepcopy(action)
        if isinstance(action, dict | list):
            action.clear()
        assert before not in ToolCallSpace({})

    check()
    check()


def test_other_spaces_are_sampled_and_nothing_of_them_is_broken():
    space = gymnasium.spaces.Discrete(3)

    @FEW
    @given(actions(space))
    def check(action: Any) -> None:
        assert action in space

    check()
    assert broken_actions(space).is_empty


class Finite(ToolEnv):
    """Two scenarios in a split, none in another."""

    def scenarios(self, split, count=None):
        return iter([Scenario("a", 1, {"x": 1}), Scenario("b", 2)] if split == "train" else [])

    @tool
    def look(self) -> str:
        """Look."""
        return "nothing"


def drawn(strategy: st.SearchStrategy[Any]) -> list[Any]:
    values = []

    @settings(max_examples=50, database=None)
    @given(strategy)
    def draw(value: Any) -> None:
        values.append(value)

    draw()
    return values


def test_scenarios_are_those_of_the_split():
    assert {scenario.id for scenario in drawn(scenarios(Finite()))} == {"a", "b"}


def test_a_split_without_scenarios_is_refused():
    with pytest.raises(ValueError, match=r"scenarios\('test'\) yields none"):
        scenarios(Finite(), "test")


def test_an_environment_without_scenarios_starts_from_seeds():
    env = gymnasium.make("CartPole-v1")
    found = drawn(scenarios(env))
    assert len({scenario.seed for scenario in found}) > 5
    assert all(scenario.options == {} for scenario in found)
