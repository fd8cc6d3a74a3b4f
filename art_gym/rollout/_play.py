"""Playing one episode: from reset to its end, or to its failure.

This module owns the loop of observation, policy call and step, with its deadlines, and decides what each error means for the episode. Which
episodes are played, and where they are kept, belongs to the runner.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar, cast

import gymnasium
import numpy as np

from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import ContextOverflow, EngineError, FailureKind, PolicyError, ToolTimeout, UsageError
from art_gym.messages import Message, Observation, ToolSchema
from art_gym.rollout._hosts import Host, HostTimeoutError
from art_gym.rollout.agent import Agent, Reply, TurnState
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace

T = TypeVar("T")

_AGENT_KEY = 0x61637473
"""Tells the agents' generators from all others that may be spawned from a scenario's seed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that one policy call, one step and one whole episode may take."""

    turn: float
    step: float
    episode: float


@dataclass(frozen=True, slots=True)
class Start:
    """What a reset gives."""

    observation: Observation
    env_id: str
    tools: list[ToolSchema]
    action_space: ToolCallSpace


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gives."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    truncation: str
    rewards: dict[str, float]
    metrics: dict[str, float]
    invalid_calls: int


class _FailedError(Exception):
    """The episode can't go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def play(episode: Episode, host: Host, agent: Agent, limits: Limits) -> None:
    """Fill the episode in as it happens. Whatever goes wrong in it ends up in `episode.failure`.

    Raises:
        UsageError: The agent can't play at all as it was set up.
        asyncio.CancelledError: The rollout was cancelled; the episode holds what happened before.
    """
    begin = perf_counter()
    try:
        await _play(episode, host, agent, limits)
    except _FailedError as error:
        episode.failure = error.failure
    finally:
        episode.seconds = perf_counter() - begin


async def _play(episode: Episode, host: Host, agent: Agent, limits: Limits) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + limits.episode
    scenario = episode.scenario
    start = await _on_host(host, reset_env, scenario, seconds=limits.episode)
    episode.env_id, episode.tools = start.env_id, start.tools
    observation = start.observation
    state = TurnState(
        env_id=start.env_id,
        scenario=scenario,
        member=episode.member,
        turn=0,
        messages=[*observation],
        observation=observation,
        tools=start.tools,
        action_space=start.action_space,
        rng=_generator(scenario.seed, episode.member),
    )
    while True:
        episode.final_observation = [*observation]
        asked = perf_counter()
        state.timeout = min(limits.turn, deadline - clock())
        reply = await _ask(agent, state)
        if reply is None:
            episode.truncated, episode.truncation = True, "context_length"
            return
        answered = perf_counter()
        step = await _on_host(host, step_env, reply.action, seconds=min(limits.step, deadline - clock()))
        episode.turns.append(
            Turn(
                observation=[*observation],
                action=reply.action,
                reward=step.reward,
                rewards=step.rewards,
                finish_reason=reply.finish_reason,
                policy=reply.policy,
                prompt_ids=reply.prompt_ids,
                completion_ids=reply.completion_ids,
                logprobs=reply.logprobs,
                invalid_calls=step.invalid_calls,
                policy_seconds=answered - asked,
                environment_seconds=perf_counter() - answered,
            )
        )
        episode.metrics.update(step.metrics)
        observation = step.observation
        if step.terminated or step.truncated:
            episode.final_observation = [*observation]
            episode.terminated, episode.truncated = step.terminated, step.truncated and not step.terminated
            if episode.truncated:
                episode.truncation = "max_turns" if step.truncation == "max_turns" else "environment"
            return
        state.turn += 1
        state.observation = observation
        state.messages += [reply.action, *observation]


def _generator(seed: int, member: int) -> np.random.Generator:
    """Make an episode's own generator.

    The environment makes its own from the bare seed, and `SeedSequence([seed, 0])` is the same as `SeedSequence(seed)`: without a key of its
    own the agent would draw the very numbers that the environment hid.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_AGENT_KEY, member)))


async def _ask(agent: Agent, state: TurnState) -> Reply | None:
    """Return the agent's reply; None if the conversation no longer fits its context."""
    scope = asyncio.timeout(state.timeout)
    try:
        async with scope:
            return await agent.act(state)
    except ContextOverflow:
        return None
    except (PolicyError, EngineError) as error:
        raise _FailedError(Failure(error.kind, str(error))) from error
    except UsageError:
        raise
    except TimeoutError as error:
        if scope.expired():
            raise _FailedError(Failure("policy", f"the agent {agent.name!r} gave no reply within {max(state.timeout, 0.0):.3g} s")) from error
        raise _failed("policy", error) from error
    except Exception as error:
        raise _failed("policy", error) from error


async def _on_host(host: Host, function: Callable[..., T], argument: Any, *, seconds: float) -> T:
    try:
        return await host.call(function, argument, timeout=seconds)
    except HostTimeoutError as error:
        kind: FailureKind = "environment" if function is reset_env else "tool_timeout"
        what = "reset" if function is reset_env else "step"
        raise _failed(kind, TimeoutError(f"the environment's {what} did not return within {max(seconds, 0.0):.3g} s")) from error
    except ToolTimeout as error:
        raise _failed("tool_timeout", error) from error
    except Exception as error:
        raise _failed("environment", error) from error


def _failed(kind: FailureKind, error: Exception) -> _FailedError:
    text = "".join(traceback.format_exception_only(error)).strip()
    return _FailedError(Failure(kind, text, "".join(traceback.format_exception(error))))


def reset_env(env: gymnasium.Env[Any, Any], scenario: Scenario) -> Start:
    """Reset the environment to the scenario. Runs where the environment lives."""
    observation, _ = env.reset(seed=scenario.seed, options=dict(scenario.options))
    unwrapped = env.unwrapped
    space = cast("ToolCallSpace", env.action_space)
    tools = getattr(unwrapped, "tools", None)
    return Start(
        observation=_messages(observation),
        env_id=env.spec.id if env.spec is not None else type(unwrapped).__name__,
        tools=list(tools) if tools is not None else _schemas(space),
        action_space=space,
    )


def step_env(env: gymnasium.Env[Any, Any], action: Any) -> Step:
    """Take a step. Runs where the environment lives."""
    observation, reward, terminated, truncated, info = env.step(action)
    return Step(
        observation=_messages(observation),
        reward=_finite("reward", reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        truncation=str(info.get("truncation", "")),
        rewards=_figures("rewards", info),
        metrics=_figures("metrics", info),
        invalid_calls=int(info.get("invalid_calls", 0)),
    )


def _messages(observation: Any) -> tuple[Message, ...]:
    if isinstance(observation, list | tuple) and all(isinstance(message, Mapping) for message in observation):
        return tuple(cast("Observation", observation))
    raise TypeError(f"an observation must be a tuple of chat messages, not {observation!r:.200}")


def _figures(key: str, info: Mapping[str, Any]) -> dict[str, float]:
    return {name: _finite(f"{key}[{name!r}]", value) for name, value in info.get(key, {}).items()}


def _finite(name: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be a finite number")
    return number


def _schemas(space: ToolCallSpace) -> list[ToolSchema]:
    """Tool schemas for an environment that declares its tools in its action space only."""
    return [{"type": "function", "function": {"name": name, "parameters": dict(schema)}} for name, schema in space.tools.items()]
