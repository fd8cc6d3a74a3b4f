"""Clients that are slow, or never end: what has to hold before there is a whole request, or while there is one."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from mock_vllm import MockVLLM, Said, serving

from art_gym.gateway import GatewaySettings, create_app
from art_gym.gateway._protocol import guarded_protocol
from art_gym.gateway._security import Guard, guard
from art_gym.gateway.settings import Limits

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}


@contextmanager
def guarded(
    upstream: str, folder: Path, *, body_seconds: float = 60.0, head_seconds: float = 30.0, unread_seconds: float = 60.0
) -> Iterator[str]:
    limits = Limits(header_bytes=8000)
    settings = GatewaySettings.of(upstream=upstream, model="mock", folder=folder, limits=limits)
    app = create_app(settings)
    app.user_middleware = [one for one in app.user_middleware if one.cls is not Guard]
    guard(app, settings, body_seconds=body_seconds)
    protocol = guarded_protocol(limits, head_seconds=head_seconds, unread_seconds=unread_seconds)
    with serving(app, http=protocol, timeout_keep_alive=5) as url:
        yield url


@contextmanager
def opened(url: str, **options: Any) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10, **options)
    try:
        yield connection
    finally:
        connection.close()


def head_of(path: str, header: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{header}\r\n\r\n".encode()


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def send_until_refused(connection: socket.socket, part: bytes, most: int) -> int:
    """Send a part again and again; how many times it went before there was an answer."""
    connection.settimeout(0.01)
    for count in range(most):
        try:
            connection.sendall(part)
            if connection.recv(1, socket.MSG_PEEK):
                connection.settimeout(10)
                return count
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            connection.settimeout(10)
            return count
    connection.settimeout(10)
    return most


@pytest.mark.parametrize("path", ["/episodes", "/v1/chat/completions"])
def test_a_body_that_comes_too_slowly_is_given_up(upstream: str, tmp_path: Path, path: str) -> None:
    with guarded(upstream, tmp_path, body_seconds=0.4) as url, opened(url) as connection:
        connection.sendall(head_of(path, "Content-Length: 100"))
        for _ in range(3):
            connection.sendall(b" ")
            time.sleep(0.05)
        began = time.monotonic()
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("sent", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_head_that_comes_too_slowly_is_given_up(upstream: str, tmp_path: Path, sent: bytes) -> None:
    with guarded(upstream, tmp_path, head_seconds=0.4) as url, opened(url) as connection:
        connection.sendall(sent)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 408")


def test_the_second_head_on_a_connection_may_not_be_slow_either(upstream: str, tmp_path: Path) -> None:
    with guarded(upstream, tmp_path, head_seconds=0.4) as url, opened(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.2)
        connection.sendall(b"GET /hea")
        answer = received(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"408"]


@pytest.mark.parametrize("part", [b"x" * 1000, b"X-More: " + b"x" * 100 + b"\r\n"])
def test_a_head_without_an_end_is_cut_off(upstream: str, tmp_path: Path, part: bytes) -> None:
    with guarded(upstream, tmp_path) as url, opened(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: y\r\nX-Longer: ")
        sent = send_until_refused(connection, part, 10_000) * len(part)
        answer = received(connection)
    assert b"431" in answer.split(b"\r\n")[0] or answer == b""
    assert sent < 10**6


def test_a_body_that_goes_on_after_its_request_was_refused_is_not_taken_in_for_ever(
    upstream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_gym.gateway._protocol._LINGER_SECONDS", 0.5)
    with guarded(upstream, tmp_path) as url, opened(url) as connection:
        connection.sendall(head_of("/episodes", f"Content-Length: {2**40}"))
        connection.settimeout(0.05)
        began, answer, ended = time.monotonic(), b"", False
        while not ended and time.monotonic() - began < 5:
            try:
                connection.sendall(b"x")
                part = connection.recv(65536)
                answer, ended = answer + part, not part
            except TimeoutError:
                continue
            except OSError:
                ended = True
    assert answer.startswith(b"HTTP/1.1 413")
    assert ended


def test_a_client_that_does_not_read_is_given_up(upstream: str, tmp_path: Path, mock: MockVLLM) -> None:
    # Far more than the sockets between them hold.
    mock.say = lambda _: Said(text=" ".join(["x" * 6000] * 1300))
    with guarded(upstream, tmp_path, unread_seconds=0.5) as url:
        made = httpx.post(url + "/episodes", json={}).json()
        body = json.dumps({**CHAT, "stream": True}).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((urlsplit(url).hostname, urlsplit(url).port))
        with connection:
            path = f"/episodes/{made['id']}/v1/chat/completions"
            connection.sendall(head_of(path, f"Content-Length: {len(body)}") + body)
            deadline = time.monotonic() + 20
            while httpx.get(url + f"/episodes/{made['id']}").json()["calls"] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        (call,) = httpx.get(url + f"/episodes/{made['id']}?include=calls").json()["captured"]
    assert call["abandoned"]


def test_pipelined_requests_are_answered_in_order(upstream: str, tmp_path: Path) -> None:
    with guarded(upstream, tmp_path) as url, opened(url) as connection:
        get = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
        connection.sendall(get % (b"/health", b"") + get % (b"/nothing", b"") + get % (b"/health", b"Connection: close\r\n"))
        answer = received(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404", b"200"]


def test_a_body_that_does_not_say_is_cut_off_while_it_comes_in(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(limits={"body_bytes": 100_000})
    for path in ("/episodes", "/v1/chat/completions"):
        with opened(url) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            )
            sent = send_until_refused(connection, b"10000\r\n" + b" " * 0x10000 + b"\r\n", 200)
            answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 413")
        assert sent < 50  # of 200 parts of 64 KiB
