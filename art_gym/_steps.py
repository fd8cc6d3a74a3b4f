"""Reading what an environment returns: from `reset`, and from `step`.

For everyone who plays environments they haven't written (the runner, recording, replay): the same reading, the same refusals. It works with any
Gymnasium environment of messages; what `ToolEnv` reports beyond the API is taken where it is there.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium

from art_gym._figures import finite
from art_gym._snapshots import restore, snapshot
from art_gym.episodes import TruncationReason
from art_gym.errors import EpisodeError
from art_gym.messages import Message, Observation, ToolSchema
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a reset gives."""

    observation: Observation
    env_id: str
    tools: list[ToolSchema]
    action_space: ToolCallSpace


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gives. `truncation` is None unless the episode was truncated; the flags are never both true."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    truncation: TruncationReason | None
    rewards: dict[str, float]
    metrics: dict[str, float]
    invalid_calls: int


def reset_env(env: gymnasium.Env[Any, Any], scenario: Scenario) -> Start:
    """Reset the environment to the scenario. Runs where the environment lives."""
    observation, _ = env.reset(seed=scenario.seed, options=dict(scenario.options))
    return read_start(env, observation)


def step_env(env: gymnasium.Env[Any, Any], action: Any) -> Step:
    """Take a step. Runs where the environment lives."""
    return read_step(env.step(action))


def snapshot_env(env: gymnasium.Env[Any, Any], _: None) -> Any:
    """Return a snapshot of the environment; None if it has none, or can't make one now. Runs where the environment lives."""
    if not env.has_wrapper_attr("snapshot"):
        return None
    try:
        return snapshot(env)
    except Exception:  # noqa: BLE001  the environment may raise anything; the steps are taken again instead
        _log.debug("no snapshot of %s", env, exc_info=True)
        return None


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken: its action, and what the environment returned."""

    action: Any
    observation: Sequence[Message]
    reward: float


def restore_env(env: gymnasium.Env[Any, Any], place: tuple[Any, Sequence[Taken]]) -> None:
    """Bring the environment, just reset to the same scenario, to where it was after some steps: by a snapshot, or without one by taking them.

    Runs where the environment lives.

    Raises:
        EpisodeError: The environment doesn't do again what it did.
    """
    state, steps = place
    if state is not None:
        restore(env, state)
        return
    for turn, taken in enumerate(steps):
        step = step_env(env, copy.deepcopy(taken.action))
        expected, actual = _as_json([taken.observation, taken.reward]), _as_json([step.observation, step.reward])
        if expected != actual or step.terminated or step.truncated:
            raise EpisodeError(
                f"the environment has no snapshots, and with the same actions it didn't do again in turn {turn} what it did: "
                f"{str(expected)[:200]} was {'its end' if expected == actual else str(actual)[:200]}"
            )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def env_id(env: gymnasium.Env[Any, Any]) -> str:
    """The environment's registered id, or else the name of its class."""
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def read_start(env: gymnasium.Env[Any, Any], observation: Any) -> Start:
    """Read what the outermost wrapper shows after a reset: its tools and its action space are those that count.

    Raises:
        TypeError: The observation isn't made of messages.
    """
    space = cast("ToolCallSpace", env.action_space)
    return Start(
        observation=read_messages(observation),
        env_id=env_id(env),
        tools=list(env.get_wrapper_attr("tools")) if env.has_wrapper_attr("tools") else _schemas(space),
        action_space=space,
    )


def read_step(result: tuple[Any, Any, Any, Any, Mapping[str, Any]]) -> Step:
    """Read what a step returned.

    Raises:
        TypeError: The observation isn't made of messages, or a figure is no number.
        ValueError: A reward or metric isn't finite.
    """
    observation, reward, terminated, truncated, info = result
    truncated = bool(truncated) and not terminated
    return Step(
        observation=read_messages(observation),
        reward=finite("reward", reward),
        terminated=bool(terminated),
        truncated=truncated,
        truncation=_reason(info) if truncated else None,
        rewards=_figures("rewards", info),
        metrics=_figures("metrics", info),
        invalid_calls=int(info.get("invalid_calls", 0)),
    )


def read_messages(observation: Any) -> Observation:
    """Return an observation that is made of messages.

    Raises:
        TypeError: It isn't: the environment is one of something else.
    """
    if isinstance(observation, list | tuple) and all(isinstance(message, Mapping) for message in observation):
        return tuple(cast("Observation", observation))
    raise TypeError(f"an observation must be a tuple of chat messages, not {observation!r:.200}")


def _reason(info: Mapping[str, Any]) -> TruncationReason:
    match info.get("truncation"):
        case "max_turns":
            return "max_turns"
        case "max_tokens":
            return "max_tokens"
        case _:
            return "environment"


def _figures(key: str, info: Mapping[str, Any]) -> dict[str, float]:
    return {name: finite(f"{key}[{name!r}]", value) for name, value in info.get(key, {}).items()}


def _schemas(space: ToolCallSpace) -> list[ToolSchema]:
    """Tool schemas for an environment that declares its tools in its action space only."""
    return [{"type": "function", "function": {"name": name, "parameters": dict(schema)}} for name, schema in space.tools.items()]
