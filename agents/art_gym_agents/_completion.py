"""What is read of a chat completion, and of an endpoint's error.

An answer is decoded once, into structs that skip what nobody uses: with logprobs that is most of it. Providers add fields and leave out others,
so that only what a reply can't do without is required. What a reply is made of belongs to `chat`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from art_gym.errors import PolicyError


class LogprobEntry(msgspec.Struct, gc=False):
    """One sampled token; null is what a server makes of a figure that isn't finite."""

    logprob: float | None


class Logprobs(msgspec.Struct):
    """Of one choice. Absent in the older form of completions."""

    content: list[LogprobEntry] | None = None


class Function(msgspec.Struct):
    """What a model calls. The arguments are what it wrote, valid or not."""

    name: str
    arguments: Any


class ToolCall(msgspec.Struct):
    """One call of a message."""

    function: Function
    id: Any = None


class Message(msgspec.Struct):
    """What the model said; the content may be text or parts."""

    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    """One answer of those asked for. `token_ids` are vLLM's."""

    message: Message
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None


class Completion(msgspec.Struct):
    """An answer to `/chat/completions`. `prompt_token_ids` are vLLM's."""

    choices: list[Choice]
    model: Any = None
    prompt_token_ids: list[int] | None = None


_DECODER = msgspec.json.Decoder(Completion)


def decode(url: str, answer: bytes) -> Completion:
    """Read a completion that has at least one choice.

    Raises:
        PolicyError: It isn't one.
    """
    try:
        completion = _DECODER.decode(answer)
    except (ValueError, RecursionError):
        completion = _decode_leniently(url, answer)
    if not completion.choices:
        raise PolicyError(f"the endpoint's answer isn't a chat completion (it has no choices): {_excerpt(answer)}")
    return completion


def _decode_leniently(url: str, answer: bytes) -> Completion:
    """Read what isn't JSON to the letter (NaN, half of a surrogate pair), or say what is wrong with it."""
    try:
        data = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{url} answered with something that isn't JSON: {answer[:200]!r}") from error
    if not isinstance(data, dict):
        raise PolicyError(f"{url} answered with JSON that isn't an object: {answer[:200]!r}")
    try:
        return msgspec.convert(data, Completion)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"the endpoint's answer isn't a chat completion ({error}): {_excerpt(answer)}") from error


def _excerpt(answer: bytes) -> str:
    return answer[:500].decode(errors="replace")


def error_of(answer: bytes) -> tuple[str, Any, Any]:
    """Text, code and parameter of an OpenAI-style error, or the body's beginning where it has another form."""
    try:
        data = json.loads(answer)
    except (ValueError, RecursionError):
        data = None
    error = data.get("error", data) if isinstance(data, dict) else None
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])[:1000], error.get("code"), error.get("param")
    return answer[:1000].decode(errors="replace"), None, None
