"""Spaces: Gymnasium's own contract, and that what they sample is what tools accept."""

from __future__ import annotations

import copy
import datetime
import enum
import ipaddress
import json
import pickle
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space, concatenate, create_empty_array, iterate
from gymnasium.vector.utils.shared_memory import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from pydantic import AnyUrl, AwareDatetime, BaseModel, Field, StringConstraints
from typing_extensions import TypedDict

from art_gym import ChatSpace, Tool, ToolCallSpace, call, calls, say
from art_gym._sampling import sample
from art_gym._schema import conforms
from art_gym._vector import SLOT_BYTES, ChatMemory, LiveObservations

NUMBER = {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 4}}, "required": ["number"]}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SPACES: dict[str, Callable[[], gymnasium.Space[Any]]] = {
    "chat": ChatSpace,
    "no tools": lambda: ToolCallSpace({}),
    "two tools": lambda: ToolCallSpace({"guess": NUMBER, "look": EMPTY}),
}


@pytest.fixture(params=SPACES.values(), ids=SPACES)
def make(request: pytest.FixtureRequest) -> Callable[[], gymnasium.Space[Any]]:
    return request.param  # type: ignore[no-any-return]


# What Gymnasium asks of a space.


def test_samples_are_contained_and_follow_the_seed(make: Callable[[], gymnasium.Space[Any]]) -> None:
    one, other = make(), make()
    one.seed(7)
    other.seed(7)
    samples = [one.sample() for _ in range(50)]
    assert samples == [other.sample() for _ in range(50)]
    assert all(sample in one for sample in samples)
    one.seed(8)
    assert samples != [one.sample() for _ in range(50)]


def test_round_trips(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
    again = pickle.loads(pickle.dumps(space))
    assert again == space == copy.deepcopy(space)
    assert again.sample() == space.sample()


def test_equality_and_repr(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    assert space == make()
    assert space != gymnasium.spaces.Discrete(2)
    assert repr(space).startswith(type(space).__name__)
    assert hash(space) == hash(make())
    assert not space.is_np_flattenable
    assert "nonsense" not in space
    assert None not in space


def test_tool_spaces_differ_by_tools_and_by_their_order() -> None:
    space = ToolCallSpace({"guess": NUMBER, "look": EMPTY})
    assert space != ToolCallSpace({"guess": NUMBER})
    assert space != ToolCallSpace({"look": EMPTY, "guess": NUMBER})
    assert space != ToolCallSpace({"guess": EMPTY, "look": EMPTY})


def test_a_space_does_not_share_the_schemas_it_is_given() -> None:
    schemas = {"guess": copy.deepcopy(NUMBER)}
    space = ToolCallSpace(schemas)
    schemas["guess"].clear()
    assert space.tools == {"guess": NUMBER}


# Masks.


def names(space: ToolCallSpace, count: int = 100, **options: Any) -> set[str]:
    actions: list[Any] = [space.sample(**options) for _ in range(count)]
    return {action["tool_calls"][0]["function"]["name"] for action in actions}


def test_masks_and_probabilities() -> None:
    space = ToolCallSpace({"a": EMPTY, "b": EMPTY, "c": EMPTY}, seed=0)
    assert names(space) == {"a", "b", "c"}
    assert names(space, mask=np.array([1, 0, 1], dtype=np.int8)) == {"a", "c"}
    assert names(space, mask={"b": True}) == {"b"}
    assert names(space, probability=np.array([0.5, 0.5, 0.0])) == {"a", "b"}
    assert names(space, probability={"c": 1.0}) == {"c"}
    nothing = space.sample(mask=np.zeros(3, dtype=np.int8))
    assert "tool_calls" not in nothing
    assert nothing in space


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mask": [1, 0]}, "one entry for each of the 3 tools"),
        ({"mask": [1, 0, 2]}, "0 and 1 only"),
        ({"mask": {"d": 1}}, "unknown tools: d"),
        ({"probability": [0.5, 0.1, 0.1]}, "add up to 1"),
        ({"probability": [1.5, -0.5, 0]}, "at least 0"),
        ({"mask": [1, 1, 1], "probability": [1, 0, 0]}, "not both"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_are_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ToolCallSpace({"a": EMPTY, "b": EMPTY, "c": EMPTY}).sample(**options)


def test_a_chat_space_has_nothing_to_mask() -> None:
    with pytest.raises(ValueError, match="neither mask nor probability"):
        ChatSpace().sample(mask=[1])


# Membership.


def written(arguments: Any, **changes: Any) -> Any:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "guess", "arguments": arguments}, **changes}],
    }


@pytest.mark.parametrize(
    "action",
    [
        call("guess", number=4),
        calls(("guess", {"number": 1}), ("look", {}), text="both"),
        say("hello"),
        {"role": "assistant", "content": ""},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": []},
        written('{"number": 2.0}'),
    ],
    ids=str,
)
def test_actions_in_the_space(action: Any) -> None:
    assert action in ToolCallSpace({"guess": NUMBER, "look": EMPTY})


@pytest.mark.parametrize(
    "action",
    [
        call("guess", number=5),
        call("guess", number="2"),
        call("guess", number=True),
        call("guess"),
        call("look", x=1),
        call("jump"),
        {"role": "user", "content": "hi"},
        {"content": "no role"},
        {"role": "assistant", "content": 3},
        {"role": "assistant", "content": None, "tool_calls": {}},
        written("{"),
        written('{"number": 1, "number": 2}'),
        written('{"number": NaN}'),
        written({"number": 1}),
        written('{"number": 1}', id=""),
        written('{"number": 1}', type="custom"),
        written('{"number": 1}', function=None),
        {"role": "assistant", "tool_calls": written('{"number": 1}')["tool_calls"] * 2},
        [],
        "guess",
        None,
    ],
    ids=str,
)
def test_actions_not_in_the_space(action: Any) -> None:
    assert action not in ToolCallSpace({"guess": NUMBER, "look": EMPTY})


@pytest.mark.parametrize(
    ("observation", "inside"),
    [
        ((), True),
        (({"role": "tool", "tool_call_id": "a", "content": "x"},), True),
        (({"role": "user", "content": [{"type": "text", "text": "x"}]},), True),
        ((call("a"),), True),
        (({"role": "tool", "content": "x"},), False),
        (({"role": "user", "content": None},), False),
        (({"role": "wizard", "content": "x"},), False),
        (({"role": "user", "content": "x", "tool_calls": [{}]},), False),
        ([{"role": "user", "content": "x"}], False),
        (({"role": ["user"], "content": "x"},), False),
    ],
    ids=str,
)
def test_observations(observation: Any, inside: bool) -> None:
    assert (observation in ChatSpace()) is inside


# Schemas: everything that pydantic generates can be sampled, and is accepted by the tool it came from.


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Suit(enum.Enum):
    HEARTS = "hearts"
    SPADES = "spades"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=2, max_length=4)]


class Tree(BaseModel):
    value: Annotated[int, Field(ge=0)]
    children: list[Tree] = []
    parent: Tree | None = None


class Chain(BaseModel):
    next: Chain | None


class Point(TypedDict):
    x: int
    y: float


@dataclass
class Span:
    start: int
    stop: int | None = None


TYPES: list[Any] = [
    int,
    float,
    bool,
    str,
    None,
    Any,
    object,
    Annotated[int, Field(gt=3, lt=5)],
    Annotated[int, Field(ge=10**30)],
    Annotated[int, Field(le=-7)],
    Annotated[int, Field(multiple_of=7, ge=100)],
    Annotated[float, Field(gt=0, lt=0.001)],
    Annotated[float, Field(ge=2, le=2)],
    Annotated[float, Field(multiple_of=0.5)],
    Annotated[str, Field(min_length=40)],
    Annotated[str, Field(max_length=0)],
    Annotated[str, StringConstraints(pattern=r"^[A-Z]{2}-\d{3}$")],
    Annotated[str, StringConstraints(pattern=r"^(foo|ba[rz])+\w?\s*$")],
    Annotated[str, StringConstraints(pattern=r"^[^@]+@[^@.]+\.com$", max_length=20)],
    Literal["a", 1, True, None],
    Colour,
    int | str | None,
    list[int],
    Annotated[list[int], Field(min_length=2, max_length=2)],
    set[int],
    Annotated[set[Literal[1, 2, 3]], Field(min_length=3)],
    frozenset[bool],
    tuple[int, str],
    tuple[int, ...],
    dict[str, int],
    Annotated[dict[str, bool], Field(min_length=2)],
    dict[Annotated[str, StringConstraints(pattern="^k[0-9]$")], int],
    dict[str, list[dict[str, float | None]]],
    Annotated[dict[int, str], Field(min_length=2)],
    Annotated[dict[Literal["a", "b"], int], Field(min_length=1)],
    Annotated[dict[Literal["a"] | Annotated[str, Field(min_length=9)], int], Field(min_length=1)],
    Annotated[dict[int | Literal["all"], int], Field(min_length=2)],
    Annotated[dict[datetime.date, int], Field(min_length=1)],
    Annotated[dict[Suit, int], Field(min_length=1)],
    Annotated[dict[Any, int], Field(min_length=1)],
    dict[int, dict[int, Chain]],
    Cat,
    Annotated[Cat | Dog, Field(discriminator="kind")],
    Tree,
    Chain,
    list[Tree],
    Point,
    Span,
    datetime.date,
    datetime.datetime,
    AwareDatetime,
    datetime.time,
    datetime.timedelta,
    Decimal,
    Annotated[Decimal, Field(ge=0, le=10)],
    Annotated[Decimal, Field(decimal_places=2)],
    uuid.UUID,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    AnyUrl,
]


@pytest.mark.parametrize("annotation", TYPES, ids=str)
def test_samples_of_each_type_are_accepted_by_the_tool(annotation: Any) -> None:
    def use(x: Any) -> None: ...

    tool = Tool.from_function(use, annotations={"x": annotation})
    space = ToolCallSpace({"use": tool.parameters}, seed=0)
    for _ in range(60):
        action: Any = space.sample()
        assert action in space
        tool.parse(action["tool_calls"][0]["function"]["arguments"])


def test_samples_reach_the_bounds_and_the_optional_parts() -> None:
    schema = {**NUMBER, "properties": {**NUMBER["properties"], "extra": {"type": "boolean"}}}  # type: ignore[dict-item]
    rng = np.random.default_rng(0)
    values = [sample(schema, schema, rng) for _ in range(200)]
    assert {value["number"] for value in values} == {1, 2, 3, 4}
    assert {value.get("extra") for value in values} == {None, True, False}


@pytest.mark.parametrize(
    "schema",
    [False, {"type": "integer", "minimum": 3, "maximum": 2}, {"enum": [1], "type": "string"}, {"$ref": "#/$defs/Gone"}],
    ids=str,
)
def test_a_schema_without_values_is_an_error(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"no value found|has no"):
        sample(schema, {}, np.random.default_rng(0))


def test_a_schema_that_needs_itself_is_an_error() -> None:
    root = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}}}
    with pytest.raises(ValueError, match="refers to itself"):
        sample(root, root, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": ["integer", "null"]}, [1, None, 2.0], [1.5, "1", True]),
        ({"const": 1}, [1, 1.0], [True, "1"]),
        ({"enum": [0, "a"]}, [0, "a"], [False, None]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [1, 0.1], [0, 1.1, float("nan"), True]),
        ({"type": "number", "multipleOf": 0.1}, [0.3, 1], [0.35]),
        ({"type": "string", "minLength": 1, "maxLength": 2, "pattern": "a"}, ["a", "ba"], ["", "b", "aaa"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "uniqueItems": True}, [[1], [1, 2]], [[], [1, 1], ["1"], [1, 1.0]]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1], []], [[1, 2], ["a"]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1}, [{}, {"a": 1}], [{"a": "b"}, {"a": 1, "b": 2}]),
        ({"type": "object", "propertyNames": {"pattern": "^k"}}, [{"k": 1}], [{"a": 1}]),
        (
            {"type": "object", "patternProperties": {"^k": {"type": "null"}}, "additionalProperties": False},
            [{"k": None}],
            [{"k": 1}, {"a": None}],
        ),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, [1, 5.5], [7, 1.5]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
        ({"not": {"type": "string"}}, [1], ["a"]),
        (True, [1, None], []),
        (False, [], [1, None]),
    ],
    ids=str,
)
def test_conformance(schema: Any, inside: list[Any], outside: list[Any]) -> None:
    assert [value for value in inside if not conforms(value, schema, {})] == []
    assert [value for value in outside if conforms(value, schema, {})] == []


# Batching.


def test_batching_as_vector_environments_do_it(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    space.seed(3)
    batched = batch_space(space, 3)
    batched.seed(4)
    assert len(batched.sample()) == 3
    items = [space.sample() for _ in range(3)]
    together = concatenate(space, items, create_empty_array(space, 3))
    assert together in batched
    assert list(iterate(batched, together)) == items
    different = batch_differing_spaces([space, make()])
    assert different.sample() in different
    assert is_space_dtype_shape_equiv(space, make())
    assert not is_space_dtype_shape_equiv(space, gymnasium.spaces.Discrete(2))


def test_shared_memory_carries_observations_of_any_size() -> None:
    space = ChatSpace()
    memory = create_shared_memory(space, n=2)
    assert isinstance(memory, ChatMemory)
    live = read_from_shared_memory(space, memory, n=2)
    assert isinstance(live, LiveObservations)
    assert copy.deepcopy(live) == ((), ())
    long: Any = ({"role": "user", "content": "é\ud800" * 300_000},)
    write_to_shared_memory(space, 1, long, memory)
    assert copy.deepcopy(live) == ((), long)
    short: Any = ({"role": "user", "content": "x"},)
    write_to_shared_memory(space, 1, short, memory)
    write_to_shared_memory(space, 0, long, memory)
    assert tuple(live) == (long, short)
    assert (live[1], len(live)) == (short, 2)


def test_an_observation_too_large_for_shared_memory_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        ChatMemory(1).write(0, ({"role": "user", "content": "x" * SLOT_BYTES},))
