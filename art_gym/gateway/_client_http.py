"""The client's HTTP side: what a request is, when it is sent again, and what a refusal says; over httpx, in two ways of waiting.

Every request that changes something carries an idempotency key, so that sending it again is safe when its answer was lost.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from art_gym._version import __version__
from art_gym.errors import UsageError
from art_gym.gateway._client_errors import GatewayError

URL, API_KEY = "ART_GYM_URL", "ART_GYM_API_KEY"
"""The environment variables that say where the gateway is, and what opens it."""

DEFAULT_URL = "http://127.0.0.1:8000"

_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 8.0
_TIMEOUT = httpx.Timeout(120.0, connect=10.0)

# The global generator belongs to the user.
_jitter = random.Random()


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gateway is, and what opens it."""

    url: str
    api_key: str | None

    @classmethod
    def of(cls, url: str | None, api_key: str | None) -> Address:
        """Take what was given, else what the environment says, else a gateway of this machine.

        Raises:
            UsageError: That is no address, or the key can't be sent.
        """
        given = url or os.environ.get(URL) or DEFAULT_URL
        key = api_key or os.environ.get(API_KEY) or None
        try:
            parts = urlsplit(given)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(f"the gateway's address is {given!r:.200}; it looks like {DEFAULT_URL} (argument url, or the variable {URL})")
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise UsageError(f"the gateway's API key has a space or a control character in it (argument api_key, or the variable {API_KEY})")
        # A base URL of the OpenAI interface is what people have at hand.
        return cls(given.rstrip("/").removesuffix("/v1"), key)

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        headers = {"User-Agent": f"art_gym/{__version__}"}
        return headers | {"Authorization": f"Bearer {self.api_key}"} if self.api_key else headers


@dataclass(slots=True)
class Request:
    """One request, which may be sent several times."""

    method: str
    path: str
    json: Any = None
    params: Mapping[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def changing(cls, path: str, json: Any) -> Request:
        """A POST, with an idempotency key of its own."""
        return cls("POST", path, json, headers={"Idempotency-Key": uuid.uuid4().hex})


class Attempts:
    """Decides how long to wait before a request is sent again, or that it isn't.

    Args:
        address: For what an error says.
        patience: Seconds from the first attempt, after which none is begun.
    """

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._deadline = time.monotonic() + patience
        self._count = 0

    def reset(self) -> None:
        """Begin anew: something went on."""
        self._deadline, self._count = time.monotonic() + self._patience, 0

    def after(self, problem: httpx.Response | httpx.TransportError) -> float:
        """Return the seconds to wait.

        Raises:
            GatewayError: It wouldn't help, or it has been tried for long enough.
        """
        asked = 0.0
        if isinstance(problem, httpx.Response):
            asked = _retry_after(problem)
            if problem.status_code not in _AGAIN and not (problem.status_code == 409 and asked):
                raise refusal(problem)
        delay = max(asked, min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**self._count) * _jitter.uniform(0.5, 1.0))
        self._count += 1
        if time.monotonic() + delay > self._deadline:
            raise refusal(problem) if isinstance(problem, httpx.Response) else self._unreachable(problem)
        return delay

    def _unreachable(self, error: httpx.TransportError) -> GatewayError:
        what = "nothing listens there" if isinstance(error, httpx.ConnectError) else str(error) or type(error).__name__
        found = GatewayError(
            f"the gateway at {self._address.url} can't be reached: {what}, for {self._patience:.3g} s; start one with `art-gym serve`, or name "
            f"another with url= or the variable {URL}"
        )
        found.__cause__ = error
        return found


def refusal(response: httpx.Response) -> GatewayError:
    """Make the error that an answer means. The answer has been read."""
    message, param = _said(response)
    if response.status_code in (401, 403):
        message += f" (the key is the argument api_key, or the variable {API_KEY})"
    where = f"{response.request.method} {response.request.url.path}"
    return GatewayError(
        f"{where}: {message} ({response.status_code})",
        status=response.status_code,
        param=param,
        request_id=response.headers.get("x-request-id", ""),
    )


def _said(response: httpx.Response) -> tuple[str, str | None]:
    """What an error's body says: an OpenAI error, FastAPI's own form, or its beginning."""
    try:
        data = response.json()
    except ValueError:
        return response.text[:300].strip() or response.reason_phrase, None
    error = data.get("error", data) if isinstance(data, dict) else None
    if isinstance(error, dict):
        if isinstance(error.get("message"), str):
            return error["message"].rstrip("."), error.get("param")
        detail = error.get("detail")
        if isinstance(detail, list) and detail and isinstance(detail[0], dict):
            place = ".".join(str(part) for part in detail[0].get("loc", ()) if part != "body")
            return f"{place}: {detail[0].get('msg')}" if place else str(detail[0].get("msg")), place or None
        if isinstance(detail, str):
            return detail, None
    return response.text[:300], None


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "")))
    except ValueError:
        return 0.0


class Sender:
    """Sends requests, and waits in the caller's thread."""

    def __init__(self, address: Address, *, patience: float, transport: httpx.BaseTransport | None = None) -> None:
        self.address, self.patience = address, patience
        self.http = httpx.Client(base_url=address.url, headers=address.headers, timeout=_TIMEOUT, transport=transport)

    def send(self, request: Request) -> Any:
        """Return the answer's JSON; None for an empty one.

        Raises:
            GatewayError: The gateway refuses, or can't be reached for as long as it is waited for.
        """
        return answer_of(self.fetch(request))

    def fetch(self, request: Request) -> httpx.Response:
        """Return a good answer as it is."""
        attempts = Attempts(self.address, self.patience)
        while True:
            try:
                response = self.http.request(**_arguments(request))
            except httpx.TransportError as error:
                time.sleep(attempts.after(error))
                continue
            if response.is_success:
                return response
            time.sleep(attempts.after(response))

    def close(self) -> None:
        self.http.close()


class AsyncSender:
    """Sends requests, and waits in the event loop."""

    def __init__(self, address: Address, *, patience: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.address, self.patience = address, patience
        # As many connections as there are episodes at once: how many those are is bounded by whoever plays them.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self.http = httpx.AsyncClient(base_url=address.url, headers=address.headers, timeout=_TIMEOUT, limits=limits, transport=transport)

    async def send(self, request: Request) -> Any:
        """Return the answer's JSON; None for an empty one.

        Raises:
            GatewayError: The gateway refuses, or can't be reached for as long as it is waited for.
        """
        return answer_of(await self.fetch(request))

    async def fetch(self, request: Request) -> httpx.Response:
        """Return a good answer as it is."""
        attempts = Attempts(self.address, self.patience)
        while True:
            try:
                response = await self.http.request(**_arguments(request))
            except httpx.TransportError as error:
                await asyncio.sleep(attempts.after(error))
                continue
            if response.is_success:
                return response
            await asyncio.sleep(attempts.after(response))

    async def close(self) -> None:
        await self.http.aclose()


def _arguments(request: Request) -> dict[str, Any]:
    arguments = {"method": request.method, "url": request.path, "json": request.json, "headers": request.headers}
    if request.params:
        arguments["params"] = {name: value for name, value in request.params.items() if value is not None}
    return arguments


def answer_of(response: httpx.Response) -> Any:
    """Read an answer's JSON.

    Raises:
        GatewayError: It has none, so that what answered is no gateway.
    """
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise GatewayError(
            f"{response.request.url} answered with something that isn't JSON ({response.text[:80]!r}): is that an art_gym gateway?",
            status=response.status_code,
        ) from None
