"""Playing one episode: from reset to its end, or to its failure.

This module owns the loop of observation, policy call and step, with its deadlines, and decides what each error means for the episode. Which
episodes are played, and where they are kept, belongs to the runner.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from art_gym._actions import message_of
from art_gym._steps import reset_env, restore_env, snapshot_env, step_env
from art_gym._transcripts import new_messages
from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import ContextOverflow, EngineError, FailureKind, PolicyError, ToolTimeout, UsageError
from art_gym.messages import AssistantMessage, Message, Observation
from art_gym.rollout._hosts import Host, HostTimeoutError
from art_gym.rollout._turnstile import Turnstile
from art_gym.rollout.agent import Agent, Reply, TurnState
from art_gym.rollout.gate import Order, RequestGate

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


@dataclass(slots=True)
class Seat:
    """Where one episode is played: a host, and whether its environment is at work."""

    host: Host
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """The place in an episode at which others begin.

    Attributes:
        turns: The turns before it, the parent's own.
        observation: What the environment had returned there.
        messages: The transcript up to there.
        memory: The agent's.
        snapshot: The environment's state; None where it can't be had, so that the turns' actions are taken again.
    """

    turns: list[Turn]
    observation: Observation
    messages: list[Message]
    memory: dict[str, Any]
    snapshot: Any


class _FailedError(Exception):
    """The episode can't go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True)
class Play:
    """The playing of one episode.

    Attributes:
        episode: Filled in as it happens.
        seat: Where its environment lives.
        agent: Who plays.
        limits: Of its waits.
        gate: Lets its policy calls through.
        turnstile: Lets it go on when it was answered.
        order: Whose turn it is at the gate.
        branches: How many episodes are to branch off before this turn; None if none ever do.
        grow: Takes the place at which they begin, and how many they are.
        start: Where it branched off another one; None if it starts at a reset.
    """

    episode: Episode
    seat: Seat
    agent: Agent
    limits: Limits
    gate: RequestGate
    turnstile: Turnstile
    order: Order
    branches: Callable[[Episode, TurnState], int] | None = None
    grow: Callable[[Branch, int], None] = lambda branch, count: None
    start: Branch | None = None
    deadline: float = math.inf

    async def run(self) -> None:
        """Fill the episode in. Whatever goes wrong in it ends up in its `failure`.

        Raises:
            UsageError: The agent can't play at all as it was set up.
            asyncio.CancelledError: The rollout was cancelled; the episode holds what happened before.
        """
        begin = perf_counter()
        self.deadline = asyncio.get_running_loop().time() + self.limits.episode
        try:
            await self._play(await self._begin())
        except _FailedError as error:
            self.episode.failure = error.failure
        finally:
            self.episode.seconds = perf_counter() - begin

    async def _begin(self) -> TurnState:
        """Reset the environment, or bring it to where the episode branches off."""
        episode, branch = self.episode, self.start
        start = await self._on_host(reset_env, episode.scenario, seconds=self.limits.episode)
        episode.env_id, episode.tools = start.env_id, start.tools
        state = TurnState(
            env_id=start.env_id,
            scenario=episode.scenario,
            member=episode.member,
            turn=0,
            messages=[*start.observation],
            observation=start.observation,
            tools=start.tools,
            action_space=start.action_space,
            rng=_generator(episode),
        )
        if branch is not None:
            await self._on_host(restore_env, (branch.snapshot, [turn.action for turn in branch.turns]), seconds=self.limits.episode)
            episode.turns = [*branch.turns]
            state.turn, state.observation, state.messages = len(branch.turns), branch.observation, [*branch.messages]
            state.memory = copy.deepcopy(branch.memory)
        return state

    async def _play(self, state: TurnState) -> None:
        episode = self.episode
        clock = asyncio.get_running_loop().time
        yielded = clock()
        while True:
            episode.final_observation = [*state.observation]
            if clock() - yielded > HOLD_SECONDS:
                await asyncio.sleep(0)
                yielded = clock()
            if self.branches is not None and state.turn > episode.shared_turns:
                await self._branch(self.branches, state)
            reply, seconds = await self._ask(state)
            if reply is None:
                episode.truncated, episode.truncation = True, "context_length"
                return
            await self.turnstile.pass_through()
            answered = perf_counter()
            step = await self._on_host(step_env, reply.action, seconds=min(self.limits.step, self.deadline - clock()))
            episode.turns.append(
                Turn(
                    observation=[*state.observation],
                    action=reply.action,
                    reward=step.reward,
                    rewards=step.rewards,
                    finish_reason=reply.finish_reason,
                    policy=reply.policy,
                    prompt_ids=reply.prompt_ids,
                    completion_ids=reply.completion_ids,
                    logprobs=reply.logprobs,
                    invalid_calls=step.invalid_calls,
                    policy_seconds=seconds,
                    environment_seconds=perf_counter() - answered,
                )
            )
            episode.metrics.update(step.metrics)
            observation, previous = step.observation, state.observation
            if step.terminated or step.truncated:
                episode.final_observation = [*observation]
                episode.terminated, episode.truncated, episode.truncation = step.terminated, step.truncated, step.truncation
                return
            state.turn += 1
            state.observation = observation
            state.messages += [reply.action, *new_messages(observation, previous, reply.action)]

    async def _branch(self, branches: Callable[[Episode, TurnState], int], state: TurnState) -> None:
        count = branches(self.episode, state)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"branch returned {count!r:.100}; it must return how many episodes branch off here, 0 for none")
        if count:
            snapshot = await self._on_host(snapshot_env, None, seconds=self.limits.episode)
            turns, messages = [*self.episode.turns], [*state.messages]
            self.grow(Branch(turns, state.observation, messages, copy.deepcopy(state.memory), snapshot), count)

    async def _ask(self, state: TurnState) -> tuple[Reply | None, float]:
        """Return the agent's reply, None if the conversation no longer fits its context, and how many seconds it took."""
        clock = asyncio.get_running_loop().time
        try:
            await self.gate.enter(self.order, self.deadline - clock())
        except TimeoutError as error:
            raise self._late() from error
        try:
            if (now := clock()) >= self.deadline:
                raise self._late()
            state.timeout = min(self.limits.turn, self.deadline - now)
            begin = perf_counter()
            return await _reply(self.agent, state), perf_counter() - begin
        finally:
            self.gate.leave()

    def _late(self) -> _FailedError:
        return _FailedError(Failure("policy", f"the episode did not end within {self.limits.episode:.3g} s"))

    async def _on_host(self, function: Callable[..., T], argument: Any, *, seconds: float) -> T:
        self.seat.busy = True
        try:
            result = await self.seat.host.call(function, argument, timeout=seconds)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.seat.busy = False
            if not isinstance(error, Exception):
                raise
            raise _host_failed(function, argument, seconds, error) from error
        self.seat.busy = False
        return result


def _generator(episode: Episode) -> np.random.Generator:
    """Make an episode's own generator.

    The environment makes its own from the bare seed, and `SeedSequence([seed, 0])` is the same as `SeedSequence(seed)`: without a key of its
    own the agent would draw the very numbers that the environment hid.
    """
    key = [_AGENT_KEY, episode.member, *branch_path(episode)]
    return np.random.default_rng(np.random.SeedSequence(episode.scenario.seed, spawn_key=key))


def branch_path(episode: Episode) -> list[int]:
    """The numbers of the branches that lead to an episode: one for each after the root's id."""
    return [int(number) for number in episode.id.split("~")[1:]] if episode.parent is not None else []


async def _reply(agent: Agent, state: TurnState) -> Reply | None:
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


def _host_failed(function: Callable[..., Any], argument: Any, seconds: float, error: Exception) -> _FailedError:
    stepped = function is step_env
    action = cast("AssistantMessage", argument) if stepped else None
    if isinstance(error, HostTimeoutError):
        what = "step" if stepped else "reset"
        late = TimeoutError(f"the environment's {what} did not return within {max(seconds, 0.0):.3g} s")
        late.__cause__ = error
        return _failed("tool_timeout" if stepped else "environment", late, action)
    return _failed("tool_timeout" if isinstance(error, ToolTimeout) else "environment", error, action)


def _failed(kind: FailureKind, error: Exception, action: AssistantMessage | None = None) -> _FailedError:
    return _FailedError(replace(Failure.of(kind, error), action=action))
