"""The HTTP protocol under uvicorn, with the limits that must hold before there is a request: heads that never end, clients that don't read.

uvicorn limits neither the size of a request's head, nor the time that it takes, when it parses with httptools.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from art_gym.gateway._errors import error_body
from art_gym.gateway.settings import Limits

_LINGER_SECONDS = 5.0
_LINGER_BYTES = 8 * 2**20
"""For how long, and how much of, a body is still taken in after its request was answered without it: a client that is cut off while it sends
may never read why."""

_LAST = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Made by `guarded_protocol`, which sets the limits."""

    most_head_bytes = 64 * 2**10
    head_seconds = 30.0
    unread_seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._linger_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        """Wait for a request, and not for long."""
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_seconds, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        for timer in (self._head_timer, self._unread_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        if self._in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.head_seconds, self._late)
            self._head_bytes += len(data)
        elif self._linger_timer is not None:
            self._linger_bytes += len(data)
            if self._linger_bytes > _LINGER_BYTES:
                self.transport.close()
                return
        super().data_received(data)
        # What comes in at once is little, so that a head is only cut off when it goes on.
        if self._in_head and self._head_bytes > self.most_head_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", 431, f"The request's head may have {self.most_head_bytes} bytes.")

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next head may come."""
        self._in_head = True
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The request is answered, though its body may still be coming in."""
        super().on_response_complete()
        if not self._in_head and self._linger_timer is None and not self.transport.is_closing():
            self._linger_bytes = 0
            self._linger_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """The client doesn't read."""
        super().pause_writing()
        self._unread_timer = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", 408, f"The request's head didn't come within {self.head_seconds:g} seconds.")

    def _refuse(self, status: bytes, code: int, message: str) -> None:
        # Within an earlier request's answer there is no place for another one.
        if self.cycle is None or self.cycle.response_complete:
            body = error_body(code, message)
            self.transport.write(_LAST % (status, len(body)) + body)
        self.transport.close()


def guarded_protocol(limits: Limits, *, head_seconds: float = 30.0, unread_seconds: float = 60.0) -> type[GuardedProtocol]:
    """The protocol for `uvicorn.Config(http=…)`.

    Args:
        limits: For the size of a head.
        head_seconds: How long a head may take, and a connection wait for its first request.
        unread_seconds: How long a client may not read what it is sent.
    """
    values = {"most_head_bytes": limits.header_bytes, "head_seconds": head_seconds, "unread_seconds": unread_seconds}
    return type("GuardedProtocol", (GuardedProtocol,), values)
