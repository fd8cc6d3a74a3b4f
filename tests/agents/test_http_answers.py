"""Answers, however they are framed, split and encoded."""

import asyncio
import contextlib
import gzip
import zlib
from itertools import pairwise

import pytest
from http_server import CHUNKED, OK, SAME, assert_same, get, opened, serving, soon
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import art_gym_agents._http as http
import art_gym_agents._responses as responses
from art_gym_agents._connections import Dialer
from art_gym_agents._http import Session
from art_gym_agents._responses import BadResponse, BrokenConnection

# Framing: each of these is the same answer


UNTIL_CLOSE = {
    "no length": b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nhello world",
    "no length, HTTP/1.0": b"HTTP/1.0 200 OK\r\nX-A: b\r\n\r\nhello world",
    "identity": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nX-A: b\r\n\r\nhello world",
}


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
