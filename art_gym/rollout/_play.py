"""Playing one episode: from reset to its end, or to its failure.

This module owns the loop of observation, policy call and step, with its deadlines, and decides what each error means for the episode. Which
episodes are played, and where they are kept, belongs to the runner.
"""

from __future__ import annotations

import asyncio
import copy
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from art_gym._steps import Taken, reset_env, restore_env, snapshot_env, step_env
from art_gym._transcripts import new_messages
from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import EngineError, EnvironmentDied, FailureKind, PolicyError, ToolTimeout, UsageError
from art_gym.messages import AssistantMessage, Message, Observation
from art_gym.rollout._asking import NoReply, ask
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

    def steps(self) -> list[Taken]:
        """The steps that lead there, as they were taken."""
        answers = [*(turn.observation for turn in self.turns[1:]), [*self.observation]]
        return [Taken(turn.action, answer, turn.reward) for turn, answer in zip(self.turns, answers, strict=True)]


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
            UsageError: The agent can't play at all as it was set up, or the environment can't be made.
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
        start = await self._on_host(reset_env, episode.scenario, self.limits.episode)
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
            await self._on_host(restore_env, (branch.snapshot, branch.steps()), self.limits.episode)
            episode.turns = [*branch.turns]
            state.turn, state.observation, state.messages = len(branch.turns), branch.observation, [*branch.messages]
            state.memory = _copied(branch.memory)
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
            step = await self._on_host(step_env, reply.action, self.limits.step)
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
        """Ask whether episodes branch off here, and let them begin."""
        try:
            count = operator.index(branches(self.episode, state))
        except Exception as error:
            raise UsageError(f"branch raised {error!r:.200}; it must return how many episodes branch off, 0 for none") from error
        if count < 0:
            raise UsageError(f"branch returned {count}; it must return how many episodes branch off, 0 for none")
        if count:
            turns, messages = [*self.episode.turns], [*state.messages]
            self.grow(Branch(turns, state.observation, messages, _copied(state.memory), await self._snapshot()), count)

    async def _snapshot(self) -> Any:
        """Return the environment's state; None where it has none, or none that can be had: the branch then takes the same actions."""
        try:
            return await self._on_host(snapshot_env, None, self.limits.episode)
        except _FailedError as error:
            if isinstance(error.__cause__, HostTimeoutError | EnvironmentDied):
                raise
            return None

    async def _ask(self, state: TurnState) -> tuple[Reply | None, float]:
        """Return the agent's reply, None if the conversation no longer fits its context, and how many seconds it took."""
        clock = asyncio.get_running_loop().time
        queued = clock()
        await self.gate.enter(self.order)
        try:
            now = clock()
            # The wait was for other episodes, and isn't this one's time.
            self.deadline += now - queued
            if now >= self.deadline:
                raise _FailedError(Failure("policy", self._late()))
            state.timeout = min(self.limits.turn, self.deadline - now)
            begin = perf_counter()
            return await ask(self.agent, state), perf_counter() - begin
        except (_FailedError, UsageError):
            raise
        except NoReply as error:
            message = str(error) if state.timeout == self.limits.turn else f"{self._late()}; {error}"
            raise _FailedError(Failure("policy", message)) from error
        except (PolicyError, EngineError) as error:
            raise _FailedError(Failure(error.kind, str(error))) from error
        except Exception as error:
            raise _failed("policy", error) from error
        finally:
            self.gate.leave()

    def _late(self) -> str:
        return f"the episode did not end within {self.limits.episode:.3g} s"

    async def _on_host(self, function: Callable[..., T], argument: Any, limit: float) -> T:
        """Run a function on the environment, for `limit` seconds at most, and never past the episode's deadline."""
        left = self.deadline - asyncio.get_running_loop().time()
        self.seat.busy = True
        try:
            result = await self.seat.host.call(function, argument, timeout=min(limit, left))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.seat.busy = False
            # What can't be made can't be played at all; what raises such an error later has a bug.
            if not isinstance(error, Exception) or (isinstance(error, UsageError) and function is reset_env):
                raise
            raise self._host_failed(function, argument, limit if limit <= left else None, error) from error
        self.seat.busy = False
        return result

    def _host_failed(self, function: Callable[..., Any], argument: Any, limit: float | None, error: Exception) -> _FailedError:
        """Say what an error of a function on the environment means; `limit` is None where the episode's time was less."""
        stepped = function is step_env
        action = cast("AssistantMessage", argument) if stepped else None
        if isinstance(error, HostTimeoutError):
            what = f"the environment's {_WHAT[function]} did not return"
            error = TimeoutError(f"{what} within {limit:.3g} s" if limit is not None else f"{self._late()}, and {what}")
            return _failed("tool_timeout" if stepped else "environment", error, action)
        return _failed("tool_timeout" if isinstance(error, ToolTimeout) else "environment", error, action)


_WHAT: dict[Callable[..., Any], str] = {reset_env: "reset", step_env: "step", snapshot_env: "snapshot", restore_env: "restore"}


def _copied(memory: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(memory)
    except Exception as error:
        raise UsageError(f"the agent's memory can't be copied for a branch ({error!r:.200}); keep plain data in TurnState.memory") from error


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


def _failed(kind: FailureKind, error: Exception, action: AssistantMessage | None = None) -> _FailedError:
    return _FailedError(replace(Failure.of(kind, error), action=action))
