"""HTTP/1.1 responses as they come in, piece by piece: llhttp finds where they end, this module bounds what they may hold."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import httptools

_LARGEST_HEAD = 64 * 1024
_LARGEST = 256 * 1024 * 1024


class BrokenConnection(Exception):
    """The connection ended before the response did, or what came was no HTTP."""


class BadResponse(Exception):
    """A response that can't be taken, and would come again."""


class Response(NamedTuple):
    """A response, read whole.

    Attributes:
        status: Such as 200; never 1xx.
        headers: By name in lower case; the values of one that came twice are joined by commas.
        body: Decoded, if it was compressed.
    """

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class ResponseReader:
    """Reads one response. The methods that begin with `on_` are called by the parser.

    Attributes:
        received: How many bytes came.
        complete: Whether the response is whole.
        keep_alive: Whether the connection may be used again; only if complete.
    """

    __slots__ = ("_body", "_head_size", "_headers", "_in_body", "_parser", "_status", "complete", "keep_alive", "received")

    def __init__(self) -> None:
        self.received = 0
        self.complete = False
        self.keep_alive = False
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._head_size = 0
        self._in_body = False
        self._body = bytearray()
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # Odd, but clear; other clients let it pass as well.
        self._parser.set_dangerous_leniencies(lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            BadResponse: There are too many of them.
            BrokenConnection: They are no HTTP.
        """
        assert self._parser is not None
        self.received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.keep_alive = False
            if not self.complete:
                raise BrokenConnection(f"what came is no HTTP: {error}") from error
        if (self._head_size if self._in_body else self.received) > _LARGEST_HEAD:
            raise BrokenConnection(f"the response's head is larger than {_LARGEST_HEAD // 1024} KiB")
        if self.received > _LARGEST:
            raise _too_large()

    def end(self) -> None:
        """Take it that the connection has ended, which for some bodies is their end."""
        chunked = b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()
        self.complete |= self._in_body and not chunked and b"content-length" not in self._headers
        self.keep_alive = False

    def response(self) -> Response:
        """Return what is complete.

        Raises:
            BadResponse: It has an unknown encoding, or is too large when decoded.
            BrokenConnection: It doesn't have the encoding that it says.
        """
        encoding = self._headers.get(b"content-encoding")
        return Response(self._status, self._headers, bytes(self._body) if encoding is None else _decoded(encoding, bytes(self._body)))

    def release(self) -> None:
        """Let go of the parser, which refers to this object."""
        self._parser = None

    def on_message_begin(self) -> None:
        if self.complete:
            self.keep_alive = False  # another response, which nothing asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value)
        if self._in_body:
            return  # a trailer
        name, value = name.lower(), value.rstrip()
        headers = self._headers
        headers[name] = b"%b, %b" % (headers[name], value) if name in headers else value

    def on_headers_complete(self) -> None:
        if not self.complete:
            assert self._parser is not None
            self._in_body = True
            self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body += data

    def on_message_complete(self) -> None:
        if self.complete:
            return
        if self._status < 200:  # "100 Continue", "103 Early Hints"
            self._headers = {}
            self._in_body = False
        else:
            assert self._parser is not None
            self.complete = True
            self.keep_alive = self._parser.should_keep_alive()


def _too_large() -> BadResponse:
    return BadResponse(f"the response has more than {_LARGEST:,} bytes")


def _decoded(encoding: bytes, body: bytes) -> bytes:
    """Undo an encoding that wasn't asked for."""
    name = encoding.lower()
    if name == b"identity" or not body:
        return body
    if name in (b"gzip", b"x-gzip"):
        bits = 16 + zlib.MAX_WBITS
    elif name == b"deflate":
        # Meant is zlib's form, which shows in its first byte. Some send the bare one.
        bits = zlib.MAX_WBITS if body[0] & 0x0F == zlib.DEFLATED else -zlib.MAX_WBITS
    else:
        raise BadResponse(f"the response is encoded as {encoding!r}, though only identity was asked for")
    found = bytearray()
    try:
        while body:  # gzip may have several members
            inflater = zlib.decompressobj(bits)
            found += inflater.decompress(body, _LARGEST + 1 - len(found))
            if len(found) > _LARGEST:
                raise _too_large()
            if not inflater.eof:
                raise zlib.error("its end is missing")
            body = inflater.unused_data
    except zlib.error as error:
        raise BrokenConnection(f"the response isn't the {name.decode()} that it says: {error}") from error
    return bytes(found)
