"""The attributes that an environment keeps for itself: an author who takes one of their names is told which, and at once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from art_gym import ToolEnv, call, tool
from art_gym.wrappers import SelectTools


class Door(ToolEnv):
    """A door."""

    @tool
    def push(self) -> str:
        """Push it."""
        self.reward("push", 0.5)
        return "It opens."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("turn", "white"),
        ("turn", 0),
        ("options", {}),
        ("tools", []),
        *((name, None) for name in ("_phase", "_tools", "_offered", "_functions", "_metrics", "_rewards", "_transcript")),
        *((name, 0.5) for name in ("reward", "metric", "finish", "start", "step", "reset", "on_text", "on_invalid", "render", "close")),
    ],
)
def test_an_attribute_of_the_environments_own_can_not_be_set(name: str, value: Any) -> None:
    env = Door()
    with pytest.raises(AttributeError, match=rf"^Door\.{name} is [^\n]*: .*name for yours$"):
        setattr(env, name, value)
    env.reset()
    assert env.step(call("push"))[1] == 0.5


@pytest.mark.parametrize("name", ["turn", "options", "_rewards", "_info", "_show", "reward", "metric", "start", "close"])
def test_an_attribute_of_the_environments_own_can_not_be_a_class_attribute(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^Chess\.{name} [^\n]*: choose another name"):
        type("Chess", (ToolEnv,), {name: 0.5})


def test_a_property_can_not_hide_a_method() -> None:
    with pytest.raises(TypeError, match=r"^Chess\.reward is a method of the environment, and can't be of type 'property'"):

        class Chess(ToolEnv):
            @property
            def reward(self) -> float:  # type: ignore[override]
                return 0.5


def test_a_mixin_is_held_to_the_same() -> None:
    class Mixin:
        turn = "white"

    with pytest.raises(TypeError, match=r"^Chess\.turn is the environment's own, the number of actions since the last reset: "):
        type("Chess", (Mixin, ToolEnv), {})


def test_other_attributes_are_the_authors() -> None:
    class Chess(ToolEnv):
        state = 1
        _board = 2
        max_turns = 3

        def start(self) -> str:
            self.state, self._board, self.colour, self.max_turns, self.instructions = 2, 3, "white", 4, "Play."
            return "Go."

    env = Chess()
    assert [message["content"] for message in env.reset()[0]] == ["Play.", "Go."]
    assert (env.state, env._board, env.colour, env.max_turns) == (2, 3, "white", 4)


def test_methods_can_be_replaced_on_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Door()
    monkeypatch.setattr(env, "start", lambda: "Hello.")
    assert env.reset()[0][-1]["content"] == "Hello."


def test_an_environment_is_copied_and_pickled_and_restored_whole() -> None:
    env = Door()
    env.reset()
    env.step(call("push"))
    state = env.snapshot()
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert other.turn == 1
        other.step(call("push"))
        other.restore(state)
        assert other.turn == 1
        assert other._offered is other._tools


def test_what_a_wrapper_leaves_out_for_a_step_is_no_state() -> None:
    class Room(Door):
        @tool
        def look(self) -> str:
            self.saved = self.snapshot()
            return ", ".join(schema["function"]["name"] for schema in self.tools)

    env = SelectTools(SelectTools(Room(), ["look", "push"]), ["look"])
    env.reset()
    assert env.step(call("look"))[0][0]["content"] == "push, look"
    assert env.step(call("push"))[0][0]["content"] == "unknown tool 'push'; the tools are: look"
    room: Any = env.unwrapped
    room.restore(room.saved)
    assert room.step(call("push"))[0][0]["content"] == "It opens."


@pytest.mark.parametrize("options", ["x", "", 0, 3, [], ["a"], object()])
def test_options_that_are_no_mapping_are_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=r"^options must be a dictionary or None, not [^\n]*: write reset\(options=\{…\}\)$"):
        Door().reset(options=options)


def test_the_options_of_another_environment_can_be_given_on() -> None:
    first, second = Door(), Door()
    first.reset()
    second.reset(options=first.options)  # type: ignore[arg-type]
    assert second.options == {}
    second.reset(options=Door.options)  # type: ignore[arg-type]
    assert second.options == {}
