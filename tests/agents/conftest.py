"""A chat endpoint in vLLM's form, in the test's own event loop."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from art_gym.rollout import TurnState
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace

GUESS = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 16}}, "required": ["number"]},
    },
}


class Endpoint:
    """Answers with what `script` holds, in order, then with `completion()`; keeps the requests.

    An entry is a body (200), a status, a tuple of status, body and headers, the word "reset", or seconds to sleep first.
    """

    def __init__(self):
        self.script = []
        self.requests = []
        self.headers = []
        self.connections = set()
        self.in_flight = self.most_in_flight = 0
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self.server = TestServer(app)

    @property
    def url(self):
        return str(self.server.make_url("/v1"))

    async def _answer(self, request):
        self.requests.append(json.loads(await request.read()))
        self.headers.append(request.headers)
        self.connections.add(request.transport.get_extra_info("peername"))
        entry = self.script.pop(0) if self.script else completion()
        if isinstance(entry, float):
            self.in_flight += 1
            self.most_in_flight = max(self.in_flight, self.most_in_flight)
            await asyncio.sleep(entry)
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
    await endpoint.server.start_server()
    yield endpoint
    await endpoint.server.close()


@pytest.fixture
def make_state():
    def make(messages=None, *, tools=(GUESS,), turn=0, member=0, timeout=5.0, seed=1):
        messages = messages or [{"role": "system", "content": "Find the number."}, {"role": "user", "content": "Begin."}]
        return TurnState(
            env_id="art_gym/GuessNumber-v0",
            scenario=Scenario("train-0", seed=seed),
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
