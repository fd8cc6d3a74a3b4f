"""The endpoint at which external programs ask the policy: the gateway's proxy and capture, without its store.

One server in a thread of its own serves all episodes of an agent, on this machine's loopback only. Where a captured answer goes is the
session's business.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, cast

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from art_gym.errors import EngineError
from art_gym.gateway._errors import ApiError
from art_gym.gateway._proxy import router
from art_gym.gateway._state import Gateway
from art_gym.gateway._upstream import Upstream
from art_gym.gateway.calls import Call
from art_gym.gateway.policy import PolicyState
from art_gym.gateway.settings import GatewaySettings, Sampling

_SAMPLING = ("/chat/completions", "/completions", "/responses")
_STARTING_SECONDS = 20.0


class Served(Protocol):
    """What the endpoint needs of a session. All but `key` is called in the server's thread."""

    key: str

    async def admit(self) -> None:
        """Wait until the policy may be asked.

        Raises:
            ApiError: It may not.
        """

    def release(self) -> None:
        """Tell that a call is over, whatever its end."""

    def captured(self, call: Call) -> None:
        """Take an answer, before the program gets it."""

    def refused(self, status: int, message: str) -> None:
        """Take note of an error that the program was answered."""


class ExternalServer:
    """Serves sessions between `add` and `remove`.

    Args:
        upstream: The base URL of vLLM, or of a gateway.
        model: The name that the policy is served under.
        api_key: Sent to the upstream.
        temperature: Of the sampling, whatever the programs ask for.
    """

    def __init__(self, upstream: str, model: str, *, api_key: str | None, temperature: float) -> None:
        self._settings = GatewaySettings.of(
            upstream=upstream,
            model=model,
            folder=Path(),  # nothing is stored
            upstream_key=api_key,
            aliases=("*",),
            sampling=Sampling(temperature=temperature),
        )
        self._sessions: dict[str, Served] = {}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.url = ""

    def add(self, session: Served) -> str:
        """Serve a session; returns its base URL."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        return f"{self.url}/episodes/{name}/v1"

    def remove(self, session: Served) -> None:
        """Serve it no more."""
        self._sessions = {name: one for name, one in self._sessions.items() if one is not session}

    def start(self) -> None:
        """Begin to serve; blocks for a moment. Does nothing where it serves.

        Raises:
            EngineError: It can't.
        """
        with self._starting:
            if self._server is not None:
                return
            config = uvicorn.Config(
                _Guarded(self._app(), self._sessions_now), host="127.0.0.1", port=0, log_level="warning", access_log=False, lifespan="on"
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, name="art_gym external agents", daemon=True)
            thread.start()
            deadline = time.monotonic() + _STARTING_SECONDS
            while not server.started:
                if not thread.is_alive() or time.monotonic() > deadline:
                    raise EngineError("the endpoint for external programs could not be started; its log is in this process's error output")
                time.sleep(0.005)
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            self._server, self._thread = server, thread

    def stop(self) -> None:
        """End it; blocks for a moment."""
        with self._starting:
            if self._server is not None and self._thread is not None:
                self._server.should_exit = True
                self._server.force_exit = True
                self._thread.join(10)
            self._server = self._thread = None

    def _sessions_now(self) -> dict[str, Served]:
        return self._sessions

    def _app(self) -> FastAPI:
        settings = self._settings

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            upstream = Upstream(settings)
            upstream.open()
            policy = PolicyState(settings.model, settings.model, aliases=settings.aliases)
            app.state.gateway = Gateway(settings, cast("Any", _NoStore(self._sessions_now)), policy, upstream, None)
            try:
                yield
            finally:
                await upstream.close()

        app = FastAPI(lifespan=lifespan, openapi_url=None)
        app.include_router(router)
        app.add_exception_handler(ApiError, _answered)
        return app


async def _answered(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


class _NoStore:
    """Stands where the proxy has its store: calls go to their sessions."""

    def __init__(self, sessions: Any) -> None:
        self._sessions = sessions

    async def get(self, id: str) -> Any:
        return SimpleNamespace(id=id, state="open", calls=0)

    async def add_call(self, id: str, call: Call) -> None:
        if call.id.count("-") > 1:
            raise ApiError(400, "An episode of an environment takes one answer at a time: ask with n = 1 and one prompt.", param="n")
        session = self._sessions().get(id)
        if session is not None:
            session.captured(call)


class _Guarded:
    """Lets requests through to their session's turn only."""

    def __init__(self, app: FastAPI, sessions: Any) -> None:
        self._app, self._sessions = app, sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts = scope["path"].split("/")
        session = self._sessions().get(parts[2]) if len(parts) > 3 and parts[1] == "episodes" else None
        try:
            if session is None:
                raise ApiError(410, "This episode is over, or there is none such: the environment has ended, or its time has.")
            if not secrets.compare_digest(_key(scope), session.key.encode()):
                raise ApiError(401, "The API key is not this episode's; give the client episode.api_key.")
            if scope["method"] != "POST" or not scope["path"].endswith(_SAMPLING):
                await self._app(scope, receive, send)
                return
            await session.admit()
        except ApiError as error:
            if session is not None:
                session.refused(error.status, error.message)
            await error.response()(scope, receive, send)
            return
        try:
            await self._app(scope, receive, _listening(send, session))
        finally:
            session.release()


def _key(scope: MutableMapping[str, Any]) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value).removeprefix(b"Bearer ").strip()
    return b""


def _listening(send: Send, session: Served) -> Send:
    """Send on, and tell the session of an error's text."""
    status, body = 0, b""

    async def sent(message: Message) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status >= 400 and len(body) < 65536:
            body += message.get("body", b"")
            if not message.get("more_body"):
                session.refused(status, _text(body))
        await send(message)

    return sent


def _text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:1000]
    except (ValueError, KeyError, TypeError):
        return body[:1000].decode(errors="replace")


async def in_loop(loop: asyncio.AbstractEventLoop, coroutine: Any) -> Any:
    """Await something in another thread's event loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))
