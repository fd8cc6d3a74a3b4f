"""The guard: keys, limits of every kind, request ids, and logs without secrets."""

from __future__ import annotations

import concurrent.futures
import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mock_vllm import MockVLLM

from art_gym.gateway import GatewaySettings
from art_gym.gateway._limits import RateLimit
from art_gym.gateway._logs import JsonFormatter, configure_logs
from art_gym.gateway._security import _hashed, guard

KEY, OTHER_KEY = "the-first-key-of-the-gateway", "the-second-key-of-the-gateway"
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def locked(make_gateway: Callable[..., Any]) -> Iterator[httpx.Client]:
    """A client of a gateway with two keys, that sends none by itself."""
    url, _ = make_gateway(api_keys=(KEY, OTHER_KEY))
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


def begun(client: httpx.Client, **body: Any) -> dict[str, Any]:
    made: dict[str, Any] = client.post("/episodes", json=body, headers=bearer(KEY)).json()
    return made


# Keys.


@pytest.mark.parametrize("path", ["/episodes", "/v1/models", "/metrics", "/docs", "/openapi.json", "/nothing", "/train"])
def test_without_a_key_nothing_opens(locked: httpx.Client, path: str) -> None:
    for headers in (
        {},
        bearer("wrong" * 5),
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"},
        bearer(KEY + "x"),
        bearer("é" * 20),
    ):
        answer = locked.get(path, headers={name: value.encode("utf-8") for name, value in headers.items()})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "AuthenticationError"


@pytest.mark.parametrize("headers", [bearer(KEY), bearer(OTHER_KEY), {"X-API-Key": KEY}, {"authorization": f"bearer  {KEY}"}])
def test_each_key_opens_everything(locked: httpx.Client, headers: dict[str, str]) -> None:
    for path in ("/episodes", "/v1/models", "/metrics", "/openapi.json"):
        assert locked.get(path, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_need_no_key(locked: httpx.Client, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, locked: httpx.Client) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("art_gym.gateway._security.hmac.compare_digest", compare)
    locked.get("/episodes", headers=bearer(KEY))

    assert compared == [(_hashed(KEY), _hashed(KEY)), (_hashed(OTHER_KEY), _hashed(KEY))]
    assert {len(one) for pair in compared for one in pair} == {32}


def test_an_episodes_key_opens_its_calls_and_its_record_only(locked: httpx.Client) -> None:
    mine, other = begun(locked), begun(locked)
    key = bearer(mine["api_key"])

    assert locked.post(f"/episodes/{mine['id']}/v1/chat/completions", json=CHAT, headers=key).status_code == 200
    assert locked.get(f"/episodes/{mine['id']}/v1/models", headers=key).status_code == 200
    assert locked.get(f"/episodes/{mine['id']}", headers=key).json()["calls"] == 1
    statuses = {
        "its end": locked.post(f"/episodes/{mine['id']}/finish", json={"reward": 100}, headers=key).status_code,
        "its reward": locked.post(f"/episodes/{mine['id']}/rewards", json={"reward": 100}, headers=key).status_code,
        "its deletion": locked.delete(f"/episodes/{mine['id']}", headers=key).status_code,
        "the list": locked.get("/episodes", headers=key).status_code,
        "the endpoint": locked.post("/v1/chat/completions", json=CHAT, headers=key).status_code,
        "training": locked.post("/train", json={}, headers=key).status_code,
        "metrics": locked.get("/metrics", headers=key).status_code,
        "another's record": locked.get(f"/episodes/{other['id']}", headers=key).status_code,
        "another's calls": locked.post(f"/episodes/{other['id']}/v1/chat/completions", json=CHAT, headers=key).status_code,
        "nobody's record": locked.get("/episodes/ep-nobody", headers=key).status_code,
        "a way round": locked.get(f"/episodes/{mine['id']}%2F..%2F{other['id']}", headers=key).status_code,
    }
    assert statuses == {
        **dict.fromkeys(("its end", "its reward", "its deletion", "the list", "the endpoint", "training", "metrics"), 403),
        **dict.fromkeys(("another's record", "another's calls", "nobody's record"), 401),
        "a way round": 403,
    }
    assert locked.get(f"/episodes/{mine['id']}", headers=bearer(KEY)).json()["reward"] is None


def test_an_episodes_key_is_confined_where_the_gateway_has_no_keys(gateway: str) -> None:
    with httpx.Client(base_url=gateway) as client:
        mine, other = (client.post("/episodes", json={}).json() for _ in range(2))
        key = bearer(mine["api_key"])
        assert client.post(f"/episodes/{mine['id']}/v1/chat/completions", json=CHAT, headers=key).status_code == 200
        assert client.post(f"/episodes/{other['id']}/v1/chat/completions", json=CHAT, headers=key).status_code == 401
        assert client.post("/v1/chat/completions", json=CHAT, headers=bearer("sk-whatever-clients-send")).status_code == 200


def test_an_episode_without_a_key_is_opened_by_none(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(api_keys=(KEY,), capture_all=True)
    with httpx.Client(base_url=url) as client:
        id = client.post("/v1/chat/completions", json=CHAT, headers=bearer(KEY)).headers["x-art-gym-episode"]
        for key in ("agk-ep-", "agk-ep-x"):
            assert client.get(f"/episodes/{id}", headers=bearer(key)).status_code == 401


def test_no_key_reaches_the_model_server(locked: httpx.Client, mock: MockVLLM) -> None:
    made = begun(locked)
    locked.post(f"/episodes/{made['id']}/v1/chat/completions", json=CHAT, headers=bearer(made["api_key"]))
    locked.post("/v1/chat/completions", json=CHAT, headers={**bearer(KEY), "X-API-Key": KEY})

    assert len(mock.seen) >= 2
    for seen in mock.seen:
        assert KEY not in str(seen.headers)
        assert made["api_key"] not in str(seen.headers)


def test_only_hashes_of_keys_are_stored(locked: httpx.Client, tmp_path: Path) -> None:
    keys = [begun(locked)["api_key"], locked.post("/episodes", json={}, headers={**bearer(KEY), "Idempotency-Key": "k"}).json()["api_key"]]

    written = b"".join(path.read_bytes() for path in tmp_path.glob("gateway*/*"))
    for key in (*keys, KEY, OTHER_KEY):
        assert key.encode() not in written
        assert key.removeprefix("agk-ep-").encode() not in written


# Browsers.


def test_no_other_origin_is_let_in(gateway: str) -> None:
    with httpx.Client(base_url=gateway) as client:
        asked = client.options("/episodes", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"})
        told = client.post("/v1/chat/completions", json=CHAT, headers={"Origin": "https://evil.example", "Content-Type": "text/plain"})
        same = client.get("/episodes", headers={"Origin": gateway})

    assert (asked.status_code, told.status_code, same.status_code) == (403, 403, 200)
    for answer in (asked, told, same):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("gateway:8000", 200),
    ],
)
def test_a_name_that_leads_here_by_another_ones_dns_is_refused_without_keys(gateway: str, host: str, status: int) -> None:
    assert httpx.get(gateway + "/episodes", headers={"Host": host}).status_code == status


def test_with_keys_any_name_will_do(locked: httpx.Client) -> None:
    assert locked.get("/episodes", headers={**bearer(KEY), "Host": "train.example.com"}).status_code == 200


# Limits.


def test_a_body_that_says_it_is_too_long_is_refused_at_once(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(limits={"body_bytes": 1000})
    for path in ("/episodes", "/v1/chat/completions"):
        answer = httpx.post(url + path, content=b" " * 1001)
        assert answer.status_code == 413
        assert "1000 bytes" in answer.json()["error"]["message"]
    assert httpx.post(url + "/episodes", content=b"{}" + b" " * 998, headers={"Content-Type": "application/json"}).status_code == 201


def test_a_head_that_is_too_long_is_refused(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(limits={"header_bytes": 2000})
    assert httpx.get(url + "/health", headers={"X-Long": "x" * 1500}).status_code == 200
    for answer in (httpx.get(url + "/health", headers={"X-Long": "x" * 2000}), httpx.get(url + "/health?" + "x" * 2000)):
        assert answer.status_code == 431
        assert "may have 2000" in answer.json()["error"]["message"]


def test_too_many_requests_of_a_key_are_refused_and_told_when_to_come_back(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(api_keys=(KEY, OTHER_KEY), limits={"requests_per_minute": 3})
    with httpx.Client(base_url=url) as client:
        statuses = [client.get("/episodes", headers=bearer(KEY)).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refused = client.get("/episodes", headers=bearer(KEY))
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert client.get("/episodes", headers=bearer(OTHER_KEY)).status_code == 200
        assert [client.get("/episodes", headers=bearer("a wrong one")).status_code for _ in range(4)] == [401, 401, 401, 429]
        assert client.get("/health").status_code == 200


def test_a_bucket_fills_evenly_and_strangers_cannot_fill_the_memory() -> None:
    now = 0.0
    limit = RateLimit(60, clock=lambda: now)
    assert [limit.take("a") for _ in range(61)] == [0.0] * 60 + [1.0]
    now = 2.5
    assert [limit.take("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    for number in range(50_000):
        limit.take(str(number))
    assert len(limit._buckets) <= 20_000
    assert limit.take("49999") == 0.0


def test_too_many_calls_at_once_are_refused(make_gateway: Callable[..., Any], mock: MockVLLM) -> None:
    mock.token_seconds = 0.1
    url, _ = make_gateway(limits={"concurrent_calls": 2})
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        statuses = sorted(pool.map(lambda _: httpx.post(url + "/v1/chat/completions", json=CHAT, timeout=30).status_code, range(6)))
    assert statuses == [200, 200, 429, 429, 429, 429]
    assert httpx.post(url + "/v1/chat/completions", json=CHAT, timeout=30).status_code == 200


# Request ids and logs.


def test_a_request_id_is_taken_up_or_made(gateway: str) -> None:
    given = httpx.get(gateway + "/health", headers={"X-Request-Id": "abc-1.2:3_4"})
    assert given.headers.get_list("x-request-id") == ["abc-1.2:3_4"]
    for wrong in ("", "a b", "x" * 129, 'a"b', "é"):
        made = httpx.get(gateway + "/nothing", headers={"X-Request-Id": wrong.encode()}).headers["x-request-id"]
        assert re.fullmatch("req-[0-9a-f]{32}", made)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the gateway writes to its log."""
    stream, loggers = io.StringIO(), [logging.getLogger(name) for name in ("art_gym", "uvicorn", "uvicorn.error", "uvicorn.access")]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    configure_logs((KEY, OTHER_KEY), stream=stream)
    yield stream
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.level, one.propagate = handlers, level, propagate


def lines(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_a_line_is_logged_for_each_request(locked: httpx.Client, log: io.StringIO) -> None:
    made = begun(locked)
    locked.post(f"/episodes/{made['id']}/v1/chat/completions", json=CHAT, headers={**bearer(made["api_key"]), "X-Request-Id": "mine"})
    time.sleep(0.05)

    line = next(one for one in lines(log) if one.get("request_id") == "mine")
    body = httpx.Request("POST", "http://a", json=CHAT).content
    expected = {"level": "info", "method": "POST", "route": "/episodes/{episode_id}/v1/chat/completions", "status": 200, "episode": made["id"]}
    assert expected.items() <= line.items()
    assert (line["by"], line["bytes_in"], line["message"]) == (f"episode {made['id']}", len(body), "request")
    assert line["bytes_out"] > 100
    assert 0 < line["seconds"] < 30


def test_no_secret_is_logged_whatever_happens(make_gateway: Callable[..., Any], log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    url, app = make_gateway(api_keys=(KEY, OTHER_KEY), upstream_key="the-key-of-the-model-server")
    with httpx.Client(base_url=url) as client:
        made = begun(client)
        inner = made["api_key"]
        client.post(f"/episodes/{made['id']}/v1/chat/completions", json=CHAT, headers=bearer(inner))
        client.get(f"/episodes?group={KEY}&api_key={KEY}", headers=bearer(KEY))
        client.get(f"/{KEY}/{inner}", headers={"X-API-Key": KEY, "X-Request-Id": OTHER_KEY})
        client.post("/episodes", content=b"{" + KEY.encode(), headers=bearer(KEY))
        client.get("/episodes", headers=bearer("almost-" + KEY))

        async def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"it fails with {KEY}, {inner} and Bearer some-other-token")

        monkeypatch.setattr(app.state.gateway.store, "list", fails)
        answer = client.get("/episodes", headers=bearer(KEY))
        assert answer.status_code == 500
        assert KEY not in answer.text
    time.sleep(0.05)

    text = log.getvalue()
    assert "it fails with [key], [key] and [key]" in text
    for secret in (KEY, OTHER_KEY, inner, inner.removeprefix("agk-ep-"), "some-other-token", "the-key-of-the-model-server"):
        assert secret not in text
    failed = [one for one in lines(log) if "traceback" in one]
    assert [one["level"] for one in failed] == ["error"]
    assert failed[0]["request_id"] in {one.get("request_id") for one in lines(log) if one.get("status") == 500}


def test_a_log_line_stays_one_line() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "two\nlines %s", ("\u2028\x00",), None)
    record.episode = 'ep-"\n'
    formatted = JsonFormatter().format(record)

    assert len(formatted.splitlines()) == 1
    assert json.loads(formatted)["message"] == "two\nlines \u2028\x00"


# Files.


def test_no_path_from_a_request_reaches_the_file_system(locked: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every open of a file while requests with paths in them are answered is of the store's own files."""
    seen: list[str] = []
    watching = threading.Event()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching.is_set() and event in ("open", "os.listdir", "os.scandir", "sqlite3.connect"):
            seen.append(str(arguments[0]))

    sys.addaudithook(hook)  # it can't be taken away, and does nothing once `watching` is cleared
    evil = ["../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/secret-of-the-machine", "file:///etc/passwd", "a%00b"]
    watching.set()
    for path in evil:
        for before, after in (("/episodes/", ""), ("/episodes/", "/v1/models"), ("/v1/responses/", ""), ("/", ""), ("/docs/", "")):
            locked.get(before + path + after, headers=bearer(KEY))
        locked.post("/episodes", json={"group": path, "scenario": {"path": path}}, headers={**bearer(KEY), "Idempotency-Key": path})
        locked.get("/episodes", params={"group": path}, headers=bearer(KEY))
    watching.clear()

    assert not [one for one in seen if "passwd" in one or "secret-of" in one]
    assert {path.name for path in tmp_path.glob("gateway*/*")} <= {
        *("gateway.sqlite3", "gateway.sqlite3-wal", "gateway.sqlite3-shm", "gateway.lock")
    }


async def test_websockets_are_closed(tmp_path: Path) -> None:
    app = FastAPI()
    guard(app, GatewaySettings.of(upstream="http://127.0.0.1:1/v1", model="mock", folder=tmp_path))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await app({"type": "websocket", "path": "/v1", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
