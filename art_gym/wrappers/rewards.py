"""Reward from outside the environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import gymnasium

from art_gym.messages import AssistantMessage, Observation
from art_gym.wrappers._base import MessageWrapper, Result, check_function


@dataclass(frozen=True, slots=True)
class Step:
    """One step, as a reward function sees it: the action, and what the environment returned for it. Not to be changed.

    Attributes:
        action: What the model wrote, well-formed or not.
        observation: The messages that answer it.
        reward: The step's reward before the function's.
        terminated: The environment ended the episode.
        truncated: The episode was cut short.
        info: As the environment returned it.
    """

    action: AssistantMessage
    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class AddReward(MessageWrapper):
    """Add a component to the reward of every step: reward shaping.

    The function's value is added to the step's reward, and to `info["rewards"]` under the name, so that the components go on adding up. Where
    the environment names no components, its own reward becomes the component "environment".

    >>> import art_gym
    >>> env = AddReward(art_gym.make("art_gym/GuessNumber-v0"), "terse", lambda step: -0.5 if step.action["content"] else 0.0)
    >>> _ = env.reset(seed=0)
    >>> _, reward, _, _, info = env.step(art_gym.say("Let me think."))
    >>> reward, info["rewards"]
    (-0.5, {'terse': -0.5})

    Args:
        env: The environment.
        name: The component's name; one that the environment uses itself is added to.
        function: Takes the `Step`, returns a finite number.
    """

    reward_range = (-math.inf, math.inf)
    """The environment's own range no longer holds."""

    def __init__(self, env: gymnasium.Env[Any, Any], name: str, function: Callable[[Step], float]) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be the name of a reward component, not {name!r:.100}")
        check_function(function, "function must take a step and return a number")
        super().__init__(env, name=name, function=function)
        self._name = name
        self._function = function

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        observation, reward, terminated, truncated, info = result
        before = float(reward)
        value = self._value(Step(action, observation, before, terminated, truncated, info))
        named = info.get("rewards")
        rewards = dict(named) if named is not None else {"environment": before}
        # As ToolEnv adds up, to the last bit; components that never added up to the reward are left as they are.
        whole = _sum(rewards.values()) == before
        rewards[self._name] = rewards.get(self._name, 0.0) + value
        total = _sum(rewards.values()) if whole else before + value
        if not math.isfinite(total):
            raise ValueError(f"the reward {self._name!r} of {value:g} and the others must add up to a finite number: {rewards}")
        return observation, total, terminated, truncated, {**info, "rewards": rewards}

    def _value(self, step: Step) -> float:
        value: Any = self._function(step)
        try:
            number = math.fsum([value])  # float() would read a text, too
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"the function of the reward {self._name!r} must return a number, not {value!r:.100}") from error
        if not math.isfinite(number):
            raise ValueError(f"the function of the reward {self._name!r} must return a finite number, not {number}")
        return number


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
