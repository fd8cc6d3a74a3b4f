"""What a stack of wrappers lets be checked.

An invariant of an environment needn't hold through every wrapper: Gymnasium's TimeLimit truncates an episode that has just terminated, a
wrapper of rewards changes their sum. What can't be asked of the stack is left out, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium import wrappers

from art_gym.errors import UsageError
from art_gym.spaces import ChatSpace

_TRANSPARENT = (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker)
_SAME_END = (
    *_TRANSPARENT,
    wrappers.RecordEpisodeStatistics,
    gymnasium.RewardWrapper,
    gymnasium.ObservationWrapper,
    gymnasium.ActionWrapper,
)
_SAME_REWARD = (*_TRANSPARENT, wrappers.TimeLimit, wrappers.RecordEpisodeStatistics, gymnasium.ObservationWrapper, gymnasium.ActionWrapper)


class Layers:
    """A stack of wrappers and what is left out because of them.

    Attributes:
        skipped: Invariant → why it isn't checked.
        ignored: The key of `info` that holds the time an episode took (RecordEpisodeStatistics), which differs from run to run.
        reward_range: Lowest and highest reward of one step.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.skipped: dict[str, str] = {}
        self.ignored: str | None = None
        limits = env.get_wrapper_attr("reward_range") if env.has_wrapper_attr("reward_range") else (-math.inf, math.inf)
        self.reward_range = _range(env, limits)
        if not isinstance(env.observation_space, ChatSpace):
            self.skipped["answers"] = "the observations aren't chat messages"
        for layer in _wrappers(env):
            self._look_at(layer)
        stack: list[gymnasium.Env[Any, Any]] = [*_wrappers(env), env.unwrapped]
        holder = next(layer for layer in stack if not isinstance(layer, _TRANSPARENT))
        for owner in (holder, env.unwrapped):  # a wrapper of art_gym has snapshots only of what has them itself
            if not all(callable(getattr(owner, name, None)) for name in ("snapshot", "restore")):
                self.skipped["snapshot"] = f"{_name(owner)} has no snapshot and restore"

    def checks(self, invariant: str) -> bool:
        return invariant not in self.skipped

    def _look_at(self, layer: gymnasium.Wrapper[Any, Any, Any, Any]) -> None:
        if isinstance(layer, wrappers.RecordEpisodeStatistics):
            self.ignored = layer._stats_key
        if type(layer).__module__.startswith("art_gym."):
            return
        if not isinstance(layer, _SAME_END):
            for invariant in ("after the end", "flags: never both"):
                self.skipped.setdefault(invariant, f"the wrapper {_name(layer)} may end an episode in its own way")
        if not isinstance(layer, _SAME_REWARD):
            for invariant in ("reward range", "reward components"):
                self.skipped.setdefault(invariant, f"the wrapper {_name(layer)} may change the reward")


def _range(env: gymnasium.Env[Any, Any], limits: Any) -> tuple[float, float]:
    try:
        low, high = (float(limit) for limit in limits)
    except (TypeError, ValueError):
        low, high = math.inf, -math.inf
    if not low <= high:
        raise UsageError(f"{_name(env.unwrapped)}.reward_range must be (lowest, highest) reward of one step, not {limits!r}")
    return low, high


def _wrappers(env: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Wrapper[Any, Any, Any, Any]]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


def _name(env: gymnasium.Env[Any, Any]) -> str:
    return type(env).__name__
