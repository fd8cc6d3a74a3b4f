"""`on_invalid`: what an author may do there, and what counts as a bug of the environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from art_gym import ToolEnv, ToolError, call, tool
from art_gym.messages import AssistantMessage

NOT_A_MESSAGE: Any = {"role": "user"}
UNKNOWN = call("jump")
TWO_CALLS: Any = {"role": "assistant", "tool_calls": [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("jump", "look")]}


class Room(ToolEnv):
    """A room."""

    def start(self) -> None:
        self.heard: list[str] = []

    @tool
    def look(self) -> str:
        """Look around."""
        return "a room"


def step(env: ToolEnv, action: AssistantMessage, *, asynchronous: bool) -> Any:
    return asyncio.run(env.astep(action)) if asynchronous else env.step(action)


both = pytest.mark.parametrize("asynchronous", [False, True], ids=["step", "astep"])
each_problem = pytest.mark.parametrize("action", [NOT_A_MESSAGE, UNKNOWN], ids=["no message", "unknown tool"])


@both
@each_problem
def test_it_may_be_async(action: AssistantMessage, asynchronous: bool) -> None:
    class Env(Room):
        async def on_invalid(self, problem: str) -> None:
            await asyncio.sleep(0)
            self.heard.append(problem)
            self.reward("invalid", -0.5)

    env = Env()
    env.reset()
    observation, reward, terminated, *_ = step(env, action, asynchronous=asynchronous)
    assert len(env.heard) == 1
    assert observation[0]["content"].startswith(env.heard[0])
    assert (reward, terminated) == (-0.5, False)


@both
def test_it_may_finish_the_episode(asynchronous: bool) -> None:
    class Env(Room):
        def on_invalid(self, problem: str) -> None:
            self.finish(reward=-1.0, success=False)

    env = Env()
    env.reset()
    observation, reward, terminated, truncated, info = step(env, TWO_CALLS, asynchronous=asynchronous)
    assert [message["content"] for message in observation] == [
        "unknown tool 'jump'; the tools are: look",
        "not executed: the episode has ended",
    ]
    assert (reward, terminated, truncated, info["invalid_calls"]) == (-1.0, True, False, 1)
    env.reset()
    observation, reward, terminated, *_ = step(env, NOT_A_MESSAGE, asynchronous=asynchronous)
    assert ([message["content"] for message in observation], reward, terminated) == (["the message's role must be 'assistant'"], -1.0, True)


@both
@each_problem
@pytest.mark.parametrize("error", [ToolError("be nice"), SystemExit(1), StopIteration(), asyncio.CancelledError()], ids=repr)
def test_what_steers_others_is_a_bug_of_the_environment(error: BaseException, action: AssistantMessage, asynchronous: bool) -> None:
    class Env(Room):
        def on_invalid(self, problem: str) -> None:
            raise error

    env = Env()
    env.reset()
    with pytest.raises(RuntimeError, match=r"^Env\.on_invalid (raised|was cancelled)") as caught:
        step(env, action, asynchronous=asynchronous)
    assert caught.value.__cause__ is error or isinstance(error, asyncio.CancelledError)
    with pytest.raises(ResetNeeded):
        env.step(action)


@both
def test_any_other_error_comes_out_as_it_is(asynchronous: bool) -> None:
    class Env(Room):
        def on_invalid(self, problem: str) -> None:
            raise KeyError("mine")

    env = Env()
    env.reset()
    with pytest.raises(KeyError, match="mine"):
        step(env, UNKNOWN, asynchronous=asynchronous)
