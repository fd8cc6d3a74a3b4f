"""Spaces: Gymnasium's own contract, and that what they sample is what tools accept."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import ipaddress
import itertools
import json
import multiprocessing
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces.utils import flatdim, flatten, flatten_space, is_space_dtype_shape_equiv, unflatten
from gymnasium.utils import seeding
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector.utils import batch_differing_spaces, batch_space, concatenate, create_empty_array, iterate
from gymnasium.vector.utils.shared_memory import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from pydantic import (
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    JsonValue,
    NegativeFloat,
    PositiveInt,
    RootModel,
    SecretStr,
    StrictInt,
    StringConstraints,
)
from typing_extensions import TypedDict

from art_gym import ChatSpace, Tool, ToolCallSpace, call, calls, say
from art_gym._regex import random_match
from art_gym._sampling import sample
from art_gym._schema import conforms
from art_gym._schema import pattern as compiled
from art_gym._vector import SLOT_BYTES, ChatMemory, LiveObservations

NUMBER = {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 4}}, "required": ["number"]}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NESTED = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/Tree"}, "names": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2}$"}}},
    "required": ["tree"],
    "$defs": {"Tree": {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}},
}
SPACES: dict[str, Callable[[], gymnasium.Space[Any]]] = {
    "chat": ChatSpace,
    "no tools": lambda: ToolCallSpace({}),
    "one tool": lambda: ToolCallSpace({"guess": NUMBER}),
    "two tools": lambda: ToolCallSpace({"guess": NUMBER, "look": EMPTY}),
    "two tools, turned": lambda: ToolCallSpace({"look": EMPTY, "guess": NUMBER}),
    "nested": lambda: ToolCallSpace({"plant": NESTED}),
}


@pytest.fixture(params=SPACES.values(), ids=SPACES)
def make(request: pytest.FixtureRequest) -> Callable[[], gymnasium.Space[Any]]:
    return request.param  # type: ignore[no-any-return]


# What Gymnasium's own tests ask of every space.


def test_samples_survive_json(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    space.seed(1)
    samples = [space.sample() for _ in range(5)]
    again = space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples))))
    assert all(data_equivalence(one, other, exact=True) for one, other in zip(samples, again, strict=True))


def test_json_shares_nothing_with_the_samples(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    samples = [space.sample()]
    expected = copy.deepcopy(samples)
    written = space.to_jsonable(samples)
    read = space.from_jsonable(written)
    for message in (*written, *read):
        (message[0] if isinstance(message, list | tuple) else message)["content"] = "changed"
    assert samples == expected


def test_a_space_equals_its_like(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    assert space == make() == copy.deepcopy(space)
    assert hash(space) == hash(make())
    # The seed is no part of it.
    space.seed(5)
    assert space == make()


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(SPACES, 2)))
def test_spaces_differ(one: str, other: str) -> None:
    assert SPACES[one]() != SPACES[other]()


@pytest.mark.parametrize("other", [gymnasium.spaces.Discrete(2), None, "ChatSpace()", {}], ids=str)
def test_a_space_differs_from_anything_else(make: Callable[[], gymnasium.Space[Any]], other: Any) -> None:
    assert make() != other


def test_a_seed_makes_samples_repeatable(make: Callable[[], gymnasium.Space[Any]]) -> None:
    one = make()
    other = copy.deepcopy(one)
    for seed in range(5):
        assert one.seed(seed) == other.seed(seed)
        assert [one.sample() for _ in range(10)] == [other.sample() for _ in range(10)]
    assert one.seed(123) != other.seed(456)
    assert [one.sample() for _ in range(50)] != [other.sample() for _ in range(50)]


@pytest.mark.parametrize("first", [None, 123])
def test_what_seed_returns_seeds_the_same_again(make: Callable[[], gymnasium.Space[Any]], first: int | None) -> None:
    space = make()
    seed = space.seed(first)
    samples = [space.sample() for _ in range(5)]
    assert space.seed(seed) == seed
    assert [space.sample() for _ in range(5)] == samples


def test_what_is_no_seed_is_refused(make: Callable[[], gymnasium.Space[Any]]) -> None:
    with pytest.raises((ValueError, TypeError, gymnasium.error.Error)):
        make().seed("abc")  # type: ignore[arg-type]  # that it isn't allowed is the point


def test_a_generator_is_taken_as_it_is() -> None:
    generator, _ = seeding.np_random(123)
    assert ChatSpace(seed=generator).np_random is generator
    assert ToolCallSpace({"guess": NUMBER}, seed=generator).np_random is generator
    assert ChatSpace(seed=123).sample() == ChatSpace(seed=123).sample()


def test_samples_are_contained(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    space.seed(0)
    for _ in range(50):
        drawn = space.sample()
        assert drawn in space
        assert space.contains(drawn) is True


@pytest.mark.parametrize("other", SPACES)
def test_samples_of_other_spaces_are_contained_or_not(make: Callable[[], gymnasium.Space[Any]], other: str) -> None:
    assert isinstance(make().contains(SPACES[other]().sample()), bool)


@pytest.mark.parametrize(
    "odd",
    [None, 3, 0.5, "nonsense", b"bytes", (), [], {}, {"role": "assistant"}, ({},), (None,), np.zeros(3), np.int64(1), object(), float("nan")],
)
def test_whatever_is_asked_for_is_contained_or_not(make: Callable[[], gymnasium.Space[Any]], odd: Any) -> None:
    assert isinstance(make().contains(odd), bool)


def test_the_repr_names_the_class_and_the_tools(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    assert repr(space).startswith(f"{type(space).__name__}(")
    assert all(name in repr(space) for name in getattr(space, "tools", ()))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_space_goes_on_with_the_same_samples(make: Callable[[], gymnasium.Space[Any]], protocol: int, tmp_path: Path) -> None:
    space = make()
    space.seed(0)
    space.sample()
    file = tmp_path / "space.pickle"
    file.write_bytes(pickle.dumps(space, protocol))
    again = pickle.loads(file.read_bytes())
    assert again == space
    assert [again.sample() for _ in range(5)] == [space.sample() for _ in range(5)]


def test_it_has_no_flat_form(make: Callable[[], gymnasium.Space[Any]]) -> None:
    space = make()
    assert not space.is_np_flattenable
    with pytest.raises(ValueError, match="cannot be flattened"):
        flatdim(space)


def test_it_stays_as_it_is_where_a_space_around_it_is_flattened(make: Callable[[], gymnasium.Space[Any]]) -> None:
    around = gymnasium.spaces.Dict({"inner": make(), "number": gymnasium.spaces.Discrete(3)}, seed=0)
    drawn = around.sample()
    flat = flatten(around, drawn)
    assert flat in flatten_space(around)
    assert flat["inner"] == drawn["inner"]  # type: ignore[call-overload,index]  # a mapping, since it can't become an array
    assert unflatten(around, flat) == drawn


def test_tool_spaces_differ_by_tools_and_by_their_order() -> None:
    space = ToolCallSpace({"guess": NUMBER, "look": EMPTY})
    assert space != ToolCallSpace({"guess": NUMBER})
    assert space != ToolCallSpace({"look": EMPTY, "guess": NUMBER})
    assert space != ToolCallSpace({"guess": EMPTY, "look": EMPTY})


def test_true_and_1_make_different_schemas() -> None:
    assert ToolCallSpace({"a": {"const": 1}}) != ToolCallSpace({"a": {"const": True}})


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


# The sum of squared deviations, each divided by the expected count, that chance exceeds once in a thousand times: from printed tables of the
# chi-squared distribution, by degrees of freedom.
CHI_SQUARED = {1: 10.828, 2: 13.816, 3: 16.266}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": 250, "b": 250, "c": 250, "d": 250}),
        ({"mask": [1, 1, 0, 1]}, {"a": 1000 / 3, "b": 1000 / 3, "d": 1000 / 3}),
        ({"mask": {"b": 1, "c": True}}, {"b": 500, "c": 500}),
        ({"probability": [0.1, 0.2, 0.3, 0.4]}, {"a": 100, "b": 200, "c": 300, "d": 400}),
        ({"probability": {"a": 0.25, "d": 0.75}}, {"a": 250, "d": 750}),
    ],
    ids=str,
)
def test_tools_are_drawn_as_often_as_they_should(options: Any, expected: dict[str, float]) -> None:
    space = ToolCallSpace(dict.fromkeys("abcd", EMPTY), seed=0)
    drawn: list[Any] = [space.sample(**options) for _ in range(1000)]
    counts = collections.Counter(action["tool_calls"][0]["function"]["name"] for action in drawn)
    assert counts.keys() == expected.keys()
    assert sum((counts[name] - count) ** 2 / count for name, count in expected.items()) < CHI_SQUARED[len(expected) - 1]


def test_integers_are_drawn_evenly() -> None:
    rng = np.random.default_rng(0)
    counts = collections.Counter(sample({"type": "integer", "minimum": 1, "maximum": 4}, {}, rng) for _ in range(1000))
    assert counts.keys() == {1, 2, 3, 4}
    assert sum((count - 250) ** 2 / 250 for count in counts.values()) < CHI_SQUARED[3]


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


def test_integers_beyond_the_floats_are_contained_or_not() -> None:
    space = ToolCallSpace({"guess": {"type": "object", "properties": {"number": {"type": "number", "multipleOf": 0.5}}}})
    for zeros in (1, 307, 308, 309, 400, 4299, 5000):
        assert (written(f'{{"number": 1{"0" * zeros}}}') in space) is (zeros <= 308)


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


class Level(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class Pair(NamedTuple):
    left: int
    right: str = "r"


class Options(TypedDict):
    name: str
    size: NotRequired[Annotated[int, Field(ge=1)]]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    key: Literal["a", "b", "c"]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    key: Annotated[str, Field(alias="theKey")]


class Names(RootModel[list[str]]):
    pass


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    content: T


TYPES: list[Any] = [
    Level,
    Literal[Colour.RED],
    Pair,
    Options,
    list[Options],
    Annotated[set[Frozen], Field(min_length=2)],
    Open,
    Names,
    Box[int],
    Box[list[Box[str]]],
    PositiveInt,
    NegativeFloat,
    StrictInt,
    SecretStr,
    Json[list[int]],
    JsonValue,
    Path,
    collections.deque[int],
    Annotated[collections.deque[int], Field(max_length=2)],
    collections.OrderedDict[str, int],
    collections.Counter[str],
    Sequence[int],
    Mapping[str, bool],
    Annotated[tuple[int, ...], Field(min_length=2)],
    tuple[Literal["x"], Point] | None,
    Annotated[int, Field(ge=1, le=3)] | Annotated[str, StringConstraints(pattern="^[xyz]$")],
    list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    dict[str, Annotated[Cat | Dog, Field(discriminator="kind")]],
    Annotated[list[Level], Field(min_length=1, max_length=2)],
    Annotated[str, StringConstraints(pattern=r"^\p{Lu}\p{Ll}+$")],
    Annotated[str, StringConstraints(pattern=r"^[\pL_]{3}\z")],
    Annotated[str, StringConstraints(pattern=r"^(?<year>\d{4})-W\d$")],
    Annotated[str, StringConstraints(strip_whitespace=True, min_length=3)],
    Annotated[float, Field(ge=-1, le=1, multiple_of=0.25)],
    Annotated[int, Field(gt=-3, lt=3, multiple_of=2)],
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
    for _ in range(30):
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
        ({"type": "number", "multipleOf": 0.1}, [0.3, 1, 10**400, 1e308], [0.35]),
        ({"type": "number", "multipleOf": 10**309}, [0.0, 10**310], [1e308, 10**308]),
        ({"multipleOf": 0.5}, [1], [float("inf"), float("nan")]),
        ({"type": "number", "maximum": 10**400}, [10**400, -(10**4000)], [10**401]),
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


# Patterns: pydantic reads them as Rust does.


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^ab$", ["ab"], ["ab\n", "abc"]),
        ("(?m)^b$", ["a\nb\nc"], ["ab"]),
        ("[$]", ["$"], ["a"]),
        (r"\$", ["a$b"], ["ab"]),
        (r"\Aab\z", ["ab"], ["ab\n", "xab"]),
        (r"^\p{Lu}$", ["A", "Ä"], ["a", "1"]),
        (r"^\P{L}$", ["1", " "], ["a", "é"]),
        (r"^\p{^L}$", ["1"], ["a"]),
        (r"^\pN+$", ["12", "½"], ["a"]),
        (r"^[\p{L}_-]+$", ["é_-"], ["1"]),
        (r"^[^\p{L}]+$", ["12"], ["a"]),
        (r"^(?<word>a|b)$", ["a"], ["c"]),
        (r"^\\p$", ["\\p"], ["p"]),
    ],
)
def test_patterns(pattern: str, inside: list[str], outside: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in inside if not conforms(text, schema, {})] == []
    assert [text for text in outside if conforms(text, schema, {})] == []
    assert conforms(random_match(pattern, np.random.default_rng(0)), schema, {})


@pytest.mark.parametrize("pattern", [r"\p{Greek}", "(", "a(?i)b"])
def test_a_pattern_that_can_not_be_read_is_not_checked_and_not_sampled(pattern: str) -> None:
    assert conforms("anything", {"type": "string", "pattern": pattern}, {})
    with pytest.raises(ValueError, match=r"^the pattern .* can't be read: "):
        compiled(pattern)
    with pytest.raises(ValueError, match=r"^the pattern .* can't be read: "):
        random_match(pattern, np.random.default_rng(0))


# Batching.


@pytest.mark.parametrize("as_iterator", [False, True], ids=["list", "iterator"])
@pytest.mark.parametrize("n", [1, 4])
def test_samples_are_put_together_and_taken_apart(make: Callable[[], gymnasium.Space[Any]], n: int, as_iterator: bool) -> None:
    space = make()
    space.seed(3)
    batched = batch_space(space, n)
    drawn = batched.sample()
    assert drawn in batched
    assert [item in space for item in iterate(batched, drawn)] == [True] * n
    empty = create_empty_array(space, n)
    assert len(list(iterate(batched, empty))) == n
    items = [space.sample() for _ in range(n)]
    together = concatenate(space, iter(items) if as_iterator else items, empty)
    assert together in batched
    assert list(iterate(batched, together)) == items


@pytest.mark.parametrize("batch", [batch_space, lambda space, n: batch_differing_spaces([space] * n)], ids=["same", "different"])
@pytest.mark.parametrize("seed", [123, 456])
def test_a_batch_draws_repeatably_and_apart_from_its_space(make: Callable[[], gymnasium.Space[Any]], batch: Any, seed: int) -> None:
    one = make()
    one.seed(seed)
    other = copy.deepcopy(one)
    batches = [batch(one, 3), batch(other, 3)]
    assert batches[0].np_random is not one.np_random
    one.sample()
    assert batches[0].sample() == batches[1].sample()


@pytest.mark.parametrize("batch", [batch_space, lambda space, n: batch_differing_spaces([space] * n)], ids=["same", "different"])
@pytest.mark.parametrize("seed", [123, 456])
def test_the_members_of_a_batch_draw_different_samples(make: Callable[[], gymnasium.Space[Any]], batch: Any, seed: int) -> None:
    space = make()
    space.seed(seed)
    batched = batch(space, 5)
    drawn = [item for _ in range(5) for item in batched.sample()]
    assert any(item != drawn[0] for item in drawn)


@pytest.mark.parametrize("n", [1, 3])
def test_a_batch_of_like_spaces_is_a_batch_of_the_space(make: Callable[[], gymnasium.Space[Any]], n: int) -> None:
    assert batch_space(make(), n) == batch_differing_spaces([make() for _ in range(n)])


def test_a_batch_of_differing_spaces_draws_from_each() -> None:
    batched = batch_differing_spaces([ToolCallSpace({"a": EMPTY}), ToolCallSpace({"b": NUMBER})])
    first, second = batched.sample()
    assert [first["tool_calls"][0]["function"]["name"], second["tool_calls"][0]["function"]["name"]] == ["a", "b"]


def test_each_member_of_a_batch_has_its_own_mask() -> None:
    batched = batch_space(ToolCallSpace({"a": EMPTY, "b": EMPTY}), 2)
    for _ in range(10):
        first, second = batched.sample(mask=(np.array([1, 0], dtype=np.int8), np.array([0, 1], dtype=np.int8)))
        assert [first["tool_calls"][0]["function"]["name"], second["tool_calls"][0]["function"]["name"]] == ["a", "b"]


@pytest.mark.parametrize("method", [None, *multiprocessing.get_all_start_methods()])
@pytest.mark.parametrize("n", [1, 8])
def test_shared_memory_gives_back_what_was_written(n: int, method: str | None) -> None:
    space = ChatSpace(seed=0)
    memory = create_shared_memory(space, n=n, ctx=multiprocessing if method is None else multiprocessing.get_context(method))
    items = [space.sample() for _ in range(n)]
    for index, item in enumerate(items):
        write_to_shared_memory(space, index, item, memory)
    assert list(read_from_shared_memory(space, memory, n=n)) == items


def test_shared_memory_reaches_a_process_that_was_not_forked() -> None:
    memory = create_shared_memory(ChatSpace(), n=2)
    message: Any = ({"role": "user", "content": "from there"},)
    process = multiprocessing.get_context("spawn").Process(target=write_to_shared_memory, args=(ChatSpace(), 1, message, memory))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert tuple(read_from_shared_memory(ChatSpace(), memory, n=2)) == ((), message)


def test_spaces_of_one_kind_share_memory(make: Callable[[], gymnasium.Space[Any]]) -> None:
    assert is_space_dtype_shape_equiv(make(), make()) is True
    assert not is_space_dtype_shape_equiv(make(), gymnasium.spaces.Discrete(2))


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


@pytest.mark.parametrize(
    ("pattern", "low", "high"),
    [(r"^\d+$", 12, 12), (r"^\d+$", 5, 5), ("^a", 2, 5), ("z$", 3, 3), (r"^[a-z]+-\d+$", 30, 31), ("^([a-z]+ )*[a-z]+$", 30, 300)],
)
def test_a_pattern_and_a_length_are_met_together(pattern: str, low: int, high: int) -> None:
    space = ToolCallSpace(
        {
            "say": {
                "type": "object",
                "properties": {"text": {"type": "string", "pattern": pattern, "minLength": low, "maxLength": high}},
                "required": ["text"],
            }
        }
    )
    space.seed(0)
    for _ in range(30):
        assert space.sample() in space
