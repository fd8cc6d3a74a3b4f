"""What the gateway costs: CPU time a call, latency added, time added to a stream's first token, and many streams at once.

    python tests/benchmarks/gateway_overhead.py [--calls 4000] [--concurrency 64] [--streams 1000]

The model server is a canned one in this process, which also plays the client; the gateway runs in a process of its own, on another core. Both
are asked the same, directly and through an episode's URL. Times are medians over the calls; CPU time is the gateway process's, user and system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from mock_vllm import MockVLLM, Said

TOKENS = 128
SECONDS = 0.2
"""How long the model server takes for an answer that isn't streamed; few enough calls a second that nobody queues."""
_ROUNDS = 5
GAP = 0.02
"""Seconds between the tokens of a stream."""


def _conversation() -> list[dict[str, Any]]:
    words = " ".join(f"word{index}" for index in range(100))
    roles = ("user", "assistant")
    return [{"role": "system", "content": words}, *({"role": roles[index % 2], "content": words} for index in range(7))]


class Canned:
    """Answers as the stand-in for vLLM would, from bytes made beforehand; with tokens and log-probabilities if it's asked for them."""

    def __init__(self) -> None:
        mock = MockVLLM(say=lambda body: Said(" ".join(f"w{index}" for index in range(TOKENS - 1))))
        self.body = {"model": "mock", "messages": _conversation()}
        asked = {"logprobs": True, "return_token_ids": True}
        self.whole = {captured: asyncio.run(_of(mock, {**self.body, **(asked if captured else {})}))[0] for captured in (False, True)}
        self.chunks = {
            captured: asyncio.run(_of(mock, {**self.body, "stream": True, **(asked if captured else {})})) for captured in (False, True)
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        captured, streamed = b'"return_token_ids":true' in body, b'"stream":true' in body
        kind = b"text/event-stream" if streamed else b"application/json"
        if streamed:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
            for chunk in self.chunks[captured]:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await asyncio.sleep(GAP)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        await asyncio.sleep(SECONDS)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": self.whole[captured], "more_body": False})


async def _of(mock: MockVLLM, body: dict[str, Any]) -> list[bytes]:
    """The pieces of the stand-in's answer."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    pieces: list[bytes] = []

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        if message.get("body"):
            pieces.append(message["body"])

    headers = [(b"content-type", b"application/json")]
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "headers": headers,
        "query_string": b"",
        "root_path": "",
    }
    await mock.app()(scope, receive, send)
    return pieces


def _gateway(upstream: str, folder: str, core: int | None, pipe: Any) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    from art_gym.gateway import GatewaySettings, Limits, create_app

    limits = Limits(calls_per_episode=10**6, episode_bytes=10**10, concurrent_calls=10**5)
    app = create_app(GatewaySettings.of(upstream=upstream, model="mock", folder=folder, limits=limits))

    async def main() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, loop="none", backlog=4096))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        store = app.state.gateway.store
        record = await store.create(group=None, scenario=None, metadata={}, key_hash="", idempotency=None)
        pipe.send((server.servers[0].sockets[0].getsockname()[1], record.id))
        loop = asyncio.get_running_loop()
        while (await loop.run_in_executor(None, pipe.recv)) == "cpu":
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((used.ru_utime + used.ru_stime, used.ru_maxrss / 1024))
        server.should_exit = True
        await task

    import uvloop

    uvloop.run(main())


async def _calls(url: str, body: dict[str, Any], count: int, concurrency: int) -> list[float]:
    """Ask so often; the seconds that each call took."""
    data, took, left = json.dumps(body, separators=(",", ":")).encode(), [], iter(range(count))
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(delay: float) -> None:
            # All at once they would stay in step, and wait for each other.
            await asyncio.sleep(delay)
            for _ in left:
                began = time.perf_counter()
                async with session.post(url, data=data, headers=headers) as answer:
                    await answer.read()
                    assert answer.status == 200
                took.append(time.perf_counter() - began)

        await asyncio.gather(*(ask(SECONDS * index / concurrency) for index in range(concurrency)))
    return took


async def _streams(url: str, body: dict[str, Any], count: int, spread: float) -> tuple[list[float], int]:
    """Open so many streams within `spread` seconds; the seconds until the first token of each, and how many came to their end."""
    data = json.dumps({**body, "stream": True}, separators=(",", ":")).encode()
    firsts, ended = [], 0
    headers = {"Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def follow(delay: float) -> None:
            nonlocal ended
            await asyncio.sleep(delay)
            began, last = time.perf_counter(), b""
            async with session.post(url, data=data, headers=headers) as answer:
                async for piece in answer.content.iter_any():
                    if not last:
                        firsts.append(time.perf_counter() - began)
                    last = piece
            ended += last.endswith(b"data: [DONE]\n\n")

        await asyncio.gather(*(follow(spread * index / count) for index in range(count)))
    return firsts, ended


def _ms(seconds: list[float], share: float = 0.5) -> float:
    return 1000 * sorted(seconds)[min(int(share * len(seconds)), len(seconds) - 1)]


async def _measure(arguments: argparse.Namespace, canned: Canned, core: int | None) -> dict[str, Any]:
    server = uvicorn.Server(uvicorn.Config(canned, port=0, log_level="warning", access_log=False, loop="none", lifespan="off", backlog=4096))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    upstream = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    here, there = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=_gateway, args=(upstream, folder, core, there), daemon=True)
        process.start()
        loop = asyncio.get_running_loop()
        port, episode = await loop.run_in_executor(None, here.recv)
        address = f"http://127.0.0.1:{port}"

        async def cpu() -> tuple[float, float]:
            here.send("cpu")
            used: tuple[float, float] = await loop.run_in_executor(None, here.recv)
            return used

        captured, plain = f"{address}/episodes/{episode}/v1/chat/completions", f"{address}/v1/chat/completions"
        direct = f"{upstream}/chat/completions"
        figures: dict[str, Any] = {}
        for url in (direct, plain, captured):
            await _calls(url, canned.body, 2 * arguments.concurrency, arguments.concurrency)
        took: dict[str, list[float]] = {"direct": [], "plain": [], "captured": []}
        used = dict.fromkeys(took, 0.0)
        # In turn, so that whatever else the machine does meets all of them.
        for _ in range(_ROUNDS):
            for name, url in (("direct", direct), ("plain", plain), ("captured", captured)):
                before = (await cpu())[0]
                took[name] += await _calls(url, canned.body, arguments.calls // _ROUNDS, arguments.concurrency)
                used[name] += (await cpu())[0] - before
        for name in ("plain", "captured"):
            figures[name] = {
                "cpu_ms_a_call": round(1000 * used[name] / len(took[name]), 3),
                "p50_added_ms": round(_ms(took[name]) - _ms(took["direct"]), 2),
                "p99_added_ms": round(_ms(took[name], 0.99) - _ms(took["direct"], 0.99), 2),
            }
        firsts = {}
        for name, url in (("direct", direct), ("captured", captured)):
            before = (await cpu())[0]
            first, ended = await _streams(url, canned.body, 4 * arguments.concurrency, 4 * TOKENS * GAP)
            assert ended == 4 * arguments.concurrency
            firsts[name] = first
            figures["stream"] = {"cpu_ms_a_stream": round(1000 * ((await cpu())[0] - before) / ended, 2)}
        figures["stream"] |= {"first_token_added_ms": round(_ms(firsts["captured"]) - _ms(firsts["direct"]), 2), "tokens": TOKENS}
        began = time.perf_counter()
        first, ended = await _streams(captured, canned.body, arguments.streams, 5.0)
        figures["many streams"] = {
            "opened": arguments.streams,
            "ended": ended,
            "seconds": round(time.perf_counter() - began, 1),
            "first_token_p50_ms": round(_ms(first), 1),
            "gateway_mib": round((await cpu())[1]),
        }
        here.send("end")
        await loop.run_in_executor(None, process.join, 20)
    server.should_exit = True
    await serving
    return figures


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]})
    canned = Canned()
    began, busy = time.perf_counter(), os.getloadavg()[0]
    import uvloop

    figures = uvloop.run(_measure(arguments, canned, cores[1] if len(cores) > 1 else None))
    print(json.dumps({**figures, "load_before": round(busy, 2), "seconds": round(time.perf_counter() - began, 1)}, indent=2))


if __name__ == "__main__":
    main()
