"""Answers of vLLM as calls: what was sampled is taken out of them, and what the client didn't ask for is taken away.

Streamed answers are put together in `_streams`; what was asked for, and why, is in `_asking`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from art_gym.gateway._asking import Asked, content_of, tool_call_of
from art_gym.gateway._errors import ApiError
from art_gym.gateway._upstream import Upstream
from art_gym.gateway._wire import NULL, Fields, encode, field_lists, fields, put
from art_gym.gateway.calls import Call
from art_gym.gateway.policy import Resolved
from art_gym.messages import AssistantMessage

logger = logging.getLogger(__name__)


class LogprobEntry(msgspec.Struct, gc=False):
    """One token; vLLM writes null for what isn't finite."""

    logprob: float | None = None


class Logprobs(msgspec.Struct):
    """`content` in chat completions, `token_logprobs` in completions."""

    content: list[LogprobEntry] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float | None]:
        """One for each token."""
        return self.token_logprobs or [] if self.content is None else [entry.logprob for entry in self.content]


class _Choice(msgspec.Struct):
    index: int
    message: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _RawMessage(msgspec.Struct):
    tokens: list[int] | None = None


class _Response(msgspec.Struct):
    output: list[dict[str, Any]]
    status: str = "completed"
    temperature: float | None = None
    top_p: float | None = None
    input_messages: list[_RawMessage] | None = None
    output_messages: list[_RawMessage] | None = None


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, LogprobEntry] | None] | None = None


class _Scores(msgspec.Struct):
    choices: list[_Scored]


_RANDOM = random.Random()
"""Seeded by the system once: ids are no secrets, and a system call for each would be a tenth of a call's time."""

_ANSWER = msgspec.json.Decoder(_Answer)
_RESPONSE = msgspec.json.Decoder(_Response)
_SCORES = msgspec.json.Decoder(_Scores)


@dataclass(slots=True)
class Sampled:
    """One choice of an answer, whole or as far as it came."""

    message: AssistantMessage
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    abandoned: bool = False
    index: int = 0


@dataclass(slots=True)
class Capture:
    """One captured request, until its calls are made.

    Attributes:
        asked: The request.
        resolved: The version that answers.
        began: When the request arrived, in seconds since 1970.
        id: The first part of the calls' ids.
    """

    asked: Asked
    resolved: Resolved
    began: float
    id: str = field(default_factory=lambda: f"call-{_RANDOM.getrandbits(128):032x}")

    def calls(self, sampled: list[Sampled]) -> list[Call]:
        """Make the calls of the choices."""
        asked, several = self.asked, self.asked.n * len(self.asked.conversations) > 1
        seconds = max(0.0, time.time() - self.began)
        made = []
        for one in sampled:
            ids = one.completion_ids
            logprobs = one.logprobs if ids is not None else None
            if logprobs is not None and ids is not None and not (len(logprobs) == len(ids) and _finite(logprobs)):
                logger.warning("an answer of %s has %d tokens and not as many log-probabilities", self.resolved.version, len(ids))
                logprobs = None
            made.append(
                Call(
                    id=f"{self.id}-{one.index}" if several else self.id,
                    kind=asked.kind,
                    messages=asked.conversations[min(one.index // asked.n, len(asked.conversations) - 1)] if asked.conversations else [],
                    tools=asked.tools,
                    action=one.message,
                    finish_reason=one.finish_reason or "abandoned",
                    policy=self.resolved.version,
                    prompt_ids=one.prompt_ids,
                    completion_ids=ids,
                    logprobs=cast("list[float] | None", logprobs),
                    temperature=asked.temperature,
                    began=self.began,
                    seconds=seconds,
                    abandoned=one.abandoned,
                )
            )
        return made

    async def whole(self, answer: bytes, upstream: Upstream) -> tuple[list[Call], bytes]:
        """Take the calls out of an answer that wasn't streamed, and give what the client is to see.

        An answer in a form that isn't known passes unchanged, with a warning, and makes no calls.
        """
        try:
            if self.asked.kind == "responses":
                response = _RESPONSE.decode(answer)
                return self.calls([await self.of_response(response, upstream)]), self.stripped_response(answer)
            decoded = _ANSWER.decode(answer)
            return self.calls([_sampled(choice, decoded.prompt_token_ids) for choice in decoded.choices]), self._stripped(answer)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            logger.warning("an answer of the model server could not be captured: %s", error)
            return [], answer

    async def of_event(self, data: bytes | msgspec.Raw, upstream: Upstream) -> Sampled:
        """The same for the response of a stream's last event.

        Raises:
            msgspec.DecodeError: It is none.
        """
        return await self.of_response(_RESPONSE.decode(data), upstream)

    async def of_response(self, response: _Response, upstream: Upstream) -> Sampled:
        """Put a response together, with its log-probabilities asked for in a request of their own: vLLM gives none with it."""
        message = message_of_items(response.output)
        finish = "length" if response.status == "incomplete" else "tool_calls" if message.get("tool_calls") else "stop"
        prompt, completion = _tokens(response.input_messages), _tokens(response.output_messages)
        if response.temperature is not None:
            self.asked.temperature = response.temperature
        logprobs: list[float | None] | None = None
        if prompt is None:
            logger.warning("the model server gave no token ids with a response, so that it can't be trained on")
            completion = None
        elif not completion:
            completion, logprobs = [], []
        elif (response.temperature or 0.0) != 1.0 or response.top_p not in (None, 1.0):
            logger.warning(
                "a response sampled with temperature %s has no log-probabilities: they can be had for 1.0 only", response.temperature
            )
        else:
            logprobs = await score(upstream, self.resolved.upstream_model, prompt, completion)
        return Sampled(message, finish, prompt, completion, logprobs)

    def _stripped(self, answer: bytes) -> bytes:
        asked = self.asked
        if asked.unchanged:
            return answer
        top = fields(answer)
        choices = field_lists(top["choices"])
        for choice in choices:
            strip_choice(choice, asked)
            if asked.hide_reasoning and "message" in choice:
                message = fields(choice["message"])
                put(message, "reasoning", NULL)
                choice["message"] = msgspec.Raw(encode(message))
        top["choices"] = msgspec.Raw(encode(choices))
        if not asked.token_ids:
            put(top, "prompt_token_ids", NULL)
        return encode(top)

    def stripped_response(self, response: bytes | msgspec.Raw) -> bytes:
        """A response without the messages that the client didn't ask for."""
        if self.asked.unchanged:
            return bytes(response)
        top = fields(response)
        put(top, "input_messages", NULL)
        put(top, "output_messages", NULL)
        return encode(top)


def strip_choice(choice: Fields, asked: Asked) -> None:
    """Take from a choice, whole or a chunk's, what the client didn't ask for."""
    if not asked.logprobs:
        put(choice, "logprobs", NULL)
    if not asked.token_ids:
        put(choice, "token_ids", NULL)
        put(choice, "prompt_token_ids", NULL)


async def score(upstream: Upstream, model: str, prompt: list[int], completion: list[int]) -> list[float | None] | None:
    """Ask for the log-probabilities of tokens after others, at temperature 1; None, with a warning, where they can't be had."""
    body = {"model": model, "prompt": prompt + completion, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    try:
        answer = await upstream.send("/completions", encode(body), {"Content-Type": "application/json"})
        data = await upstream.read(answer)
        if answer.status != 200:
            raise ApiError(answer.status, data[:300].decode(errors="replace"))
        entries = _SCORES.decode(data).choices[0].prompt_logprobs or []
        found = [(entry or {})[str(token)].logprob for token, entry in zip(completion, entries[len(prompt) :], strict=True)]
    except (ApiError, msgspec.DecodeError, IndexError, KeyError, ValueError) as error:
        logger.warning("the log-probabilities of a response could not be had, so that it can't be trained on: %s", error)
        return None
    return found


def message_of_items(items: list[dict[str, Any]]) -> AssistantMessage:
    """What a response's output says, as one assistant message."""
    texts, calls, thoughts = [], [], []
    for item in items:
        kind = item.get("type")
        if kind == "message":
            texts.append(str(content_of(item.get("content"))))
        elif kind in ("function_call", "custom_tool_call"):
            calls.append(tool_call_of(item))
        elif kind == "reasoning":
            thoughts.append(str(content_of(item.get("content"))))
    return assistant("".join(texts) or None, calls, "".join(thoughts))


def assistant(content: str | None, calls: list[Any], reasoning: str | None = None) -> AssistantMessage:
    """An assistant message without empty fields."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    elif content is None:
        message["content"] = ""
    return cast("AssistantMessage", message)


def _sampled(choice: _Choice, prompt_ids: list[int] | None) -> Sampled:
    said = choice.message or {}
    content = choice.text if choice.message is None else said.get("content")
    thoughts = said.get("reasoning") or said.get("reasoning_content")
    return Sampled(
        assistant(content, said.get("tool_calls") or [], thoughts),
        choice.finish_reason or "stop",
        prompt_ids if choice.prompt_token_ids is None else choice.prompt_token_ids,
        choice.token_ids,
        choice.logprobs.values() if choice.logprobs is not None else ([] if choice.token_ids == [] else None),
        index=choice.index,
    )


def _tokens(messages: list[_RawMessage] | None) -> list[int] | None:
    """All token ids of a response's messages; None where one has none, as with gpt-oss."""
    if messages is None or any(one.tokens is None for one in messages):
        return None
    return [token for one in messages for token in one.tokens or ()]


def _finite(numbers: list[float | None]) -> bool:
    return None not in numbers and all(map(math.isfinite, cast("list[float]", numbers)))
