"""The transport: what is sent, the pool of connections, deadlines and the end."""

import asyncio
import gc
import os
import subprocess
import sys

import pytest
from http_server import CHUNKED, OK, SAME, assert_same, get, opened, post, serving, sockets

import art_gym_agents._http as http
from art_gym_agents._connections import Dialer
from art_gym_agents._http import Session
from art_gym_agents._responses import BrokenConnection
from art_gym_agents._urls import locate

# What is sent


async def test_a_request_is_one_write_of_head_and_body():
    async with serving(OK) as server, opened(Authorization="Bearer secret") as session:
        await post(session, f"{server.url}/chat?api-version=3", b'{"a": 1}')
        ((head, body),) = server.requests
    assert body == b'{"a": 1}'
    assert head == (
        b"POST /v1/chat?api-version=3 HTTP/1.1\r\n"
        b"Host: 127.0.0.1:%d\r\nAuthorization: Bearer secret\r\nAccept-Encoding: identity\r\nContent-Length: 8\r\n\r\n" % server.port
    )


async def test_a_request_without_a_body_has_no_length_if_it_is_a_get():
    async with serving(OK) as server, opened() as session:
        await get(session, server.url)
        await post(session, server.url, b"")
    assert b"Content-Length" not in server.requests[0][0]
    assert b"Content-Length: 0\r\n" in server.requests[1][0]


async def test_a_body_larger_than_any_buffer_arrives_whole():
    body = os.urandom(5_000_000)
    async with serving(OK) as server, opened() as session:
        assert (await post(session, server.url, body)).body == b"hi"
    assert server.requests[0][1] == body


@pytest.mark.parametrize("name", ["a\r\nEvil", "a b", "", "ä"])
def test_a_header_that_would_split_the_request_is_refused(name):
    with pytest.raises(ValueError, match="header"):
        Session({name: "x"})
    with pytest.raises(ValueError, match="header") as caught:
        Session({"Authorization": "Bearer secret\r\nEvil: 1"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "host", "port", "header", "target"),
    [
        ("http://example.org", "example.org", 80, "example.org", "/"),
        ("http://EXAMPLE.org:80/", "example.org", 80, "example.org", "/"),
        ("https://example.org/v1/", "example.org", 443, "example.org", "/v1/"),
        ("https://example.org:8443/a/b?c=d&e=f", "example.org", 8443, "example.org:8443", "/a/b?c=d&e=f"),
        ("http://example.org?c=d", "example.org", 80, "example.org", "/?c=d"),
        ("http://[::1]:8000/v1", "::1", 8000, "[::1]:8000", "/v1"),
        ("http://[fe80::1%25eth0]/v1", "fe80::1%eth0", 80, "[fe80::1]", "/v1"),
        ("http://bücher.example/ä b%20c?ö=1", "xn--bcher-kva.example", 80, "xn--bcher-kva.example", "/%C3%A4%20b%20c?%C3%B6=1"),
        ("http://my_host.internal:8000/v1", "my_host.internal", 8000, "my_host.internal:8000", "/v1"),
    ],
)
def test_a_url_is_taken_apart(url, host, port, header, target):
    location = locate(url)
    assert (location.host, location.port, location.header, location.target) == (host, port, header, target)
    assert location.tls == url.startswith("https")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.org", "http://"),
        ("example.org:8000", "http://"),
        ("http://", "no host"),
        ("http://:8000", "no host"),
        ("http://example.org:99999", "port"),
        ("http://example.org:0", "port"),
        ("http://example.org:x", "port"),
        ("http://[::1", "URL"),
        ("http://a..b/", "host"),
        ("http://" + "a" * 64 + "/", "host"),
        ("http://a b/", "host"),
        ("http://a\x00b/", "host"),
        ("http://user:secret@example.org", "user name"),
        ("http://user@example.org", "user name"),
        ("http://example.org/v1#part", "#"),
    ],
)
def test_what_is_no_url_says_why(url, words):
    with pytest.raises(ValueError, match=words) as caught:
        locate(url)
    assert "secret" not in str(caught.value)


# The pool


async def test_connections_are_kept_and_the_latest_is_used_first():
    async with serving(OK) as server, opened() as session:
        await asyncio.gather(*(get(session, server.url) for _ in range(5)))
        assert server.connections == session.idle == 5
        for _ in range(20):
            await get(session, server.url)
    assert server.connections == 5


@pytest.mark.parametrize(
    "answer",
    [
        SAME["close"],
        SAME["HTTP/1.0"],
        SAME["length"] + b"garbage",
        SAME["length"] + SAME["length"],
        SAME["chunked"] + b"\x00",
    ],
    ids=["close", "HTTP/1.0", "garbage", "a second answer", "a zero byte"],
)
async def test_a_connection_that_may_not_be_reused_is_not(answer):
    async with serving(answer) as server, opened() as session:
        for _ in range(3):
            assert_same(await get(session, server.url))
            assert session.idle == 0
    assert server.connections == 3


async def test_what_comes_unasked_on_an_idle_connection_ends_it():
    async with serving(OK) as server, opened() as session:
        await get(session, server.url)
        (writer,) = server.writers
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        await asyncio.sleep(0.05)
        assert session.idle == 0
        assert (await get(session, server.url)).status == 200
    assert server.connections == 2


async def test_an_idle_connection_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(http, "_KEEP_ALIVE", 0.1)
    async with serving(OK) as server, opened() as session:
        await asyncio.gather(*(get(session, server.url) for _ in range(5)))
        await asyncio.sleep(0.3)
        assert session.idle == 0
        assert server.writers == set()
        await get(session, server.url)
    assert server.connections == 6


async def test_one_that_was_idle_too_long_is_not_used_though_its_time_was_not_noticed(monkeypatch):
    async with serving(OK) as server, opened() as session:
        await get(session, server.url)
        monkeypatch.setattr(http, "_KEEP_ALIVE", -1.0)  # the loop was busy when the time came
        await get(session, server.url)
    assert server.connections == 2


async def test_a_connection_closed_while_idle_is_not_used():
    async with serving(OK) as server, opened() as session:
        await get(session, server.url)
        await server.hang_up()
        assert session.idle == 0
        await get(session, server.url)
    assert len(server.requests) == 2


@pytest.mark.parametrize("ending", [None, "reset"])
async def test_a_request_that_dies_on_a_used_connection_unanswered_is_sent_again_on_a_new_one(ending):
    async with serving(OK, OK, OK, [ending], OK) as server, opened() as session:
        await asyncio.gather(*(get(session, server.url) for _ in range(3)))
        assert (await get(session, server.url)).body == b"hi"
    assert (len(server.requests), server.connections) == (5, 4)


async def test_it_is_sent_again_once():
    async with serving(OK, [None]) as server, opened() as session:
        await get(session, server.url)
        with pytest.raises(BrokenConnection):
            await get(session, server.url)
    assert len(server.requests) == 3


@pytest.mark.parametrize("ending", [None, "reset"])
async def test_a_request_that_dies_on_a_new_connection_is_the_callers_to_repeat(ending):
    async with serving([ending]) as server, opened() as session:
        with pytest.raises(BrokenConnection, match=r"without a response|reset"):
            await get(session, server.url)
    assert len(server.requests) == 1


@pytest.mark.parametrize("ending", [None, "reset"])
@pytest.mark.parametrize(
    "begin",
    [b"H", b"HTTP/1.1 200 OK\r\nConte", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", CHUNKED + b"5\r\nhi", CHUNKED + b"2\r\nhi\r\n"],
    ids=["a byte", "head", "body", "chunk", "between chunks"],
)
@pytest.mark.parametrize("used", [False, True])
async def test_an_answer_that_breaks_off_is_not_asked_for_again(begin, ending, used):
    async with serving(*[OK] * used, [begin, 0.05, ending]) as server, opened() as session:
        for _ in range(used):
            await get(session, server.url)
        with pytest.raises(BrokenConnection):
            await get(session, server.url)
    assert len(server.requests) == 1 + used


async def test_a_reset_in_a_body_without_a_length_is_no_end():
    async with serving([b"HTTP/1.1 200 OK\r\n\r\nhi", 0.05, "reset"]) as server, opened() as session:
        with pytest.raises(BrokenConnection):
            await get(session, server.url)


async def test_an_answer_may_begin_before_the_request_is_whole():
    async def early(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(0.5)
        writer.transport.abort()

    listener = await asyncio.start_server(early, "127.0.0.1", 0, limit=1024)
    async with listener, opened() as session:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        response = await post(session, url, bytes(20_000_000))
        assert (response.status, response.body) == (413, b"no")
        # What is left of the body would be read as the next request.
        assert session.idle == 0
        await asyncio.sleep(0.6)


# Deadlines and cancelling


# Each goes no further than a phase of the exchange.
UNFINISHED = {
    "head": [b"", 30.0],
    "in the head": [b"HTTP/1.1 200 OK\r\nConte", 30.0],
    "body": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 30.0],
    "in the body": [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", 30.0],
    "until close": [b"HTTP/1.1 200 OK\r\n\r\nhi", 30.0],
    "a drop at a time": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n", 0.01] * 3000],
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("answer", UNFINISHED.values(), ids=UNFINISHED)
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_what_was_half_read_never_returns_to_the_pool(answer, how, used):
    async with serving(*[OK] * used, answer, OK) as server, opened() as session:
        for _ in range(used):
            await get(session, server.url)
        if how == "deadline":
            with pytest.raises(TimeoutError):
                await get(session, server.url, 0.1)
        else:
            asked = asyncio.create_task(get(session, server.url))
            await asyncio.sleep(0.1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert (session.idle, len(server.requests)) == (0, 1 + used)
        await asyncio.sleep(0)
        assert session.open == 0
        assert (await get(session, server.url)).body == b"hi"


async def test_a_deadline_that_is_over_sends_nothing():
    async with serving(OK) as server, opened() as session:
        with pytest.raises(TimeoutError):
            await get(session, server.url, -1.0)
    assert server.requests == []


async def test_an_answer_at_the_moment_of_the_cancel_leaves_a_usable_connection():
    async with serving([0.05, OK]) as server, opened() as session:
        asked = asyncio.create_task(get(session, server.url))
        while session.idle == 0:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert (await get(session, server.url)).body == b"hi"
    assert server.connections == 1


async def test_a_body_that_is_still_being_sent_ends_with_the_deadline():
    async def deaf(reader, writer):
        await asyncio.sleep(0.5)
        writer.transport.abort()

    listener = await asyncio.start_server(deaf, "127.0.0.1", 0, limit=1024)
    async with opened() as session:
        with pytest.raises(TimeoutError):
            await post(session, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/", bytes(50_000_000), 0.2)
        await asyncio.sleep(0)
        assert session.open == 0
    await asyncio.sleep(0.5)
    listener.close()


# Closing


@pytest.mark.parametrize("answer", [[30.0], [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi", 30.0]])
async def test_closing_breaks_what_is_in_flight_and_leaves_no_socket(answer):
    async with serving(answer) as server:
        before = sockets()
        session = Session({})
        asked = [asyncio.create_task(get(session, server.url)) for _ in range(20)]
        await asyncio.sleep(0.1)
        await session.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert {type(result) for result in results} == {BrokenConnection}
        assert session.open == 0
        with pytest.raises(BrokenConnection, match="closed"):
            await get(session, server.url)
    await asyncio.sleep(0.05)
    assert sockets() <= before


async def test_closing_while_connections_are_opened_leaves_none():
    async with serving([0.01, OK]) as server, opened() as session:
        asked = [asyncio.create_task(get(session, server.url)) for _ in range(300)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await session.close()
        await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert (session.open, session.idle) == (0, 0)


def test_a_closed_session_leaves_nothing_for_the_collector():
    async def use():
        async with serving(OK) as server, opened() as session:
            await asyncio.gather(*(get(session, server.url) for _ in range(50)))
        await asyncio.sleep(0.05)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(use())
        assert [thing for thing in gc.get_objects() if type(thing) is http._Connection] == []
    finally:
        gc.enable()


# Before any request


def test_no_other_http_client_comes_with_it():
    program = "import sys, art_gym_agents; print(sorted({'aiohttp', 'httpx', 'openai', 'requests', 'urllib3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_dialer_resolves_no_literal_address():
    assert Dialer("127.0.0.1", 80, tls=False).resolved
    assert Dialer("::1", 80, tls=False).resolved
    assert not Dialer("localhost", 80, tls=False).resolved
