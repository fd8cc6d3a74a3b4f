"""Opening connections, of which every request in flight needs one: addresses, TLS, and the open files behind them.

What is said over a connection belongs to `_http`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import resource
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

_CONNECT_TIMEOUT = 5.0

_OPENING = 128
"""As many as a listener's queue holds by custom."""

_RESOLVED_FOR = 10.0
"""Seconds that the addresses of a name are good for."""

_ENOUGH_FILES = 65_536
"""Some programs that are started from here walk over all descriptors that they might have: no more than are of use."""

_Address = tuple[int, int, int, tuple[Any, ...]]
"""Family, kind, protocol, and what a socket connects to."""

_P = TypeVar("_P", bound=asyncio.BaseProtocol)


class ConnectFailed(OSError):
    """No connection could be made. `errno` is that of the cause, if it had one."""


class Dialer:
    """Opens connections to one server, a few at a time.

    Of ten thousand opened at once many would time out: the server's queue overflows, and the event loop comes to an answer only when all have
    been asked for.

    Args:
        host: A name or an address, IPv6 without brackets.
        port: A TCP port.
        tls: Whether it speaks TLS.
    """

    def __init__(self, host: str, port: int, *, tls: bool) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._opening = asyncio.Semaphore(_OPENING)
        self._resolving = asyncio.Lock()
        self._good_until = 0.0
        self._addresses: list[_Address] = []
        with suppress(OSError):  # a name
            self._addresses = _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
            self._good_until = math.inf

    @property
    def resolved(self) -> bool:
        """Whether the address is known already, as that of a host without a name is."""
        return bool(self._addresses)

    async def dial(self, factory: Callable[[], _P], deadline: float, instead: Callable[[], _P | None]) -> _P:
        """Open a connection, waiting for a turn.

        Args:
            factory: Makes the protocol.
            deadline: In the event loop's time.
            instead: Asked when it is the caller's turn: a connection that has become free meanwhile spares the opening.

        Raises:
            ConnectFailed: Nothing takes the connection, or not in time.
            TimeoutError: The deadline is over.
        """
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(deadline) as whole, self._opening:
                free = instead()
                if free is not None:
                    return free
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT):
                        return await self._dial(factory, min(deadline, clock() + _CONNECT_TIMEOUT))
                except OSError as error:  # a timeout too
                    raise self._failure(error) from error
        except ConnectFailed:
            if whole.expired() or clock() >= deadline:
                raise TimeoutError from None
            raise

    async def _dial(self, factory: Callable[[], _P], deadline: float) -> _P:
        loop = asyncio.get_running_loop()
        addresses = await self._resolve()
        failure: OSError | None = None
        for index, address in enumerate(addresses):
            # One that swallows packets must leave time for the others.
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(share):
                    protocol = await self._dial_address(factory, address)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                failure = failure or error
            else:
                if index:
                    self._addresses = [address, *(other for other in addresses if other is not address)]
                return protocol
        assert failure is not None  # a resolver that finds nothing raises
        raise failure

    async def _dial_address(self, factory: Callable[[], _P], target: _Address) -> _P:
        family, kind, number, address = target
        loop = asyncio.get_running_loop()
        sock = socket.socket(family, kind, number)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            name = self._host.partition("%")[0] if self._tls else None
            _, protocol = await loop.create_connection(factory, sock=sock, ssl=self._context, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        return protocol

    async def _resolve(self) -> list[_Address]:
        loop = asyncio.get_running_loop()
        # Many ask at the same moment, and the answer is the same for all.
        async with self._resolving:
            if self._good_until <= loop.time():
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                self._addresses = _addresses(found)
                self._good_until = loop.time() + _RESOLVED_FOR
        return self._addresses

    @cached_property
    def _context(self) -> ssl.SSLContext | None:
        if not self._tls:
            return None
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _failure(self, error: OSError) -> ConnectFailed:
        text = str(error) or f"no connection within {_CONNECT_TIMEOUT:g} s"
        if isinstance(error, ssl.SSLCertVerificationError):
            text += " (the environment variable SSL_CERT_FILE names the authorities to trust)"
        failure = ConnectFailed(f"no connection to {self._host} port {self._port}: {text}")
        failure.errno = error.errno
        return failure


def _addresses(found: Iterable[tuple[int, int, int, str, tuple[Any, ...]]]) -> list[_Address]:
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


def raise_open_files_limit() -> None:
    """Let this process open as many files as it may, up to what any rollout needs. The limit never falls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(_ENOUGH_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a system may have a limit below the one that it tells
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files_limit() -> int:
    """How many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
