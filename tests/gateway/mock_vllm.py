"""A stand-in for vLLM's server: the same routes, keys, chunks and errors as vLLM 0.32, over a model that makes up words.

Its tokens are words: whatever it says is what a later prompt spells the same way, so that a conversation that goes on extends the tokens of
the one before. Every word it makes up is new; tests can tell which answer a token belongs to. Tests steer it through `MockVLLM`'s attributes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse

FINGERPRINT = "vllm-0.32.0-mock"
END = "<|im_end|>\n"
_PIECE = re.compile(r"<\|im_start\|>\w+\n|<\|im_end\|>\n|</?tool_call>|</?think>|\s*[^\s<]+|\s+|<")


@dataclass(slots=True)
class Said:
    """What the model is to say: a text, calls as (name, arguments as JSON text), a reasoning text before both."""

    text: str = ""
    calls: Sequence[tuple[str, str]] = ()
    reasoning: str = ""


@dataclass(slots=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next request: an error answer, or a connection broken before or within the answer."""

    status: int = 500
    body: Any = None
    breaks: bool = False
    after_chunks: int = 0


@dataclass(slots=True, eq=False)
class MockVLLM:
    """The server's state, which tests look at and set.

    Attributes:
        model: The served base model.
        max_model_len: Longest sequence, in tokens.
        say: Makes an answer of a request's body; the default makes up words, and calls the first tool where one must or may be called first.
        token_seconds: Pause before each token.
        hold_after: Streams pause after so many tokens, until `go` is set.
        hold_end: They pause before they tell that they are done.
        reasoning_parser: Whether the server has one, so that `include_reasoning: false` hides token ids.
        seen: Every request.
        cancelled: Requests that the client left.
        running: Requests under way.
        faults: Taken from the front, one for each request for an answer.
        adapters: Loaded adapters, by name.
        done: Control requests, in order, such as "reload_weights".
    """

    model: str = "mock"
    max_model_len: int = 100_000
    say: Callable[[dict[str, Any]], Said] | None = None
    token_seconds: float = 0.0
    hold_after: int | None = None
    hold_end: bool = False
    reasoning_parser: bool = False
    words: int = 4
    seen: list[Seen] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    faults: list[Fault] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    vocabulary: dict[str, int] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    _counter: Any = field(default_factory=lambda: itertools.count(1))

    # Tokens.

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; unknown pieces get new ones."""
        ids = []
        for piece in _PIECE.findall(text):
            if (known := self.vocabulary.get(piece)) is None:
                known = self.vocabulary[piece] = len(self.pieces)
                self.pieces.append(piece)
            ids.append(known)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return "".join(self.pieces[one] for one in ids)

    def logprob(self, position: int, token: int) -> float:
        """Log-probability of a token at a position of its sequence: made up, but the same for whoever asks."""
        return -((token * 7 + position) % 97 + 1) / 100

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> str:
        """The prompt of a conversation."""
        text = ""
        if tools:
            text += "<|im_start|>system\n# Tools " + json.dumps([_function(tool) for tool in tools]) + END
        for message in messages:
            text += f"<|im_start|>{message['role']}\n" + self._spelled(message) + END
        return text + "<|im_start|>assistant\n"

    def _spelled(self, message: Any) -> str:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        for call in message.get("tool_calls") or ():
            content += _spelled_call(call["function"]["name"], call["function"]["arguments"])
        return content

    # Answers.

    def sample(self, prompt: list[int], body: dict[str, Any], most: int | None) -> Sampled:
        """Answer a prompt."""
        said = (self.say or self._make_up)(body)
        text = (f"<think>{said.reasoning}</think>" if said.reasoning else "") + said.text
        ids = self.encode(text + "".join(_spelled_call(*call) for call in said.calls) + END)
        room = self.max_model_len - len(prompt)
        most = room if most is None else min(most, room)
        length = len(ids) > most
        ids = ids[:most]
        logprobs = [self.logprob(len(prompt) + index, token) for index, token in enumerate(ids)]
        return Sampled(self, said, prompt, ids, logprobs, "length" if length else "stop")

    def _make_up(self, body: dict[str, Any]) -> Said:
        tools, choice = body.get("tools") or (), body.get("tool_choice", "auto" if body.get("tools") else "none")
        last = (body.get("messages") or [{}])[-1]
        word = f"w{next(self._counter)}"
        if tools and choice != "none" and (choice != "auto" or last.get("role") == "user"):
            name = choice["function"]["name"] if isinstance(choice, dict) and "function" in choice else _function(tools[0])["name"]
            return Said(calls=[(name, json.dumps({"query": word}))])
        if body.get("response_format", {}).get("type") == "json_schema":
            return Said(text=json.dumps({"answer": word}))
        return Said(text=" ".join([word, *(f"w{next(self._counter)}" for _ in range(self.words - 1))]))

    def serves(self, model: Any) -> str | None:
        """The name that answers to a request's model; None if there is none."""
        if not model or model == self.model:
            return self.model
        return model if model in self.adapters else None

    def app(self) -> Starlette:
        """The server, an ASGI application."""
        from mock_routes import routes  # they need this module

        return Starlette(routes=routes(self))


@dataclass(slots=True)
class Sampled:
    """One choice as it was sampled."""

    mock: MockVLLM
    said: Said
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str

    @property
    def whole(self) -> bool:
        return self.finish == "stop"

    @property
    def text(self) -> str:
        """What was said, without the end token."""
        return self.mock.decode(self.ids).removesuffix(END)

    def pieces(self) -> list[str]:
        return [self.mock.pieces[one] for one in self.ids]

    def logprobs_content(self, top: int = 0, span: slice = slice(None)) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat completion."""
        entries = []
        for token, logprob in list(zip(self.ids, self.logprobs, strict=True))[span]:
            piece = self.mock.pieces[token]
            entry = {"token": piece, "logprob": logprob, "bytes": list(piece.encode())}
            entries.append({**entry, "top_logprobs": [dict(entry)] * min(top, 1)})
        return entries


def _spelled_call(name: str, arguments: str) -> str:
    return f'<tool_call> {{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def _function(tool: Any) -> Any:
    """A tool's function, in the form of chat completions or of responses."""
    return tool.get("function") or {key: part for key, part in tool.items() if key != "type"}


def error(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """vLLM's form of an error."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Run an ASGI application in a thread and event loop of its own; yields its address, such as "http://127.0.0.1:41234".

    The loop is at `app.state.loop`.
    """

    async def known(scope: Any, receive: Any, send: Any) -> None:
        app.state.loop = asyncio.get_running_loop()
        await app(scope, receive, send)

    options = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 3, **options}
    server = uvicorn.Server(uvicorn.Config(known, host="127.0.0.1", port=0, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended at once")
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
