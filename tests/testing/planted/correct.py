"""Environments without a bug, some of them odd."""

from __future__ import annotations

import copy
from typing import Annotated, Any, ClassVar, Literal

import gymnasium
from gymnasium.error import ResetNeeded
from pydantic import BaseModel, Field

from art_gym import Scenario, ToolEnv, ToolError, tool
from art_gym.spaces import ChatSpace, ToolCallSpace


class Counter(ToolEnv):
    """A task without a bug: add numbers up to a goal, remember words, stop."""

    instructions = "Add up to the goal, then stop."
    max_turns = 6
    reward_range = (-1.0, 1.0)

    def start(self) -> str:
        self.goal = int(self.np_random.integers(1, 20))
        self.count = 0
        self.words: list[str] = []
        return f"The goal is {self.goal}."

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += amount
        return f"The count is {self.count}."

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        if not word:
            raise ToolError("Give a word.")
        self.words.append(word)
        return f"{len(self.words)} remembered."

    @tool
    def stop(self) -> str:
        """Stop counting."""
        right = self.count == self.goal
        self.finish(reward=1.0 if right else 0.0, success=right)
        return "Right." if right else "Wrong."


class Units(Counter):
    """Without a bug: scenarios whose options say what is counted, and some that leave it to the default."""

    defaults: ClassVar[dict[str, str]] = {"unit": "points"}

    def scenarios(self, split, count=None):
        units = ({}, {"unit": "apples"}, {"unit": "pears"}, {})
        first = 1000 * ("train", "validation", "test").index(split)
        rows = [Scenario(f"{split}-{index}", first + index, units[index % 4]) for index in range(40)]
        return iter(rows[:count])

    def chosen(self) -> dict[str, str]:
        return {**self.defaults, **self.options}

    def start(self) -> str:
        text = super().start()
        self.unit = self.chosen()["unit"]
        return text

    @tool
    def look(self) -> str:
        """Look at the count."""
        return f"There are {self.count} {self.unit}."


class Plain(gymnasium.Env[Any, Any]):
    """A correct environment of messages that isn't a `ToolEnv`: it echoes."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = ChatSpace()
        self.action_space = ToolCallSpace({})
        self.running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.running = True
        return ({"role": "user", "content": f"Say {int(self.np_random.integers(100))}."},), {}

    def step(self, action):
        if not self.running:
            raise ResetNeeded("call reset first")
        content = action.get("content") if isinstance(action, dict) else None
        self.running = content != ""
        return (*self.answers(action), {"role": "user", "content": "Go on."}), 0.0, content == "", False, {}

    def answers(self, action):
        calls = action.get("tool_calls") if isinstance(action, dict) and action.get("role", "assistant") == "assistant" else None
        ids = [call.get("id") if isinstance(call, dict) else None for call in calls] if isinstance(calls, list) else []
        return [
            {"role": "tool", "tool_call_id": id_ if isinstance(id_, str) and id_ else f"made-{index}", "content": "There are no tools."}
            for index, id_ in enumerate(ids)
        ]


class Silent(ToolEnv):
    """No tools, no instructions, no first message."""

    max_turns = 3

    def on_text(self, text: str) -> str:
        if "bye" in text:
            self.finish(success=True)
        return text[::-1]


class Talk(ToolEnv):
    """A message ends the episode, with an async `on_text`."""

    instructions = "Answer."

    def start(self) -> list[Any]:
        return [
            {"role": "user", "content": "What is the capital of France?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "ask", "arguments": ""}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "Paris."},
            {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
        ]

    async def on_text(self, text: str) -> None:  # type: ignore[override]
        self.finish(reward=1.0 if "Paris" in text else 0.0)

    @tool
    async def ask(self, question: str = "") -> str:
        """Ask."""
        return question.upper()


class Place(BaseModel):
    """A place in a tree of places."""

    name: str
    level: Literal["city", "land"] = "city"
    inside: list[Place] = []


class Nested(ToolEnv):
    """Tools with nested, recursive, optional and free-form parameters."""

    max_turns = 8
    max_parallel_calls = 2

    def start(self) -> str:
        self.places: dict[str, Any] = {}
        self.rng_state = copy.deepcopy(self.np_random.bit_generator.state)
        return "Describe places."

    @tool(name="add-place")
    def add_place(self, place: Place, tags: set[str] | None = None, scores: dict[str, float] | None = None) -> dict[str, Any]:
        """Add a place."""
        self.places[place.name] = place.model_dump()
        self.reward("added", 0.1)
        return {"places": len(self.places), "tags": sorted(tags or ()), "scores": scores}

    @tool
    def roll(self) -> int:
        """Roll a die."""
        return int(self.np_random.integers(1, 7))


CORRECT = (Counter, Units, Plain, Silent, Talk, Nested)
