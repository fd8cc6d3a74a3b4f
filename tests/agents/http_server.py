"""Servers that write exact bytes, and sessions of the transport to them."""

import asyncio
import contextlib
import os
import socket
import struct
from contextlib import asynccontextmanager

from art_gym_agents._http import Session

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
# Each is the same answer.
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


def assert_same(response):
    assert (response.status, response.headers[b"x-a"], response.body) == (200, b"b", b"hello world")
