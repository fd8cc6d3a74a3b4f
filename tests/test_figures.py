"""Rewards, metrics and limits that an author gives: numbers, or an error that names which one isn't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from art_gym import ToolCallSpace, ToolEnv, UsageError, call, make, tool


class Door(ToolEnv):
    @tool
    def push(self) -> str:
        return "It opens."


def running() -> Door:
    env = Door()
    env.reset()
    return env


@pytest.mark.parametrize("value", ["1", "x", b"1", None, [], 1j, ...], ids=repr)
def test_a_figure_is_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^reward 'a' must be a number, not [^\n]*$"):
        running().reward("a", value)
    with pytest.raises(TypeError, match=r"^metric 'a' must be a number, not [^\n]*$"):
        running().metric("a", value)
    with pytest.raises(TypeError, match=r"^reward 'outcome' must be a number, not [^\n]*$"):
        running().finish(reward=value)


def test_numbers_of_other_kinds_count() -> None:
    env = running()
    for value in (1, True, np.float32(1), np.int64(1), np.array(1.0)):
        env.reward("a", value)
    assert env.step(call("push"))[4]["turn"] == 1


@pytest.mark.parametrize("name", ["max_turns", "max_parallel_calls"])
@pytest.mark.parametrize("value", ["5", 2.5, True, -1, [], float("inf")], ids=repr)
def test_a_limit_is_a_whole_number(name: str, value: Any) -> None:
    cls: Any = type("Room", (Door,), {name: value})
    with pytest.raises(TypeError, match=rf"^Room\.{name} must be a whole number of at least 0, or None for no limit, not [^\n]*$"):
        cls().reset()


@pytest.mark.parametrize("value", [None, 1, np.int64(1)], ids=repr)
def test_a_limit_may_be_of_any_whole_type(value: Any) -> None:
    env = Door()
    env.max_turns = env.max_parallel_calls = value
    env.reset()
    assert env.step(call("push"))[3] is (value is not None)


@pytest.mark.parametrize("count", ["x", -1, 1.5], ids=repr)
def test_a_count_of_scenarios_is_a_whole_number(count: Any) -> None:
    with pytest.raises(TypeError, match=r"^count must be a whole number of at least 0, or None for no limit, not [^\n]*$"):
        Door().scenarios("train", count)


@pytest.mark.parametrize("tools", ["x", None, [], {"a": 3}, {3: {}}], ids=str)
def test_a_space_takes_schemas_by_name(tools: Any) -> None:
    with pytest.raises(TypeError, match=r"^ToolCallSpace takes a mapping from each tool's name to the JSON schema of its parameters, not "):
        ToolCallSpace(tools)


@pytest.mark.parametrize("given", ["x", ["a"], [[1], [2, 3]], ...], ids=str)
def test_a_mask_holds_numbers(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected one number for each of the 1 tools, got [^\n]*$"):
        Door().action_space.sample(mask=given)


def test_an_environment_is_made_by_its_id() -> None:
    with pytest.raises(UsageError, match=r"^an environment is made by its id, such as 'art_gym/GuessNumber-v0', not by 3$"):
        make(3)  # type: ignore[arg-type]
