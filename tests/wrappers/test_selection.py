"""SelectTools: what is offered, and how a call to what isn't is answered."""

from __future__ import annotations

from typing import Any

import pytest

from art_gym import call, calls, say
from art_gym.wrappers import SelectTools, Transcript


def contents(env: Any, action: Any) -> list[Any]:
    return [message["content"] for message in env.step(action)[0]]


@pytest.fixture
def env(vault: Any) -> Any:
    env = SelectTools(vault(), ["kick", "dial"])
    env.reset(seed=0, options={"code": 42})
    return env


def test_tools_and_action_space_hold_the_selection_in_the_environments_order(env: Any) -> None:
    assert list(env.action_space.tools) == ["dial", "kick"]
    assert [schema["function"]["name"] for schema in env.tools] == ["dial", "kick"]
    assert [schema["function"]["name"] for schema in env.unwrapped.tools] == ["peek", "dial", "kick"]
    assert call("peek") not in env.action_space
    assert call("peek") in env.unwrapped.action_space


def test_a_call_to_one_left_out_is_unknown_and_reaches_no_tool(env: Any) -> None:
    observation, reward, _, _, info = env.step(call("peek"))
    (answer,) = observation
    assert answer == {"role": "tool", "tool_call_id": "call_0", "content": "unknown tool 'peek'; the tools are: dial, kick"}
    assert (reward, info["invalid_calls"], env.unwrapped.peeked) == (-0.25, 1, 0)
    assert env.unwrapped.refused == ["unknown tool 'peek'; the tools are: dial, kick"]


def test_the_other_calls_of_the_message_are_answered_in_their_places(env: Any) -> None:
    observation, _, terminated, _, info = env.step(calls(("peek", {}), ("kick", {}), ("dial", {"code": 42}), ("peek", {})))
    assert [message["tool_call_id"] for message in observation] == ["call_0", "call_1", "call_2", "call_3"]
    assert [message["content"] for message in observation] == [
        "unknown tool 'peek'; the tools are: dial, kick",
        "Ouch.",
        "It opens.",
        "not executed: the episode has ended",
    ]
    assert (terminated, info["invalid_calls"], info["tool_errors"]) == (True, 1, 1)


def test_no_text_names_what_is_left_out(env: Any) -> None:
    broken = {"tool_calls": [{"id": "a", "function": {"name": "look", "arguments": "{}"}}, {"id": "b"}]}
    for action in (say("Hm."), call("look"), broken, None):
        assert not any("peek" in text for text in contents(env, action)), action


def test_the_environment_itself_still_has_all_its_tools(env: Any) -> None:
    contents(env, call("peek"))
    assert contents(env.unwrapped, call("peek")) == ["The code is 42."]


def test_it_still_has_them_when_a_tool_raised(env: Any) -> None:
    with pytest.raises(ValueError, match="the vault fell over"):
        env.step(call("kick", force="hard"))
    env.reset(seed=0, options={"code": 42})
    assert contents(env.unwrapped, call("peek")) == ["The code is 42."]


def test_a_selection_of_a_selection(vault: Any) -> None:
    env: Any = SelectTools(Transcript(SelectTools(vault(), ["peek", "dial"])), ["dial"])
    env.reset(seed=0)
    assert list(env.action_space.tools) == ["dial"]
    assert env.step(calls(("peek", {}), ("kick", {})))[0][-1]["content"] == "unknown tool 'kick'; the tools are: dial"
    with pytest.raises(ValueError, match="unknown tool 'peek'; the tools are: dial"):
        SelectTools(env, ["peek"])


def test_none_at_all_leaves_text_only(vault: Any) -> None:
    env = SelectTools(vault(), [])
    env.reset(seed=0)
    assert (env.tools, env.action_space.tools) == ([], {})
    assert contents(env, call("peek")) == ["unknown tool 'peek'; there are no tools"]
    assert contents(env, say("Hm.")) == ["Go on."]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["peck"], "unknown tool 'peck'; did you mean 'peek'\\? the tools are: peek, dial, kick"),
        (["dial", 3], "unknown tool 3; the tools are: peek, dial, kick"),
    ],
)
def test_a_name_that_is_no_tool_is_refused(vault: Any, names: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SelectTools(vault(), names)


def test_a_text_is_no_list_of_names(vault: Any) -> None:
    with pytest.raises(TypeError, match=r"write \['dial'\]"):
        SelectTools(vault(), "dial")


def test_an_environment_that_is_no_tool_env_is_refused(plain: Any) -> None:
    with pytest.raises(TypeError, match="SelectTools needs a ToolEnv, not Plain"):
        SelectTools(plain(), ["go"])


@pytest.mark.parametrize("names", [None, 3, True, b"dial", {"dial": 1}], ids=repr)
def test_names_that_are_no_list_are_told(vault: Any, names: Any) -> None:
    with pytest.raises(TypeError, match="names must be a list of tools' names, not "):
        SelectTools(vault(), names)
