"""What an agent is: something that turns the state of an episode into a reply.

Agents keep no state of their own between turns, so that one agent plays any number of episodes at once; what an agent wants to remember about
one episode goes into `TurnState.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from art_gym.messages import AssistantMessage, Message, ToolSchema
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace


@dataclass(slots=True)
class TurnState:
    """What an agent sees when it is asked to act.

    Attributes:
        env_id: The environment's id.
        scenario: Where the episode started.
        member: The episode's place in its group.
        turn: Index of the turn, from 0.
        messages: The whole transcript so far, the new observation included. Not to be changed.
        observation: What the environment returned: the new messages, or the whole transcript where a wrapper shows that.
        tools: Tool schemas in OpenAI wire form.
        action_space: The environment's action space.
        rng: The episode's own generator, the same for equal scenario and member.
        memory: A scratch pad of the agent's own, kept for the episode.
        timeout: Seconds that the reply may take; the runner cuts it off after that.
    """

    env_id: str
    scenario: Scenario
    member: int
    turn: int
    messages: list[Message]
    observation: tuple[Message, ...]
    tools: list[ToolSchema]
    action_space: ToolCallSpace
    rng: np.random.Generator
    memory: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0


@dataclass(slots=True)
class Reply:
    """An agent's action, with the tokens behind it where there are any (see `art_gym.episodes.Turn`)."""

    action: AssistantMessage
    finish_reason: str = "stop"
    policy: str = ""
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How busy the servers behind an agent are, summed up over them.

    Attributes:
        running: Requests that are being computed.
        waiting: Requests that the servers hold back, for want of memory or of a place.
        cache_usage: Share of the key-value cache that is in use, of the fullest server: 0 to 1.
        preemptions: How many running requests were put back since the servers started, for want of memory.
    """

    running: int
    waiting: int
    cache_usage: float = 0.0
    preemptions: int = 0


@runtime_checkable
class Agent(Protocol):
    """A policy that plays episodes.

    An agent that asks servers may also have `async def server_load(self) -> ServerLoad | None`, by which the runner finds out how many requests
    at once they take (None: not known now). It has 2 seconds; if it fails, that is warned of once, and no more are tried until it tells.

    Attributes:
        name: Names it in errors and reports.
    """

    name: str

    async def act(self, state: TurnState) -> Reply:
        """Return the next action of an episode. Called for many episodes at once, and cancelled after `state.timeout` seconds.

        Raises:
            ContextOverflow: The conversation no longer fits; the episode ends as truncated.
            PolicyError: The policy's endpoint fails for this episode, which fails with kind "policy". So does one in which anything else is
                raised.
            EngineError: The server is gone; the rollout ends.
            UsageError: The agent can't play as it was set up; the rollout ends.
        """
        ...

    async def close(self) -> None:
        """Give back what it holds, such as connections. Called by `Runner.collect` at its end, and else by whoever made the agent."""
        ...
