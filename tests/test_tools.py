"""Tools: what is derived from a signature, what is accepted, and what a model is told when it isn't."""

from __future__ import annotations

import copy
import datetime
import enum
import functools
import json
import pickle
import types
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, Optional

import pydantic
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # pydantic asks for this one before Python 3.12

from art_gym import Tool, ToolEnv, ToolError, call, tool
from art_gym._arguments import read_arguments
from art_gym._results import result_content


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1


class Person(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    age: int = 0


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Point(TypedDict):
    x: int
    y: int


@dataclass
class Span:
    start: int
    stop: int = 9


class Circle(BaseModel):
    shape: Literal["circle"]


class Square(BaseModel):
    shape: Literal["square"]


SHAPE = Annotated[Circle | Square, Field(discriminator="shape")]


def derive(function: Any, **options: Any) -> Tool:
    return Tool.from_function(function, **options)


def problem(function: Any, arguments: Any) -> str:
    with pytest.raises(ToolError) as caught:
        derive(function).parse(arguments)
    return str(caught.value)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# What is derived.


def test_schema_in_wire_form() -> None:
    def find(word: str, limit: Annotated[int, Field(ge=1)] = 3) -> str:
        """Find mails.

        They are searched from the newest.

        Args:
            word: One word.
            limit: How many at most.
        """
        return word

    assert derive(find).schema == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find mails.\n\nThey are searched from the newest.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"description": "One word.", "type": "string"},
                    "limit": {"default": 3, "description": "How many at most.", "minimum": 1, "type": "integer"},
                },
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    "doc",
    [
        "Add.\n\nArgs:\n    a: The first.",
        "Add.\n\nParameters\n----------\na : int\n    The first.",
        "Add.\n\n:param a: The first.",
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_descriptions_come_from_each_docstring_style(doc: str) -> None:
    def plus(a: int) -> int:
        return a

    plus.__doc__ = doc
    derived = derive(plus)
    assert derived.description == "Add."
    assert derived.parameters["properties"]["a"]["description"] == "The first."


def test_a_description_in_the_annotation_wins() -> None:
    def plus(a: Annotated[int, Field(description="From the annotation.")]) -> int:
        """Add.

        Args:
            a: From the docstring.
        """
        return a

    assert derive(plus).parameters["properties"]["a"]["description"] == "From the annotation."


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045  the spelling is what is tested
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (dict[str, int], {"additionalProperties": {"type": "integer"}, "type": "object"}),
        (
            dict[Annotated[str, Field(pattern="^k")], int],
            {"additionalProperties": False, "patternProperties": {"^k": {"type": "integer"}}, "type": "object"},
        ),
        (
            dict[int, str],
            {"additionalProperties": {"type": "string"}, "propertyNames": {"pattern": "^(0|-?[1-9][0-9]*)$"}, "type": "object"},
        ),
        (list[int], {"items": {"type": "integer"}, "type": "array"}),
        (datetime.date, {"format": "date", "type": "string"}),
        (Annotated[str, Field(max_length=5, pattern="^a")], {"maxLength": 5, "pattern": "^a", "type": "string"}),
        (Annotated[int, Field(ge=1, lt=9, multiple_of=2)], {"exclusiveMaximum": 9, "minimum": 1, "multipleOf": 2, "type": "integer"}),
        (Colour, {"$ref": "#/$defs/Colour"}),
        (Person, {"$ref": "#/$defs/Person"}),
    ],
    ids=str,
)
def test_types_and_constraints_are_kept(annotation: Any, schema: dict[str, Any]) -> None:
    def use(x: Any) -> None: ...

    assert derive(use, annotations={"x": annotation}).parameters["properties"]["x"] == schema


@pytest.mark.parametrize(
    ("annotation", "written", "value"),
    [
        (int, "0", 0),
        (Literal["a", "b"], '"b"', "b"),
        (Optional[int], "null", None),  # noqa: UP045
        (int | str, '"7"', "7"),
        (dict[str, int], '{"k": 1}', {"k": 1}),
        (dict[int, str], '{"-7": "a"}', {-7: "a"}),
        (set[int], "[1, 1, 2]", {1, 2}),
        (tuple[int, str], '[1, "x"]', (1, "x")),
        (datetime.date, '"2024-02-29"', datetime.date(2024, 2, 29)),
        (Decimal, '"1.5"', Decimal("1.5")),
        (Colour, '"blue"', Colour.BLUE),
        (Person, '{"name": "Ana", "age": 3}', Person(name="Ana", age=3)),
        (Tree, '{"value": 1, "children": [{"value": 2}]}', Tree(value=1, children=[Tree(value=2)])),
        (Point, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (Span, '{"start": 1}', Span(1, 9)),
        (float, "3", 3.0),
        (int, '"2"', 2),
    ],
    ids=str,
)
def test_values_arrive_as_the_annotated_type(annotation: Any, written: str, value: Any) -> None:
    def use(x: Any) -> None: ...

    assert derive(use, annotations={"x": annotation}).parse(f'{{"x": {written}}}') == {"x": value}


def test_defaults_stay_optional() -> None:
    def plus(a: int = 7, *, b: int | None = None) -> None: ...

    derived = derive(plus)
    assert "required" not in derived.parameters
    assert derived.parse("{}") == {"a": 7, "b": None}


def test_a_mutable_default_is_not_shared_between_calls() -> None:
    def plus(items: list[int] = []) -> None: ...  # noqa: B006  what is tested

    derived = derive(plus)
    derived.parse("")["items"].append(1)
    assert derived.parse("") == {"items": []}


def test_parameters_named_like_attributes_of_pydantic() -> None:
    def odd(json: int, copy: int, model_config: int, _id: int, self_: int = 0) -> None: ...

    written = {"json": 1, "copy": 2, "model_config": 3, "_id": 4}
    assert derive(odd).parse(json.dumps(written)) == {**written, "self_": 0}


def test_a_callable_object() -> None:
    class Adder:
        """Adds."""

        def __call__(self, a: int) -> int:
            return a

    derived = derive(Adder(), name="adder")
    assert derived.parameters["required"] == ["a"]


def test_an_object_is_described_by_what_is_called() -> None:
    class Adder:
        """Adds.

        Args:
            a: Of the constructor.
        """

        def __call__(self, a: int) -> int:
            """Add.

            Args:
                a: Of the call.
            """
            return a

    class Plain:
        """Described by its class."""

        def __call__(self) -> None: ...

    derived = derive(Adder())
    assert (derived.name, derived.description) == ("Adder", "Add.")
    assert derived.parameters["properties"] == {"a": {"description": "Of the call.", "type": "integer"}}
    assert derive(Plain()).description == "Described by its class."


def test_a_partial_shows_what_is_left_to_fill_in() -> None:
    def find(folder: str, word: str, limit: int = 3, *, exact: bool) -> str:
        """Find mails.

        Args:
            word: One word.
        """
        return f"{folder} {word} {limit} {exact}"

    partial = functools.partial(find, "inbox", exact=True)
    derived = derive(partial)
    assert (derived.name, derived.description) == ("find", "Find mails.")
    assert derived.parameters["properties"] == {
        "word": {"description": "One word.", "type": "string"},
        "limit": {"default": 3, "type": "integer"},
    }
    assert partial(**derived.parse('{"word": "a"}')) == "inbox a 3 True"


def test_a_bound_method_has_no_self() -> None:
    class Box:
        def put(self, item: str) -> None: ...

        @classmethod
        def make(cls, size: int) -> None: ...

    assert list(derive(Box().put).parameters["properties"]) == ["item"]
    assert list(derive(Box.make).parameters["properties"]) == ["size"]
    with pytest.raises(TypeError, match="tool 'put': its first parameter is 'self': give the method of an object"):
        derive(Box.put)


def test_keyword_only_and_async_parameters() -> None:
    async def find(*, word: str, limit: int = 3) -> str:
        return word

    derived = derive(find)
    assert derived.parameters["required"] == ["word"]
    assert derived.parse('{"word": "a"}') == {"word": "a", "limit": 3}


def test_an_annotation_of_the_result_need_not_exist() -> None:
    def find(word: str) -> Missing:  # type: ignore[name-defined]  # noqa: F821  what is tested
        return word

    assert derive(find).parameters["properties"] == {"word": {"type": "string"}}


def test_field_gives_defaults_and_limits() -> None:
    def find(limit: int = Field(3, ge=1, description="How many."), words: list[str] = Field(default_factory=list)) -> None: ...  # noqa: B008

    derived = derive(find)
    assert derived.parameters["properties"]["limit"] == {"default": 3, "description": "How many.", "minimum": 1, "type": "integer"}
    assert derived.parse("") == {"limit": 3, "words": []}
    with pytest.raises(ToolError, match="'limit' should be greater than or equal to 1, got 0"):
        derived.parse('{"limit": 0}')


DOCSTRINGS = {
    "google": """Find mails.

    From the newest.

    Args:
        word: One word.
            No more.
        limit (int): How many.

    Returns:
        Mails.
    """,
    "numpy": """Find mails.

    From the newest.

    Parameters
    ----------
    word : str
        One word.
        No more.
    limit : int, optional
        How many.

    Returns
    -------
    str
        Mails.
    """,
    "sphinx": """Find mails.

    From the newest.

    :param word: One word.
        No more.
    :type word: str
    :param int limit: How many.
    :returns: Mails.
    """,
}


@pytest.mark.parametrize("style", DOCSTRINGS)
def test_every_part_of_a_docstring_is_found_in_each_style(style: str) -> None:
    def find(word: str, limit: int = 3) -> str:
        return word

    find.__doc__ = DOCSTRINGS[style]
    derived = derive(find)
    assert derived.description == "Find mails.\n\nFrom the newest."
    properties = derived.parameters["properties"]
    assert properties["word"]["description"].split() == ["One", "word.", "No", "more."]
    assert properties["limit"]["description"] == "How many."


def test_an_unannotated_parameter_takes_anything() -> None:
    def use(x): ...  # type: ignore[no-untyped-def]

    assert derive(use).parse('{"x": [1]}') == {"x": [1]}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (bytes, "bytes can't be written in JSON"),
        (list[bytes], "parameter 'x': bytes"),
        (bytearray, "parameter 'x': <class 'bytearray'> has no JSON form: take what JSON can carry"),
        (Iterable[int], "an Iterable can't be checked before the tool runs: take a list"),
        (type[int], "a class can't be written in JSON"),
        (Callable[[int], int], "Callable has no JSON form"),
        (Literal[Colour.RED], "a Literal of Colour.RED can't be read back from JSON"),
        (type(lambda: 0), ""),
        (ToolEnv, ""),
        (complex, "a complex number can't be written in JSON: take two floats"),
        (dict[float, str], r"a mapping's keys are text in JSON.*take dict\[str, …\]"),
        (dict[bool, str], "a mapping's keys"),
        (dict[Decimal, str], "a mapping's keys"),
        (dict[tuple[int, int], str], "a mapping's keys"),
        (dict[Literal[1, 2], str], "a mapping's keys"),
        (dict[Literal["a", 2], str], "a mapping's keys"),
        (dict[Size, str], "a mapping's keys"),
        (dict[Annotated[int, Field(ge=1)], str], "a mapping's keys"),
        (dict[str | None, str], "a mapping's keys"),
        (list[dict[float, str]], "a mapping's keys"),
        (Mapping[float, str], "a mapping's keys"),
        (OrderedDict[float, str], "a mapping's keys"),
        (Counter[float], "a mapping's keys"),
    ],
    ids=str,
)
def test_what_json_cannot_carry_is_refused_when_the_tool_is_made(annotation: Any, text: str) -> None:
    def use(x: Any) -> None: ...

    with pytest.raises(TypeError, match=f"tool 'use'.*{text}"):
        derive(use, annotations={"x": annotation})


def test_the_parameter_that_cannot_be_described_is_named() -> None:
    def use(a: int, b: bytes, c: str) -> None: ...

    with pytest.raises(TypeError, match=r"^tool 'use': parameter 'b': bytes can't be written in JSON: take a str, and decode it$"):
        derive(use)


@pytest.mark.parametrize("function", [Person, functools.partial(Person, name="a"), 3, "add", None], ids=str)
def test_what_cannot_be_called_is_no_tool(function: Any) -> None:
    with pytest.raises(TypeError, match=r"can't be a tool: it is (a class|of type '.*'), and no function"):
        derive(function)


def test_parameters_that_have_no_name_are_refused() -> None:
    def star(*args: int) -> None: ...
    def stars(**kwargs: int) -> None: ...
    def positional(a: int, /) -> None: ...

    for function in (star, stars, positional):
        with pytest.raises(TypeError, match="can't be passed by name"):
            derive(function)


def test_names_and_timeouts_are_checked() -> None:
    with pytest.raises(TypeError, match="letters, digits"):
        tool(name="two words")
    with pytest.raises(TypeError, match="positive number of seconds"):
        tool(timeout=0)
    with pytest.raises(TypeError, match=r"@tool\(name=\.\.\.\)"):
        derive(lambda: None)


@pytest.mark.parametrize("timeout", [0, -1, True, False, float("inf"), float("nan"), "5", 1e12, [], b"5"], ids=repr)
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    text = r"^a tool's timeout is a positive number of seconds, or None for no limit, not [^\n]*$"
    with pytest.raises(TypeError, match=text):
        tool(timeout=timeout)
    with pytest.raises(TypeError, match=text):
        Tool.from_function(add, timeout=timeout)


@pytest.mark.parametrize("name", [5, b"look", [], "", "two words", "x" * 65], ids=repr)
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(TypeError, match=r"^a tool's name is 1 to 64 letters, digits, '_' or '-', not [^\n]*$"):
        tool(name=name)
    if name:
        with pytest.raises(TypeError, match=r"^a tool's name is 1 to 64 letters, digits, '_' or '-', not [^\n]*$"):
            Tool.from_function(add, name=name)


def test_a_schema_can_be_changed_without_changing_the_tool() -> None:
    derived = derive(add)
    derived.schema["function"]["parameters"]["properties"].clear()
    assert set(derived.schema["function"]["parameters"]["properties"]) == {"a", "b"}


# What a model is told.


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("[1, 2]", "arguments must be an object, not a list"),
        ("3", "arguments must be an object, not a number"),
        ('"a"', "arguments must be an object, not a string"),
        ("true", "arguments must be an object, not true or false"),
        (7, "arguments must be an object, written as JSON text"),
        ('{"a": 1,', "arguments are not valid JSON: Expecting property name enclosed in double quotes at character 8"),
        ('{"a": NaN, "b": 1}', "NaN is not a JSON number: give a finite one"),
        ('{"a": -Infinity, "b": 1}', "-Infinity is not a JSON number: give a finite one"),
        ('{"a": 1e999, "b": 1}', "the number 1e999 is out of range"),
        ('{"a": 1, "a": 2}', "'a' is given more than once"),
        ('{"a": ' + "9" * 5000 + "}", f"the number {'9' * 20} is out of range"),
        ('{"a": ' + "[" * 100_000, "arguments are nested too deeply: 100 levels at most"),
        ('{"a": "\\ud800", "b": 1}', "arguments are not valid JSON: they hold an unpaired surrogate, which is no character"),
        ('{"\ud800": 1}', "arguments are not valid JSON: they hold an unpaired surrogate, which is no character"),
        ('{"a": 1}', "invalid arguments: 'b' is required"),
        ("", "invalid arguments: 'a' is required; 'b' is required"),
        ('{"a": 1, "b": 2, "c": 3}', "invalid arguments: 'c' is not an argument; the arguments are: a, b"),
        ('{"a": 1.5, "b": 2}', "invalid arguments: 'a' should be a valid integer, got a number with a fractional part, got 1.5"),
        ('{"a": null, "b": 2}', "invalid arguments: 'a' should be a valid integer, got null"),
        ('{"a": [1], "b": {}}', "invalid arguments: 'a' should be a valid integer, got a list; 'b' should be a valid integer, got an object"),
        (
            '{"a": "x", "b": 2}',
            "invalid arguments: 'a' should be a valid integer, unable to parse string as an integer, got 'x'",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_error_texts(arguments: Any, text: str) -> None:
    assert problem(add, arguments) == text


def test_the_path_of_a_nested_problem() -> None:
    def meet(people: list[Person]) -> None: ...

    assert problem(meet, '{"people": [{"name": "A"}, {"name": ""}]}') == (
        "invalid arguments: 'people[1].name' should have at least 1 character, got ''"
    )
    assert problem(meet, '{"people": [3]}') == "invalid arguments: 'people[0]' should be an object, got 3"


def test_the_branches_of_a_union_are_told_without_internal_names() -> None:
    def use(x: Annotated[int, Field(ge=5)] | Literal["none"]) -> None: ...

    assert problem(use, '{"x": 3}') == ("invalid arguments: 'x' should be greater than or equal to 5, got 3; 'x' should be 'none', got 3")


@pytest.mark.parametrize(
    ("annotation", "written", "text"),
    [
        (Literal["a", None, True], "3", "'x' should be 'a', null or true, got 3"),
        (Literal[Size.SMALL], "3", "'x' should be 1, got 3"),
        (SHAPE, '{"shape": "dot"}', "'x' should have as 'shape' one of 'circle', 'square', got 'dot'"),
        (SHAPE, "{}", "'x' needs 'shape', which says what kind of object it is"),
        (tuple[int, int], "{}", "'x' should be a list, got an object"),
        (tuple[int, int], "[1]", "'x[1]' is required"),
        (set[int], "3", "'x' should be a list, got 3"),
        (dict[str, int], "[]", "'x' should be an object, got a list"),
        (Span, '{"start": 1, "end": 2}', "'x.end' is not an argument"),
        (Span, "{}", "'x.start' is required"),
        (Point, '{"x": 1}', "'x.y' is required"),
        (Decimal, "[]", "'x' should be a number, got a list"),
        (datetime.timedelta, "[]", "'x' should be a duration such as 90 (seconds) or 'PT1M30S', got a list"),
        (Annotated[list[int], Field(min_length=2)], "[1]", "'x' should have at least 2 items after validation, not 1, got a list"),
    ],
    ids=str,
)
def test_problems_are_told_in_words_of_json(annotation: Any, written: str, text: str) -> None:
    def use(x: Any) -> None: ...

    with pytest.raises(ToolError) as caught:
        derive(use, annotations={"x": annotation}).parse(f'{{"x": {written}}}')
    assert str(caught.value) == f"invalid arguments: {text}"


def test_many_problems_are_cut() -> None:
    def use(a: int, b: int, c: int, d: int, e: int) -> None: ...

    assert problem(use, "{}").endswith("'c' is required (and 2 more)")


def test_long_words_of_the_model_are_cut() -> None:
    assert len(problem(add, json.dumps({"a": "x" * 1_000_000, "b": 1}))) < 200
    assert len(problem(add, json.dumps({"x" * 1_000_000: 1, "a": 1, "b": 1}))) < 200


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    def look() -> None: ...

    for arguments in ("", " ", "{}", "null", None, {}):
        assert derive(look).parse(arguments) == {}
    assert problem(look, '{"x": 1}') == "invalid arguments: 'x' is not an argument; this tool takes no arguments"


def test_a_validator_of_the_authors_speaks_to_the_model() -> None:
    def use(x: Annotated[int, pydantic.AfterValidator(even)]) -> None: ...

    assert problem(use, '{"x": 3}') == "invalid arguments: 'x' is not valid: must be even, got 3"


def test_strings_are_not_taken_for_infinite_numbers() -> None:
    def use(x: float) -> None: ...

    assert "finite" in problem(use, '{"x": "nan"}')


@pytest.mark.parametrize("text", ['{"a": 1} {"b": 2}', "{'a': 1}", "{a: 1}", "```json\n{}\n```", "\x00", "{]", '{"a": 0x10}', "{" * 1000])
def test_text_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ToolError, match="arguments are n"):
        read_arguments(text)


def test_a_number_that_python_does_not_write_is_refused() -> None:
    for arguments in ({"a": 10**5000}, {"a": [{10**5000: 1}]}):
        with pytest.raises(ToolError, match=r"^a number is out of range$"):
            read_arguments(arguments)


# Results.


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ("text", "text"),
        ("", ""),
        (None, "ok"),
        (0, "0"),
        (1.5, "1.5"),
        (True, "true"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (Person(name="Ana"), '{"name": "Ana", "age": 0}'),
        (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (Span(1), '{"start": 1, "stop": 9}'),
        ({"b", "c", "a"}, '["a", "b", "c"]'),
        ([{"type": "text", "text": "hi"}], [{"type": "text", "text": "hi"}]),
        ([{"type": "fruit"}], '[{"type": "fruit"}]'),
        ("\ud800!", "?!"),
        ((1, "a"), '[1, "a"]'),
        (Decimal("1.50"), '"1.50"'),
        (float("inf"), "Infinity"),
        (Colour.RED, '"red"'),
        ([Person(name="Ana"), Span(1)], '[{"name": "Ana", "age": 0}, {"start": 1, "stop": 9}]'),
        ([], "[]"),
        (
            [{"type": "text", "text": "a map"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            [{"type": "text", "text": "a map"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        ),
        ([{"type": "text", "text": "\ud800!"}], [{"type": "text", "text": "?!"}]),
        ([{"type": "text", "text": "a"}, 3], '[{"type": "text", "text": "a"}, 3]'),
        ([{"type": "file", "name": "a.txt"}], '[{"type": "file", "name": "a.txt"}]'),
        ([{"type": "file", "file": "a.txt"}], '[{"type": "file", "file": "a.txt"}]'),
        ([{"type": "file", "file": {"file_id": "f"}}], [{"type": "file", "file": {"file_id": "f"}}]),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}],) * 2,
        ([{"type": "text", "value": 3}], '[{"type": "text", "value": 3}]'),
        ([{"type": "text", "text": 3}], '[{"type": "text", "text": 3}]'),
        ([{"type": ["text"]}], '[{"type": ["text"]}]'),
        (types.MappingProxyType({"a": 1}), '{"a": 1}'),
    ],
)
def test_results(result: Any, content: Any) -> None:
    assert result_content("t", result) == content


def test_a_result_without_a_json_form_is_the_environments_bug() -> None:
    with pytest.raises(TypeError, match="tool 't' returned object, which has no JSON form"):
        result_content("t", object())


WAYS = ["a1", "b2", "c3", "d4", "e5", "f6"]


class Room(BaseModel):
    ways: set[str] = {*WAYS}
    again: frozenset[str] = frozenset(WAYS)
    inside: dict[str, tuple[set[str], int]] = {"x": ({*WAYS}, 1)}
    queue: deque[set[str]] = deque([{*WAYS}])
    back: Any = Field(default=None, exclude=True)

    @pydantic.field_serializer("again")
    def _joined(self, again: frozenset[str]) -> str:
        assert isinstance(again, frozenset)
        return "-".join(again)


class Whole(BaseModel):
    ways: set[str] = {*WAYS}

    @pydantic.model_serializer
    def _written(self) -> dict[str, Any]:
        return {"first": next(iter(self.ways)), "all": self.ways, "more": len(self.ways | {"z"})}


class Roots(pydantic.RootModel[set[str]]):
    pass


class Wider(BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class Cave:
    ways: frozenset[Any]
    rooms: Any = None


class Opaque:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


class Sealed(BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    items: Annotated[set[Opaque], pydantic.PlainSerializer(lambda items: [item.name for item in items])]


class Ways(NamedTuple):
    ways: set[str]


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        ({*WAYS}, WAYS),
        ({"x": [{*WAYS}]}, {"x": [WAYS]}),
        ({frozenset(WAYS), frozenset()}, [WAYS, []]),
        (Room(), {"ways": WAYS, "again": "-".join(WAYS), "inside": {"x": [WAYS, 1]}, "queue": [WAYS]}),
        (Whole(), {"first": "a1", "all": WAYS, "more": 7}),
        (Roots({*WAYS}), WAYS),
        (Wider(ways={*WAYS}), {"ways": WAYS}),  # type: ignore[call-arg]
        (Cave(frozenset(WAYS), [Roots({*WAYS})]), {"ways": WAYS, "rooms": [WAYS]}),
        (Cave(frozenset({Cave(frozenset(WAYS))})), {"ways": [{"ways": WAYS, "rooms": None}], "rooms": None}),
        (defaultdict(set, {"x": {*WAYS}}), {"x": WAYS}),
        (OrderedDict(x=[Whole()]), {"x": [{"first": "a1", "all": WAYS, "more": 7}]}),
        (UserDict(x={*WAYS}), {"x": WAYS}),
        (types.MappingProxyType({"x": {*WAYS}}), {"x": WAYS}),
        (Ways({*WAYS}), [WAYS]),
        (Sealed(items={Opaque(name) for name in WAYS}), {"items": WAYS}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sets_in_a_result_are_sorted_wherever_they_are(result: Any, plain: Any) -> None:
    kept = repr(result)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(str(result_content("t", result))) == plain
    assert repr(result) == kept


def test_a_result_may_hold_itself_where_that_is_not_written() -> None:
    room = Room()
    room.back = {"room": room, "ways": {*WAYS}}
    assert json.loads(str(result_content("t", room)))["ways"] == WAYS


# Collecting the tools of a class.


def test_only_marked_methods_become_tools() -> None:
    class Env(ToolEnv):
        @tool
        def look(self) -> str:
            return "a room"

        @tool(name="reset", timeout=5)
        def begin_again(self) -> str:
            return "again"

        @tool
        @staticmethod
        def add(a: int, b: int) -> int:
            return a + b

        def helper(self) -> str:
            return "no tool"

    assert [schema["function"]["name"] for schema in Env().tools] == ["look", "reset", "add"]


@pytest.mark.parametrize(
    "name", ["step", "reset", "close", "render", "np_random", "spec", "finish", "start", "action_space", "tools", "scenarios"]
)
def test_a_tool_that_would_hide_an_attribute_is_refused_when_the_class_is_defined(name: str) -> None:
    @tool
    def method(self: Any) -> None: ...

    with pytest.raises(TypeError, match=rf"Env\.{name}: a tool would hide .*@tool\(name=\"{name}\"\)"):
        type("Env", (ToolEnv,), {name: method})


def test_a_tool_without_self_is_refused_when_the_class_is_defined() -> None:
    with pytest.raises(
        TypeError, match=r"Env\.t: a tool's first parameter must be 'self': write def t\(self\), or put @staticmethod under @tool"
    ):

        class Env(ToolEnv):
            @tool
            def t() -> None: ...  # type: ignore[misc]

    with pytest.raises(TypeError, match=r"Env2\.t: .* write def t\(self, number, word\)"):

        class Env2(ToolEnv):
            @tool
            def t(number: int, word: str) -> None: ...  # type: ignore[misc]  # noqa: N805  what is tested

    with pytest.raises(TypeError, match=r"Env3\.t: .* must be 'self'"):

        class Env3(ToolEnv):
            @tool
            def t(*, number: int) -> None: ...  # type: ignore[misc]

    with pytest.raises(TypeError, match=r"Env4\.t: a tool's first parameter must be 'cls': write def t\(cls\)"):

        class Env4(ToolEnv):
            @tool
            @classmethod
            def t() -> None: ...  # type: ignore[misc]


def test_what_stands_for_self_may_be_spelled_otherwise() -> None:
    def plain(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    class Env(ToolEnv):
        @tool
        def unused(_self) -> str:  # noqa: N805  what is tested
            return "a"

        @tool
        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

        @tool
        @plain
        def wrapped(self, number: int) -> int:
            return number

    env = Env()
    env.reset(seed=0)
    assert [env.step(action)[0][0]["content"] for action in (call("unused"), call("of_class"), call("wrapped", number=3))] == ["a", "Env", "3"]


@pytest.mark.parametrize("kind", [property, functools.cached_property])
def test_a_property_is_no_tool(kind: Any) -> None:
    def look(self: Any) -> str:
        return "a room"

    with pytest.raises(TypeError, match=rf"Env\.look: a tool is called and a {kind.__name__} is read: remove @{kind.__name__}"):
        type("Env", (ToolEnv,), {"look": kind(tool(look))})
    with pytest.raises(TypeError, match=rf"@tool marks a method, and 'look' is a {kind.__name__}: remove @{kind.__name__}"):
        tool(kind(look))


@pytest.mark.parametrize(
    ("marked", "text"),
    [("look", r"write @tool\(name='look'\)"), (Person, "not 'Person', which is of type 'class'"), (3, "not 3, which is of type 'int'")],
    ids=str,
)
def test_what_is_no_method_is_no_tool(marked: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        tool(marked)
    with pytest.raises(TypeError, match="@tool marks a method"):
        tool(name="a")(marked)


def test_an_async_generator_is_no_tool() -> None:
    with pytest.raises(TypeError, match=r"Env\.watch: an async generator can't be a tool: collect what it yields in a list, and return that"):

        class Env(ToolEnv):
            @tool
            async def watch(self) -> AsyncIterator[int]:
                yield 1


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="two tools named 'look': a and b"):

        class Env(ToolEnv):
            @tool(name="look")
            def a(self) -> None: ...

            @tool(name="look")
            def b(self) -> None: ...


class Base(ToolEnv):
    @tool
    def first(self) -> str:
        return "base"

    @tool
    def second(self) -> str:
        return "base"


def test_subclasses_inherit_override_and_drop_tools() -> None:
    class Derived(Base):
        @tool
        def first(self) -> str:
            return "derived"

        second = None  # type: ignore[assignment]

        @tool
        def third(self) -> str:
            return "derived"

    env = Derived()
    env.reset(seed=0)
    assert list(env.action_space.tools) == ["first", "third"]
    assert env.step(call("first"))[0][0]["content"] == "derived"
    assert list(Base().action_space.tools) == ["first", "second"]


def test_an_override_that_is_not_a_tool_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Derived\.first overrides a tool.*decorate it with @tool"):

        class Derived(Base):
            def first(self) -> str:
                return "derived"


def test_annotations_may_name_local_and_later_classes() -> None:
    class Local(BaseModel):
        x: int

    class Env(ToolEnv):
        @tool
        def use(self, item: Local, later: Later) -> None: ...

    assert set(Env().tools[0]["function"]["parameters"]["properties"]) == {"item", "later"}  # type: ignore[call-overload]


def test_constrain_knows_local_annotations() -> None:
    class Local(BaseModel):
        x: int

    class Env(ToolEnv):
        def __init__(self) -> None:
            super().__init__()
            self.constrain("use", number=Annotated[int, Field(le=3)])

        @tool
        def use(self, item: Local, number: int) -> None: ...

    properties = Env().action_space.tools["use"]["properties"]
    assert properties == {"item": {"$ref": "#/$defs/Local"}, "number": {"maximum": 3, "type": "integer"}}


def test_constrain_changes_one_instance() -> None:
    class Env(ToolEnv):
        def __init__(self, high: int) -> None:
            super().__init__()
            self.constrain("pick", number=Annotated[int, Field(le=high)])

        @tool
        def pick(self, number: int) -> str:
            """Pick.

            Args:
                number: Which.
            """
            return str(number)

    small, large = Env(3), Env(9)
    assert small.action_space.tools["pick"]["properties"]["number"] == {"description": "Which.", "maximum": 3, "type": "integer"}
    small.reset(seed=0)
    large.reset(seed=0)
    assert "less than or equal to 3" in small.step(call("pick", number=5))[0][0]["content"]  # type: ignore[operator]
    assert large.step(call("pick", number=5))[0][0]["content"] == "5"
    with pytest.raises(ValueError, match="unknown tool 'pikc'; did you mean 'pick'\\? The tools are: pick"):
        large.constrain("pikc", number=int)
    with pytest.raises(TypeError, match="no parameter 'nmber'"):
        large.constrain("pick", nmber=int)


def test_a_tool_survives_copying() -> None:
    derived = derive(add)
    assert copy.deepcopy({"t": derived})["t"].parse('{"a": 1, "b": 2}') == {"a": 1, "b": 2}


def test_environments_with_tools_pickle() -> None:
    env = pickle.loads(pickle.dumps(Constrained()))
    env.reset(seed=0)
    assert "less than or equal to 3" in env.step(call("pick", number=5))[0][0]["content"]


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


class Later(BaseModel):
    y: int


class Constrained(ToolEnv):
    def __init__(self) -> None:
        super().__init__()
        self.constrain("pick", number=Annotated[int, Field(le=3)])

    @tool
    def pick(self, number: int) -> str:
        return str(number)
