"""Whatever comes in: no crash, no 5xx, no leak, bounded memory."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from mock_vllm import MockVLLM, error, serving

from art_gym.gateway import GatewaySettings, create_app
from art_gym.gateway._protocol import guarded_protocol
from art_gym.gateway.settings import Limits

schemathesis = pytest.importorskip("schemathesis")

LIMITS = Limits(body_bytes=200_000, header_bytes=16_000, calls_per_episode=20, episode_bytes=10**6)


class Strict:
    """The stand-in for vLLM, which answers as vLLM does to what it can't make sense of."""

    def __init__(self, mock: MockVLLM) -> None:
        self.app, self.state = mock.app(), SimpleNamespace()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            # The inner application's own handler would answer with 500.
            await self.app.router(scope, receive, watched)
        except (TypeError, KeyError, ValueError, AttributeError, IndexError, RecursionError) as problem:
            if not started:
                await error(400, str(problem), "BadRequestError")(scope, receive, send)


@pytest.fixture
def fuzzed(mock: MockVLLM, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A gateway as `art-gym serve` runs it, with small limits, and its application."""
    with serving(Strict(mock)) as upstream:
        app = create_app(GatewaySettings.of(upstream=upstream + "/v1", model="mock", folder=tmp_path, limits=LIMITS))
        with serving(app, http=guarded_protocol(LIMITS, head_seconds=2.0), ws="none") as url:
            yield url, app


def episode_of(url: str) -> str:
    return str(httpx.post(url + "/episodes", json={}).json()["id"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_request_that_the_document_allows_or_forbids_is_answered_with_5xx(fuzzed: tuple[str, Any]) -> None:
    from hypothesis import HealthCheck, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

    url, _ = fuzzed
    document = schemathesis.openapi.from_url(url + "/openapi.json")
    ours = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    tried = 0
    for result in document.get_all_operations():
        operation = result.ok()
        # Training has no jobs behind it here, and says so with 503; proxied answers are the model server's.
        is_proxied = "/v1" in operation.path
        if operation.path.startswith(("/train", "/checkpoints")):
            continue

        def check(case: Any, is_proxied: bool = is_proxied, episode: str = episode_of(url)) -> None:
            nonlocal tried
            tried += 1
            if "episode_id" in case.path_parameters and tried % 2:
                case.path_parameters["episode_id"] = episode
            if isinstance(case.body, dict) and isinstance(case.body.get("n"), int):
                # The stand-in has no limit of its own.
                case.body["n"] = min(case.body["n"], 4)
            case.call_and_validate(checks=[not_a_server_error] if is_proxied else ours, timeout=30)

        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            run = operation.as_strategy(generation_mode=mode)
            settled = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            _given(run, settled, check)
    assert tried > 500
    assert httpx.get(url + "/health").status_code == 200


def _given(strategy: Any, settled: Any, check: Callable[[Any], None]) -> None:
    from hypothesis import given
    from hypothesis.errors import Unsatisfiable

    @settled
    @given(case=strategy)
    def run(case: Any) -> None:
        check(case)

    try:
        run()
    except Unsatisfiable:
        # Such as a route without parameters, of which nothing can be wrong.
        return


BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"0",
    b'"text"',
    b"{",
    b"\xff\xfe\x00",
    b'{"messages": null}',
    b'{"messages": [1, null, {"role": 5}]}',
    b'{"messages": "' + b"x" * 50_000 + b'"}',
    b'{"model": 5}',
    b'{"model": "mock@99999999999999999999999999"}',
    b'{"model": "mock", "messages": [], "n": -1, "stream": "yes"}',
    b'{"model": "mock", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "mock", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"model": "mock", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1e999}',
    b'{"model": "mock", "input": {"a": [' + b"[" * 3000 + b"]" * 3000 + b"]}}",
    b'{"reward": 1, "reward": 2}',
    b'{"reward": ' + b"9" * 400 + b"}",
    b"[" * 100_000,
    b'{"a":' * 30_000,
]


def test_malformed_bodies_are_answered(fuzzed: tuple[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    url, _ = fuzzed
    id = episode_of(url)
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    paths = [*paths, *(f"/episodes/{id}{path}" for path in paths), "/episodes", f"/episodes/{id}/finish", f"/episodes/{id}/rewards", "/train"]
    with httpx.Client(base_url=url, timeout=30) as client:
        for path in paths:
            for body in BODIES:
                for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
                    answer = client.post(path, content=body, headers={"Content-Type": kind})
                    assert answer.status_code < 500 or path == "/train", (path, body[:60], answer.text)
    assert not [record for record in caplog.records if "failed" in record.message]


def _mutated(draw: random.Random, id: str) -> bytes:
    """A request with something wrong in it, or several things."""
    path = draw.choice(
        [
            "/health",
            "/v1/chat/completions",
            f"/episodes/{id}",
            "/episodes",
            f"/episodes/{id}/v1/responses",
            "/%ff%00",
            "*",
            "//",
            "/" + "a" * 3000,
        ]
    )
    head = f"{draw.choice(['GET', 'POST', 'DELETE', 'HEAD', 'OPTIONS', 'TRACE', 'NONSENSE'])} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    lines = [
        b"Content-Type: application/json",
        b"Content-Length: -5",
        b"Content-Length: 99999999999999999999999",
        b"Content-Length: 10",
        b"Content-Length: 10\r\nContent-Length: 11",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, chunked, identity",
        b"Authorization: \xff\xfe",
        b"Authorization: Bearer agk-ep-" + b"\xe9" * 20,
        b"Expect: 100-continue",
        b"Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
        b"Origin: http://[::1",
        b"Origin: null",
        b"Host: [::1",
        b"X-Request-Id: " + b"\x01" * 5,
        b"Idempotency-Key: " + b"\xff" * 300,
        b": no name",
        b"No colon",
        b"Folded: a\r\n b",
        b"Cookie: " + b"c" * 5000,
    ]
    head += b"".join(line + b"\r\n" for line in draw.sample(lines, draw.randint(0, 4))) + b"\r\n"
    head += draw.choice(
        [b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffffff\r\n", draw.randbytes(200), draw.choice(BODIES)]
    )
    data = bytearray(head)
    for _ in range(draw.choice([0, 0, 1, 5])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data))])])


@pytest.mark.slow
def test_malformed_requests_neither_crash_nor_leak(fuzzed: tuple[str, Any], mock: MockVLLM, caplog: pytest.LogCaptureFixture) -> None:
    url, app = fuzzed
    id, parts = episode_of(url), urlsplit(url)

    def attack(seed: int) -> bytes:
        draw = random.Random(seed)
        answer = b""
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            try:
                connection.sendall(_mutated(draw, id))
                if draw.random() < 0.3:
                    return b""  # leaves without waiting
                connection.settimeout(0.3)
                answer = connection.recv(65536)
            except OSError:
                pass
        return answer

    def rest() -> tuple[int, int, int]:
        """Tasks, connections of this process, and its memory, once all is quiet."""
        time.sleep(2.5)
        gc.collect()
        tasks = asyncio.run_coroutine_threadsafe(_tasks(), app.state.loop).result(10)
        process = psutil.Process()
        return tasks, len(process.net_connections("tcp")), process.memory_info().rss

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(attack, range(1000, 1300)))
        before = rest()
        answers = list(pool.map(attack, range(1200)))
        after = rest()

    assert not [answer for answer in answers if answer.startswith((b"HTTP/1.1 5", b"HTTP/1.0 5"))]
    assert not [record for record in caplog.records if record.exc_info]
    assert after[0] <= before[0] + 2
    assert after[1] <= before[1] + 4
    assert after[2] - before[2] < 30 * 2**20
    assert httpx.get(url + "/ready").json()["ready"]
    assert mock.running == 0


async def _tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.slow
def test_huge_inputs_from_many_clients_stay_within_bounds(fuzzed: tuple[str, Any]) -> None:
    url, _ = fuzzed
    parts = urlsplit(url)
    httpx.get(url + "/health")
    before = psutil.Process().memory_info().rss

    def pour(number: int) -> int:
        """Send up to 64 MiB, as a chunked body, a header, or a body that said how long it is; returns how many bytes were taken."""
        heads = [
            b"POST /episodes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Huge: ",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 67108864\r\n\r\n",
        ]
        part = b"10000\r\n" + b"a" * 0x10000 + b"\r\n" if number % 3 == 0 else b"a" * 0x10000
        sent = 0
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
            try:
                connection.sendall(heads[number % 3])
                for _ in range(1024):
                    connection.sendall(part)
                    sent += len(part)
            except OSError:
                pass
        return sent

    with ThreadPoolExecutor(24) as pool:
        sent = list(pool.map(pour, range(72)))
    gc.collect()

    # What lies in sockets' buffers was sent too, though never read.
    assert max(sent) < 32 * 2**20
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert httpx.get(url + "/health").status_code == 200


def test_many_slow_clients_do_not_keep_others_waiting(fuzzed: tuple[str, Any]) -> None:
    url, _ = fuzzed
    parts = urlsplit(url)
    slow = [socket.create_connection((parts.hostname, parts.port), timeout=5) for _ in range(200)]
    try:
        for number, connection in enumerate(slow):
            connection.sendall(b"GET /hea" if number % 2 else b"POST /episodes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        began = time.monotonic()
        for _ in range(20):
            assert httpx.get(url + "/health").status_code == 200
        assert time.monotonic() - began < 5
        time.sleep(2.5)
        late = slow[1].recv(1000)
        assert late.startswith(b"HTTP/1.1 408")
    finally:
        for connection in slow:
            connection.close()


def test_ids_and_keys_that_clients_make_up_are_answered(fuzzed: tuple[str, Any]) -> None:
    url, _ = fuzzed
    draw = random.Random(7)
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(200):
            key = bytes(draw.choice([*range(32, 127), *range(160, 256)]) for _ in range(draw.randint(1, 300))).strip() or b"x"
            answer = client.post("/episodes", json={}, headers={b"Idempotency-Key": key})
            assert answer.status_code in (201, 422), (key, answer.text)
            answer = client.get(f"/episodes/{json.dumps(key.decode('latin-1'))[:100]}")
            assert answer.status_code in (404, 422), answer.text
