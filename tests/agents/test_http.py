"""The transport against servers that write exact bytes: framing, pooling, deadlines, and what a broken connection is."""

import asyncio
import contextlib
import errno
import gc
import gzip
import os
import socket
import ssl
import struct
import subprocess
import sys
import zlib
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import art_gym_agents._connections as connections
import art_gym_agents._http as http
import art_gym_agents._responses as responses
from art_gym_agents._connections import ConnectFailed, Dialer
from art_gym_agents._http import Session
from art_gym_agents._responses import BadResponse, BrokenConnection
from art_gym_agents._urls import locate

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head, await reader.readexactly(length)


class Server:
    """Answers each request with the next of `answers`, written piece by piece, then with the last one for ever; None closes, "reset" resets."""

    def __init__(self, *answers, pause=0.0):
        self.answers = list(answers)
        self.pause = pause
        self.requests = []
        self.connections = 0
        self.writers = set()

    async def __call__(self, reader, writer):
        self.connections += 1
        self.writers.add(writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                self.requests.append(await read_request(reader))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                for piece in answer if isinstance(answer, list | tuple) else [answer]:
                    if piece is None:
                        return
                    if piece == "reset":
                        sock = writer.get_extra_info("socket")
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        writer.transport.abort()
                        return
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                        continue
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self.pause)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # streams would log a cancelled handler
        finally:
            self.writers.discard(writer)
            writer.close()

    async def hang_up(self):
        for writer in list(self.writers):
            writer.close()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(*answers, host="127.0.0.1", pause=0.0, **options):
    server = Server(*answers, pause=pause)
    listener = await asyncio.start_server(server, host, 0, backlog=2048, **options)
    server.port = listener.sockets[0].getsockname()[1]
    server.url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}/v1"
    try:
        yield server
    finally:
        listener.close()
        for writer in list(server.writers):
            writer.transport.abort()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def opened(**headers):
    session = Session(headers)
    try:
        yield session
    finally:
        await session.close()


def soon(seconds=5.0):
    return asyncio.get_running_loop().time() + seconds


async def get(session, url, seconds=5.0):
    return await session.request("GET", url, deadline=soon(seconds))


async def post(session, url, body=b"{}", seconds=5.0):
    return await session.request("POST", url, body, deadline=soon(seconds))


def sockets():
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return found


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


# Framing: each of these is the same answer

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
SAME = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world",
    "chunked": CHUNKED + b"6\r\nhello \r\n5\r\nworld\r\n0\r\n\r\n",
    "chunk extensions and trailers": CHUNKED + b'00b;name="va;l\\"ue";x\r\nhello world\r\n0;last\r\nX-Trailer: 1\r\nX-A: c\r\n\r\n',
    "odd case and whitespace": b"HTTP/1.1 200\r\ncONTENT-lENGTH:11  \r\nX-a:\t b \t\r\n\r\nhello world",
    "100 first": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    + b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nx-a: b\r\n\r\nhello world",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 11\nX-A: b\n\nhello world",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world",
    "close": b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world",
}
UNTIL_CLOSE = {
    "no length": b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello world",
    "no length, HTTP/1.0": b"HTTP/1.0 200 OK\r\nX-A: b\r\n\r\nhello world",
    "identity": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nX-A: b\r\n\r\nhello world",
}


def assert_same(response):
    assert (response.status, response.headers[b"x-a"], response.body) == (200, b"b", b"hello world")


@pytest.mark.parametrize("answer", SAME.values(), ids=SAME)
async def test_an_answer_reads_the_same_split_at_every_byte(answer):
    splits = [(answer[:at], answer[at:]) for at in range(1, len(answer))]
    async with serving(*splits, pause=0.0005) as server, opened() as session:
        for _ in splits:
            assert_same(await get(session, server.url))


@pytest.mark.parametrize("answer", [*SAME.values(), *UNTIL_CLOSE.values()], ids=[*SAME, *UNTIL_CLOSE])
async def test_an_answer_reads_the_same_byte_by_byte(answer):
    async with serving([*(bytes([byte]) for byte in answer), None], pause=0.0002) as server, opened() as session:
        assert_same(await get(session, server.url))


def feed(*pieces, eof=False):
    """What a session gets of an answer that arrives in these pieces, without a socket."""

    async def exchange():
        connection = http._Connection(Session({}), http._Origin(Dialer("127.0.0.1", 9, tls=False)))
        connection.connection_made(FakeTransport(connection))
        asked = asyncio.ensure_future(connection.exchange(b"", soon()))
        await asyncio.sleep(0)
        for piece in pieces:
            if not asked.done() and not connection._transport.closing:
                connection.data_received(piece)
        if eof and not connection._transport.closing:
            connection.eof_received()
        return await asked

    return asyncio.run(exchange())


class FakeTransport:
    closing = False

    def __init__(self, protocol):
        self.protocol = protocol

    def write(self, data):
        pass

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return 0

    def abort(self):
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


tokens = st.text(st.sampled_from("abcXYZ0189-_"), min_size=1, max_size=12).map(lambda name: f"x-{name}")
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    status=st.sampled_from([200, 201, 400, 404, 429, 500, 503, 599]),
    headers=st.dictionaries(tokens.map(str.lower), values, max_size=6),
    body=st.binary(max_size=300),
    framing=st.sampled_from(["length", "chunked", "close"]),
    data=st.data(),
)
def test_any_answer_reads_the_same_however_it_is_split(status, headers, body, framing, data):
    head = f"HTTP/1.1 {status} Any Reason\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if framing == "length":
        answer = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    elif framing == "chunked":
        cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=4)) | {0, len(body)})
        chunks = [body[a:b] for a, b in pairwise(cuts)]
        framed = b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        answer = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + framed + b"0\r\n\r\n"
    else:
        answer = f"{head}\r\n".encode() + body
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=12)) | {0, len(answer)})
    response = feed(*(answer[a:b] for a, b in pairwise(cuts)), eof=framing == "close")
    assert (response.status, response.body) == (status, body)
    assert {name.decode(): value.decode() for name, value in response.headers.items() if name.startswith(b"x-")} == headers


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=60), max_size=5), st.booleans(), st.booleans())
def test_no_bytes_whatever_do_harm(pieces, like_http, eof):
    pieces = [b"HTTP/1.1 200 OK\r\n", *pieces] if like_http else pieces
    with contextlib.suppress(BrokenConnection, BadResponse, TimeoutError):
        feed(*pieces, b"\r\n\r\n" if eof else b"\x00\x00HTTP", eof=True)


async def test_a_folded_header_is_one_line():
    async with serving(b"HTTP/1.1 200 OK\r\nX-A: one\r\n two\r\nContent-Length: 2\r\n\r\nhi") as server, opened() as session:
        response = await get(session, server.url)
    assert response.headers[b"x-a"].split() == [b"one", b"two"]
    assert response.body == b"hi"


async def test_a_header_that_came_twice_has_both_values():
    async with serving(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 2\r\n\r\nhi") as server, opened() as session:
        assert (await get(session, server.url)).headers[b"x-a"] == b"1, 2"


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_ends_with_its_head(status):
    async with serving(b"HTTP/1.1 %b\r\nX-A: b\r\n\r\n" % status) as server, opened() as session:
        for _ in range(3):
            assert (await get(session, server.url)).body == b""
    assert server.connections == 1


async def test_trailers_do_not_leak_into_the_next_answer():
    trailers = CHUNKED + b"2\r\nhi\r\n0\r\nX-Trailer: 1\r\n\r\n"
    async with serving(trailers, OK) as server, opened() as session:
        first, second = await get(session, server.url), await get(session, server.url)
    assert (first.body, second.body, server.connections) == (b"hi", b"hi", 1)
    assert second.headers == {b"content-length": b"2"}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0x2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhi!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999999\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        CHUNKED + b"-2\r\nhi\r\n0\r\n\r\n",
        CHUNKED + b"xyz\r\nhi\r\n0\r\n\r\n",
        CHUNKED + b"1\r\nhi\r\n0\r\n\r\n",
        CHUNKED + b"fffffffffffffffffff\r\nhi",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nxyz",
        b"220 mail.example.org ESMTP\r\n",
        b"\x16\x03\x01\x00\x00",
        b"\x00" * 100,
    ],
    ids=lambda answer: str(answer[:70]),
)
async def test_wrong_framing_breaks_the_connection_at_once(answer):
    async with serving([answer, 30.0]) as server, opened() as session:
        with pytest.raises(BrokenConnection, match="HTTP"):
            await get(session, server.url)
        assert session.idle == 0


@pytest.mark.parametrize("header", [b"X: " + b"x" * 200_000, b"X: y\r\n" * 30_000, b"x" * 200_000 + b": y"], ids=["value", "number", "name"])
@pytest.mark.parametrize("ends", [True, False])
async def test_an_oversized_head_is_refused(header, ends):
    answer = b"HTTP/1.1 200 OK\r\n" + header + (b"\r\nContent-Length: 2\r\n\r\nhi" if ends else b"")
    async with serving([answer, 30.0]) as server, opened() as session:
        with pytest.raises(BrokenConnection, match="64 KiB"):
            await get(session, server.url)


@pytest.mark.parametrize("framing", [b"Content-Length: 3000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2dc6c0\r\n", b"\r\n"])
async def test_a_body_beyond_the_bound_is_refused(framing, monkeypatch):
    monkeypatch.setattr(responses, "_LARGEST", 1_000_000)
    async with serving([b"HTTP/1.1 200 OK\r\n" + framing + b"x" * 3_000_000, 30.0]) as server, opened() as session:
        with pytest.raises(BadResponse, match="more than"):
            await get(session, server.url)


# Encodings that weren't asked for


def deflated(data, bits):
    packer = zlib.compressobj(wbits=bits)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (b"gzip", gzip.compress(b"hello world")),
        (b"X-GZip", gzip.compress(b"hello ") + gzip.compress(b"world")),
        (b"deflate", deflated(b"hello world", 15)),
        (b"deflate", deflated(b"hello world", -15)),
        (b"identity", b"hello world"),
    ],
    ids=["gzip", "two members", "deflate", "raw deflate", "identity"],
)
async def test_a_compressed_answer_is_decoded_all_the_same(name, body):
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (name, len(body), body)
    async with serving(answer) as server, opened() as session:
        assert (await get(session, server.url)).body == b"hello world"


async def test_an_encoding_nobody_knows_is_a_bad_answer():
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\nhi") as server, opened() as session:
        with pytest.raises(BadResponse, match="br"):
            await get(session, server.url)


@pytest.mark.parametrize("body", [b"nonsense", gzip.compress(b"hello world")[:-10]])
async def test_a_damaged_compressed_answer_breaks(body):
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(answer) as server, opened() as session:
        with pytest.raises(BrokenConnection, match="gzip"):
            await get(session, server.url)


async def test_a_small_answer_that_swells_is_refused(monkeypatch):
    monkeypatch.setattr(responses, "_LARGEST", 1_000_000)
    body = gzip.compress(bytes(50_000_000))
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serving(answer) as server, opened() as session:
        with pytest.raises(BadResponse, match="more than"):
            await get(session, server.url)


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


# Connecting


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_refused_connection_says_so():
    async with opened() as session:
        with pytest.raises(ConnectFailed, match=r"refused|Connect call failed") as caught:
            await get(session, f"http://127.0.0.1:{free_port()}/")
    assert caught.value.errno == errno.ECONNREFUSED


async def test_a_name_that_does_not_resolve_says_so(monkeypatch):
    async def nowhere(*args, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nowhere)
    async with opened() as session:
        with pytest.raises(ConnectFailed, match=r"no-such-host\.invalid.*not known"):
            await get(session, "http://no-such-host.invalid/")


def resolve_to(monkeypatch, *hosts):
    asked = []

    async def getaddrinfo(host, port, **options):
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_is_resolved_once_for_many_connections(monkeypatch):
    asked = resolve_to(monkeypatch, "127.0.0.1")
    async with serving(OK) as server, opened() as session:
        await asyncio.gather(*(get(session, f"http://name.invalid:{server.port}/") for _ in range(50)))
    assert asked == ["name.invalid"]


async def test_the_next_address_is_tried_and_the_good_one_remembered(monkeypatch):
    tried = []
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        tried.append(address[0])
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving([OK, None]) as server, opened() as session:
        resolve_to(monkeypatch, "127.0.0.77", "127.0.0.1")
        for _ in range(2):
            await get(session, f"http://name.invalid:{server.port}/")
            await asyncio.sleep(0.02)
    assert tried == ["127.0.0.77", "127.0.0.1", "127.0.0.1"]


async def test_an_address_that_swallows_everything_leaves_time_for_the_next(monkeypatch):
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT", 0.6)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        if address[0] == "127.0.0.77":
            await asyncio.sleep(30.0)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving(OK) as server, opened() as session:
        resolve_to(monkeypatch, "127.0.0.77", "127.0.0.1")
        assert (await get(session, f"http://name.invalid:{server.port}/")).status == 200


@pytest.mark.parametrize(("timeout", "seconds", "error"), [(0.1, 5.0, ConnectFailed), (5.0, 0.1, TimeoutError)])
async def test_connecting_takes_no_longer_than_it_may(monkeypatch, timeout, seconds, error):
    async def never(self, sock, address):
        await asyncio.sleep(30.0)

    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT", timeout)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", never)
    before = sockets()
    async with opened() as session:
        with pytest.raises(error):
            await get(session, "http://127.0.0.1:9/", seconds)
        asked = asyncio.create_task(get(session, "http://127.0.0.1:9/"))
        await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.wait([asked])
        assert asked.cancelled()
    assert sockets() == before


async def test_a_flood_of_requests_opens_its_connections_by_and_by_and_by_server(monkeypatch):
    opening, most = {}, {}

    async def connect(self, sock, address):
        opening[address] = opening.get(address, 0) + 1
        most[address[0]] = max(most.get(address[0], 0), opening[address])
        await asyncio.sleep(0.01)
        opening[address] -= 1
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", connect)
    async with opened() as session:
        asked = [get(session, f"http://127.0.0.{n}:9/", 60.0) for n in (1, 2) for _ in range(500)]
        assert {type(result) for result in await asyncio.gather(*asked, return_exceptions=True)} == {ConnectFailed}
    assert most == {"127.0.0.1": 128, "127.0.0.2": 128}


async def test_one_that_waits_to_connect_takes_what_becomes_free(monkeypatch):
    monkeypatch.setattr(connections, "_OPENING", 1)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        await asyncio.sleep(0.01)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving([0.02, OK]) as server, opened() as session:
        await asyncio.gather(*(get(session, server.url, 30.0) for _ in range(100)))
    assert server.connections < 60


async def test_one_that_is_cancelled_while_it_waits_for_its_turn_gives_it_up(monkeypatch):
    monkeypatch.setattr(connections, "_OPENING", 1)
    connect = asyncio.SelectorEventLoop.sock_connect

    async def sock_connect(self, sock, address):
        await asyncio.sleep(0.1)
        await connect(self, sock, address)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", sock_connect)
    async with serving(OK) as server, opened() as session:
        asked = [asyncio.create_task(get(session, server.url)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in asked[:2]:  # one connects, one waits
            task.cancel()
        with pytest.raises(TimeoutError):
            await get(session, server.url, 0.05)
        results = await asyncio.gather(*asked, get(session, server.url), return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["CancelledError", "CancelledError", "Response", "Response"]


async def test_a_thousand_at_once_leave_few_sockets(monkeypatch):
    monkeypatch.setattr(http, "_KEEP_ALIVE", 0.2)
    before = sockets()
    async with serving([0.1, OK]) as server, opened() as session:
        responses = await asyncio.gather(*(post(session, server.url, b"x" * 1000, 60.0) for _ in range(1000)))
        assert {response.body for response in responses} == {b"hi"}
        await asyncio.sleep(0.8)
        # The test's own listener, the server's ends, and no more than one sweep's rest.
        assert sockets() - before < 20
        assert session.open < 10


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
async def test_a_host_may_be_an_ipv6_address():
    try:
        async with serving(OK, host="::1") as server, opened() as session:
            assert (await get(session, server.url)).status == 200
            assert b"Host: [::1]:%d\r\n" % server.port in server.requests[0][0]
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


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


# TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


@pytest.fixture
def server_tls(certificate):
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_of_the_users_own_is_trusted_if_the_environment_names_it(certificate, server_tls, host, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    body = os.urandom(300_000)
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + body, ssl=server_tls) as server, opened() as session:
        for _ in range(3):
            assert (await post(session, f"https://{host}:{server.port}/v1", body)).body == body
    assert server.connections == 1
    assert server.requests[0][1] == body


async def test_a_certificate_nobody_vouches_for_is_refused_with_the_way_out(server_tls):
    async with serving(OK, ssl=server_tls) as server, opened() as session:
        with pytest.raises(ConnectFailed, match=r"(?s)certificate.*SSL_CERT_FILE"):
            await get(session, f"https://127.0.0.1:{server.port}/")
        await asyncio.sleep(0.05)
        assert session.open == 0
    assert server.requests == []


async def test_a_certificate_for_another_host_is_refused(certificate, server_tls, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with serving(OK, host="127.0.0.2", ssl=server_tls) as server, opened() as session:
        with pytest.raises(ConnectFailed, match="certificate"):
            await get(session, f"https://127.0.0.2:{server.port}/")


async def test_https_of_a_server_that_speaks_http_fails_to_connect():
    async with serving(OK) as server, opened() as session:
        with pytest.raises((ConnectFailed, TimeoutError)):
            await get(session, f"https://127.0.0.1:{server.port}/", 2.0)


async def test_a_handshake_that_hangs_ends_with_the_deadline_or_the_cancel():
    before = sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/"
        async with opened() as session:
            with pytest.raises(TimeoutError):
                await get(session, url, 0.2)
            asked = asyncio.create_task(get(session, url))
            await asyncio.sleep(0.1)
            asked.cancel()
            await asyncio.wait([asked])
            assert asked.cancelled()
    await asyncio.sleep(0.05)
    assert sockets() == before


@pytest.mark.parametrize("ending", [None, "reset"])
async def test_a_connection_under_tls_that_died_while_idle_is_replaced(certificate, server_tls, monkeypatch, ending):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with serving(OK, [ending], OK, ssl=server_tls) as server, opened() as session:
        for _ in range(2):
            assert (await get(session, f"https://localhost:{server.port}/")).body == b"hi"
    assert server.connections == 2


# Before any request


def test_no_other_http_client_comes_with_it():
    program = "import sys, art_gym_agents; print(sorted({'aiohttp', 'httpx', 'openai', 'requests', 'urllib3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_dialer_resolves_no_literal_address():
    assert Dialer("127.0.0.1", 80, tls=False).resolved
    assert Dialer("::1", 80, tls=False).resolved
    assert not Dialer("localhost", 80, tls=False).resolved
