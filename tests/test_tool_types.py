"""Every type that a tool's parameter may have: its values, what else a model may write for it, its strict form, and grammars made from it."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional

import pydantic
import pytest
from openai.lib._pydantic import _ensure_strict_json_schema, to_strict_json_schema
from pydantic import BaseModel, Field
from typing_extensions import TypeAliasType, TypedDict  # before Python 3.12

from art_gym import Tool, ToolCallSpace, ToolError, UsageError, strict_schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    TEXT = "a"
    WHOLE = 2
    NOTHING = None


class Person(BaseModel):
    """Somebody."""

    name: Annotated[str, Field(min_length=1)]
    age: int = 0


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Number(BaseModel):
    value: float


class Sum(BaseModel):
    left: Number | Sum
    right: Number | Sum


class Point(TypedDict):
    x: int
    y: NotRequired[int]


class Pair(NamedTuple):
    number: int
    word: str = "b"


@dataclass
class Span:
    start: int
    stop: int = 9
    tags: list[str] = field(default_factory=list)


class Ids(pydantic.RootModel[list[int]]):
    pass


Weights = TypeAliasType("Weights", list[float])

FREE_KEYS = "is a mapping with free keys"
ANYTHING = "takes anything"

TYPES: dict[str, tuple[Any, str, Any, str]] = {
    # name: annotation, a value as JSON, the value, why it has no strict form ("" if it has)
    "int": (int, "0", 0, ""),
    "int within limits": (Annotated[int, Field(ge=1, lt=9, multiple_of=2)], "4", 4, ""),
    "float": (float, "1.5", 1.5, ""),
    "bool": (bool, "false", False, ""),
    "str": (str, '""', "", ""),
    "str within limits": (Annotated[str, Field(min_length=2, max_length=5, pattern="^[a-z]+$")], '"abc"', "abc", ""),
    "None": (None, "null", None, ""),
    "Any": (Any, "[1, {}]", [1, {}], ANYTHING),
    "Literal": (Literal["a", "b"], '"b"', "b", ""),
    "Literal of one": (Literal["a"], '"a"', "a", ""),
    "Literal of many kinds": (Literal["a", 2, None, True], "null", None, ""),
    "Literal of an enum's member": (Literal[Level.HIGH], "2", Level.HIGH, ""),
    "enum": (Colour, '"blue"', Colour.BLUE, ""),
    "enum of numbers": (Level, "1", Level.LOW, ""),
    "enum of many kinds": (Mixed, "2", Mixed.WHOLE, ""),
    "Optional": (Optional[int], "null", None, ""),  # noqa: UP045  the spelling is what is tested
    "union": (int | str, '"7"', "7", ""),
    "union with limits": (Annotated[int, Field(gt=0)] | Annotated[str, Field(max_length=3)], '"abc"', "abc", ""),
    "union of lists": (int | list[int] | None, "[1]", [1], ""),
    "model": (Person, '{"name": "Ana"}', Person(name="Ana"), ""),
    "recursive model": (Tree, '{"value": 1, "children": [{"value": 2}]}', Tree(value=1, children=[Tree(value=2)]), ""),
    "recursive union": (
        Number | Sum,
        '{"left": {"value": 1}, "right": {"left": {"value": 2}, "right": {"value": 3}}}',
        Sum(left=Number(value=1), right=Sum(left=Number(value=2), right=Number(value=3))),
        "",
    ),
    "union of models": (Cat | Dog, '{"kind": "dog", "name": "Rex"}', Dog(kind="dog", name="Rex"), ""),
    "discriminated union": (Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind": "cat"}', Cat(kind="cat"), ""),
    "TypedDict": (Point, '{"x": 1}', {"x": 1}, ""),
    "dataclass": (Span, '{"start": 1}', Span(1, 9), ""),
    "NamedTuple": (Pair, '[1, "c"]', Pair(1, "c"), ""),
    "root model": (Ids, "[1, 2]", Ids([1, 2]), ""),
    "alias": (Weights, "[0.5]", [0.5], ""),
    "list": (list[int], "[]", [], ""),
    "list of lists": (list[list[str]], '[["a"], []]', [["a"], []], ""),
    "list of models": (list[Person], '[{"name": "Ana"}]', [Person(name="Ana")], ""),
    "list of anything": (list, "[1, null]", [1, None], ANYTHING),
    "list within limits": (Annotated[list[int], Field(min_length=1, max_length=2)], "[1]", [1], ""),
    "tuple": (tuple[int, str], '[1, "x"]', (1, "x"), ""),
    "tuple of one type": (tuple[int, int], "[1, 2]", (1, 2), ""),
    "tuple of any length": (tuple[int, ...], "[1, 2, 3]", (1, 2, 3), ""),
    "tuple of nothing": (tuple[()], "[]", (), ""),
    "set": (set[int], "[1, 1, 2]", {1, 2}, ""),
    "frozenset": (frozenset[str], '["a"]', frozenset({"a"}), ""),
    "deque": (collections.deque[int], "[1]", collections.deque([1]), ""),
    "Sequence": (Sequence[int], "[1]", [1], ""),
    "dict": (dict[str, int], '{"k": 1}', {"k": 1}, FREE_KEYS),
    "dict of anything": (dict, '{"k": []}', {"k": []}, FREE_KEYS),
    "dict with whole numbers as keys": (dict[int, str], '{"-7": "a"}', {-7: "a"}, FREE_KEYS),
    "dict of models": (dict[str, Person], '{"a": {"name": "Ana"}}', {"a": Person(name="Ana")}, FREE_KEYS),
    "dict with patterned keys": (dict[Annotated[str, Field(pattern="^k")], int], '{"k": 1}', {"k": 1}, FREE_KEYS),
    "Mapping": (Mapping[str, int], '{"k": 1}', {"k": 1}, FREE_KEYS),
    "JSON": (pydantic.JsonValue, '{"a": [1, "b", null]}', {"a": [1, "b", None]}, ANYTHING),
    "JSON in text": (pydantic.Json[list[int]], '"[1, 2]"', [1, 2], ""),
    "date": (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29), ""),
    "datetime": (datetime.datetime, '"2024-02-29T12:30:00"', datetime.datetime(2024, 2, 29, 12, 30), ""),
    "time": (datetime.time, '"12:30:00"', datetime.time(12, 30), ""),
    "timedelta": (datetime.timedelta, '"PT1M30S"', datetime.timedelta(seconds=90), ""),
    "Decimal": (Decimal, '"1.5"', Decimal("1.5"), ""),
    "Decimal of two places": (Annotated[Decimal, Field(ge=0, decimal_places=2)], "0.25", Decimal("0.25"), ""),
    "UUID": (uuid.UUID, f'"{uuid.UUID(int=7)}"', uuid.UUID(int=7), ""),
    "URL": (pydantic.HttpUrl, '"https://example.org/"', pydantic.HttpUrl("https://example.org/"), ""),
}

ODD_VALUES = [
    *("null", "true", "0", "-1", "1.5", "-0.0", "1e300", "-1e300", "5e-324", "1" + "0" * 400, "9" * 4000, "253402300800", "1e18"),
    *('""', '"a"', '"\\u0000"', '"1"', '"1e5"', '"inf"', '"nan"', '"é😀"', '"\\ud83d\\ude00"', f'"{"9" * 5000}"', f'"{"x" * 1_000_000}"'),
    *('"2024-02-30"', '"9999999-01-01"', '"0000-00-00"', '"12:99"', '"P99999999999999999999D"', '"-PT1S"', '"http://"', '"[1"'),
    *("[]", "[1]", "[null]", "[[[[1]]]]", "[" * 99 + "]" * 99, f"[{'1,' * 10_000}1]"),
    *("{}", '{"": 1}', '{"kind": "bird"}', '{"kind": 3}', '{"value": 1}', '{"left": 1}', '{"x": null}', '{"name": "", "age": null}'),
    *('{"value": 1, "children": ' * 45 + "[]" + "}" * 45, '[{"name": "a", "age": null}]'),
]


def make(annotation: Any, *default: Any) -> Tool:
    def use(x: Any) -> None:
        """Use it."""

    def use_or_not(x: Any = default[0] if default else None) -> None:
        """Use it."""

    return Tool.from_function(use_or_not if default else use, name="use", annotations={"x": annotation})


def each(names: Any = TYPES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", names)


# Values.


@each()
def test_a_value_arrives_as_the_annotated_type(name: str) -> None:
    annotation, written, value, _ = TYPES[name]
    assert make(annotation).parse(f'{{"x": {written}}}') == {"x": value}


@pytest.mark.slow
@each()
def test_whatever_else_is_written_is_taken_or_refused_in_few_words(name: str) -> None:
    tool = make(TYPES[name][0])
    for written in ODD_VALUES:
        try:
            tool.parse(f'{{"x": {written}}}')
        except ToolError as error:
            text = str(error)
            assert len(text) < 600, written
            assert "\n" not in text, written
            for word in ("Traceback", "pydantic", "<class", "function-", "NoneType"):
                assert word not in text, written
            text.encode()


@each()
def test_a_sample_of_the_space_is_in_the_space(name: str) -> None:
    space = ToolCallSpace({"use": make(TYPES[name][0]).parameters}, seed=0)
    for _ in range(10):
        assert space.sample() in space


# The strict form.


def violations(schema: Any, path: str = "", *, root: bool = True) -> Iterator[str]:
    """What of OpenAI's documented rules for strict mode a schema breaks (guide on structured outputs, "Supported schemas")."""
    if not isinstance(schema, dict):
        yield f"{path}: no object"
        return
    allowed = {
        "string": {"enum", "pattern", "format"},
        "number": {"enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"},
        "integer": {"enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"},
        "boolean": {"enum"},
        "null": set(),
        "array": {"items", "minItems", "maxItems"},
        "object": {"properties", "required", "additionalProperties"},
    }
    keys = set(schema) - {"description", *(["$defs"] if root else [])}
    if root and schema.get("type") != "object":
        yield f"{path}: the root must be an object"
    if "$ref" in schema:
        if set(schema) != {"$ref"}:
            yield f"{path}: nothing may stand beside a reference"
        return
    if "anyOf" in schema:
        if keys != {"anyOf"}:
            yield f"{path}: {keys} beside anyOf"
        for part in schema["anyOf"]:
            yield from violations(part, f"{path}|", root=False)
        return
    kind = schema.get("type")
    if kind not in allowed:
        yield f"{path}: no type"
        return
    if unknown := keys - allowed[kind] - {"type"}:
        yield f"{path}: {unknown} isn't supported"
    if schema.get("format", "date") not in {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}:
        yield f"{path}: format {schema['format']}"
    if kind == "array":
        yield from violations(schema.get("items"), f"{path}[]", root=False)
    if kind == "object":
        if schema.get("additionalProperties") is not False:
            yield f"{path}: open"
        if schema.get("required") != list(schema.get("properties", ())):
            yield f"{path}: optional properties"
        for name, part in schema.get("properties", {}).items():
            yield from violations(part, f"{path}.{name}", root=False)
    for name, part in schema.get("$defs", {}).items() if root else ():
        yield from violations(part, name, root=False)


def strict(tool: Tool) -> dict[str, Any]:
    function: Any = strict_schema(tool.schema)["function"]
    assert function["strict"] is True
    return function["parameters"]  # type: ignore[no-any-return]


STRICT = [name for name, (*_, why) in TYPES.items() if not why]


def test_the_rule_checker_finds_what_is_wrong() -> None:
    for name in ("model", "set", "tuple", "discriminated union", "str within limits", "Literal of one"):
        assert [*violations(make(TYPES[name][0]).parameters)], name


@each(STRICT)
@pytest.mark.parametrize("default", [(), (None,)], ids=["required", "optional"])
def test_the_strict_form_keeps_to_the_rules(name: str, default: tuple[Any, ...]) -> None:
    plain = make(TYPES[name][0], *default).schema
    kept = copy.deepcopy(plain)
    written = strict(make(TYPES[name][0], *default))
    assert [*violations(written)] == []
    assert plain == kept
    # The SDK's own function enforces the same; it finds nothing to change.
    assert _ensure_strict_json_schema(copy.deepcopy(written), path=(), root=copy.deepcopy(written)) == written  # type: ignore[arg-type]


@each([name for name in TYPES if name not in STRICT])
def test_what_has_no_strict_form_is_named(name: str) -> None:
    annotation, _, _, why = TYPES[name]
    with pytest.raises(UsageError, match=rf"^tool 'use' has no form in strict mode: parameter 'x.*' {why}: .*(take|give)[^\n]*$"):
        strict(make(annotation))


@pytest.mark.parametrize(
    ("annotation", "path"),
    [(list[dict[str, int]], r"x\[\]"), (tuple[int, Any], r"x\[\]"), (int | dict[str, int], "x")],
    ids=str,
)
def test_the_part_that_has_no_strict_form_is_named(annotation: Any, path: str) -> None:
    with pytest.raises(UsageError, match=f"parameter '{path}' "):
        strict(make(annotation))


class Bag(BaseModel):
    things: list[Loose]


class Loose(BaseModel):
    extra: dict[str, int]


def test_the_part_of_a_model_that_has_no_strict_form_is_named() -> None:
    with pytest.raises(UsageError, match=r"parameter 'x\.things\[\]\.extra' is a mapping with free keys"):
        strict(make(Bag))


class Trip(BaseModel):
    """A trip."""

    start: Colour
    days: Annotated[int, Field(ge=1, description="How many.")]
    stops: list[Person2]


class Person2(BaseModel):
    name: str
    age: int | None


def test_the_strict_form_agrees_with_the_sdk() -> None:
    def without_titles(schema: Any) -> Any:
        if isinstance(schema, dict):
            return {key: without_titles(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
        return [without_titles(item) for item in schema] if isinstance(schema, list) else schema

    theirs = without_titles(to_strict_json_schema(Trip))
    ours = strict(make(Trip))
    assert ours["$defs"].pop("Trip") == {key: value for key, value in theirs.items() if key != "$defs"}
    assert ours["$defs"] == theirs["$defs"]


def test_the_strict_form_of_each_keyword() -> None:
    def use(
        word: Annotated[str, Field(min_length=2, max_length=5, description="A word.")],
        pair: tuple[int, str],
        tags: set[str],
        animal: Annotated[Cat | Dog, Field(discriminator="kind")],
        colour: Colour = Colour.RED,
        limit: Annotated[int, Field(le=9)] = 3,
        note: str | None = None,
    ) -> None: ...

    written = strict(Tool.from_function(use))
    assert written["properties"] == {
        "word": {"type": "string", "description": "A word. Minimum length: 2. Maximum length: 5."},
        "pair": {
            "type": "array",
            "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "minItems": 2,
            "maxItems": 2,
            "description": "The items in order: integer, string.",
        },
        "tags": {"type": "array", "items": {"type": "string"}, "description": "No item twice."},
        "animal": {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
        "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "description": 'Null for the default, "red".'},
        "limit": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}], "description": "Null for the default, 3."},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    assert written["$defs"]["Cat"] == {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["cat"]},
            "lives": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "Null for the default, 9."},
        },
        "required": ["kind", "lives"],
        "additionalProperties": False,
    }


def test_a_tool_without_parameters_has_a_strict_form() -> None:
    def look() -> None: ...

    assert strict(Tool.from_function(look)) == {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    assert strict_schema({"type": "function", "function": {"name": "look"}})["function"]["strict"] is True


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"], "additionalProperties": False}
    return inner


def test_schemas_beyond_the_size_of_strict_mode_are_refused() -> None:
    def write(parameters: dict[str, Any]) -> None:
        strict_schema({"type": "function", "function": {"name": "use", "parameters": parameters}})

    write(nested(10))
    with pytest.raises(UsageError, match=r"parameter 'a(\.a){9}' is an object more than 10 levels deep"):
        write(nested(11))
    many = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(5001)}}
    with pytest.raises(UsageError, match=r"it has 5001 properties .* 5000 are allowed"):
        write(many)
    options = {"type": "object", "properties": {"x": {"type": "integer", "enum": [*range(1001)]}}}
    with pytest.raises(UsageError, match=r"it has 1001 options .* 1000 are allowed"):
        write(options)
    long = {"type": "object", "properties": {"x": {"type": "string", "enum": ["y" * 120_000]}}}
    with pytest.raises(UsageError, match=r"it has 120001 characters .* 120000 are allowed"):
        write(long)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"not": {"type": "string"}}, "is limited by 'not'"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "must fit several schemas at once"),
        ({"$ref": "other.json"}, "refers to 'other.json'"),
        ({"enum": [[1]]}, r"may be \[1\]"),
        (True, ANYTHING),
    ],
    ids=str,
)
def test_schemas_from_elsewhere_that_have_no_strict_form_are_refused(part: Any, text: str) -> None:
    with pytest.raises(UsageError, match=f"parameter 'x' {text}"):
        strict_schema({"type": "function", "function": {"name": "use", "parameters": {"type": "object", "properties": {"x": part}}}})
    with pytest.raises(UsageError, match="the parameters must be an object"):
        strict_schema({"type": "function", "function": {"name": "use", "parameters": {"type": "array"}}})


@pytest.mark.parametrize("schema", [{}, None, "look", [], {"function": None}, {"function": {}}, {"type": "function", "name": "look"}], ids=str)
def test_what_is_no_tools_schema_is_refused(schema: Any) -> None:
    with pytest.raises(UsageError, match=r"^a tool's schema has the form \{'type': 'function', .*not [^\n]*$"):
        strict_schema(schema)


@pytest.mark.parametrize(
    "part",
    [
        {"type": 3},
        {"type": [3]},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": "a"},
        {"anyOf": {}},
        {"enum": 3},
        {"$ref": 3},
        {"$ref": "#/$defs/Nothing"},
        {"type": "array", "prefixItems": {"a": 1}},
        {"type": "string", "description": 3},
    ],
    ids=str,
)
def test_a_schema_that_can_not_be_read_is_refused(part: Any) -> None:
    with pytest.raises(UsageError, match=r"^tool 'use' has no form in strict mode: parameter 'x' can't be read: [^\n]*$"):
        strict_schema({"type": "function", "function": {"name": "use", "parameters": {"type": "object", "properties": {"x": part}}}})


@pytest.mark.parametrize("parameters", [3, [1], "x", {"properties": {}}], ids=str)
def test_parameters_that_are_no_object_are_refused(parameters: Any) -> None:
    with pytest.raises(UsageError, match="the parameters must be an object"):
        strict_schema({"type": "function", "function": {"name": "use", "parameters": parameters}})


# Nulls that stand for what isn't given.


@pytest.mark.parametrize(
    ("annotation", "default", "written", "value"),
    [
        (int, 3, "null", 3),
        (int | None, 3, "null", None),
        (Any, 3, "null", None),
        (Annotated[int, Field(ge=1)], 0, "null", 0),
        (list[Person], (), '[{"name": "Ana", "age": null}]', [Person(name="Ana", age=0)]),
        (Point, None, '{"x": 1, "y": null}', {"x": 1}),
        (Span, None, '{"start": 1, "stop": null, "tags": null}', Span(1, 9, [])),
        (Tree, None, '{"value": 1, "children": [{"value": 2, "children": null}]}', Tree(value=1, children=[Tree(value=2)])),
        (Cat | Dog, None, '{"kind": "cat", "lives": null}', Cat(kind="cat")),
        (tuple[Person, int], None, '[{"name": "Ana", "age": null}, 1]', (Person(name="Ana"), 1)),
        (dict[str, Person], None, '{"a": {"name": "Ana", "age": null}}', {"a": Person(name="Ana")}),
    ],
    ids=str,
)
def test_null_is_taken_for_not_given_where_there_is_a_default(annotation: Any, default: Any, written: str, value: Any) -> None:
    assert make(annotation, default).parse(f'{{"x": {written}}}') == {"x": value}


@pytest.mark.parametrize(
    ("annotation", "written", "text"),
    [
        (int, "null", "'x' should be a valid integer, got null"),
        (dict[str, int], '{"k": null}', "'x.k' should be a valid integer, got null"),
        (Person, '{"name": null, "age": null}', "'x.name' should be a valid string, got null"),
        (list[int], "[null]", "'x[0]' should be a valid integer, got null"),
    ],
    ids=str,
)
def test_null_is_refused_where_a_value_is_needed(annotation: Any, written: str, text: str) -> None:
    with pytest.raises(ToolError) as caught:
        make(annotation).parse(f'{{"x": {written}}}')
    assert str(caught.value) == f"invalid arguments: {text}"


def test_what_is_wrong_beside_a_null_is_told_alone() -> None:
    def use(a: int, b: int = 2) -> None: ...

    with pytest.raises(ToolError) as caught:
        Tool.from_function(use).parse('{"a": "x", "b": null}')
    assert str(caught.value) == "invalid arguments: 'a' should be a valid integer, unable to parse string as an integer, got 'x'"


# Grammars.


@pytest.mark.vllm
@pytest.mark.parametrize("form", ["plain", "strict"])
def test_every_schema_makes_a_grammar(form: str) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    for name in TYPES if form == "plain" else STRICT:
        for default in ((), (None,)):
            tool = make(TYPES[name][0], *default)
            xgrammar.Grammar.from_json_schema(json.dumps(strict(tool) if form == "strict" else tool.parameters))
