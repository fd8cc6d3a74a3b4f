"""Limits of turns and of tokens: an episode that reaches one is truncated."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import gymnasium
from gymnasium.error import ResetNeeded

from art_gym._actions import text_of
from art_gym._steps import read_messages
from art_gym._transcripts import new_messages
from art_gym.episodes import TruncationReason
from art_gym.messages import AssistantMessage, Message, Observation
from art_gym.wrappers._base import MessageWrapper, Result, check_function
from art_gym.wrappers._wire import wire_form

BYTES_PER_TOKEN = 4
"""The usual rule of thumb for English text."""


class _Limit(MessageWrapper, ABC):
    """A limit of something that an episode uses up; the step that reaches it is the last one."""

    _state: ClassVar[tuple[str, ...]] = ("_used", "_over")
    _reason: ClassVar[TruncationReason]

    def __init__(self, env: gymnasium.Env[Any, Any], limit: int, **arguments: Any) -> None:
        super().__init__(env, **arguments)
        self._limit = limit
        self._used = 0
        self._over = False

    def _opening_cost(self, observation: Observation) -> int:
        """Return what a reset uses up."""
        return 0

    @abstractmethod
    def _cost(self, action: AssistantMessage, observation: Observation) -> int:
        """Return what a step uses up."""

    def _opened(self, observation: Observation, info: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        self._used, self._over = self._opening_cost(observation), False
        return observation, {"truncation": "", **info}

    def _around(self, action: AssistantMessage) -> AbstractContextManager[None]:
        if self._over:
            raise ResetNeeded(f"step needs an episode that is running, this one was truncated by {self._reason}: call reset first")
        return nullcontext()

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        observation, reward, terminated, truncated, info = result
        info = {"truncation": "", **info}
        self._used += self._cost(action, observation)
        if self._used >= self._limit and not terminated and not truncated:
            truncated = self._over = True
            info["truncation"] = self._reason
        return observation, reward, terminated, truncated, info


class TurnLimit(_Limit):
    """Truncate an episode after a number of turns, unless it ends before.

    The environment's own `max_turns` holds as well. Unlike `gymnasium.wrappers.TimeLimit` it says why (`info["truncation"]` is "max_turns"),
    never sets `truncated` beside `terminated`, and takes no step after the end.

    >>> import art_gym
    >>> env = TurnLimit(art_gym.make("art_gym/GuessNumber-v0"), max_turns=1)
    >>> _ = env.reset(seed=0)
    >>> _, _, terminated, truncated, info = env.step(art_gym.say("Hm."))
    >>> terminated, truncated, info["truncation"]
    (False, True, 'max_turns')

    Args:
        env: The environment.
        max_turns: Actions after which an unfinished episode is truncated, at least 1.
    """

    _reason = "max_turns"

    def __init__(self, env: gymnasium.Env[Any, Any], max_turns: int) -> None:
        max_turns = _positive("max_turns", max_turns)
        super().__init__(env, max_turns, max_turns=max_turns)

    @property
    def max_turns(self) -> int:
        """Actions after which an unfinished episode is truncated."""
        return self._limit

    def _cost(self, action: AssistantMessage, observation: Observation) -> int:
        return 1


class TokenLimit(_Limit):
    """Truncate an episode when its messages have used up a number of tokens: the observations', and the actions', from the reset on.

    The step that reaches the limit is still taken, with its reward, and is the last one; `info["truncation"]` is then "max_tokens". What the
    chat template and the tool schemas add isn't counted. Around a wrapper that shows the whole transcript (see `Transcript`), each message
    counts once.

    >>> import art_gym
    >>> env = TokenLimit(art_gym.make("art_gym/GuessNumber-v0"), max_tokens=100)
    >>> _ = env.reset(seed=0)
    >>> env.tokens
    20
    >>> _, _, terminated, truncated, info = env.step(art_gym.say("Hm. " * 80))
    >>> env.tokens, truncated, info["truncation"]
    (103, True, 'max_tokens')

    Args:
        env: The environment.
        max_tokens: Tokens at which an unfinished episode is truncated, at least 1.
        count: Takes a message in OpenAI wire form (an action too, whatever the model wrote), returns its tokens. By default an estimate that
            needs no tokenizer: 4 bytes of UTF-8 a token, rounded up for each message, of its text and of its calls' names and arguments. Images
            count nothing.
    """

    _state = (*_Limit._state, "_shown")
    _reason = "max_tokens"

    def __init__(self, env: gymnasium.Env[Any, Any], max_tokens: int, count: Callable[[Message], int] | None = None) -> None:
        if count is not None:
            check_function(count, "count must take a message and return its tokens")
        max_tokens = _positive("max_tokens", max_tokens)
        super().__init__(env, max_tokens, max_tokens=max_tokens, count=count)
        self._count = count or _estimate
        self._shown: Observation = ()

    @property
    def max_tokens(self) -> int:
        """Tokens at which an unfinished episode is truncated."""
        return self._limit

    @property
    def tokens(self) -> int:
        """Tokens used since the last reset."""
        return self._used

    def _opening_cost(self, observation: Observation) -> int:
        self._shown = copy.deepcopy(read_messages(observation))
        return self._total(observation)

    def _cost(self, action: AssistantMessage, observation: Observation) -> int:
        new = new_messages(read_messages(observation), self._shown, action)
        self._shown = copy.deepcopy(observation)
        return self._total([wire_form(action), *new])

    def _total(self, messages: Iterable[Message]) -> int:
        return sum(self._tokens(message) for message in messages)

    def _tokens(self, message: Message) -> int:
        count: Any = self._count(message)
        try:
            tokens = operator.index(count)
        except TypeError:
            tokens = -1
        if tokens < 0:
            raise TypeError(f"count must return how many tokens a message has, an integer of at least 0, not {count!r:.100}")
        return tokens


def _estimate(message: Message) -> int:
    """Estimate a message's tokens."""
    texts = [text_of(message.get("content"))]
    calls: Any = message.get("tool_calls") or ()
    for call in calls:
        texts += [call["function"]["name"], call["function"]["arguments"]]
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return -(-size // BYTES_PER_TOKEN)


def _positive(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r:.100}")
    return number
