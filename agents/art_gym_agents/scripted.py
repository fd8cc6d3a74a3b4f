"""The scripted policy: a function of the turn's state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable

from art_gym.messages import AssistantMessage, say
from art_gym.rollout.agent import Reply, TurnState

Script = Callable[[TurnState], AssistantMessage | str | Awaitable[AssistantMessage | str]]
"""What the scripted agent plays: gets the state, returns an action, or text to say; may be a coroutine function."""


class ScriptedAgent:
    """Plays what a function says.

    Randomness comes from `state.rng` and what is to be remembered goes into `state.memory`, so that episodes don't disturb each other.
    A function that waits should be a coroutine function: a plain one runs in the rollout's event loop.

    >>> from art_gym import call
    >>> agent = ScriptedAgent(lambda state: call("guess", number=state.turn + 1), name="counts up")
    >>> agent
    ScriptedAgent('counts up')
    """

    def __init__(self, function: Script, *, name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", "scripted"))

    async def act(self, state: TurnState) -> Reply:
        action = self.function(state)
        if isawaitable(action):
            action = await action
        return Reply(action=say(action) if isinstance(action, str) else action, policy=self.name)

    async def close(self) -> None:
        """Nothing to release."""

    def __repr__(self) -> str:
        return f"ScriptedAgent({self.name!r})"
