"""The OpenAI routes: requests go to vLLM, answers come back as they are, and those under an episode's URL are captured on the way.

Bodies are vLLM's to validate. They are handled without FastAPI's own machinery, which would cost more than the rest of a call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from art_gym.gateway._asking import PATHS, ask
from art_gym.gateway._capture import Capture
from art_gym.gateway._errors import ApiError, error_body
from art_gym.gateway._openapi import PROXIED, described
from art_gym.gateway._state import Gateway, gateway_of
from art_gym.gateway._streams import ResponseStreamCapture, StreamCapture
from art_gym.gateway._upstream import failure
from art_gym.gateway._wire import Fields, encode, raw, read_fields, value
from art_gym.gateway.calls import Call, CallKind
from art_gym.gateway.policy import Ticket, UnknownModel

logger = logging.getLogger(__name__)

EPISODE_HEADER = "x-art-gym-episode"
"""Names the episode that a plain call became, where every call is captured."""

_INVALID = (400, 422)

_KINDS: dict[str, CallKind] = {path: kind for kind, path in PATHS.items()}

_NOT_SENT = frozenset(
    (
        *("host", "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
        *("content-length", "accept-encoding", "expect", "authorization", "cookie", "x-api-key", "forwarded", "via"),
    )
)
_NOT_RETURNED = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"upgrade", b"trailer"))


class Proxied:
    """One request under way: an ASGI response, so that it sees the client leave.

    Args:
        gateway: Where it came to.
        path: After the base URL.
        body: As received; None for GET.
        headers: The ones that go to vLLM.
        episode: The id of the episode that it belongs to.
        method: Of HTTP.
        query: After the "?".
    """

    def __init__(
        self,
        gateway: Gateway,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        episode: str | None = None,
        method: str = "POST",
        query: str = "",
    ) -> None:
        self._gateway, self._path, self._method, self._query = gateway, path, method, query
        self._body, self._headers, self._episode = body, headers, episode
        self._began = time.time()
        self._gone = self._started = self._over = False
        self._ticket: Ticket | None = None
        self._stream: StreamCapture | ResponseStreamCapture | None = None
        self._episode_made = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        listener = asyncio.create_task(self._until_gone(receive, task))
        try:
            await self._run(send)
        except asyncio.CancelledError:
            # The client left, the weights are about to be written over, or the server ends: none of them cancels what is still to be done here.
            if task is not None:
                task.uncancel()
            await self._keep_rest()
            if not self._gone:
                await self._tell_of_end(send)
        finally:
            listener.cancel()
            if self._ticket is not None:
                self._gateway.policy.leave(self._ticket)

    async def _tell_of_end(self, send: Send) -> None:
        if self._ticket is not None and self._ticket.interrupted:
            error = ApiError(
                503, "The policy's weights are being replaced, and the call took too long; ask again.", headers={"Retry-After": "1"}
            )
        else:
            error = ApiError(503, "The gateway is shutting down.", headers={"Retry-After": "5"})
        if not self._started:
            raise error
        await self._fail(send, error)

    async def _until_gone(self, receive: Receive, task: asyncio.Task[Any] | None) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # The server also tells of the end of its own answer.
        if not self._over and task is not None:
            self._gone = True
            task.cancel()

    async def _run(self, send: Send) -> None:
        gateway, kind = self._gateway, _KINDS.get(self._path)
        fields = None if self._body is None else read_fields(self._body)
        model = None if fields is None else _model_of(fields)
        captured = kind is not None and fields is not None and (self._episode is not None or gateway.settings.capture_all)
        if self._episode is not None:
            await self._check_episode(self._episode, captured)
        try:
            self._ticket = await gateway.policy.enter(model)
        except UnknownModel as error:
            raise ApiError(404, str(error), param="model") from error
        resolved = self._ticket.resolved
        if not captured or kind is None or fields is None:
            await self._relay(send, self._body if fields is None else self._own_body(resolved.upstream_model), None)
            return
        if value(fields, "background"):
            raise ApiError(400, "Background responses can't be captured; ask without `background`.", param="background")
        asked = ask(kind, fields, gateway.settings.sampling)
        capture = Capture(asked, resolved, self._began)
        await self._relay(send, asked.encoded(resolved.upstream_model), capture)

    def _own_body(self, upstream_model: str) -> bytes:
        """The client's request, with vLLM's name for the model."""
        assert self._body is not None
        fields = read_fields(self._body)
        if _model_of(fields) == upstream_model:
            return self._body
        fields["model"] = raw(upstream_model)
        return encode(fields)

    async def _check_episode(self, episode: str, captured: bool) -> None:
        record = await self._gateway.store.get(episode)
        if not captured:
            return
        if record.state != "open":
            raise ApiError(409, f"Episode {episode} is {record.state}: it takes no more calls. Create another one.")
        most = self._gateway.settings.limits.calls_per_episode
        if record.calls >= most:
            raise ApiError(409, f"Episode {episode} has {record.calls} calls, and may have no more ({most}). Finish it.")

    async def _relay(self, send: Send, body: bytes | None, capture: Capture | None) -> None:
        answer = await self._gateway.upstream.send(self._path, body, self._headers, method=self._method, query=self._query)
        try:
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                if capture is not None and answer.status == 200:
                    kind = capture.asked.kind
                    self._stream = ResponseStreamCapture(capture, self._gateway.upstream) if kind == "responses" else StreamCapture(capture)
                await self._relay_stream(send, answer)
                return
            data = await self._gateway.upstream.read(answer)
        finally:
            # What wasn't read to its end is cancelled by closing the connection; else this does nothing.
            answer.close()
        if capture is not None and answer.status in _INVALID:
            answer, data = await self._own_error(answer, data, capture)
        elif capture is not None and answer.status == 200:
            calls, data = await capture.whole(data, self._gateway.upstream)
            await self._add(calls)
        headers = _returned(answer)
        if self._episode_made:
            headers.append((EPISODE_HEADER.encode(), str(self._episode).encode()))
        headers.append((b"content-length", str(len(data)).encode()))
        self._started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._end(send, data)

    async def _own_error(self, answer: aiohttp.ClientResponse, data: bytes, capture: Capture) -> tuple[aiohttp.ClientResponse, bytes]:
        """The error that vLLM has for the client's own request, as its texts tell of what was sent."""
        assert self._body is not None
        named = _model_of(read_fields(self._body)) is not None
        body = self._own_body(capture.resolved.upstream_model) if named else self._body
        own = await self._gateway.upstream.send(self._path, body, self._headers)
        try:
            return (own, await self._gateway.upstream.read(own)) if own.status in _INVALID else (answer, data)
        finally:
            own.close()

    async def _relay_stream(self, send: Send, answer: aiohttp.ClientResponse) -> None:
        headers, stream = _returned(answer), self._stream
        if stream is not None and self._episode is None:
            await self._make_episode()
            headers.append((EPISODE_HEADER.encode(), str(self._episode).encode()))
        self._started = True
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            async for received in answer.content.iter_any():
                data = received
                if isinstance(stream, StreamCapture):
                    data = stream.feed(received)
                elif stream is not None:
                    data = await stream.feed(received)
                if stream is not None and stream.complete:
                    # Before the client can know of the end, and finish the episode.
                    await self._add(stream.take())
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._keep_rest()
            await self._fail(send, failure(error))
            return
        except ApiError as error:
            await self._fail(send, error)
            return
        rest = b""
        if stream is not None:
            await self._keep_rest()
            rest = stream.end()
        await self._end(send, rest)

    async def _end(self, send: Send, data: bytes) -> None:
        self._over = True
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _fail(self, send: Send, error: ApiError) -> None:
        """Tell of an error within a stream, as vLLM does."""
        data = error_body(error.status, error.message, kind=error.kind)
        if self._path == "/responses":
            event = {"type": "error", "code": str(error.status), "message": error.message, "param": None, "sequence_number": 0}
            end = b"event: error\ndata: " + encode(event) + b"\n\n"
        else:
            end = b"data: " + data + b"\n\ndata: [DONE]\n\n"
        await self._end(send, end)

    async def _keep_rest(self) -> None:
        """Keep what was sampled of a stream that didn't come to its end."""
        if self._stream is not None:
            try:
                await self._add(self._stream.take())
            except ApiError as error:
                logger.warning("an abandoned call of episode %s could not be kept: %s", self._episode, error)

    async def _add(self, calls: list[Call]) -> None:
        if not calls:
            return
        if self._episode is None:
            await self._make_episode()
        assert self._episode is not None
        store = self._gateway.store
        for call in calls:
            await store.add_call(self._episode, call)
        if self._episode_made:
            await store.finish(self._episode, reward=None, rewards={}, metrics={}, failure=None, idempotency=None)

    async def _make_episode(self) -> None:
        record = await self._gateway.store.create(group=None, scenario=None, metadata={}, key_hash="", idempotency=None)
        self._episode, self._episode_made = record.id, True


def _model_of(fields: Fields) -> str | None:
    model = value(fields, "model")
    if model is None or isinstance(model, str):
        return model
    raise ApiError(400, "`model` must be a text.", param="model")


def _sent(request: Request) -> dict[str, str]:
    """The headers that vLLM is to see; the client's key isn't among them."""
    names = request.headers.get("connection", "").lower()
    return {
        name.decode("latin-1"): content.decode("latin-1")
        for name, content in request.scope["headers"]
        if (text := name.decode("latin-1")) not in _NOT_SENT and not text.startswith(("x-stainless-", "x-forwarded-")) and text not in names
    }


def _returned(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), content) for name, content in answer.raw_headers if name.lower() not in _NOT_RETURNED]


class _RawRoute(APIRoute):
    """A route that is documented as FastAPI does, and handled without it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Awaitable[Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            return await endpoint(request)

        return handle


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ApiError(400, "The client left before its request had arrived.") from None


def _posted(path: str) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        body = await _body(request)
        return Proxied(gateway_of(request), path, body, _sent(request), episode=request.path_params.get("episode_id"))

    return handle


async def _models(request: Request) -> Response:
    """VLLM's list, with the names that the gateway adds."""
    gateway = gateway_of(request)
    if (episode := request.path_params.get("episode_id")) is not None:
        await gateway.store.get(episode)
    answer = await gateway.upstream.send("/models", None, _sent(request), method="GET")
    data = await gateway.upstream.read(answer)
    if answer.status == 200:
        data = _with_public_names(data, gateway)
    return Response(data, answer.status, media_type="application/json")


def _with_public_names(data: bytes, gateway: Gateway) -> bytes:
    listed = read_fields(data)
    cards = value(listed, "data", [])
    by_name = {card["id"]: card for card in cards}
    policy = gateway.policy
    named = [(policy.name, policy.current), *((policy.version(step), policy.resolve(policy.version(step))) for step in policy.steps)]
    for name, resolved in named:
        if name not in by_name and (like := by_name.get(resolved.upstream_model)) is not None:
            cards.append({**like, "id": name})
    listed["data"] = raw(cards)
    return encode(listed)


def _stored(method: str, ending: str) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        name = request.path_params["response_id"]
        if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum() and len(name) <= 200):
            raise ApiError(404, f"Response with id '{name:.200}' not found.", param="response_id", kind="invalid_request_error")
        gateway, episode = gateway_of(request), request.path_params.get("episode_id")
        body = await _body(request) or None
        query = request.scope["query_string"].decode("latin-1")
        path = f"/responses/{name}{ending}"
        if episode is not None:
            await gateway.store.get(episode)
        return Passed(gateway, path, body, _sent(request), method=method, query=query)

    return handle


class Passed(Proxied):
    """A request about a response that vLLM stores: it samples nothing, and passes as it is."""

    async def _run(self, send: Send) -> None:
        await self._relay(send, self._body, None)


def _router() -> APIRouter:
    router = APIRouter(route_class=_RawRoute)
    for prefix in ("/episodes/{episode_id}/v1", "/v1"):
        for path, about in PROXIED.items():
            tags, extra = ["openai" if prefix == "/v1" else "openai in an episode"], described(about, prefix)
            options: dict[str, Any] = {"tags": tags, "summary": about.summary, "description": about.description, "openapi_extra": extra}
            handlers: dict[str, Callable[[Request], Awaitable[Any]]] = {
                "/models": _models,
                "/responses/{response_id}": _stored("GET", ""),
                "/responses/{response_id}/cancel": _stored("POST", "/cancel"),
            }
            name = f"{'episode_' if 'episode' in prefix else ''}{about.name}"
            router.add_api_route(
                prefix + path,
                handlers.get(path) or _posted(path),
                methods=[about.method],
                name=name,
                operation_id=name,
                response_model=None,
                **options,
            )
    return router


router = _router()
