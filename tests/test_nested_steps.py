"""An environment whose tools step another environment: whatever each of the two is made of, the step ends, and as if it were taken alone."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from art_gym import ToolEnv, ToolTimeout, call, tool


class Inner(ToolEnv):
    """Echoes, in each way that a tool may run."""

    @tool
    def sync(self) -> str:
        return "inner"

    @tool(timeout=5)
    def timed(self) -> str:
        return "inner"

    @tool
    async def awaited(self) -> str:
        await asyncio.sleep(0.001)
        return "inner"

    @tool(timeout=5)
    async def awaited_in_time(self) -> str:
        await asyncio.sleep(0.001)
        return "inner"

    @tool(timeout=5)
    def returned(self) -> Any:
        return self.awaited()

    @tool(timeout=0.1)
    async def late(self) -> str:
        await asyncio.sleep(30)
        return "inner"


class Outer(ToolEnv):
    """Hands its calls on to another environment, in each way that a tool may run."""

    def __init__(self, inner: ToolEnv) -> None:
        super().__init__()
        self.inner = inner

    def start(self) -> None:
        self.inner.reset(seed=0)

    def hand_on(self, name: str) -> str:
        return str(self.inner.step(call(self.names[0], **({} if not self.names[1:] else {"name": self.names[1]})))[0][0]["content"])

    names: tuple[str, ...] = ()

    @tool
    def sync(self, name: str) -> str:
        return self.hand_on(name)

    @tool(timeout=10)
    def timed(self, name: str) -> str:
        return self.hand_on(name)

    @tool
    async def awaited(self, name: str) -> str:
        return self.hand_on(name)

    @tool(timeout=10)
    async def awaited_in_time(self, name: str) -> str:
        return self.hand_on(name)

    @tool(timeout=10)
    async def in_a_thread(self, name: str) -> str:
        return await asyncio.to_thread(self.hand_on, name)

    @tool(timeout=10)
    async def properly(self, name: str) -> str:
        return str((await self.inner.astep(call(self.names[0])))[0][0]["content"])


OUTER = ["sync", "timed", "awaited", "awaited_in_time", "in_a_thread", "properly"]
INNER = ["sync", "timed", "awaited", "awaited_in_time", "returned"]


def within(seconds: float, function: Any) -> Any:
    """Return what the function returns; fail, and leave it behind, when it takes longer."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "deadlock"
    return outcome[0]


def step(env: ToolEnv, action: Any, *, asynchronous: bool) -> Any:
    return asyncio.run(env.astep(action)) if asynchronous else env.step(action)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["step", "astep"])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_a_tool_may_step_another_environment(outer: str, inner: str, asynchronous: bool) -> None:
    env = Outer(Inner())
    env.names = (inner,)
    env.reset()
    result = within(5, lambda: step(env, call(outer, name=inner), asynchronous=asynchronous))
    assert result[0][0]["content"] == "inner"


def test_three_deep() -> None:
    middle = Outer(Inner())
    middle.names = ("awaited_in_time",)
    env = Outer(middle)
    env.names = ("awaited_in_time", "x")
    env.reset()
    assert within(5, lambda: env.step(call("awaited_in_time", name="x")))[0][0]["content"] == "inner"


def test_the_inner_deadline_holds() -> None:
    class Env(Outer):
        @tool
        async def late(self) -> str:
            began = time.monotonic()
            with pytest.raises(ToolTimeout, match="tool 'late' ran past its time limit"):
                self.inner.step(call("late"))
            return f"{time.monotonic() - began < 2}"

    env = Env(Inner())
    env.reset()
    assert within(5, lambda: env.step(call("late")))[0][0]["content"] == "True"


def test_what_an_inner_tool_opens_lives_in_its_next_call() -> None:
    class Keeper(ToolEnv):
        @tool
        async def loop(self) -> str:
            return str(id(asyncio.get_running_loop()))

    class Env(Outer):
        @tool
        async def ask(self) -> str:
            return str(self.inner.step(call("loop"))[0][0]["content"])

    env = Env(Keeper())
    env.reset()
    first, second = (within(5, lambda: env.step(call("ask")))[0][0]["content"] for _ in range(2))
    assert first == second
