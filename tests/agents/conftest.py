"""A chat endpoint in vLLM's form, in the test's own event loop."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from art_gym.rollout import TurnState
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["http_server.py"]

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 16}}, "required": ["number"]},
    },
}


class Endpoint:
    """Answers with what `script` holds, in order, then with `completion()`, or with `usual` if that is set; keeps the requests.

    An entry is a body (200), a status, a tuple of status, body and headers, the word "reset", or seconds to sleep first. Beside them there are
    `/health` and `/v1/models` with a status each, and `/metrics` with a page, if it has one.
    """

    def __init__(self):
        self.script = []
        self.usual = None
        self.requests = []
        self.headers = []
        self.connections = set()
        self.in_flight = self.most_in_flight = 0
        self.health, self.models, self.metrics = 200, 200, None
        self.asked = []
        self.port = 0
        self._runner = None
        self._transports = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self):
        """Listen, on the same port as before."""
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/health", self._beside)
        app.router.add_get("/v1/models", self._beside)
        app.router.add_get("/metrics", self._beside)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self):
        """Be gone: no connection is left, and none can be made."""
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            for transport in self._transports:
                transport.abort()
            self._transports.clear()
            await self._runner.cleanup()
            self._runner = None

    async def _beside(self, request):
        self.asked.append(request.path)
        if request.path == "/metrics":
            if isinstance(self.metrics, float):
                await asyncio.sleep(self.metrics)
            return web.Response(body=self.metrics) if isinstance(self.metrics, bytes) else web.Response(status=404)
        return web.Response(status=self.health if request.path == "/health" else self.models)

    async def _answer(self, request):
        self.requests.append(json.loads(await request.read()))
        self.headers.append(request.headers)
        self.connections.add(request.transport.get_extra_info("peername"))
        self._transports.add(request.transport)
        entry = self.script.pop(0) if self.script else completion() if self.usual is None else self.usual
        if isinstance(entry, float):
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
            try:
                await asyncio.sleep(entry)
            finally:
                self.in_flight -= 1
            entry = completion()
        if entry == "reset":
            request.transport.abort()
            entry = 500
        status, body, headers = entry if isinstance(entry, tuple) else (entry, {}, {}) if isinstance(entry, int) else (200, entry, {})
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)


def completion(message=None, *, finish_reason="tool_calls", token_ids=(7, 8, 2), logprobs=(-0.5, -0.25, 0.0), prompt=(1, 5, 6), **more):
    """A chat completion as vLLM 0.32 sends it, with the fields it leaves empty."""
    message = message or {
        "content": None,
        "tool_calls": [{"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}],
    }
    empty = {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
    entries = None if logprobs is None else [{"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []} for value in logprobs]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "served",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", **empty, **message},
                "logprobs": entries if entries is None else {"content": entries},
                "finish_reason": finish_reason,
                "stop_reason": None,
                "token_ids": None if token_ids is None else list(token_ids),
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
        "prompt_token_ids": None if prompt is None else list(prompt),
        **more,
    }


def error(status, message, **more):
    return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status, **more}}, {}


@pytest.fixture
def make_completion():
    return completion


@pytest.fixture
def make_error():
    return error


@pytest.fixture
async def endpoint():
    endpoint = Endpoint()
    await endpoint.start()
    yield endpoint
    await endpoint.kill()


@pytest.fixture
async def endpoints():
    """Three of them."""
    endpoints = [Endpoint() for _ in range(3)]
    for endpoint in endpoints:
        await endpoint.start()
    yield endpoints
    for endpoint in endpoints:
        await endpoint.kill()


@pytest.fixture
def make_state():
    def make(messages=None, *, tools=(GUESS,), turn=0, member=0, timeout=5.0, seed=1, scenario="train-0"):
        messages = messages or [{"role": "system", "content": "Find the number."}, {"role": "user", "content": "Begin."}]
        return TurnState(
            env_id="art_gym/GuessNumber-v0",
            scenario=Scenario(scenario, seed=seed),
            member=member,
            turn=turn,
            messages=list(messages),
            observation=tuple(messages[-1:]),
            tools=list(tools),
            action_space=ToolCallSpace({tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}),
            rng=np.random.default_rng(np.random.SeedSequence([seed, member])),
            timeout=timeout,
        )

    return make
