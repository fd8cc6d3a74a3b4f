"""Streamed answers: each event goes on as soon as it is whole, and what was sampled is put together on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec

from art_gym.gateway._capture import Capture, Logprobs, Sampled, assistant, message_of_items, strip_choice
from art_gym.gateway._upstream import Upstream
from art_gym.gateway._wire import NULL, Fields, encode, field_lists, fields, put
from art_gym.gateway.calls import Call

logger = logging.getLogger(__name__)

_DATA = b"data: "
_DONE = b"data: [DONE]"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


class _TextDelta(msgspec.Struct):
    delta: str = ""


class _ItemDone(msgspec.Struct):
    item: dict[str, Any]


_CHUNK = msgspec.json.Decoder(_Chunk)
_TEXT_DELTA = msgspec.json.Decoder(_TextDelta)
_ITEM_DONE = msgspec.json.Decoder(_ItemDone)


class Events:
    """Cuts a stream of bytes into server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the events that are whole, each with the empty line that ends it."""
        data = self._rest + data if self._rest else data
        start = 0
        while (end := data.find(b"\n\n", start)) >= 0:
            yield data[start : end + 2]
            start = end + 2
        self._rest = data[start:]

    @property
    def rest(self) -> bytes:
        """What has come of an event that isn't whole."""
        return self._rest


class _Assembly:
    """One choice as it comes in."""

    __slots__ = ("calls", "content", "finish_reason", "ids", "logprobs", "prompt_ids", "reasoning", "spoke")

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.ids: list[int] | None = None
        self.logprobs: list[float | None] | None = None
        self.prompt_ids: list[int] | None = None
        self.finish_reason: str | None = None
        self.spoke = False

    def add(self, choice: _Choice) -> None:
        if (delta := choice.delta) is not None:
            if delta.content is not None:
                self.spoke = True
                self.content.append(delta.content)
            if thought := delta.reasoning or delta.reasoning_content:
                self.reasoning.append(thought)
            for call in delta.tool_calls or ():
                self._add_call(call)
        elif choice.text is not None:
            self.spoke = True
            self.content.append(choice.text)
        if choice.token_ids is not None:
            self.ids = choice.token_ids if self.ids is None else self.ids + choice.token_ids
        if choice.logprobs is not None:
            values = choice.logprobs.values()
            self.logprobs = values if self.logprobs is None else self.logprobs + values
        if choice.prompt_token_ids is not None:
            self.prompt_ids = choice.prompt_token_ids
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason

    def _add_call(self, call: _ToolCall) -> None:
        known = self.calls.setdefault(call.index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        known["id"] = call.id or known["id"]
        if call.function is not None:
            known["function"]["name"] += call.function.name or ""
            known["function"]["arguments"] += call.function.arguments or ""

    def sampled(self, index: int, prompt_ids: list[int] | None) -> Sampled:
        content: str | None = "".join(self.content)
        calls = [self.calls[number] for number in sorted(self.calls)]
        if not content and (calls or not self.spoke):
            content = None
        logprobs = self.logprobs if self.logprobs or self.ids != [] else []
        prompt = prompt_ids if self.prompt_ids is None else self.prompt_ids
        message = assistant(content, calls, "".join(self.reasoning))
        return Sampled(message, self.finish_reason, prompt, self.ids, logprobs, self.finish_reason is None, index)


class StreamCapture:
    """A captured stream of chat completions or completions.

    `feed` gives what the client is to see; once `complete`, `calls` can be made, and should be before the client learns of the end.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._choices: dict[int, _Assembly] = {}
        self._prompt_ids: list[int] | None = None
        self._events = Events()
        self._expected = capture.asked.n * max(1, len(capture.asked.conversations))
        self._finished = 0
        self._taken = False

    @property
    def complete(self) -> bool:
        """Whether every choice has come to its end."""
        return self._finished >= self._expected

    def feed(self, data: bytes) -> bytes:
        """Take in what vLLM sent; return what goes to the client."""
        return b"".join([self._passed(event) for event in self._events.feed(data)])

    def end(self) -> bytes:
        """What is left when the stream is over."""
        return self._events.rest

    def take(self) -> list[Call]:
        """The calls, once: whole where they came to their end, and abandoned where not. What nothing was sampled of makes none."""
        if self._taken:
            return []
        self._taken = True
        sampled = [one.sampled(index, self._prompt_ids) for index, one in sorted(self._choices.items()) if one.finish_reason or one.ids]
        return self._capture.calls(sampled)

    def _passed(self, event: bytes) -> bytes:
        if not event.startswith(_DATA) or event.startswith(_DONE):
            return event
        payload = event[6:-2]
        try:
            chunk = _CHUNK.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("a chunk of the model server could not be captured: %s", error)
            return event
        if chunk.prompt_token_ids is not None:
            self._prompt_ids = chunk.prompt_token_ids
        for choice in chunk.choices:
            if (assembly := self._choices.get(choice.index)) is None:
                assembly = self._choices[choice.index] = _Assembly()
            assembly.add(choice)
            self._finished += choice.finish_reason is not None
        if self._capture.asked.unchanged or not chunk.choices:
            return event
        return self._stripped(payload)

    def _stripped(self, payload: bytes) -> bytes:
        asked = self._capture.asked
        top = fields(payload)
        choices = field_lists(top["choices"])
        kept = [choice for choice in choices if self._keeps(choice)]
        if not kept:
            return b""
        for choice in kept:
            strip_choice(choice, asked)
        top["choices"] = msgspec.Raw(encode(kept))
        if not asked.token_ids:
            put(top, "prompt_token_ids", NULL)
        return b"data: " + encode(top) + b"\n\n"

    def _keeps(self, choice: Fields) -> bool:
        """Whether vLLM would have sent the choice to the client's own request: tokens that say nothing come only where they were asked for."""
        asked = self._capture.asked
        if (delta := choice.get("delta")) is None or asked.logprobs or asked.token_ids:
            return True
        if asked.hide_reasoning and b'"reasoning"' in bytes(delta):
            said = fields(delta)
            said.pop("reasoning", None)
            choice["delta"] = delta = msgspec.Raw(encode(said))
        return bytes(delta) != b"{}" or choice.get("finish_reason", NULL) != NULL


class ResponseStreamCapture:
    """A captured stream of the responses API, whose last event carries the whole response."""

    def __init__(self, capture: Capture, upstream: Upstream) -> None:
        self._capture, self._upstream = capture, upstream
        self._events = Events()
        self._texts: list[bytes] = []
        self._items: list[bytes] = []
        self._sampled: Sampled | None = None
        self._taken = False

    @property
    def complete(self) -> bool:
        """Whether the response has come to its end."""
        return self._sampled is not None

    async def feed(self, data: bytes) -> bytes:
        """Take in what vLLM sent; return what goes to the client. The last event is held back until its tokens are known."""
        return b"".join([await self._passed(event) for event in self._events.feed(data)])

    def end(self) -> bytes:
        """What is left when the stream is over."""
        return self._events.rest

    def take(self) -> list[Call]:
        """The call, once. One that was left before the end has no tokens: vLLM tells them with the end."""
        if self._taken:
            return []
        self._taken = True
        if self._sampled is not None:
            return self._capture.calls([self._sampled])
        if not (self._texts or self._items):
            return []
        message = message_of_items([_ITEM_DONE.decode(item).item for item in self._items])
        unfinished = "".join(_TEXT_DELTA.decode(text).delta for text in self._texts)
        if unfinished:
            message["content"] = unfinished
        return self._capture.calls([Sampled(message, abandoned=True)])

    async def _passed(self, event: bytes) -> bytes:
        kind, _, payload = event.partition(b"\ndata: ")
        if kind.endswith(b".output_text.delta"):
            self._texts.append(payload[:-2])
        elif kind.endswith(b".output_item.done"):
            self._items.append(payload[:-2])
        elif kind == b"event: response.completed":
            try:
                top = fields(payload[:-2])
                self._sampled = await self._capture.of_event(top["response"], self._upstream)
                top["response"] = msgspec.Raw(self._capture.stripped_response(top["response"]))
            except (msgspec.DecodeError, KeyError) as error:
                logger.warning("a response of the model server could not be captured: %s", error)
                return event
            return kind + b"\ndata: " + encode(top) + b"\n\n"
        return event
