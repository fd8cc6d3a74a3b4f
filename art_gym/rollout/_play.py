"""Playing one episode: from reset to its end, or to its failure.

This module owns the loop of observation, policy call and step, with its deadlines, and decides what each error means for the episode. Which
episodes are played, and where they are kept, belongs to the runner.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from art_gym._actions import message_of
from art_gym._steps import reset_env, step_env
from art_gym._transcripts import new_messages
from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import ContextOverflow, EngineError, FailureKind, PolicyError, ToolTimeout, UsageError
from art_gym.messages import AssistantMessage
from art_gym.rollout._hosts import Host, HostTimeoutError
from art_gym.rollout.agent import Agent, Reply, TurnState

T = TypeVar("T")

HOLD_SECONDS = 0.05
"""How long an episode in which nothing waits may keep the event loop to itself."""

_AGENT_KEY = 0x61637473
"""Tells the agents' generators from all others that may be spawned from a scenario's seed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that one policy call, one step and one whole episode may take."""

    turn: float
    step: float
    episode: float


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
    yielded = clock()
    while True:
        episode.final_observation = [*observation]
        if clock() - yielded > HOLD_SECONDS:
            await asyncio.sleep(0)
            yielded = clock()
        if (now := clock()) >= deadline:
            raise _FailedError(Failure("policy", f"the episode did not end within {limits.episode:.3g} s"))
        asked = perf_counter()
        state.timeout = min(limits.turn, deadline - now)
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
        observation, previous = step.observation, observation
        if step.terminated or step.truncated:
            episode.final_observation = [*observation]
            episode.terminated, episode.truncated, episode.truncation = step.terminated, step.truncated, step.truncation
            return
        state.turn += 1
        state.observation = observation
        state.messages += [reply.action, *new_messages(observation, previous, reply.action)]


def _generator(seed: int, member: int) -> np.random.Generator:
    """Make an episode's own generator.

    The environment makes its own from the bare seed, and `SeedSequence([seed, 0])` is the same as `SeedSequence(seed)`: without a key of its
    own the agent would draw the very numbers that the environment hid.
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_AGENT_KEY, member)))


async def _ask(agent: Agent, state: TurnState) -> Reply | None:
    """Return the agent's reply; None if the conversation no longer fits its context."""
    scope = asyncio.timeout(state.timeout)
    reply: Any
    try:
        async with scope:
            reply = agent.act(state)
            if not inspect.isawaitable(reply):
                raise UsageError(f"the agent {agent.name!r} must be asynchronous, and its act returned {reply!r:.100}: write async def act")
            reply = await reply
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
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, KeyboardInterrupt | GeneratorExit) or (isinstance(error, asyncio.CancelledError) and task and task.cancelling()):
            raise
        # The SystemExit of a library that gives up, or a task of the agent's own that was cancelled: neither is the rollout's end.
        raise _failed("policy", RuntimeError(f"raised {error!r}")) from error
    if not isinstance(reply, Reply):
        raise _failed("policy", TypeError(f"the agent {agent.name!r} must return a Reply, such as Reply(call(…)), not {reply!r:.100}"))
    if isinstance(reply.action, Mapping) or (message := message_of(reply.action)) is None:
        return reply
    return replace(reply, action=cast("AssistantMessage", dict(message)))  # a message object of the OpenAI SDK


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
    return _FailedError(Failure.of(kind, error))
