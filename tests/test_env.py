"""ToolEnv: Gymnasium's contract, and that whatever a model writes is answered."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from string import Template
from typing import Annotated, Any, ClassVar, TypeVar, cast

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from art_gym import Scenario, Tool, ToolEnv, ToolError, ToolTimeout, _calls, call, calls, say, tool
from art_gym.wrappers import Transcript

T = TypeVar("T")


class Counter(ToolEnv):
    """Count up to a target that depends on the seed."""

    instructions = "Count."
    max_turns = 6

    def start(self) -> str:
        self.target = int(self.np_random.integers(3, 6))
        self.count = 0
        self.log: list[str] = []
        return f"Count to {self.target}."

    @tool
    def add(self, number: int = 1) -> str:
        """Add to the count."""
        if number < 0:
            raise ToolError("only upwards")
        self.count += number
        self.log.append(f"+{number}")
        self.reward("progress", 0.25)
        self.metric("count", self.count)
        if self.count >= self.target:
            self.finish(1.0, success=self.count == self.target)
        return str(self.count)

    @tool
    def roll(self) -> int:
        """Roll a die."""
        return int(self.np_random.integers(1, 7))

    @tool
    def fail(self) -> None:
        """Hit a bug."""
        raise KeyError("a bug")


def fresh(seed: int = 0) -> Counter:
    env = Counter()
    env.reset(seed=seed)
    return env


def contents(observation: Any) -> list[Any]:
    return [message["content"] for message in observation]


# Gymnasium.


def test_reset_shows_system_and_user_message() -> None:
    env = Counter()
    observation, info = env.reset(seed=1)
    assert observation == ({"role": "system", "content": "Count."}, {"role": "user", "content": f"Count to {env.target}."})
    assert info == {"turn": 0, "rewards": {}, "metrics": {}, "invalid_calls": 0, "tool_errors": 0, "truncation": ""}


def test_step_returns_new_messages_only() -> None:
    env = fresh()
    observation, reward, terminated, truncated, info = env.step(call("add"))
    assert observation == ({"role": "tool", "tool_call_id": "call_0", "content": "1"},)
    assert (reward, terminated, truncated) == (0.25, False, False)
    assert info == {"turn": 1, "rewards": {"progress": 0.25}, "metrics": {"count": 1.0}, "invalid_calls": 0, "tool_errors": 0, "truncation": ""}


def test_reward_components_add_up_and_the_end_is_terminated() -> None:
    env = fresh()
    _, reward, terminated, truncated, info = env.step(calls(("add", {"number": 1}), ("add", {"number": env.target - 1})))
    assert info["rewards"] == {"progress": 0.5, "outcome": 1.0}
    assert (reward, terminated, truncated) == (1.5, True, False)
    assert info["metrics"] == {"count": float(env.target), "success": 1.0}


def test_the_same_seed_gives_the_same_episode_again_and_again() -> None:
    env = Counter()
    seen = set()
    for _ in range(6):
        env.reset(seed=1234)
        seen.add((env.target, str(contents(env.step(calls(("roll", {}), ("roll", {})))[0]))))
    assert len(seen) == 1


def test_reset_without_a_seed_goes_on_with_the_generator() -> None:
    def rolls(env: Counter) -> list[str]:
        found = []
        for _ in range(4):
            env.reset()
            found += contents(env.step(call("roll"))[0])
        return found

    assert rolls(fresh(5)) == rolls(fresh(5))


def test_turns_run_out() -> None:
    env = fresh()
    flags = [env.step(say("hm"))[2:] for _ in range(6)]
    assert [(terminated, truncated, info["truncation"]) for terminated, truncated, info in flags] == [
        *[(False, False, "")] * 5,
        (False, True, "max_turns"),
    ]


def test_an_end_on_the_last_turn_is_not_a_truncation() -> None:
    env = fresh()
    for _ in range(5):
        env.step(say("hm"))
    assert env.step(call("add", number=9))[2:4] == (True, False)


@pytest.mark.parametrize("end", ["terminated", "truncated", "not reset", "failed"])
def test_step_outside_an_episode_needs_a_reset(end: str) -> None:
    env = Counter()
    if end != "not reset":
        env.reset(seed=0)
    if end == "terminated":
        env.step(call("add", number=9))
    if end == "truncated":
        for _ in range(6):
            env.step(say(""))
    if end == "failed":
        with pytest.raises(KeyError):
            env.step(call("fail"))
    with pytest.raises(ResetNeeded):
        env.step(call("add"))
    env.reset(seed=0)
    env.step(call("add"))


def test_options_reach_the_episode_and_are_not_shared() -> None:
    env, options = Counter(), {"a": [1]}
    env.reset(seed=0, options=options)
    options["a"].append(2)
    assert env.options == {"a": [1]}
    env.reset(seed=0)
    assert env.options == {}


def test_observations_and_infos_are_never_changed_later() -> None:
    env = fresh()
    kept = [env.reset(seed=0), *(env.step(call("add"))[::4] for _ in range(2))]
    copies = copy.deepcopy(kept)
    env.step(call("add"))
    for observation, info in kept:
        for message in observation:
            message["content"] = "scribbled"  # type: ignore[typeddict-item]
        info["rewards"]["x"] = 1.0
    assert env.reset(seed=0) == copies[0]
    assert env.step(call("add"))[::4] == copies[1]


def test_flags_and_rewards_are_plain_python_values() -> None:
    class Env(ToolEnv):
        @tool
        def end(self) -> None:
            self.finish(np.float32(0.5), success=np.bool_(True))  # type: ignore[arg-type]

    env = Env()
    env.reset()
    _, reward, terminated, truncated, info = env.step(call("end"))
    assert [type(value) for value in (reward, terminated, truncated)] == [float, bool, bool]
    assert json.loads(json.dumps(info))["metrics"] == {"success": 1.0}


def test_a_forgotten_super_init_is_named() -> None:
    class Env(ToolEnv):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match=r"Env\.__init__ doesn't call super\(\)\.__init__\(\)"):
        Env().reset()


def test_close_twice() -> None:
    env = fresh()
    env.close()
    env.close()


# Answers.


def test_every_call_is_answered_once_in_order_with_its_id() -> None:
    env = fresh()
    action: Any = calls(("add", {"number": -1}), ("jump", {}), ("add", {"number": "x"}), ("add", {"number": 1}), ("add", {"numbr": 1}))
    observation, _, _, _, info = env.step(action)
    assert [message["tool_call_id"] for message in observation] == [f"call_{index}" for index in range(5)]  # type: ignore[typeddict-item]
    assert contents(observation) == [
        "only upwards",
        "unknown tool 'jump'; the tools are: add, roll, fail",
        "invalid arguments: 'number' should be a valid integer, unable to parse string as an integer, got 'x'",
        "1",
        "invalid arguments: 'numbr' is not an argument; the arguments are: number",
    ]
    assert (info["invalid_calls"], info["tool_errors"]) == (3, 1)


def test_calls_after_the_end_are_not_executed() -> None:
    env = fresh()
    observation, reward, terminated, _, info = env.step(calls(("add", {"number": 9}), ("add", {}), ("jump", {})))
    assert contents(observation) == ["9", "not executed: the episode has ended", "not executed: the episode has ended"]
    assert (reward, terminated, env.count, info["invalid_calls"]) == (1.25, True, 9, 0)


def test_calls_beyond_the_limit_are_not_executed() -> None:
    class Limited(Counter):
        max_parallel_calls = 1

    env = Limited()
    env.reset(seed=0)
    observation, _, _, _, info = env.step(calls(("add", {}), ("add", {})))
    assert contents(observation) == ["1", "not executed: a message may hold 1 tool call at most"]
    assert (env.count, info["invalid_calls"]) == (1, 1)


@pytest.mark.parametrize("name", ["reset", "step", "close", "start", "finish", "_info", "target", "__init__", "on_text"])
def test_methods_that_are_no_tools_cannot_be_called(name: str) -> None:
    assert contents(fresh().step(call(name))[0]) == [f"unknown tool '{name}'; the tools are: add, roll, fail"]


@pytest.mark.parametrize(("name", "near"), [("ad", "add"), ("Roll", "roll"), ("tools.fail", "fail"), ("failed", "fail"), ("adds", "add")])
def test_the_tool_that_was_perhaps_meant_is_named(name: str, near: str) -> None:
    assert contents(fresh().step(call(name))[0]) == [f"unknown tool '{name}'; did you mean '{near}'? The tools are: add, roll, fail"]


def one_call(**parts: Any) -> Any:
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "roll", "arguments": "{}"}, **parts}]}


@pytest.mark.parametrize(
    ("action", "content"),
    [
        (one_call(function=None), "a tool call's 'function' must be an object with 'name' and 'arguments'; the tools are: add, roll, fail"),
        (one_call(function={"name": ""}), "the call names no tool; the tools are: add, roll, fail"),
        (one_call(function={"name": 3}), "the call names no tool; the tools are: add, roll, fail"),
        (one_call(type="custom"), "a tool call's type must be 'function'; the tools are: add, roll, fail"),
        ({"tool_calls": ["add"]}, "a tool call must be an object with 'id', 'type' and 'function'; the tools are: add, roll, fail"),
        (one_call(function={"name": "\ud800", "arguments": ""}), "unknown tool '?'; the tools are: add, roll, fail"),
        (one_call(function={"name": "x" * 10**6}), f"unknown tool '{'x' * 60}…'; the tools are: add, roll, fail"),
        (one_call(function={"name": "add", "arguments": "[]"}), "arguments must be an object, not a list"),
        ({"role": "user", "content": "hi"}, "the message's role must be 'assistant'. Call a tool; the tools are: add, roll, fail."),
        ({"tool_calls": {}}, "tool_calls must be a list of calls. Call a tool; the tools are: add, roll, fail."),
        (None, "the action must be an assistant message. Call a tool; the tools are: add, roll, fail."),
        ([], "the action must be an assistant message. Call a tool; the tools are: add, roll, fail."),
    ],
    ids=lambda value: str(value)[:50],
)
def test_malformed_actions_are_answered(action: Any, content: str) -> None:
    env = fresh()
    observation, _, _, _, info = env.step(action)
    assert contents(observation) == [content]
    assert info["invalid_calls"] == 1
    assert observation in env.observation_space


@pytest.mark.parametrize(
    "action",
    [
        {"tool_calls": [{"function": {"name": "add"}}]},
        {"tool_calls": [{"function": {"name": "add", "arguments": ""}}]},
        {"tool_calls": [{"function": {"name": "add", "arguments": {"number": 1}}}]},
        {"role": "assistant", "content": None, "tool_calls": ({"type": None, "function": {"name": "add", "arguments": "null"}},)},
    ],
    ids=str,
)
def test_optional_keys_may_be_missing(action: Any) -> None:
    assert contents(fresh().step(action)[0]) == ["1"]


def test_ids_that_are_missing_are_given_and_none_is_used_for_two() -> None:
    roll = {"function": {"name": "roll"}}
    action: Any = {"tool_calls": [roll, {**roll, "id": "call_0"}, {**roll, "id": 7}, {**roll, "id": "same"}, {**roll, "id": "same"}]}
    ids = [message["tool_call_id"] for message in fresh().step(action)[0]]  # type: ignore[typeddict-item]
    assert ids == ["call_0_", "call_0", "call_2", "same", "same"]


def test_sdk_message_objects_are_actions_too() -> None:
    class Message:
        def model_dump(self) -> Any:
            return call("add")

    assert contents(fresh().step(Message())[0]) == ["1"]  # type: ignore[arg-type]


def test_text_beside_calls_is_no_text_turn() -> None:
    class Env(Counter):
        def on_text(self, text: str) -> str:
            raise AssertionError("called")

    env = Env()
    env.reset(seed=0)
    assert contents(env.step(calls(("add", {}), text="I add."))[0]) == ["1"]


@pytest.mark.parametrize("action", [say("hello"), say(""), {"role": "assistant", "content": None}, {"tool_calls": []}, {}], ids=str)
def test_a_message_without_calls_is_nudged(action: Any) -> None:
    observation, reward, terminated, truncated, info = fresh().step(action)
    assert observation == ({"role": "user", "content": "Call a tool; the tools are: add, roll, fail."},)
    assert (reward, terminated, truncated, info["invalid_calls"]) == (0.0, False, False, 0)


def test_on_text_may_speak_or_end_the_episode() -> None:
    class Chat(ToolEnv):
        def start(self) -> None:
            self.heard: list[str] = []

        def on_text(self, text: str) -> str | None:
            self.heard.append(text)
            if text == "?":
                raise ToolError("Speak up.")
            if text == "bye":
                self.finish(reward=1.0)
                return None
            return "Go on, please."

    env = Chat()
    assert env.reset()[0] == ()
    parts: Any = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]}
    assert contents(env.step(parts)[0]) == ["Go on, please."]
    assert contents(env.step(say("?"))[0]) == ["Speak up."]
    observation, reward, terminated, *_ = env.step(say("bye"))
    assert (observation, reward, terminated) == ((), 1.0, True)
    assert env.heard == ["ab", "?", "bye"]


def test_on_invalid_hears_what_the_model_is_told() -> None:
    class Strict(Counter):
        def on_invalid(self, problem: str) -> None:
            self.log.append(problem)
            self.reward("invalid", -0.1)

    env = Strict()
    env.reset(seed=0)
    observation, reward, *_ = env.step(calls(("jump", {}), ("add", {"number": -1})))
    assert env.log == contents(observation)[:1]
    assert reward == -0.1
    assert env.step({"role": "user"})[1] == -0.1  # type: ignore[typeddict-item]


def test_the_instructions_may_be_a_method_that_knows_the_start() -> None:
    class Env(ToolEnv):
        def instructions(self) -> str:
            return f"Find {self.secret}."

        def start(self) -> list[Any]:
            self.secret = 7
            return [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Hi."}]

    assert contents(Env().reset()[0]) == ["Find 7.", "Hello.", "Hi."]


def test_text_instructions_are_taken_as_they_are() -> None:
    class Env(ToolEnv):
        instructions = "Pay $5 for {this}, $name."

    assert contents(Env().reset()[0]) == ["Pay $5 for {this}, $name."]


class Templated(ToolEnv):
    instructions = Template("Find a number from $low to ${high}, in $max_turns turns, for $$5.")
    max_turns = 7

    def __init__(self, low: int = 1) -> None:
        super().__init__()
        self.low = low

    def start(self) -> None:
        self.high = int(self.np_random.integers(10, 20))


def test_a_template_is_filled_from_the_attributes_after_the_start() -> None:
    env = Templated(low=3)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        assert contents(observation) == [f"Find a number from 3 to {env.high}, in 7 turns, for $5."]
    env.instructions = lambda: Template("At $low.")
    assert contents(env.reset(seed=0)[0]) == ["At 3."]


def test_an_environment_with_a_template_pickles() -> None:
    env = pickle.loads(pickle.dumps(Templated(low=3)))
    assert env.reset(seed=0) == Templated(low=3).reset(seed=0)


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        (
            "At $hihg.",
            AttributeError,
            r"Env\.instructions names \$hihg, and Env has no attribute 'hihg': set it in __init__ or start, or write",
        ),
        ("At $5.", ValueError, r"Env\.instructions is no valid string\.Template: .* a dollar sign itself is written '\$\$'"),
        ("At $start.", TypeError, r"Env\.instructions names \$start, which is a method"),
    ],
)
def test_a_template_that_cannot_be_filled_is_told(text: str, error: type[Exception], told: str) -> None:
    class Env(ToolEnv):
        instructions = Template(text)

    with pytest.raises(error, match=told):
        Env().reset()


# Tools that are given.


def shout(text: str, times: int = 1) -> str:
    """Say it loudly.

    Args:
        text: What to say.
        times: How often.
    """
    return " ".join([text.upper()] * times)


async def whisper(text: str) -> str:
    return text.lower()


class Shelf:
    """Something outside the environment that has a state of its own."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str) -> int:
        """Put an item on the shelf."""
        self.items.append(item)
        return len(self.items)


class Stocked(Counter):
    def __init__(self, tools: Any = (), **options: Any) -> None:
        self.shelf = Shelf()
        super().__init__(tools=[shout, self.shelf.put, *tools], **options)


def stocked(seed: int = 0) -> Stocked:
    env = Stocked()
    env.reset(seed=seed)
    return env


def test_functions_are_tools_beside_the_methods() -> None:
    env = Stocked([whisper, Tool.from_function(len_of, name="length", timeout=5), Tool.from_function(partial(shout, times=2), name="twice")])
    env.reset(seed=0)
    assert list(env.action_space.tools) == ["add", "roll", "fail", "shout", "put", "whisper", "length", "twice"]
    assert env.tools[3] == Tool.from_function(shout).schema
    given = [("shout", {"text": "a", "times": 2}), ("put", {"item": "x"}), ("whisper", {"text": "B"}), ("length", {"text": "abc"})]
    assert contents(env.step(calls(*given, ("add", {}), ("twice", {"text": "c"})))[0]) == ["A A", "1", "b", "3", "1", "C C"]
    assert env.shelf.items == ["x"]


async def test_given_tools_work_in_async_steps() -> None:
    env = Stocked([whisper])
    env.reset(seed=0)
    assert contents((await env.astep(calls(("whisper", {"text": "B"}), ("shout", {"text": "a"}))))[0]) == ["b", "A"]


def test_given_tools_answer_bad_arguments_and_can_be_constrained() -> None:
    env = stocked()
    assert contents(env.step(call("shout", txt="a"))[0]) == [
        "invalid arguments: 'text' is required; 'txt' is not an argument; the arguments are: text, times"
    ]
    env.constrain("shout", times=Annotated[int, Field(le=2)])
    assert env.action_space.tools["shout"]["properties"]["times"] == {
        "default": 1,
        "description": "How often.",
        "maximum": 2,
        "type": "integer",
    }
    assert "less than or equal to 2" in contents(env.step(call("shout", text="a", times=3))[0])[0]
    assert contents(env.step(call("shout", text="a", times=2))[0]) == ["A A"]


def test_a_marked_function_keeps_its_options() -> None:
    @tool(name="say-it", timeout=0.2)
    def say_it(text: str) -> str:
        time.sleep(1)
        return text

    env = ToolEnv(tools=[say_it])
    env.reset(seed=0)
    with pytest.raises(ToolTimeout, match="tool 'say-it' ran past its time limit"):
        env.step(call("say-it", text="a"))


def test_an_environment_without_a_class_of_its_own_takes_tools() -> None:
    env = ToolEnv(tools=(shout,))
    env.reset(seed=0)
    assert contents(env.step(call("shout", text="a"))[0]) == ["A"]
    assert ToolEnv().action_space.tools == {}


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ([lambda: None], "a tool's name is 1 to 64 letters"),
        ([shout, shout], r"ToolEnv has two tools named 'shout': tools= holds both; Tool\.from_function\(…, name=…\) gives one another name"),
        (["shout"], "'shout' is no tool: tools= takes functions, objects that can be called, and Tool"),
        ([Shelf], "the class 'Shelf' is no tool"),
        ([None], "None is no tool"),
        ([Shelf.put], "tool 'put': its first parameter is 'self'"),
        (shout, "tools must be a list of functions and Tools, not function"),
        ("shout", "tools must be a list of functions and Tools, not str"),
        ({"shout": shout}, "tools must be a list of functions and Tools, not dict"),
        ([sum], "tool 'sum': parameter 'iterable' can't be passed by name"),
    ],
)
def test_what_is_no_tool_is_refused(tools: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ToolEnv(tools=tools)


def test_a_given_tool_may_not_take_the_name_of_a_marked_one() -> None:
    def add(number: int) -> int:
        return number

    with pytest.raises(TypeError, match="Stocked has two tools named 'add': its class marks one, and tools= holds another"):
        Stocked([add])
    env = Stocked([Tool.from_function(add, name="plus")])
    env.reset(seed=0)
    assert contents(env.step(call("plus", number=3))[0]) == ["3"]


def test_a_tool_may_be_run_by_an_attribute() -> None:
    def talk(text: str) -> str:
        raise AssertionError("not this one")

    talking = Tool.from_function(talk, attribute="answer")

    class Env(ToolEnv):
        def answer(self, text: str) -> str:
            return f"heard {text}"

    env = Env(tools=[talking])
    env.reset(seed=0)
    assert contents(env.step(call("talk", text="a"))[0]) == ["heard a"]
    with pytest.raises(TypeError, match="tool 'talk' is run by the environment's attribute 'answer', and there is none"):
        ToolEnv(tools=[talking])


def test_what_a_given_tool_holds_is_copied_pickled_and_restored_with_the_environment() -> None:
    env = stocked()
    env.step(call("put", item="x"))
    twins: list[Any] = [copy.deepcopy(env), pickle.loads(pickle.dumps(env)), Stocked()]
    twins[2].restore(pickle.loads(pickle.dumps(env.snapshot())))
    state = env.snapshot()
    assert contents(env.step(call("put", item="y"))[0]) == ["2"]
    for twin in twins:
        assert twin.shelf.items == ["x"]
        assert contents(twin.step(call("put", item="z"))[0]) == ["2"]
        assert twin.shelf.items == ["x", "z"]
    for _ in range(2):
        env.restore(state)
        assert contents(env.step(call("put", item="w"))[0]) == ["2"]
        assert env.shelf.items == ["x", "w"]


def len_of(text: str) -> int:
    return len(text)


# What authors get wrong.


def test_reward_must_be_finite_and_within_an_episode() -> None:
    env = fresh()
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="reward 'x' must be finite"):
            env.reward("x", value)
        with pytest.raises(ValueError, match="metric 'x' must be finite"):
            env.metric("x", value)
    with pytest.raises(RuntimeError, match="needs an episode"):
        Counter().finish()


def test_an_episode_ends_once() -> None:
    class Env(ToolEnv):
        @tool
        def end(self) -> None:
            self.finish()
            self.finish()

    env = Env()
    env.reset()
    with pytest.raises(RuntimeError, match="finish needs an episode that is running, this one is over"):
        env.step(call("end"))


def test_a_bug_in_a_tool_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="a bug"):
        fresh().step(call("fail"))


class Exhausted(ToolEnv):
    """Runs out of items, everywhere: StopIteration means something to whoever drives generators."""

    where = "step"

    def start(self) -> str:
        return self.take("start")

    def on_text(self, text: str) -> str:
        return self.take("step")

    def on_invalid(self, problem: str) -> None:
        self.take("step")

    def take(self, where: str) -> str:
        items: list[str] = [] if where == self.where else ["item"]
        return next(iter(items))

    @tool
    def sync(self) -> str:
        return self.take("step")

    @tool(timeout=5)
    def timed(self) -> str:
        return self.take("step")

    @tool
    async def awaited(self) -> str:
        return self.take("step")

    @tool(timeout=5)
    async def awaited_briefly(self) -> str:
        return self.take("step")


class InstantlyExhausted(Exhausted):
    instant = True


EXHAUSTING = [call("sync"), call("timed"), call("awaited"), call("awaited_briefly"), say("hm"), call("jump")]


def assert_exhausted(error: RuntimeError) -> None:
    cause: Any = error.__cause__
    assert isinstance(cause, StopIteration)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)][-1] == "take"


@pytest.mark.parametrize("action", EXHAUSTING, ids=str)
@pytest.mark.parametrize("cls", [Exhausted, InstantlyExhausted])
async def test_an_exhausted_iterator_in_a_tool_is_a_bug_of_the_environment(cls: type[Exhausted], action: Any) -> None:
    env = cls()
    for asynchronous in (False, True):
        env.reset()
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            await asyncio.wait_for(env.astep(action), 5) if asynchronous else env.step(action)
        assert_exhausted(caught.value)
        with pytest.raises(ResetNeeded):
            env.step(action)


@pytest.mark.parametrize("method", ["start", "instructions"])
def test_an_exhausted_iterator_at_the_start_is_a_bug_of_the_environment(method: str) -> None:
    env = Exhausted()
    if method == "start":
        env.where = "start"
    else:
        env.instructions = lambda: env.take("step")
    with pytest.raises(RuntimeError, match=f"{method} raised StopIteration") as caught:
        env.reset()
    assert_exhausted(caught.value)


@pytest.mark.parametrize("name", ["awaits", "raises", "raises_briefly"])
async def test_a_tool_that_cancels_itself_does_not_look_like_a_cancelled_step(name: str) -> None:
    class Env(ToolEnv):
        @tool
        async def awaits(self) -> None:
            task = asyncio.ensure_future(asyncio.sleep(5))
            task.cancel()
            await task

        @tool
        def raises(self) -> None:
            raise asyncio.CancelledError

        @tool(timeout=5)
        def raises_briefly(self) -> None:
            raise asyncio.CancelledError

    env = Env()
    env.reset()
    with pytest.raises(RuntimeError, match=f"tool '{name}' was cancelled"):
        await env.astep(call(name))
    env.reset()
    with pytest.raises(RuntimeError, match=f"tool '{name}' was cancelled"):
        env.step(call(name))


class Exiting(ToolEnv):
    """Gives up as argparse does, and in other ways that end a thread, a loop or a program."""

    error: type[BaseException] = SystemExit

    @tool
    def sync(self) -> None:
        raise self.error

    @tool(timeout=5)
    def timed(self) -> None:
        raise self.error

    @tool
    async def awaited(self) -> None:
        await asyncio.sleep(0)
        raise self.error

    @tool(timeout=5)
    async def awaited_briefly(self) -> None:
        raise self.error

    @tool
    def returned(self) -> Any:
        return self.awaited()

    @tool(timeout=5)
    async def in_a_task(self) -> None:
        await asyncio.create_task(self.awaited())

    @tool(timeout=5)
    async def stops_its_loop(self) -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "goes on"


class InstantlyExiting(Exiting):
    instant = True


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, BaseException])
@pytest.mark.parametrize("name", ["sync", "timed", "awaited", "awaited_briefly", "returned", "in_a_task"])
@pytest.mark.parametrize("cls", [Exiting, InstantlyExiting])
def test_a_tool_that_exits_is_a_bug_of_the_environment_and_ends_nothing_else(cls: type[Exiting], name: str, error: type[BaseException]) -> None:
    def in_a_loop(env: Exiting) -> None:
        async def step() -> None:
            other = asyncio.create_task(asyncio.sleep(0.05))
            try:
                await env.astep(call(name))
            finally:
                await other

        asyncio.run(step())

    env = cls()
    env.error = error
    for step in (lambda: in_thread(lambda: env.step(call(name))), lambda: in_a_loop(env)):
        env.reset()
        with pytest.raises(RuntimeError, match=rf"tool '{name}' raised {error.__name__}") as caught:
            step()
        assert type(caught.value.__cause__) is error
        assert in_thread(loop_of_this_process)


@pytest.mark.parametrize("name", ["start", "instructions"])
def test_an_exit_at_the_start_is_a_bug_of_the_environment(name: str) -> None:
    env = Exiting()
    setattr(env, name, env.sync)
    with pytest.raises(RuntimeError, match=f"{name} raised SystemExit"):
        env.reset()


@pytest.mark.parametrize("name", ["sync", "returned"])
def test_an_interrupt_ends_the_program_but_not_from_another_thread(name: str) -> None:
    env = Exiting()
    env.error = KeyboardInterrupt
    env.reset()
    if name == "sync":
        with pytest.raises(KeyboardInterrupt):
            env.step(call(name))
        env.reset()
    with pytest.raises(RuntimeError, match=f"tool '{name}' raised KeyboardInterrupt"):
        in_thread(lambda: env.step(call(name)))
    assert in_thread(loop_of_this_process)


def test_a_tool_that_stops_the_loop_does_not_stop_the_others() -> None:
    env = Exiting()
    env.reset()
    assert contents(in_thread(lambda: env.step(call("stops_its_loop")))[0]) == ["goes on"]


def test_a_loop_that_was_closed_is_replaced() -> None:
    loop_of_this_process()
    served = _calls._process_loop.get()
    served.retire()
    served.thread.join(5)
    assert served.loop.is_closed()
    assert in_thread(loop_of_this_process)
    assert _calls._process_loop.get() is not served


@pytest.mark.parametrize(
    ("opening", "text"),
    [
        ([{"role": "user", "content": None}], r"Env\.start: message 0 \(\{'role': 'user', 'content': None\}\) is no chat message"),
        ([{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}], "message 1 .*'wizard'"),
        ([{"content": "a"}], "message 0"),
        ([{"role": "tool", "content": "a"}], "message 0 .*tool_call_id"),
        (["a"], "message 0 .'a'. is no chat message"),
        ({"role": "user", "content": "a"}, "returned one message, not a list"),
        (3, "must return text, a list of messages or None, not int"),
    ],
    ids=str,
)
def test_what_start_returns_must_be_messages(opening: Any, text: str) -> None:
    class Env(ToolEnv):
        def start(self) -> Any:
            return opening

    with pytest.raises(TypeError, match=text):
        Env().reset()


def test_whatever_start_returns_can_be_written_as_utf8() -> None:
    opening: list[Any] = [
        {"role": "user", "name": "a\ud800", "content": [{"type": "text", "text": "b\udfff"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at\ud800": "\ud83d"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "é"},
    ]

    class Env(ToolEnv):
        def start(self) -> Any:
            return opening

    env = Env()
    shown, _ = env.reset()
    assert shown == (
        {"role": "user", "name": "a?", "content": [{"type": "text", "text": "b?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at?": "?"}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "é"},
    )
    assert shown in env.observation_space
    shown[2]["content"] = "changed"
    assert opening[2]["content"] == "é"


def test_an_async_start_is_refused() -> None:
    class Env(ToolEnv):
        async def start(self) -> str:  # type: ignore[override]
            return "a"

    with pytest.raises(TypeError, match=r"Env\.start must return text, a list of messages or None, not coroutine"):
        Env().reset()


def test_instructions_and_replies_must_be_text() -> None:
    class Env(ToolEnv):
        def on_text(self, text: str) -> Any:
            return {"role": "user", "content": "a"}

    env = Env()
    env.reset()
    with pytest.raises(TypeError, match=r"Env\.on_text must return text, not dict"):
        env.step(say("a"))
    env.instructions = ["Win."]  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Env\.instructions must be text or a string\.Template, not list"):
        env.reset()


@pytest.mark.parametrize("components", [["a", "b"], ["a", "a", "b"]], ids=str)
def test_rewards_that_add_up_beyond_a_float_are_refused(components: list[str]) -> None:
    env = fresh()
    *fine, last = components
    for name in fine:
        env.reward(name, 1e308 / len(fine))
    with pytest.raises(ValueError, match=r"reward 'b': .*add up to a finite number"):
        env.reward(last, 1e308)


def test_a_reward_range_is_a_promise_that_step_does_not_check() -> None:
    class Env(Counter):
        reward_range = (0.0, 0.1)

    assert Counter.reward_range == (-math.inf, math.inf)
    env = Env()
    env.reset(seed=0)
    assert env.step(call("add"))[1] == 0.25


def test_numbers_beyond_a_float_are_refused() -> None:
    env = fresh()
    with pytest.raises(ValueError, match="reward 'a' must be finite"):
        env.reward("a", 10**5000)
    with pytest.raises(ValueError, match="metric 'a' must be finite"):
        env.metric("a", 10**5000)
    env.reward("a", 1e308)
    with pytest.raises(ValueError, match="reward 'a' must be finite"):
        env.reward("a", 1e308)
    assert env.step(say("hm"))[1] == 0.0


def test_a_reward_outside_an_action_is_told_where_it_belongs() -> None:
    class Env(ToolEnv):
        def start(self) -> None:
            if self.options.get("finish"):
                self.finish()
            self.reward("early", 1.0)

        @tool
        def end(self) -> None:
            self.finish()
            self.reward("late", 1.0)

    early = "reward 'early' needs an episode that is running, this one is starting: it belongs to an action, in a tool"
    with pytest.raises(RuntimeError, match=early):
        Env().reset()
    with pytest.raises(RuntimeError, match="finish needs an episode that is running, this one is starting: it belongs to an action"):
        Env().reset(options={"finish": True})
    with pytest.raises(RuntimeError, match="finish needs an episode that is running, this one is not reset: call reset first"):
        Env().finish()
    Env.start = lambda self: None  # type: ignore[method-assign]
    env = Env()
    env.reset()
    with pytest.raises(RuntimeError, match=r"reward 'late' needs .* this one is over: give it before finish, or as finish\(reward=…\)"):
        env.step(call("end"))


def in_thread(function: Callable[[], T]) -> T:
    """Call the function in a thread that may hang."""
    return cast("T", _calls._in_thread(function).result(5))


def loop_of_this_process() -> int:
    async def loop() -> int:
        return id(asyncio.get_running_loop())

    return int(_calls.run(_calls.Call(loop, "loop")))


def test_threads_that_start_at_once_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    make = asyncio.new_event_loop

    def make_slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)
        return make()

    monkeypatch.setattr(asyncio, "new_event_loop", make_slowly)
    _calls._process_loop.forget()
    barrier = threading.Barrier(16)

    def work(_: int) -> int:
        barrier.wait()
        return loop_of_this_process()

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(work, range(16)))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    code = (
        "import os, signal\n"
        "from tests.test_env import loop_of_this_process\n"
        "loop_of_this_process()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    signal.alarm(5)\n"
        "    loop_of_this_process()\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# Async tools, blocking tools, deadlines.


class Slow(ToolEnv):
    loops: ClassVar[set[int]] = set()

    @tool
    async def sleep(self, seconds: float = 0.0) -> str:
        await asyncio.sleep(seconds)
        self.loops.add(id(asyncio.get_running_loop()))
        return "slept"

    @tool(timeout=0.3)
    async def sleep_briefly(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    @tool(timeout=0.3)
    async def hold_briefly(self, seconds: float) -> str:
        time.sleep(seconds)
        return "held the loop"

    @tool(timeout=0.3)
    def return_hold(self, seconds: float) -> Any:
        return self.hold_briefly(seconds)

    @tool(timeout=0.3)
    def block_briefly(self, seconds: float) -> str:
        time.sleep(seconds)
        return "blocked"

    @tool(timeout=5)
    def name_thread(self) -> str:
        return threading.current_thread().name

    @tool
    async def refuse(self) -> None:
        raise ToolError("not today")

    @tool(timeout=5)
    def times_out_itself(self) -> None:
        raise TimeoutError("the tool's own")


def slow() -> Slow:
    env = Slow()
    env.reset(seed=0)
    return env


def test_async_tools_work_in_plain_steps() -> None:
    env = slow()
    env.loops.clear()
    assert contents(env.step(calls(("sleep", {}), ("refuse", {}), ("sleep", {}), ("sleep_briefly", {"seconds": 0})))[0]) == [
        "slept",
        "not today",
        "slept",
        "slept",
    ]
    env.step(call("sleep"))
    assert len(env.loops) == 1


async def test_async_tools_work_in_a_plain_step_inside_a_loop() -> None:
    assert contents(slow().step(call("sleep"))[0]) == ["slept"]


@pytest.mark.parametrize("name", ["block_briefly", "sleep_briefly"])
def test_a_deadline_holds(name: str) -> None:
    env = slow()
    begin = time.perf_counter()
    with pytest.raises(ToolTimeout, match=rf"tool '{name}' ran past its time limit of 0\.3 s"):
        env.step(call(name, seconds=1.5))
    assert 0.25 < time.perf_counter() - begin < 0.8
    with pytest.raises(ResetNeeded):
        env.step(call(name, seconds=0))


@pytest.mark.parametrize("name", ["block_briefly", "sleep_briefly"])
async def test_a_deadline_holds_in_an_async_step(name: str) -> None:
    begin = time.perf_counter()
    with pytest.raises(ToolTimeout):
        await slow().astep(call(name, seconds=1.5))
    assert 0.25 < time.perf_counter() - begin < 0.8


def drive_in_a_loop(env: ToolEnv, action: Any) -> Any:
    return asyncio.run(env.astep(action))


@pytest.mark.parametrize("step", [ToolEnv.step, drive_in_a_loop])
@pytest.mark.parametrize("name", ["hold_briefly", "return_hold"])
def test_a_deadline_holds_for_an_async_tool_that_blocks_and_others_go_on(name: str, step: Callable[..., Any]) -> None:
    begin = time.perf_counter()
    with pytest.raises(ToolTimeout, match=rf"tool '{name}' ran past its time limit of 0\.3 s"):
        step(slow(), call(name, seconds=1.5))
    assert 0.25 < time.perf_counter() - begin < 0.8
    for action in (call("sleep_briefly", seconds=0), call("sleep")):
        assert contents(step(slow(), action)[0]) == ["slept"]
    assert contents(slow().step(call("sleep"))[0]) == ["slept"]
    assert time.perf_counter() - begin < 1.2


async def test_an_async_tool_that_blocks_leaves_the_callers_loop_free() -> None:
    step = asyncio.create_task(slow().astep(call("hold_briefly", seconds=1.0)))
    begin = time.perf_counter()
    await asyncio.sleep(0.05)
    assert time.perf_counter() - begin < 0.25
    with pytest.raises(ToolTimeout):
        await step


@pytest.mark.slow
def test_a_loop_that_is_free_stays_after_a_timeout_and_one_that_was_left_behind_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _calls._process_loop.get()
    with monkeypatch.context() as patient:
        patient.setattr(_calls, "_ANSWER_SECONDS", 5.0)
        with pytest.raises(ToolTimeout):
            slow().step(call("sleep_briefly", seconds=1.5))
    assert _calls._process_loop.get() is before
    with pytest.raises(ToolTimeout):
        slow().step(call("hold_briefly", seconds=0.6))
    assert _calls._process_loop.get() is not before
    until = time.perf_counter() + 5
    while not before.loop.is_closed() and time.perf_counter() < until:
        time.sleep(0.05)
    assert before.loop.is_closed()


def test_within_the_deadline_the_result_counts() -> None:
    assert contents(slow().step(calls(("block_briefly", {"seconds": 0}), ("name_thread", {})))[0]) == ["blocked", "art_gym-tool"]


def test_a_timeout_of_the_tools_own_is_a_bug_not_a_deadline() -> None:
    with pytest.raises(TimeoutError, match="the tool's own"):
        slow().step(call("times_out_itself"))


async def test_an_async_step_equals_a_plain_one() -> None:
    actions = [calls(("add", {}), ("jump", {}), ("add", {"number": -1})), say("hm"), call("roll"), call("add", number=9)]
    plain, other = fresh(3), fresh(3)
    assert [plain.step(action) for action in actions] == [await other.astep(action) for action in actions]
    with pytest.raises(ResetNeeded):
        await other.astep(call("add"))


async def test_async_steps_run_side_by_side() -> None:
    class Blocking(ToolEnv):
        @tool
        def block(self) -> str:
            time.sleep(0.2)
            return "done"

    envs = [Blocking() for _ in range(20)]
    for env in envs:
        env.reset()
    begin = time.perf_counter()
    await asyncio.gather(*(env.astep(call("block")) for env in envs))
    assert time.perf_counter() - begin < 1.5


async def test_an_async_step_that_is_cancelled_leaves_a_failed_episode() -> None:
    env = slow()
    step = asyncio.create_task(env.astep(call("sleep", seconds=5.0)))
    await asyncio.sleep(0.05)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(ResetNeeded):
        env.step(call("sleep"))


# Snapshots, copies, rendering, scenarios, wrappers.


def play(env: Counter) -> list[Any]:
    return [env.step(calls(("roll", {}), ("add", {}))), env.step(call("add")), env.log[:], env.turn]


def test_a_restored_snapshot_plays_on_in_the_same_way() -> None:
    env = fresh(2)
    env.step(call("add"))
    state = env.snapshot()
    first = play(env)
    env.extra = "added later"  # type: ignore[attr-defined]
    for _ in range(2):
        env.restore(state)
        assert play(env) == first
    assert not hasattr(env, "extra")


def test_a_snapshot_fits_another_instance_and_is_independent() -> None:
    env, other = fresh(2), Counter()
    env.step(call("add"))
    other.restore(pickle.loads(pickle.dumps(env.snapshot())))
    env.log.append("scribbled")
    assert other.log == ["+1"]
    env.log.pop()
    assert play(other) == play(env)


def test_bound_methods_in_the_state_stay_with_the_environment() -> None:
    class Env(Counter):
        def start(self) -> str:
            self.handler = self.roll
            return super().start()

    env = Env()
    env.reset(seed=0)
    env.restore(env.snapshot())
    assert env.handler.__self__ is env  # type: ignore[attr-defined]


def test_instances_share_nothing() -> None:
    one, other = fresh(1), fresh(1)
    one.action_space.tools.clear()
    one.step(call("add", number=9))
    assert list(other.action_space.tools) == ["add", "roll", "fail"]
    assert contents(other.step(call("add"))[0]) == ["1"]


def test_environments_copy_and_pickle_in_the_middle_of_an_episode() -> None:
    env = fresh(2)
    env.step(call("add"))
    twins = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    played = play(env)
    assert [play(twin) for twin in twins] == [played, played]


def test_ansi_renders_the_transcript() -> None:
    env = Counter(render_mode="ansi")
    env.reset(seed=0)
    env.step(calls(("add", {"number": 1}), text="One."))
    broken: list[Any] = [{"tool_calls": [None]}, {"content": "\ud800"}, None, {"tool_calls": 3, "role": 5}]
    for action in broken:
        env.step(action)
    assert env.render() == "\n".join(
        [
            "system: Count.",
            f"user: Count to {env.target}.",
            "assistant: One.",
            'assistant: add({"number": 1})',
            "tool: 1",
            "assistant: (a call that can't be read)",
            "tool: a tool call must be an object with 'id', 'type' and 'function'; the tools are: add, roll, fail",
            "assistant: ?",
            "user: Call a tool; the tools are: add, roll, fail.",
            "user: the action must be an assistant message. Call a tool; the tools are: add, roll, fail.",
            "5: ",
            "user: the message's role must be 'assistant'. Call a tool; the tools are: add, roll, fail.",
        ]
    )


def test_message_objects_are_rendered_too() -> None:
    class Message:
        def model_dump(self) -> Any:
            return call("add")

    env = Counter(render_mode="ansi")
    env.reset(seed=0)
    env.step(Message())  # type: ignore[arg-type]
    assert str(env.render()).splitlines()[2:] == ["assistant: add({})", "tool: 1"]


def test_human_prints_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    env = Counter(render_mode="human")
    env.reset(seed=0)
    env.step(call("add"))
    assert env.render() is None
    assert capsys.readouterr().out.split() == f"system: Count. user: Count to {env.target}. assistant: add({{}}) tool: 1".split()


def test_an_unknown_render_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="render_mode must be one of ansi, human, not 'rgb_array'"):
        Counter(render_mode="rgb_array")


def test_scenarios_are_disjoint_endless_and_the_same_each_time() -> None:
    env = Counter()
    found = {split: list(islice(env.scenarios(split), 1000)) for split in ("train", "validation", "test")}
    seeds = [scenario.seed for scenarios in found.values() for scenario in scenarios]
    assert len(set(seeds)) == 3000
    assert found["train"][:2] == [Scenario("train-0", 0), Scenario("train-1", 3)]
    assert list(Counter().scenarios("test", 5)) == found["test"][:5]
    with pytest.raises(ValueError, match="one of train, validation, test, not 'dev'"):
        env.scenarios("dev")  # type: ignore[arg-type]


def test_the_transcript_wrapper_shows_everything_each_time() -> None:
    env: Any = Transcript(Counter())
    first, _ = env.reset(seed=0)
    broken: Any = {"tool_calls": [{"function": {"name": "add"}}]}
    second, *_ = env.step(broken)
    third, *_ = env.step(say("hm"))
    assert [message["role"] for message in third] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert third in env.observation_space
    assert env.reset(seed=0)[0] == first


def doubled(env: Any) -> Any:
    return gymnasium.wrappers.TransformReward(env, lambda reward: 2 * reward)


@pytest.mark.parametrize("wrapper", [gymnasium.wrappers.RecordEpisodeStatistics, doubled])
def test_gymnasiums_wrappers_work(wrapper: Any) -> None:
    env = wrapper(Counter())
    env.reset(seed=0)
    assert contents(env.step(call("add"))[0]) == ["1"]


# Anything at all.

TEXT = st.text(st.characters() | st.just("\ud800"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.one_of(
    st.integers(-3, 9).map(lambda number: json.dumps({"number": number})),
    st.sampled_from(["", "{}", "null", "[1, 2]", '{"number": ', '{"number": NaN}', '{"number": 1, "number": 2}', '{"number": "\\ud800"}']),
    JSON.map(json.dumps),
    TEXT,
    JSON,
)
NAMES = st.sampled_from(["add", "roll", "jump", "reset", ""]) | JSON
GOOD_FUNCTION = st.integers(0, 2).map(lambda number: {"name": "add", "arguments": json.dumps({"number": number})}) | st.just({"name": "roll"})
GOOD_CALL = st.fixed_dictionaries({"id": st.text(min_size=1, max_size=4), "type": st.just("function"), "function": GOOD_FUNCTION})
BROKEN_FUNCTION = JSON | st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})
BROKEN_CALL = JSON | st.fixed_dictionaries({}, optional={"id": JSON, "type": JSON, "function": BROKEN_FUNCTION})
CALLS = st.lists(st.one_of(GOOD_CALL, GOOD_CALL, GOOD_CALL, BROKEN_CALL), max_size=4)
ACTIONS = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | st.text(max_size=5), "tool_calls": CALLS}),
    st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON, "tool_calls": CALLS | JSON}),
    JSON,
)


def expected_ids(action: Any) -> Iterator[Any]:
    """The id of each call that has one, None for each that hasn't."""
    for written in action["tool_calls"]:
        given_id = written.get("id") if isinstance(written, dict) else None
        yield given_id if isinstance(given_id, str) and given_id else None


@given(st.lists(ACTIONS, min_size=1, max_size=8), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_anything_is_answered_and_twins_agree(actions: list[Any], seed: int) -> None:
    env, twin = fresh(seed), fresh(seed)
    for action in actions:
        before = copy.deepcopy(action)
        result = env.step(action)
        assert repr(action) == repr(before)
        assert result == twin.step(action)
        observation, reward, terminated, truncated, info = result
        assert observation in env.observation_space
        assert math.isfinite(reward)
        assert reward == pytest.approx(sum(info["rewards"].values()))
        assert not (terminated and truncated)
        assert json.loads(json.dumps(info, allow_nan=False)) == info
        json.dumps([message["content"] for message in observation], ensure_ascii=False).encode()
        answers = [message["tool_call_id"] for message in observation if message["role"] == "tool"]
        is_message = isinstance(action, dict) and action.get("role", "assistant") == "assistant"
        if is_message and isinstance(action.get("tool_calls"), list) and action["tool_calls"]:
            wanted = list(expected_ids(action))
            assert len(answers) == len(wanted) == len(observation)
            assert all(id_ is None or id_ == answer for id_, answer in zip(wanted, answers, strict=True))
        else:
            assert [message["role"] for message in observation] == ["user"]
        if terminated or truncated:
            with pytest.raises(ResetNeeded):
                env.step(action)
            break
