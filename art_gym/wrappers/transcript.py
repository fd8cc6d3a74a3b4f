"""The whole transcript as the observation."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium

from art_gym._steps import read_messages
from art_gym.messages import AssistantMessage, Message, Observation
from art_gym.wrappers._base import MessageWrapper, Result
from art_gym.wrappers._wire import wire_form


class Transcript(MessageWrapper):
    """Observe the whole transcript, the actions included, where the environment itself returns only what is new.

    >>> import art_gym
    >>> env = Transcript(art_gym.make("art_gym/GuessNumber-v0"))
    >>> _ = env.reset(seed=0)
    >>> [message["role"] for message in env.step(art_gym.call("guess", number=1))[0]]
    ['system', 'user', 'assistant', 'tool']
    """

    _state = ("_messages",)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._messages: list[Message] = []

    def _opened(self, observation: Observation, info: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        self._messages = list(copy.deepcopy(read_messages(observation)))
        return self._observe(), info

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        observation, reward, terminated, truncated, info = result
        self._messages += [wire_form(action), *copy.deepcopy(read_messages(observation))]
        return self._observe(), reward, terminated, truncated, info

    def _observe(self) -> Observation:
        return tuple(copy.deepcopy(self._messages))
