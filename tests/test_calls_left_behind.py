"""Calls that go on when nobody waits for them any more: the next episode isn't theirs."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from art_gym import ToolEnv, ToolTimeout, _calls, call, calls, say, tool
from art_gym.wrappers import Transcript

released = threading.Event()
"""Lets the calls return."""


class Ledger(ToolEnv):
    """Write down what is said, some of it late."""

    def start(self) -> None:
        self.written: list[str] = []

    @tool(timeout=0.05)
    def block(self) -> None:
        """Write when released, in a thread."""
        released.wait(10)
        self.written.append("block")

    @tool(timeout=0.05)
    async def hold(self) -> None:
        """Write when released, and block the loop until then."""
        released.wait(10)
        self.written.append("hold")

    @tool(timeout=0.05)
    async def persist(self) -> None:
        """Write when released, whoever cancels it."""
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        self.written.append("persist")

    @tool(timeout=0.05)
    async def obey(self) -> None:
        """End when cancelled, with a last word."""
        try:
            await asyncio.sleep(10)
        finally:
            self.written.append("obey")

    @tool
    def wait(self) -> None:
        """Write when released, without a limit."""
        released.wait(10)
        self.written.append("wait")

    @tool
    async def sleep(self) -> None:
        """End when cancelled, with a last word, without a limit."""
        try:
            await asyncio.sleep(10)
        finally:
            self.written.append("sleep")

    @tool
    def note(self) -> None:
        """Write at once."""
        self.written.append("note")

    async def on_text(self, text: str) -> str:
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        self.written.append("on_text")
        return "Heard."


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    released.clear()
    yield
    released.set()


def started() -> Ledger:
    env = Ledger()
    env.reset(seed=0)
    return env


def step_in_a_loop(env: ToolEnv, action: Any) -> Any:
    return asyncio.run(env.astep(action))


def resets(env: Any) -> None:
    """Reset the environment as soon as that can be done."""
    give_up = time.monotonic() + 10
    while True:
        try:
            env.reset(seed=0)
        except RuntimeError:
            assert time.monotonic() < give_up
            time.sleep(0.01)
        else:
            return


each_step = pytest.mark.parametrize("step", [ToolEnv.step, step_in_a_loop], ids=["step", "astep"])


@each_step
@pytest.mark.parametrize("name", ["block", "hold", "persist"])
def test_after_a_timeout_there_is_no_next_episode_while_the_call_runs(name: str, step: Callable[..., Any]) -> None:
    env = started()
    with pytest.raises(ToolTimeout):
        step(env, call(name))
    text = rf"^reset needs an environment that nothing else changes, and tool '{name}' of an earlier step still runs: make a new Ledger"
    with pytest.raises(RuntimeError, match=text):
        env.reset(seed=1)
    released.set()
    resets(env)
    time.sleep(0.05)
    assert env.written == []
    env.step(call("note"))
    assert env.written == ["note"]


@each_step
def test_a_call_that_ends_when_it_is_told_to_keeps_nobody_waiting(step: Callable[..., Any]) -> None:
    env = started()
    with pytest.raises(ToolTimeout):
        step(env, call("obey"))
    env.reset(seed=1)
    time.sleep(0.05)
    assert env.written == []


def test_a_snapshot_is_not_gone_back_to_while_the_call_runs() -> None:
    env = started()
    state = env.snapshot()
    with pytest.raises(ToolTimeout):
        env.step(call("block"))
    with pytest.raises(RuntimeError, match=r"^restore needs an environment that nothing else changes"):
        env.restore(state)
    other = Ledger()
    other.restore(state)
    other.step(call("note"))
    assert other.written == ["note"]


async def cancelled(env: ToolEnv, action: Any) -> None:
    step = asyncio.create_task(env.astep(action))
    await asyncio.sleep(0.05)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


@pytest.mark.parametrize(("action", "what"), [(call("wait"), "tool 'wait'"), (say("Hm."), r"Ledger\.on_text")], ids=["tool", "text"])
async def test_a_step_that_was_cancelled_leaves_no_call_to_the_next_episode(action: Any, what: str) -> None:
    env = started()
    await cancelled(env, action)
    with pytest.raises(RuntimeError, match=rf"and {what} of an earlier step still runs"):
        env.reset(seed=1)
    released.set()
    await asyncio.sleep(0.05)
    resets(env)
    assert env.written == []


async def test_what_a_cancelled_tool_still_does_belongs_to_its_step() -> None:
    env = started()
    await cancelled(env, call("sleep"))
    assert env.written == ["sleep"]
    env.reset(seed=1)
    assert env.written == []


def test_around_it_a_wrapper_says_so_too() -> None:
    env: Any = Transcript(started())
    env.reset(seed=0)
    with pytest.raises(ToolTimeout):
        env.step(call("block"))
    with pytest.raises(RuntimeError, match="tool 'block' of an earlier step still runs: make a new Ledger"):
        env.reset(seed=1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"])
def test_a_copy_is_free(copied: Callable[[Any], Any]) -> None:
    env = started()
    with pytest.raises(ToolTimeout):
        env.step(call("block"))
    twin = copied(env)
    twin.reset(seed=1)
    released.set()
    resets(env)
    assert twin.written == []


def test_calls_that_are_over_are_not_kept() -> None:
    env = started()
    released.set()
    for _ in range(3):
        env.step(calls(*[("block", {})] * 3))
        asyncio.run(env.astep(calls(("sleep_not", {}), ("note", {}), ("hold", {}))))
    assert len(env._underway._calls) <= 1


def test_a_call_in_place_is_taken_down_nowhere() -> None:
    underway = _calls.Underway()
    assert _calls.run(_calls.Call(lambda: 1, "one", underway=underway)) == 1
    assert underway._calls == []
