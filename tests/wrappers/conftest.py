"""An environment that the wrappers are put around, and a plain Gymnasium one."""

from __future__ import annotations

from typing import Annotated, Any

import gymnasium
import pytest
from pydantic import Field

from art_gym import ChatSpace, ToolCallSpace, ToolEnv, ToolError, tool


class Vault(ToolEnv):
    """Three tools; every refused call costs 0.25, the right code gives 1."""

    instructions = "Open the vault."
    max_turns = 6
    instant = True

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.constrain("dial", code=Annotated[int, Field(ge=0, le=99)])

    def start(self) -> str:
        self.code = int(self.options.get("code", self.np_random.integers(100)))
        self.peeked = 0
        self.refused: list[str] = []
        self.metric("success", 0.0)
        return f"Session {int(self.np_random.integers(1000))}: the vault is shut."

    @tool
    def peek(self) -> str:
        """Look at the code."""
        self.peeked += 1
        self.reward("peek", 0.5)
        return f"The code is {self.code}."

    @tool
    def dial(self, code: int) -> str:
        """Dial a code."""
        if code == self.code:
            self.finish(reward=1.0, success=True)
            return "It opens."
        return "It stays shut."

    @tool
    def kick(self, force: str = "") -> str:
        """Kick the vault."""
        if force == "hard":
            raise ValueError("the vault fell over")
        raise ToolError("Ouch.")

    def on_invalid(self, problem: str) -> None:
        self.refused.append(problem)
        self.reward("invalid", -0.25)


class Plain(gymnasium.Env[Any, Any]):
    """A Gymnasium environment of messages that isn't a `ToolEnv`: 3 steps, each worth 0.5, the last one ends it."""

    def __init__(self) -> None:
        self.observation_space = ChatSpace()
        self.action_space = ToolCallSpace({"go": {"type": "object", "properties": {}}})
        self.turn = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.turn = 0
        self.start = int(self.np_random.integers(1000))
        return ({"role": "user", "content": f"start {self.start}"},), {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return ({"role": "user", "content": f"step {self.turn}"},), 0.5, self.turn == 3, False, {}


@pytest.fixture
def vault() -> type[Vault]:
    return Vault


@pytest.fixture
def plain() -> type[Plain]:
    return Plain
