"""A part of an environment's tools."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import gymnasium

from art_gym.env import ToolEnv
from art_gym.messages import AssistantMessage, ToolSchema
from art_gym.spaces import ToolCallSpace
from art_gym.wrappers._base import MessageWrapper


class SelectTools(MessageWrapper):
    """Offer only some of a `ToolEnv`'s tools.

    Tool schemas and action space hold these alone, in the environment's order. A call to one that is left out is answered as unknown, in its
    place among the answers; the environment's `on_invalid` hears of it, and `info["invalid_calls"]` counts it.

    >>> import art_gym
    >>> env = SelectTools(art_gym.make("art_gym/Lookup-v0"), ["answer"])
    >>> list(env.action_space.tools)
    ['answer']
    >>> _ = env.reset(seed=0)
    >>> env.step(art_gym.call("search", word="gate"))[0][0]["content"].split(";")
    ["unknown tool 'search'", ' the tools are: answer']

    Args:
        env: A `ToolEnv`, with or without other wrappers around it.
        names: The wire names of the tools to offer; none at all leaves text only.

    Raises:
        ValueError: The environment has no such tool.
        TypeError: The environment is no `ToolEnv`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise TypeError(f"names must be a list of tools' names, not one text: write [{names!r}]")
        if not isinstance(names, Iterable) or isinstance(names, bytes | Mapping):
            raise TypeError(f"names must be a list of tools' names, not {names!r:.100}")
        names = list(names)
        super().__init__(env, names=names)
        if not isinstance(self.unwrapped, ToolEnv):
            raise TypeError(f"SelectTools needs a ToolEnv, not {type(self.unwrapped).__name__}: leave the tools out where it defines them")
        known = list(self._inner_space.tools)
        for name in names:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(f"unknown tool {name!r}; {hint}the tools are: {', '.join(known) or 'none'}")
        self._names = frozenset(names)
        self._made_from: ToolCallSpace | None = None
        self._made: ToolCallSpace | None = None

    @property
    def tools(self) -> list[ToolSchema]:
        """The tools that are offered, in OpenAI wire form; new objects each time."""
        return [schema for schema in self.env.get_wrapper_attr("tools") if schema["function"]["name"] in self._names]

    @property
    def action_space(self) -> gymnasium.Space[AssistantMessage]:
        """The environment's action space (a `ToolCallSpace`) without the tools left out; the same object as long as the environment's is."""
        whole = self._inner_space
        if self._made is None or self._made_from is not whole:
            self._made = ToolCallSpace({name: schema for name, schema in whole.tools.items() if name in self._names})
            self._made_from = whole
        return self._made

    @action_space.setter
    def action_space(self, space: gymnasium.Space[AssistantMessage]) -> None:
        raise AttributeError("SelectTools makes its action space from the environment's: set that one")

    @property
    def _inner_space(self) -> ToolCallSpace:
        return cast("ToolCallSpace", self.env.action_space)

    def _around(self, action: AssistantMessage) -> AbstractContextManager[None]:
        """Leave the environment only these tools for the step, so that its own rules answer, in its own words and order."""
        return cast("ToolEnv", self.unwrapped)._offering(self._names)
