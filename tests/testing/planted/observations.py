"""Observations that are shared or changed, and actions that are."""

from __future__ import annotations

from typing import Any, ClassVar

from .bugs import bug
from .correct import Counter


@bug("observation aliased")
class AliasedObservation(Counter):
    """The same message object is returned again and again."""

    hint: ClassVar[dict[str, Any]] = {"role": "user", "content": "Go on."}

    def step(self, action):
        observation, *rest = super().step(action)
        return (*observation, self.hint), *rest


@bug("observation mutated")
class GrowingObservation(Counter):
    """A message that was returned is written to later."""

    def step(self, action):
        result = super().step(action)
        if getattr(self, "shown", None) and self.turn > 1:
            self.shown[-1]["content"] += " (old)"
        self.shown = result[0]
        return result


@bug("observation aliased")
class KeepsObservation(Counter):
    """It keeps what it returned, and goes by it later; the caller may have changed it."""

    def step(self, action):
        last = "".join(message.get("content", "gone") for message in getattr(self, "shown", ()))
        observation, *rest = super().step(action)
        self.shown = observation
        shown = [{**message, "content": f"{message['content']} ({len(last)})"} for message in observation]
        return (tuple(shown), *rest) if self.turn > 2 else (observation, *rest)

    def start(self) -> str:
        self.shown = ()
        return super().start()


@bug("observation space")
class NoObservation(Counter):
    """The observation is a list, not a tuple, after a tool's error."""

    def step(self, action):
        observation, *rest = super().step(action)
        return (list(observation) if rest[3]["tool_errors"] else observation), *rest


@bug("action mutated")
class ChangesAction(Counter):
    """It writes into the action."""

    def step(self, action):
        if isinstance(action, dict) and isinstance(action.get("tool_calls"), list):
            for index, call in enumerate(action["tool_calls"]):
                if isinstance(call, dict):
                    call.setdefault("id", f"call_{index}")
        return super().step(action)
