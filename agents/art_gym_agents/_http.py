"""HTTP/1.1 as a client: requests over kept-alive connections, each a bare `asyncio.Protocol` with an llhttp parser.

Written for many requests to few servers. Each costs a write, a read, a timer and no task, which is a fifth of what a general HTTP client takes.
Redirects aren't followed, proxies aren't looked for, cookies aren't kept. How connections are opened belongs to `_connections`, and what an
answer means to `_client`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from art_gym_agents._connections import Dialer
from art_gym_agents._responses import BadResponse, BrokenConnection, Response, ResponseReader
from art_gym_agents._urls import locate

# uvicorn, under vLLM too, closes a connection that was idle for 5 s; one reused at that moment would be reset.
_KEEP_ALIVE = 4.0

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(slots=True, eq=False)
class _Origin:
    """One server: how it is reached, and the connections that wait for a request, the latest last."""

    dialer: Dialer
    idle: dict[_Connection, None] = field(default_factory=dict)

    def take(self) -> _Connection | None:
        """Return the connection that was used last, if it may be used again."""
        now = asyncio.get_running_loop().time()
        while self.idle:
            connection, _ = self.idle.popitem()
            if connection.idle_since + _KEEP_ALIVE > now:
                return connection
            connection.abort()
        return None


@dataclass(slots=True, eq=False)
class _Route:
    """What the requests of one method to one URL have in common."""

    origin: _Origin
    head: bytes


class Session:
    """The connections of one event loop, any number of them: how many requests are in flight is the caller's choice.

    Args:
        headers: Sent with every request.

    Raises:
        ValueError: A header can't be sent.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        # A compressed answer would cost more processor time than a few kilobytes of traffic are worth.
        lines = {**headers, "Accept-Encoding": "identity"}
        for name, value in lines.items():
            if not _TOKEN.fullmatch(name) or _CONTROL.search(value):
                raise ValueError(f"the header {name!r} has a character that no header may have")
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._routes: dict[tuple[str, str], _Route] = {}
        self._origins: dict[tuple[bool, str, int], _Origin] = {}
        self._connections: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    @property
    def idle(self) -> int:
        """How many of them wait for a request."""
        return sum(len(origin.idle) for origin in self._origins.values())

    async def request(self, method: str, url: str, body: bytes = b"", *, deadline: float) -> Response:
        """Send a request and read the answer.

        A server may close a connection at the moment that a request is written to it. A request that ends so, on a connection that was used
        before and without a byte of an answer, is sent once more on a new one.

        Args:
            method: "GET" has no body.
            url: As `locate` takes it.
            body: Sent as it is.
            deadline: In the event loop's time; no answer is waited for beyond.

        Raises:
            BadResponse: It is too large, or has an unknown encoding.
            BrokenConnection: It wasn't answered whole.
            ConnectFailed: Nothing takes connections there.
            TimeoutError: The deadline is over.
            ValueError: The URL is none.
        """
        route = self._routes.get((method, url)) or self._route(method, url)
        message = b"%b\r\n" % route.head if method == "GET" else b"%bContent-Length: %d\r\n\r\n%b" % (route.head, len(body), body)
        if deadline <= asyncio.get_running_loop().time():
            raise TimeoutError
        origin = route.origin
        response = await (origin.take() or await self._connect(origin, deadline, origin.take)).exchange(message, deadline)
        if response is None:
            # The others that wait may have ended with this one.
            response = await (await self._connect(origin, deadline, lambda: None)).exchange(message, deadline)
            assert response is not None  # on a new connection
        return response

    async def close(self) -> None:
        """Close all connections; requests in flight break."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._connections):
            connection.abort()
        while self._connections:  # noqa: ASYNC110  # the loop ends each within its next rounds
            await asyncio.sleep(0)

    def _route(self, method: str, url: str) -> _Route:
        location = locate(url)
        server = (location.tls, location.host, location.port)
        origin = self._origins.get(server)
        if origin is None:
            origin = self._origins[server] = _Origin(Dialer(location.host, location.port, tls=location.tls))
        head = f"{method} {location.target} HTTP/1.1\r\nHost: {location.header}\r\n{self._lines}"
        route = self._routes[method, url] = _Route(origin, head.encode())
        return route

    async def _connect(self, origin: _Origin, deadline: float, instead: Callable[[], _Connection | None]) -> _Connection:
        if self._closed:
            raise BrokenConnection("the session was closed")
        return await origin.dialer.dial(lambda: _Connection(self, origin), deadline, instead)

    # Called by the connections:

    def made(self, connection: _Connection) -> None:
        """Count one in."""
        self._connections.add(connection)
        if self._closed:
            connection.abort()

    def lost(self, connection: _Connection) -> None:
        """Count one out."""
        self._connections.discard(connection)

    def release(self, connection: _Connection) -> None:
        """Keep one for further requests, as long as servers do."""
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        connection.origin.idle[connection] = None
        if self._sweep is None:
            self._sweep = loop.call_later(_KEEP_ALIVE, self._close_overdue)

    def _close_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = math.inf
        for origin in self._origins.values():
            overdue = []
            for connection in origin.idle:
                if connection.idle_since + _KEEP_ALIVE > loop.time():
                    oldest = min(oldest, connection.idle_since)
                    break
                overdue.append(connection)
            for connection in overdue:
                connection.abort()
        self._sweep = None if oldest == math.inf else loop.call_at(oldest + _KEEP_ALIVE, self._close_overdue)


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time.

    Attributes:
        origin: Where it leads.
        idle_since: When the last response was complete, in the event loop's time; 0 before the first.
    """

    __slots__ = ("_lost", "_reader", "_session", "_transport", "_waiter", "idle_since", "origin")

    def __init__(self, session: Session, origin: _Origin) -> None:
        self._session = session
        self.origin = origin
        self.idle_since = 0.0
        self._lost = False
        # Both are there while a request is in flight.
        self._reader: ResponseReader | None = None
        self._waiter: asyncio.Future[Response | None] | None = None

    async def exchange(self, message: bytes, deadline: float) -> Response | None:
        """Send a request; return the response, or None if a connection that was used before ended without a byte of one.

        Raises:
            BadResponse, BrokenConnection, TimeoutError: As `Session.request` says.
        """
        if self._lost:
            if self.idle_since:
                return None
            raise BrokenConnection("it ended before a request was sent")
        loop = asyncio.get_running_loop()
        self._reader = ResponseReader()
        waiter: asyncio.Future[Response | None] = loop.create_future()
        self._waiter = waiter
        timer = loop.call_at(deadline, self._expire)
        self._transport.write(message)
        try:
            return await waiter
        finally:
            timer.cancel()
            if self._waiter is waiter:  # the caller was cancelled
                self.abort()

    def abort(self, error: Exception | None = None) -> None:
        """End it at once. A request in flight fails with this error."""
        self._lost = True
        self.origin.idle.pop(self, None)
        self._transport.abort()
        waiter = self._settle()
        if waiter is not None:
            waiter.set_exception(error or BrokenConnection("this side closed it"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._session.made(self)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            self.abort()  # nothing was asked for
            return
        try:
            reader.feed(data)
        except (BadResponse, BrokenConnection) as error:
            self.abort(error)
            return
        if reader.complete:
            self._finish(reader)

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._session.lost(self)

    def _finish(self, reader: ResponseReader) -> None:
        try:
            response = reader.response()
        except (BadResponse, BrokenConnection) as error:
            self.abort(error)
            return
        waiter = self._settle()
        if waiter is not None:
            waiter.set_result(response)
        # A server may respond before it has read the request; what is left of that would be taken for the next one.
        if reader.keep_alive and not self._lost and not self._transport.get_write_buffer_size():
            self._session.release(self)
        else:
            self.abort()

    def _end(self, error: Exception | None) -> None:
        """Take it that nothing more will come."""
        self._lost = True
        self.origin.idle.pop(self, None)
        reader = self._reader
        if reader is None:
            return
        if error is None:
            reader.end()
        if reader.complete:
            self._finish(reader)
        elif self.idle_since and not reader.received:
            waiter = self._settle()
            if waiter is not None:
                waiter.set_result(None)
        else:
            where = "in the middle of a response" if reader.received else "without a response"
            self.abort(BrokenConnection(f"it ended {where}" + (f": {error}" if error else "")))

    def _expire(self) -> None:
        self.abort(TimeoutError())

    def _settle(self) -> asyncio.Future[Response | None] | None:
        """End the request in flight; return who waits for it, if someone still does."""
        reader, self._reader = self._reader, None
        waiter, self._waiter = self._waiter, None
        if reader is not None:
            reader.release()
        return waiter if waiter is not None and not waiter.done() else None
