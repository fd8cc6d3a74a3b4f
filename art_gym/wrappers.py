"""Wrappers around message environments, as Gymnasium wrappers."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from art_gym._actions import printable, read_action
from art_gym.messages import AssistantMessage, Message, Observation


class Transcript(gymnasium.Wrapper[Observation, AssistantMessage, Observation, AssistantMessage], RecordConstructorArgs):
    """Observe the whole transcript, the actions included, where the environment itself returns only what is new.

    >>> import art_gym
    >>> env = Transcript(art_gym.make("art_gym/GuessNumber-v0"))
    >>> _ = env.reset(seed=0)
    >>> [message["role"] for message in env.step(art_gym.call("guess", number=1))[0]]
    ['system', 'user', 'assistant', 'tool']
    """

    def __init__(self, env: gymnasium.Env[Observation, AssistantMessage]) -> None:
        RecordConstructorArgs.__init__(self)
        gymnasium.Wrapper.__init__(self, env)
        self._messages: list[Message] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._messages = list(copy.deepcopy(observation))
        return self._observe(), info

    def step(self, action: AssistantMessage) -> tuple[Observation, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._messages += [_wire_form(action), *copy.deepcopy(observation)]
        return self._observe(), reward, terminated, truncated, info

    def _observe(self) -> Observation:
        return tuple(copy.deepcopy(self._messages))


def _wire_form(action: Any) -> AssistantMessage:
    """Return the action as a message of the observation space, with the ids by which its calls were answered, whatever the model wrote."""
    if not isinstance(action, Mapping) and callable(dump := getattr(action, "model_dump", None)):
        action = dump()  # a message object of the OpenAI SDK
    written = read_action(action)
    silent = isinstance(action, Mapping) and action.get("content") is None
    message: AssistantMessage = {"role": "assistant", "content": None if silent else printable(written.text)}
    if written.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": printable(call.name), "arguments": _json_text(call.arguments)}}
            for call in written.calls
        ]
    return message


def _json_text(arguments: Any) -> str:
    """Return a call's arguments as text: as the model wrote them, or as JSON where the endpoint has read them already."""
    if arguments is None:
        return ""
    if isinstance(arguments, str):
        return printable(arguments)
    try:
        return printable(json.dumps(arguments, ensure_ascii=False, default=str))
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or an object that holds itself
        return printable(repr(arguments))
