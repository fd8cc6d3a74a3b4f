"""Environments that refer to themselves: what is restored belongs to the instance that it is restored to. And tools that pickle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import gymnasium
import pytest
from pydantic import Field

from art_gym import ToolEnv, call, tool
from art_gym.testing import check_transitions
from art_gym.wrappers import Transcript


class Part:
    def __init__(self, env: Machine) -> None:
        self.env = env


class Machine(ToolEnv):
    """Refers to itself in every way that it can."""

    max_turns = 8
    instant = True

    def __init__(self) -> None:
        super().__init__(tools=[self.double])
        self.ops = {"up": self._up, "down": self._down}
        self.partial: Callable[[], None] = partial(self._add, 10)
        self.part = Part(self)
        self.itself = self

    def start(self) -> str:
        self.n = int(self.np_random.integers(10))
        return "go"

    def _up(self) -> None:
        self.n += 1

    def _down(self) -> None:
        self.n -= 1

    def _add(self, number: int) -> None:
        self.n += number

    def double(self) -> int:
        """Double it."""
        self.n *= 2
        return self.n

    @tool
    def do(self, op: str) -> int:
        """Do something."""
        match op:
            case "partial":
                self.partial()
            case "part":
                self.part.env.n += 100
            case "itself":
                self.itself.n += 1000
            case _:
                self.ops["down" if op == "down" else "up"]()
        return self.n


ACTIONS = [call("do", op=op) for op in ("up", "down", "partial", "part", "itself")] + [call("double")]


def pickled(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("through", [lambda state: state, copy.deepcopy, pickled], ids=["as it is", "copied", "pickled"])
@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_what_refers_to_the_environment_refers_to_the_one_that_is_restored(action: Any, through: Any) -> None:
    first, second = Machine(), Machine()
    first.reset(seed=1)
    second.reset(seed=2)
    before = first.n
    state = through(first.snapshot())
    expected = first.step(action)
    first.n = -1
    for env in (second, first, second):
        env.restore(state)
        assert env.n == before
        assert env.step(action) == expected
        assert env.ops["up"].__self__ is env.part.env is env.itself is env  # type: ignore[attr-defined]
        assert all(other.n == -1 for other in (first, second) if other is not env)
        env.n = -1


def test_a_snapshot_holds_nothing_of_its_environment() -> None:
    env = Machine()
    env.reset(seed=1)
    state = env.snapshot()
    assert state["itself"] is not env
    assert not isinstance(state["itself"], Machine)


@pytest.mark.slow
def test_an_environment_that_refers_to_itself_passes_the_checks() -> None:
    assert check_transitions(Machine, examples=10)


class Counting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper that knows nothing of snapshots and refers to itself, to what it wraps, and to the environment within."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count = 0
        self.hooks = [self._counted]
        self.wrapped = env
        self.inner = env.unwrapped

    def _counted(self) -> None:
        self.count += 1

    def step(self, action: Any) -> Any:
        for hook in self.hooks:
            hook()
        return super().step(action)


@pytest.mark.parametrize("through", [lambda state: state, pickled], ids=["as it is", "pickled"])
def test_wrappers_of_gymnasium_refer_to_their_own_layers(through: Any) -> None:
    first, second = (Transcript(Counting(Counting(Machine()))) for _ in range(2))
    first.reset(seed=1)
    second.reset(seed=2)
    first.step(call("double"))
    second.restore(through(first.snapshot()))
    second.step(call("double"))
    outer: Any = second.env
    for layer in (outer, outer.env):
        assert layer.count == 2
        assert layer.hooks[0].__self__ is layer
        assert layer.wrapped is layer.env
        assert layer.inner is second.unwrapped
    assert first.env.count == 1  # type: ignore[attr-defined]


class Dice(ToolEnv):
    sides = 6

    def __init__(self) -> None:
        super().__init__()
        self.constrain("face", number=Annotated[int, Field(ge=1, le=self.sides)])

    @tool
    @classmethod
    def face(cls, number: int) -> str:
        """Show a face.

        Args:
            number: Which one.
        """
        return f"{number} of {cls.sides}"

    @classmethod
    @tool
    def count(cls) -> int:
        return cls.sides

    @tool
    @staticmethod
    def kind() -> str:
        return "dice"


class Large(Dice):
    sides = 20


@pytest.mark.parametrize("cls", [Dice, Large])
def test_tools_of_every_kind_of_method_pickle(cls: type[Dice]) -> None:
    env = cls()
    env.reset(seed=1)
    twin = pickled(env)
    assert twin.tools == env.tools
    for action in (call("face", number=cls.sides), call("face", number=21), call("count"), call("kind")):
        assert twin.step(action) == env.step(action)


def listed() -> str:
    return "listed"


@pytest.mark.parametrize("value", [[listed], [], None, listed], ids=["functions", "none", "None", "a function"])
def test_tools_on_the_class_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^Shed\.tools hides .*: .*super\(\)\.__init__\(tools=\[…\]\)"):
        type("Shed", (ToolEnv,), {"tools": value})
    mixin = type("Mixin", (), {"tools": value})
    with pytest.raises(TypeError, match=r"^Shed\.tools hides"):
        type("Shed", (mixin, ToolEnv), {})


def test_the_property_may_be_overridden_by_one() -> None:
    class Shed(ToolEnv):
        @property
        def tools(self) -> Any:
            return list(reversed(super().tools))

        @tool
        def a(self) -> None: ...

        @tool
        def b(self) -> None: ...

    assert [schema["function"]["name"] for schema in Shed().tools] == ["b", "a"]
