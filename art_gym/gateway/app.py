"""The application: what a gateway is made of, and how it begins and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from art_gym._version import __version__
from art_gym.gateway._episodes_api import router as episode_routes
from art_gym.gateway._errors import ApiError, error_body
from art_gym.gateway._jobs_api import router as job_routes
from art_gym.gateway._operations import router as operation_routes
from art_gym.gateway._proxy import router as proxy_routes
from art_gym.gateway._security import guard
from art_gym.gateway._state import Gateway
from art_gym.gateway._upstream import Upstream
from art_gym.gateway.policy import PolicyState
from art_gym.gateway.settings import GatewaySettings
from art_gym.gateway.store import SessionStore

if TYPE_CHECKING:
    from art_gym.gateway.jobs import Jobs

_ABOUT = """
An OpenAI endpoint before vLLM that captures episodes token for token, takes rewards, and trains from them.

Give any OpenAI client the `base_url` of an episode; its calls become the episode's turns. Errors have OpenAI's form.
"""

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string", "description": "What happened, and the way out."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "What of the request is at fault."},
                "code": {"type": "integer", "description": "The HTTP status."},
            },
        }
    },
}

_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request can't be answered.", "content": {"application/json": {"schema": _ERROR}}},
    "5XX": {"description": "The gateway or the model server failed.", "content": {"application/json": {"schema": _ERROR}}},
}


def create_app(settings: GatewaySettings, *, policy: PolicyState | None = None, jobs: Jobs | None = None) -> FastAPI:
    """Make a gateway; it runs under any ASGI server, as one process.

    Args:
        settings: What it is started with.
        policy: The versions that are served; by default one, the model of the settings under its own name.
        jobs: Trains; without it the gateway captures and can't train.
    """
    state = policy or PolicyState(settings.model, settings.model, drain_seconds=settings.drain_seconds, aliases=settings.aliases)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            store, upstream = SessionStore(settings.folder, limits=settings.limits), Upstream(settings)
            stack.push_async_callback(store.close)
            upstream.open()
            stack.push_async_callback(upstream.close)
            app.state.gateway = Gateway(settings, store, state, upstream, jobs)
            if jobs is not None:
                stack.push_async_callback(jobs.close)
                await jobs.open(store)
            yield

    app = FastAPI(title="art_gym gateway", version=__version__, description=_ABOUT.strip(), lifespan=lifespan, responses=_RESPONSES)
    # First what is asked most: routes are tried in turn.
    for routes in (proxy_routes, episode_routes, job_routes, operation_routes):
        app.include_router(routes)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    guard(app, settings)
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return Response(error_body(error.status_code, str(error.detail)), error.status_code, headers, "application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    message = f"{param or first['loc'][0]}: {first['msg']}"
    return Response(error_body(422, message, param=param), 422, media_type="application/json")


async def _bug(request: Request, error: Exception) -> Response:
    return Response(error_body(500, "The gateway failed; its log says why."), 500, media_type="application/json")
