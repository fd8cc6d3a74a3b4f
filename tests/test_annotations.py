"""Annotations that are text, as `from __future__ import annotations` makes them all: names that are local where a tool is defined are found."""

from __future__ import annotations

import abc
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Annotated, Any, Literal

import cloudpickle
import pytest
from pydantic import BaseModel, Field

from art_gym import Tool, ToolEnv, call, tool


def moved(env: ToolEnv) -> Any:
    env.reset()
    return env.step(call("push", move={"step": 2}))[0][0]["content"]


class Meta(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:  # a frame between the class and its base
        return super().__new__(mcs, name, bases, namespace)


class Hooked(ToolEnv):
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)


@pytest.mark.parametrize("metaclass", [type, abc.ABCMeta, Meta], ids=lambda metaclass: metaclass.__name__)
@pytest.mark.parametrize("base", [ToolEnv, Hooked], ids=lambda base: base.__name__)
def test_a_class_in_a_function(base: Any, metaclass: Any) -> None:
    class Move(BaseModel):
        step: int

    class Env(base, metaclass=metaclass):  # type: ignore[misc]
        @tool
        def push(self, move: Move) -> str:
            return f"{move.step}"

    assert Env._class_tools, "at once"
    assert moved(Env()) == "2"


@pytest.mark.parametrize("metaclass", [type, abc.ABCMeta], ids=lambda metaclass: metaclass.__name__)
def test_a_class_whose_types_come_later_in_the_function(metaclass: Any) -> None:
    def make() -> Callable[[], ToolEnv]:
        class Env(ToolEnv, metaclass=metaclass):
            @tool
            def push(self, move: Move) -> str:
                return f"{move.step}"

        class Move(BaseModel):
            step: int

        return Env

    assert moved(make()()) == "2"


def test_a_type_in_the_class() -> None:
    class Env(ToolEnv):
        class Move(BaseModel):
            step: int

        @tool
        def push(self, move: Move) -> str:
            return f"{move.step}"

        @tool
        def list(self, names: list[str]) -> str:  # `list` is the built-in one, though the class has another
            return ",".join(names)

    class Sub(Env):
        """Inherits the tools."""

    assert moved(Env()) == moved(Sub()) == "2"


class Holder:
    class Move(BaseModel):
        step: int

    class Env(ToolEnv):
        class Jump(BaseModel):
            height: int

        @tool
        def push(self, move: Move) -> str:  # noqa: F821  the class around is not looked into by Python itself
            return f"{move.step}"

        @tool
        def jump(self, jump: Jump) -> str:
            return f"{jump.height}"


def test_a_class_in_a_class() -> None:
    assert moved(Holder.Env()) == "2"
    copied = pickle.loads(pickle.dumps(Holder.Env()))
    assert moved(copied) == "2"


def test_a_type_of_the_function_around() -> None:
    class Move(BaseModel):
        step: int

    def inside() -> ToolEnv:
        class Env(ToolEnv):
            @tool
            def push(self, move: Move) -> str:
                return f"{move.step}"

        return Env()

    assert moved(inside()) == "2"


def test_functions_that_are_handed_over() -> None:
    class Move(BaseModel):
        step: int

    def push(move: Move, why: Annotated[str, Field(max_length=3)] = "") -> str:
        return f"{move.step}"

    class Arm:
        def push(self, move: Move) -> str:
            return f"{move.step}"

    for given in (push, Arm().push, Tool.from_function(push)):
        assert moved(ToolEnv(tools=[given])) == "2"


def test_a_local_name_hides_a_global_one() -> None:
    Literal = int  # noqa: F841, N806  the name is what is tested

    def use(x: Literal) -> None: ...

    assert Tool.from_function(use).parameters["properties"] == {"x": {"type": "integer"}}


def make_without_move() -> type[ToolEnv]:
    class Env(ToolEnv):
        @tool
        def push(self, move: Move) -> str:  # type: ignore[name-defined]  # noqa: F821  what is tested
            return ""

    return Env


def test_the_names_of_whoever_calls_do_not_count() -> None:
    class Move(BaseModel):
        step: int

    with pytest.raises(NameError, match="'Move' is not defined"):
        make_without_move()()
    assert Move


def test_an_environment_with_local_types_is_pickled_by_value() -> None:
    class Move(BaseModel):
        step: int

    class Env(ToolEnv):
        @tool
        def push(self, move: Move) -> str:
            return f"{move.step}"

    assert moved(cloudpickle.loads(cloudpickle.dumps(Env))()) == "2"
    assert moved(cloudpickle.loads(cloudpickle.dumps(Env()))) == "2"


def test_nothing_is_kept_of_a_class_that_is_gone() -> None:
    def make() -> weakref.ref[type]:
        class Env(ToolEnv):
            @tool
            def push(self, move: Move) -> None: ...

        class Move(BaseModel):
            step: int

        return weakref.ref(Env)

    gone = make()
    gc.collect()
    assert gone() is None


# Defaults in annotations.


@pytest.mark.parametrize(
    ("annotation", "default", "shown"),
    [
        (Annotated[int, Field(default=4)], 4, {"default": 4, "type": "integer"}),
        (Annotated[int | None, Field(default=None)], None, {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}),
        (
            Annotated[int, Field(default=4, ge=1, description="How many.")],
            4,
            {"default": 4, "description": "How many.", "minimum": 1, "type": "integer"},
        ),
        (Annotated[Annotated[int, Field(default=3)], Field(default=4)], 4, {"default": 4, "type": "integer"}),
        (Annotated[list[int], Field(default_factory=lambda: [7])], [7], {"items": {"type": "integer"}, "type": "array"}),
    ],
    ids=str,
)
def test_a_default_in_the_annotation_makes_a_parameter_optional(annotation: Any, default: Any, shown: Any) -> None:
    def use(x): ...  # type: ignore[no-untyped-def]

    derived = Tool.from_function(use, annotations={"x": annotation})
    assert derived.parse("{}") == {"x": default}
    assert "required" not in derived.parameters
    assert derived.parameters["properties"] == {"x": shown}


def test_the_default_of_the_signature_counts_more() -> None:
    def use(x: Annotated[int, Field(default=4)] = 5) -> None: ...

    assert Tool.from_function(use).parse("{}") == {"x": 5}


def test_a_default_that_is_made_from_other_arguments_is_refused() -> None:
    def use(a: int, x: Annotated[int, Field(default_factory=lambda data: data["a"])]) -> None: ...

    with pytest.raises(TypeError, match=r"^tool 'use': parameter 'x': its default_factory takes the other arguments, [^\n]*: take None, "):
        Tool.from_function(use)


def test_each_call_has_a_default_of_its_own() -> None:
    def use(x: Annotated[list[int], Field(default_factory=list)]) -> None: ...

    derived = Tool.from_function(use)
    first, second = derived.parse("{}")["x"], derived.parse("{}")["x"]
    assert first == second == []
    assert first is not second
