"""A scripted chat endpoint in a process of its own: it answers as vLLM does, plays the ledgers without a mistake, and costs next to nothing.

An answer depends on its request alone: on the ledger that the question names and on the number of assistant messages. Bodies are templates that
were rendered at the start. Each carries the ids of the whole prompt, which grows by turn, and the ids and logprobs of the reply.

    python -m rollout.mock_server [--port 8000] [--core 1] [--latency 0.5] [--fault 429=0.01 --fault reset=0.005]

It prints its port, and ends when its standard input does, so that it doesn't outlive who started it. GET /stats tells what it has cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import time
import urllib.request
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rollout.ledger import total

COMPLETION_TOKENS, RESULT_TOKENS, FIRST_PROMPT_TOKENS = 24, 16, 180
MAX_ENTRIES = 8
FAULTS = ("429", "500", "reset")

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_QUESTION = re.compile(rb"What do the (\d+) entries of ledger (\d+) ")
_LEDGER, _TOTAL = 987_654_321, 123_456_789  # stand for the numbers in a template


class MockServer:
    """The endpoint's process, as who started it sees it.

    Args:
        latency: Seconds from request to answer.
        core: The core that it is pinned to; None leaves that to the kernel.
        faults: How often each of `FAULTS` happens, as a share of the turns. A turn meets each at most once, so that another attempt succeeds.
        port: 0 takes a free one, and keeps it through restarts.
    """

    def __init__(self, *, latency: float = 0.0, core: int | None = None, faults: Mapping[str, float] | None = None, port: int = 0) -> None:
        self.latency, self.core, self.faults, self.port = latency, core, dict(faults or {}), port
        self._process: subprocess.Popen[str] | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def start(self) -> Self:
        options = [f"--port={self.port}", f"--latency={self.latency}", *(f"--fault={name}={rate}" for name, rate in self.faults.items())]
        if self.core is not None:
            options.append(f"--core={self.core}")
        command = [sys.executable, "-m", "rollout.mock_server", *options]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the endpoint did not start: {' '.join(command)}")
        self.port = int(line)
        return self

    def kill(self) -> None:
        """Kill it, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def stats(self) -> dict[str, Any]:
        """What it has done and cost so far: requests, seconds of CPU, and each fault's count."""
        with urllib.request.urlopen(f"{self.root}/stats", timeout=30) as response:
            return json.load(response)  # type: ignore[no-any-return]  # an object

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class Script:
    """What is answered, and what goes wrong on purpose."""

    def __init__(self, faults: Mapping[str, float]) -> None:
        self._faults = faults
        self._met: set[tuple[str, int, int]] = set()
        self.counts: Counter[str] = Counter()
        self._calls = {(turn, name): _template(turn, name) for turn in range(MAX_ENTRIES + 1) for name in ("look", "report")}

    def answer(self, body: bytes) -> bytes | None:
        """Return the response to a chat request; None resets the connection."""
        self.counts["requests"] += 1
        found = _QUESTION.search(body)
        if found is None:
            return _response(400, b'{"error":{"message":"no ledger is asked about","type":"BadRequestError","param":null,"code":400}}')
        entries, ledger, turn = int(found[1]), int(found[2]), body.count(b'"assistant"')
        for name, rate in self._faults.items():
            if zlib.crc32(b"%b %d %d" % (name.encode(), ledger, turn)) < rate * 2**32 and (name, ledger, turn) not in self._met:
                self._met.add((name, ledger, turn))
                self.counts[name] += 1
                return self._fault(name)
        if turn > entries:
            return _response(400, b'{"error":{"message":"the episode is over","type":"BadRequestError","param":null,"code":400}}')
        template = self._calls[turn, "look" if turn < entries else "report"]
        return _response(200, template % {b"ledger": ledger, b"total": total(ledger, entries)})

    def _fault(self, name: str) -> bytes | None:
        if name == "reset":
            return None
        error = b'{"error":{"message":"on purpose","type":"Error","param":null,"code":%b}}' % name.encode()
        return _response(int(name), error, b"Retry-After: %b\r\n" % (b"0", b"0.05")[self.counts[name] % 2] if name == "429" else b"")


class Connection(asyncio.Protocol):
    """One client's connection: requests in, answers out after the latency."""

    in_flight = 0

    def __init__(self, script: Script, latency: float) -> None:
        self._script = script
        self._latency = latency
        self._loop = asyncio.get_running_loop()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if len(self._buffer) < end:
                return
            request, self._buffer = self._buffer[:end], self._buffer[end:]
            self._take(request, head + 4)

    def _take(self, request: bytes, head: int) -> None:
        if request.startswith(b"POST"):
            response = self._script.answer(request[head:])
            if self._latency:
                Connection.in_flight += 1
                self._loop.call_later(self._latency, self._send_late, response)
            else:
                self._send(response)
        elif request.startswith(b"GET /stats"):
            self._send(_response(200, json.dumps({"cpu": time.process_time(), **self._script.counts}).encode()))
        elif request.startswith(b"GET /metrics"):
            self._send(_response(200, _METRICS % Connection.in_flight, kind=b"text/plain; version=0.0.4"))
        else:
            self._send(_response(200 if request.startswith(b"GET /health") else 404, b"{}"))

    def _send_late(self, response: bytes | None) -> None:
        Connection.in_flight -= 1
        self._send(response)

    def _send(self, response: bytes | None) -> None:
        if response is not None:
            self._transport.write(response)
            return
        if self._script.counts["reset"] % 2:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{")
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset rather than an orderly end
        self._transport.abort()


_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 429: b"Too Many Requests", 500: b"Internal Server Error"}
_METRICS = b"""\
vllm:num_requests_running{engine="0",model_name="mock"} %d.0
vllm:num_requests_waiting{engine="0",model_name="mock"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="mock"} 0.0
vllm:num_preemptions_total{engine="0",model_name="mock"} 0.0
"""


def _response(status: int, body: bytes, headers: bytes = b"", kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d %b\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\nserver: uvicorn\r\n%bcontent-length: %d\r\ncontent-type: %b\r\n\r\n%b" % (
        status,
        _REASONS[status],
        headers,
        len(body),
        kind,
        body,
    )


def _template(turn: int, name: str) -> bytes:
    """Render the completion of a turn that calls the tool, with marks where the ledger and its total go."""
    rng = random.Random(f"{turn} {name}")
    arguments = {"ledger": _LEDGER, "index": turn} if name == "look" else {"ledger": _LEDGER, "total": _TOTAL}
    entries = []
    for _ in range(COMPLETION_TOKENS):
        token = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_{}:", k=rng.randint(1, 7)))
        entries.append({"token": token, "logprob": -rng.expovariate(3.0), "bytes": [*token.encode()], "top_logprobs": []})
    prompt = _first_prompt()
    for earlier in range(turn):
        prompt += [*_completion(earlier, "look"), *_result(earlier)]
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": f"chatcmpl-tool-{_LEDGER}-{turn}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        ],
        "reasoning": None,
    }
    completion = {
        "id": f"chatcmpl-{_LEDGER}-{turn}",
        "object": "chat.completion",
        "created": 1_704_067_200,
        "model": "mock",
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": {"content": entries},
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "token_ids": _completion(turn, name),
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + COMPLETION_TOKENS,
            "completion_tokens": COMPLETION_TOKENS,
            "prompt_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
        "kv_transfer_params": None,
    }
    text = json.dumps(completion, separators=(",", ":")).replace("%", "%%")
    return text.replace(str(_LEDGER), "%(ledger)d").replace(str(_TOTAL), "%(total)d").encode()


def _first_prompt() -> list[int]:
    return [*_ids("prompt", FIRST_PROMPT_TOKENS - 1), _LEDGER]


def _completion(turn: int, name: str) -> list[int]:
    return [_LEDGER, *_ids(f"{name} {turn}", COMPLETION_TOKENS - 1)]


def _result(turn: int) -> list[int]:
    return _ids(f"result {turn}", RESULT_TOKENS)


def _ids(what: str, count: int) -> list[int]:
    rng = random.Random(what)
    return [rng.randrange(100, 49_000) for _ in range(count)]


def raise_file_limit() -> None:
    """Take as many open files as the kernel allows: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(port: int, latency: float, faults: Mapping[str, float]) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), lambda: ended.done() or ended.set_result(None))
    script = Script(faults)
    server = await loop.create_server(lambda: Connection(script, latency), "127.0.0.1", port, backlog=4096, reuse_address=True)
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--core", type=int)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[], help=f"NAME=SHARE, of {', '.join(FAULTS)}")
    options = parser.parse_args()
    faults = {name: float(share) for name, _, share in (fault.partition("=") for fault in options.fault)}
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"unknown fault {', '.join(unknown)}")
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    raise_file_limit()
    asyncio.run(serve(options.port, options.latency, faults))


if __name__ == "__main__":
    main()
