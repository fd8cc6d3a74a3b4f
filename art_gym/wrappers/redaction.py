"""Text that the model isn't to see."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import gymnasium

from art_gym._steps import read_messages
from art_gym.messages import AssistantMessage, Message, Observation
from art_gym.wrappers._base import MessageWrapper, Result, check_function


class Redact(MessageWrapper):
    r"""Take text out of what the model is shown.

    All text of the observations goes through it: contents, text parts, and the arguments of calls in assistant messages, such as `Transcript`
    shows. The environment itself, its state, its `info` and its rendering keep the whole text.

    >>> import art_gym
    >>> env = Redact(art_gym.make("art_gym/GuessNumber-v0"), r"\d+", "#")
    >>> env.reset(seed=0)[0][0]["content"]
    'Find the secret number from # to # by calling guess.'

    Args:
        env: The environment.
        patterns: One or several regular expressions, each match of which is replaced; or a function from a text to what is shown of it.
        replacement: What stands in a match's place, word for word.

    Raises:
        ValueError: A pattern is no regular expression.
        TypeError: `patterns` is none of these.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        patterns: str | Iterable[str] | Callable[[str], str],
        replacement: str = "[redacted]",
    ) -> None:
        self._function: Callable[[str], str] | None = None
        self._patterns: list[re.Pattern[str]] = []
        if callable(patterns):
            check_function(patterns, "patterns may be a function from a text to what is shown of it")
            self._function = patterns
        else:
            patterns = _listed(patterns)
            self._patterns = [_compiled(pattern) for pattern in patterns]
        if not isinstance(replacement, str):
            raise TypeError(f"replacement must be text, not {replacement!r:.100}")
        super().__init__(env, patterns=patterns, replacement=replacement)
        self._replacement = replacement

    def _opened(self, observation: Observation, info: dict[str, Any]) -> tuple[Observation, dict[str, Any]]:
        return self._shown(observation), info

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        observation, *rest = result
        return cast("Result", (self._shown(observation), *rest))

    def _shown(self, observation: Observation) -> Observation:
        return tuple(self._message(message) for message in read_messages(observation))

    def _message(self, message: Message) -> Message:
        shown: dict[str, Any] = dict(message)
        content = shown.get("content")
        if isinstance(content, str):
            shown["content"] = self._text(content)
        elif isinstance(content, list | tuple):
            shown["content"] = [self._part(part) for part in content]
        if shown.get("tool_calls"):
            shown["tool_calls"] = [self._call(call) for call in shown["tool_calls"]]
        return cast("Message", shown)

    def _part(self, part: Any) -> Any:
        return {**part, "text": self._text(part["text"])} if isinstance(part.get("text"), str) else part

    def _call(self, call: Any) -> Any:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._arguments(function["arguments"])}}

    def _arguments(self, arguments: str) -> str:
        """Redact the values within the arguments, so that they stay JSON; where there is nothing, or no JSON, the text as a whole."""
        try:
            values = json.loads(arguments)
            shown = self._values(values)
            return self._text(arguments) if shown == values else json.dumps(shown, ensure_ascii=False)
        except (ValueError, RecursionError):
            return self._text(arguments)

    def _values(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._values(item) for item in value]
        if isinstance(value, dict):
            return {self._text(key): self._values(item) for key, item in value.items()}
        if isinstance(value, str):
            return self._text(value)
        text = json.dumps(value)
        shown = self._text(text)
        return value if shown == text else shown

    def _text(self, text: str) -> str:
        if self._function is not None:
            shown: Any = self._function(text)
            if not isinstance(shown, str):
                raise TypeError(f"the function that redacts must return text, not {shown!r:.100}")
            return shown
        for pattern in self._patterns:
            text = pattern.sub(lambda match: self._replacement, text)
        return text


def _listed(patterns: Any) -> list[Any]:
    if isinstance(patterns, Iterable) and not isinstance(patterns, str | bytes | Mapping):
        return list(patterns)
    return [patterns]


def _compiled(pattern: Any) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        way_out = f": write its text, {pattern.pattern!r:.100}, with flags such as (?i) in front" if isinstance(pattern, re.Pattern) else ""
        raise TypeError(f"patterns must be regular expressions as text, or a function, not {pattern!r:.100}{way_out}")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}; re.escape makes one of a text") from error
