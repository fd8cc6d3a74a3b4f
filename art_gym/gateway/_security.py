"""The guard before all routes: who asks, how much, how slowly and how often; and what is counted and logged of each request.

One ASGI middleware, in front of everything else. What has to hold before there is a request, is in `_protocol`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import random
import re
import time
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_gym.gateway._episodes_api import EPISODE_KEY
from art_gym.gateway._errors import ApiError
from art_gym.gateway._limits import RateLimit, retry_after
from art_gym.gateway._logs import request_id
from art_gym.gateway._operations import Metrics
from art_gym.gateway.settings import GatewaySettings
from art_gym.gateway.store import UnknownEpisode

logger = logging.getLogger(__name__)
access = logging.getLogger("art_gym.gateway.access")

BODY_SECONDS = 60.0
"""How long a request's body may take to arrive."""

_OPEN_TO_ALL = frozenset(("/health", "/ready"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_EPISODE_PATH = re.compile(r"/episodes/([^/]+)(/v1(?:/.*)?)?")
_CALL_PATH = re.compile(r"(?:/episodes/[^/]+)?/v1/.*", re.DOTALL)


def guard(app: FastAPI, settings: GatewaySettings, *, body_seconds: float = BODY_SECONDS) -> None:
    """Put the guard before an application's routes, and its figures at `app.state.metrics`."""
    app.state.metrics = Metrics(app)
    app.add_middleware(Guard, settings=settings, metrics=app.state.metrics, body_seconds=body_seconds)


class Guard:
    """Answers what may not pass, and watches what does.

    Args:
        app: What is guarded.
        settings: Keys and limits.
        metrics: Where requests are counted.
        body_seconds: How long a body may take to arrive.
    """

    def __init__(self, app: ASGIApp, *, settings: GatewaySettings, metrics: Metrics, body_seconds: float = BODY_SECONDS) -> None:
        self._app, self._metrics, self._limits, self._body_seconds = app, metrics, settings.limits, body_seconds
        self._keys = [_hashed(key.get_secret_value()) for key in settings.api_keys]
        per_minute = settings.limits.requests_per_minute
        self._rate = None if per_minute is None else RateLimit(per_minute)
        self._public_host = urlsplit(settings.public_url or "").hostname
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return
        request = _Watched(scope, receive, send, self._limits.body_bytes, self._body_seconds)
        token = request_id.set(request.id)
        self._metrics.under_way.inc()
        try:
            await self._answer(request)
        finally:
            self._metrics.under_way.dec()
            self._tell(request)
            request_id.reset(token)

    async def _answer(self, request: _Watched) -> None:
        is_call = False
        try:
            self._check_head(request)
            await self._check_key(request)
            # Only what may ask counts, and what asks the policy.
            if is_call := request.scope["method"] == "POST" and _CALL_PATH.fullmatch(request.scope["path"]) is not None:
                self._calls += 1
                if self._calls > self._limits.concurrent_calls:
                    raise ApiError(429, f"{self._limits.concurrent_calls} calls are under way, and no more may be.", headers=retry_after(1))
            await self._app(request.scope, request.receive, request.send)
        except ApiError as error:
            if request.status:
                raise
            await error.response()(request.scope, request.receive, request.send)
        except asyncio.CancelledError:
            request.ending = "cancelled"
            raise
        except Exception:
            logger.exception("a request failed")
            request.ending = "failed"
            if request.status:
                # The answer has begun: breaking the connection is what tells the client that it isn't whole.
                raise
            await ApiError(500, "The gateway failed; its log says why.").response()(request.scope, request.receive, request.send)
        finally:
            if is_call:
                self._calls -= 1

    def _check_head(self, request: _Watched) -> None:
        scope, headers = request.scope, request.headers
        size = (
            len(scope.get("raw_path") or b"") + len(scope["query_string"]) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        )
        if size > self._limits.header_bytes:
            raise ApiError(431, f"The request's head has {size} bytes, and may have {self._limits.header_bytes}.")
        length = headers.get(b"content-length")
        if length is not None and length.isdigit() and (len(length) > 18 or int(length) > self._limits.body_bytes):
            raise ApiError(413, f"The request's body may have {self._limits.body_bytes} bytes, and has {length.decode():.30}.")
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin")
        if origin is not None and _host_of(origin.decode("latin-1")) != host.lower():
            raise ApiError(403, "Web pages of other origins can't use the gateway: it answers to no cross-origin request.", param="Origin")
        if not self._keys and not self._is_own(host):
            # Else a web page could reach a gateway on its visitor's machine, by a name of its own that leads there.
            raise ApiError(
                403, f"The gateway doesn't know itself as {host!r:.200}; ask by its address, or set its public URL or API keys.", param="Host"
            )

    def _is_own(self, host: str) -> bool:
        """Whether a Host header names this gateway for certain: by an address, or a name that public DNS doesn't have."""
        name = _name_of(host)
        if name is None:
            return host == ""
        if "." not in name and ":" not in name:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == self._public_host or name.endswith(".localhost")
        return True

    async def _check_key(self, request: _Watched) -> None:
        path, address = request.scope["path"], (request.scope.get("client") or ("", 0))[0]
        if path in _OPEN_TO_ALL:
            return
        key = request.key()
        if key is not None and key.startswith(EPISODE_KEY):
            request.who = await self._of_episode(request, key, address)
        elif not self._keys:
            request.who = f"address {address}"
        else:
            # All are compared, so that the time tells nothing.
            given = _hashed(key or "")
            found = [index for index, known in enumerate(self._keys, 1) if hmac.compare_digest(known, given)]
            if not found:
                self._refuse(address, "No API key was given; send it as `Authorization: Bearer …`." if key is None else "The API key is wrong.")
            request.who = f"key {found[0]}"
        self._limit_rate(request.who)

    async def _of_episode(self, request: _Watched, key: str, address: str) -> str:
        """Let an episode's own key open its calls and its record, and nothing else."""
        match = _EPISODE_PATH.fullmatch(request.scope["path"])
        if match is None or not (match[2] is not None or request.scope["method"] in ("GET", "HEAD")):
            raise ApiError(403, "The key is an episode's own: it opens that episode's calls and record only. Use the gateway's key.")
        try:
            known = (await request.scope["app"].state.gateway.store.get(match[1])).key_hash
        except UnknownEpisode:
            known = ""
        if not hmac.compare_digest(known.encode(), hashlib.sha256(key.encode("latin-1", "replace")).hexdigest().encode()):
            self._refuse(address, "The key isn't the one of this episode.")
        return f"episode {match[1]}"

    def _refuse(self, address: str, message: str) -> None:
        # Guesses count too.
        self._limit_rate(f"address {address}")
        raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _limit_rate(self, who: str) -> None:
        if self._rate is not None and (seconds := self._rate.take(who)):
            most = self._limits.requests_per_minute
            raise ApiError(429, f"No more than {most} requests a minute; come back in {seconds:.1f} seconds.", headers=retry_after(seconds))

    def _tell(self, request: _Watched) -> None:
        scope, seconds = request.scope, time.perf_counter() - request.began
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        self._metrics.count(scope["method"], route, request.status, seconds)
        if access.isEnabledFor(logging.INFO):
            extra: dict[str, Any] = {"method": scope["method"], "route": route, "status": request.status, "seconds": round(seconds, 6)}
            if (episode := scope.get("path_params", {}).get("episode_id")) is not None:
                extra["episode"] = episode[:100]
            extra["by"], extra["bytes_in"], extra["bytes_out"] = request.who, request.bytes_in, request.bytes_out
            if request.ending != "whole":
                extra["ending"] = request.ending
            access.info("request", extra=extra)


class _Watched:
    """A request under way: its body is counted and timed as it comes in, and its answer gets the request's id."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_bytes: int, body_seconds: float) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self._most, self._seconds = body_bytes, body_seconds
        self.began = time.perf_counter()
        self._deadline = asyncio.get_running_loop().time() + body_seconds
        self.headers = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self._id = given if _REQUEST_ID.fullmatch(given) else b"req-%032x" % random.getrandbits(128)
        self.who = "nobody"
        self.status = self.bytes_in = self.bytes_out = 0
        self.ending = "whole"
        self._body_over = False

    @property
    def id(self) -> str:
        """The client's own id for it where that can be one, else a new one."""
        return self._id.decode()

    def key(self) -> str | None:
        """The key that was given."""
        value = self.headers.get(b"authorization", b"").decode("latin-1").strip()
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return str(key).strip()
        given: str = self.headers.get(b"x-api-key", b"").decode("latin-1").strip()
        return given or None

    async def receive(self) -> Message:
        """The body's next part.

        Raises:
            HTTPException: The body is too long (413) or too slow (408). FastAPI lets that kind pass when it reads a body.
        """
        if self._body_over:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            self._body_over = True
            raise HTTPException(
                408, f"The request's body didn't come within {self._seconds:g} seconds.", headers={"Connection": "close"}
            ) from None
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
            self._body_over = not message.get("more_body", False)
            if self.bytes_in > self._most:
                self._body_over = True
                raise HTTPException(413, f"The request's body may have {self._most} bytes.", headers={"Connection": "close"})
        else:
            self._body_over = True
        return message

    async def send(self, message: Message) -> None:
        """Send the answer's next part."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message.setdefault("headers", [])
            if not any(name == b"x-request-id" for name, _ in headers):
                message["headers"] = [*headers, (b"x-request-id", self._id)]
        elif message["type"] == "http.response.body":
            self.bytes_out += len(message.get("body", b""))
        await self._send(message)


def _hashed(key: str) -> bytes:
    """Of equal length for all keys, so that comparing them tells no length either."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _host_of(origin: str) -> str | None:
    """The host and port of an origin, as a Host header gives them."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name_of(host: str) -> str | None:
    """The name or address in a Host header, without its port; None if it's none."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
