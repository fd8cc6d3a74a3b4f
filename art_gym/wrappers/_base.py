"""What all wrappers of this package share: the hooks that a wrapper fills in, and snapshots that go through wrappers.

A wrapper keeps no copy of what belongs to the environment: attributes are looked up when they are asked for (`env.get_wrapper_attr`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeAlias

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from art_gym import _calls
from art_gym._snapshots import copy_in, copy_out, layers, restore, snapshot
from art_gym.messages import AssistantMessage, Observation

Result: TypeAlias = tuple[Observation, Any, bool, bool, dict[str, Any]]
"""What `step` returns."""


class MessageWrapper(gymnasium.Wrapper[Observation, AssistantMessage, Observation, AssistantMessage], RecordConstructorArgs):
    """A wrapper around an environment of messages.

    Its episode's state is what `_state` names; that goes into snapshots. A wrapper changes what comes out of the environment by `_opened` and
    `_stepped`, and what happens around a step by `_around`, so that `step` and `astep` can't differ.
    """

    _state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, env: gymnasium.Env[Any, Any], **arguments: Any) -> None:
        """Wrap the environment; `arguments` are the wrapper's own, as its spec records them.

        Raises:
            TypeError: `env` is no environment.
        """
        if not isinstance(env, gymnasium.Env):
            raise TypeError(f"{type(self).__name__} needs an environment, not {_no_environment(env)}")
        # Functions are among them, and some can't be copied.
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **arguments)
        gymnasium.Wrapper.__init__(self, env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._opened(observation, info)

    def step(self, action: AssistantMessage) -> Result:
        with self._around(action):
            result = self.env.step(action)
        return self._stepped(action, result)

    async def astep(self, action: AssistantMessage) -> Result:
        """`step` without blocking the event loop (see `ToolEnv.astep`); an environment that has no `astep` is stepped in a thread."""
        with self._around(action):
            if callable(astep := getattr(self.env, "astep", None)):
                result = await astep(action)
            else:
                instant = getattr(self.unwrapped, "instant", False) is True
                result = await _calls.run_async(_calls.Call(partial(self.env.step, action), "step"), inline=instant)
        return self._stepped(action, result)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the episode, the wrapper's own included (see `ToolEnv.snapshot`).

        Raises:
            AttributeError: The environment has no snapshots.
        """
        return {"env": snapshot(self.env), "wrapper": copy_out({name: getattr(self, name) for name in self._state}, layers(self))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot, of this instance or of another one that was made and wrapped alike."""
        restore(self.env, state["env"])
        vars(self).update(copy_in(state["wrapper"], layers(self)))

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether the wrapper or its environment has the attribute; there are snapshots only where the environment itself has them."""
        if name in ("snapshot", "restore"):
            return self.env.has_wrapper_attr(name)
        return super().has_wrapper_attr(name)

    def _opened(self, observation: Observation, info: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        """Take what `reset` returned, and return what is shown."""
        return observation, info

    def _around(self, action: AssistantMessage) -> AbstractContextManager[None]:
        """Make what a step of the environment runs in; may raise, and the step then isn't taken."""
        return nullcontext()

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        """Take what `step` returned, and return what is shown."""
        return result


def check_function(function: Any, expected: str) -> None:
    """Refuse what can't be called, and what would have to be awaited; `expected` says what was to be given."""
    if not callable(function):
        raise TypeError(f"{expected}, and {function!r:.100} can't be called")
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{expected}, and {function!r:.100} is async: make it a plain function")


def _no_environment(value: Any) -> str:
    """Say what was given instead of an environment, and how to come by one."""
    if isinstance(value, str):
        return f"an id: make it first, with art_gym.make({value!r:.100})"
    if isinstance(value, type):
        return f"the class {value.__name__}: make an instance, {value.__name__}(), or take art_gym.make"
    if callable(value):
        return f"the function {value!r:.100}: call it, or take art_gym.make"
    return f"{value!r:.100}: make one with art_gym.make"
