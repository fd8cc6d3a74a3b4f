"""Answers to calls that are missing, wrong or too many, and exceptions in their place."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field

from art_gym import tool

from .bugs import bug
from .correct import Counter, Plain


@bug("answers")
class UnansweredCall(Counter):
    """Of several calls the last isn't answered."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (observation[:2] if len(observation) > 2 else observation), *rest


@bug("answers")
class WrongId(Counter):
    """Answers carry ids of its own."""

    def step(self, action):
        observation, *rest = super().step(action)
        renamed = [
            {**message, "tool_call_id": f"call_{index}"} if message["role"] == "tool" else message for index, message in enumerate(observation)
        ]
        return tuple(renamed), *rest


@bug("answers")
class WrongOrder(Counter):
    """Answers come in the reverse order."""

    def step(self, action):
        observation, *rest = super().step(action)
        return observation[::-1], *rest


@bug("answers")
class AnsweredTwice(Counter):
    """A call that failed is answered twice."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (*observation, *[dict(message) for message in observation if rest[3]["tool_errors"]]), *rest


@bug("answers")
class UnaskedAnswer(Counter):
    """A message without calls gets a tool message."""

    def step(self, action):
        observation, *rest = super().step(action)
        if observation and observation[0]["role"] == "user":
            observation = ({"role": "tool", "tool_call_id": "none", "content": observation[0]["content"]},)
        return observation, *rest


@bug("answers")
class PlainUnanswered(Plain):
    """Written without `ToolEnv`, it takes a call without an id for none."""

    def answers(self, action):
        return [answer for answer in super().answers(action) if not answer["tool_call_id"].startswith("made-")]


@bug("exception")
class RaisesOnBadInput(Counter):
    """Reads the arguments of a call without care."""

    def step(self, action):
        for call in (action.get("tool_calls") or ()) if isinstance(action, dict) else ():
            json.loads(call["function"]["arguments"])
        return super().step(action)


@bug("exception")
class RaisesOnUnknownTool(Counter):
    """Looks the tool up without care."""

    def step(self, action):
        result = super().step(action)
        if isinstance(action, dict) and isinstance(action.get("tool_calls"), list):
            for call in action["tool_calls"]:
                name = call.get("function", {}).get("name") if isinstance(call, dict) and isinstance(call.get("function"), dict) else None
                if isinstance(name, str) and name:
                    getattr(self, name.strip().lower())
        return result


@bug("exception")
class RaisesOnGoodInput(Counter):
    """Divides by zero for one argument of ten, after the first turn."""

    @tool
    def add(self, amount: Annotated[int, Field(ge=0, le=9)]) -> str:
        """Add to the count."""
        self.count += 10 // (amount - 7) if self.turn > 1 else amount
        return f"The count is {self.count}."


@bug("exception")
class RaisesOnSuccess(Counter):
    """Success alone raises, and success takes a word from the first message."""

    def start(self) -> str:
        text = super().start()
        self.password = f"{'abcdefgh'[int(self.np_random.integers(8))]}{int(self.np_random.integers(100, 999))}"
        return f"{text} The password is {self.password}."

    @tool
    def say_password(self, word: str) -> str:
        """Say the password."""
        if word == self.password:
            raise RuntimeError("nobody ever came here")
        return "Wrong."
