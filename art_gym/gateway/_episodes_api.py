"""The routes of episodes: create, list, fetch, finish, reward and delete."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from art_gym.gateway._errors import ApiError
from art_gym.gateway._state import Gateway, gateway_of
from art_gym.gateway._store_tables import EpisodeRecord, EpisodeState, new_id
from art_gym.gateway.schemas import (
    SCHEMA_VERSION,
    CreatedEpisode,
    Deleted,
    EpisodeList,
    EpisodeObject,
    EpisodeWithCalls,
    ErrorObject,
    Finish,
    NewEpisode,
    Reward,
    episode_data,
)

EPISODE_KEY = "agk-ep-"
"""What an episode's own key begins with."""

_HOST = re.compile(r"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")

Id = Annotated[str, Path(max_length=100, description="The episode's id.", examples=["ep-Zr2mZ0m1Tq2oX9v7yQ3kTA"])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Makes it safe to send the request again: the same key with the same request gets the same answer, for a day.",
        examples=["3f0d3d1b2a4c"],
    ),
]


def _errors(**texts: str) -> dict[int | str, dict[str, Any]]:
    return {int(name[1:]): {"model": ErrorObject, "description": text} for name, text in texts.items()}


_COMMON = _errors(
    _401="No key, or a wrong one.", _403="The key is an episode's own.", _413="The body is too large.", _503="The store can't be written."
)
_UNKNOWN = _errors(_404="There is no such episode.")
_INVALID = _errors(_400="The body is no JSON.", _422="A field isn't right, or the idempotency key was used for another request.")
_RATE = _errors(_429="Too many requests in a minute; `Retry-After` says when to come back.")

router = APIRouter(tags=["episodes"], responses={**_COMMON, **_RATE})


@router.post(
    "/episodes",
    status_code=201,
    response_model=CreatedEpisode,
    responses={**_INVALID, **_errors(_429="Too many episodes are open, or too many requests in a minute.")},
    summary="Begin an episode",
)
async def create_episode(request: Request, body: NewEpisode, idempotency_key: IdempotencyKey = None) -> Response:
    """Returns a `base_url`: whatever an OpenAI client asks there becomes the episode's turns. `api_key` opens this episode and nothing else."""
    gateway = gateway_of(request)

    # With an idempotency key the same answer can be asked for again, key included, and only its hash is stored.
    def key_of(id: str) -> str:
        return EPISODE_KEY + (secrets.token_hex(32) if idempotency_key is None else gateway.store.key_for(id, idempotency_key))

    id = new_id()
    key = key_of(id)
    record = await gateway.store.create(
        group=body.group,
        scenario=body.scenario,
        metadata=body.metadata,
        key_hash=hashlib.sha256(key.encode()).hexdigest(),
        idempotency=idempotency_key,
        id=id,
    )
    if record.id != id:
        key = key_of(record.id)
    return _answer({**_data(request, gateway, record), "api_key": key}, 201, {"Location": f"/episodes/{record.id}"})


@router.get("/episodes", response_model=EpisodeList, responses=_errors(_422="A parameter isn't right."), summary="List episodes")
async def list_episodes(
    request: Request,
    group: Annotated[str | None, Query(max_length=200, description="Of this group only.", examples=["q17"])] = None,
    state: Annotated[EpisodeState | None, Query(description="In this state only.", examples=["finished"])] = None,
    after: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="The `next` of the page before.", examples=[100])] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="How many at most.", examples=[100])] = 100,
) -> Response:
    """A page of them in the order of their creation, without their calls."""
    gateway = gateway_of(request)
    page = await gateway.store.list(group=group, state=state, after=after, limit=limit)
    return _answer({"schema": SCHEMA_VERSION, "episodes": [_data(request, gateway, one) for one in page.episodes], "next": page.next})


@router.get("/episodes/{episode_id}", response_model=EpisodeWithCalls, responses={**_UNKNOWN, **_errors(_422="A parameter isn't right.")})
async def get_episode(
    request: Request,
    episode_id: Id,
    include: Annotated[Literal["calls"] | None, Query(description="`calls`: with all captured calls, tokens included.")] = None,
) -> Response:
    """Its record; the episode's own key opens it too."""
    gateway = gateway_of(request)
    # Calls first, so that the counts are of at least as many.
    calls = await gateway.store.calls_json(episode_id) if include == "calls" else None
    data = _data(request, gateway, await gateway.store.get(episode_id))
    return _answer({**data, "captured": None if calls is None else msgspec.Raw(calls)})


@router.post(
    "/episodes/{episode_id}/finish",
    response_model=EpisodeObject,
    responses={**_UNKNOWN, **_INVALID, **_errors(_409="The episode is over already, with another end.")},
    summary="End an episode",
)
async def finish_episode(request: Request, episode_id: Id, body: Finish, idempotency_key: IdempotencyKey = None) -> Response:
    """When this is answered, the episode and all of its calls are on disk. The same end given twice counts once."""
    gateway = gateway_of(request)
    record = await gateway.store.finish(
        episode_id, reward=body.reward, rewards=body.rewards, metrics=body.metrics, failure=body.failure, idempotency=idempotency_key
    )
    return _answer(_data(request, gateway, record))


@router.post(
    "/episodes/{episode_id}/rewards",
    response_model=EpisodeObject,
    responses={**_UNKNOWN, **_INVALID, **_errors(_409="The episode failed or has expired.")},
    summary="Add to an episode's reward",
)
async def add_reward(request: Request, episode_id: Id, body: Reward, idempotency_key: IdempotencyKey = None) -> Response:
    """Before or after its end, as often as needed: rewards add up. Send an `Idempotency-Key`, so that a repeated request adds nothing."""
    gateway = gateway_of(request)
    record = await gateway.store.append_reward(
        episode_id, reward=body.reward, rewards=body.rewards, metrics=body.metrics, idempotency=idempotency_key
    )
    return _answer(_data(request, gateway, record))


@router.delete("/episodes/{episode_id}", response_model=Deleted, responses=_UNKNOWN, summary="Delete an episode")
async def delete_episode(request: Request, episode_id: Id) -> Response:
    """With all of its calls, in whatever state it is. A call that is under way isn't kept."""
    await gateway_of(request).store.delete(episode_id)
    return _answer({"schema": SCHEMA_VERSION, "id": episode_id, "deleted": True})


def _answer(data: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, "application/json")


def _data(request: Request, gateway: Gateway, record: EpisodeRecord) -> dict[str, Any]:
    return episode_data(record, f"{_address(request, gateway)}/episodes/{record.id}/v1", gateway.policy.name)


def _address(request: Request, gateway: Gateway) -> str:
    """Where the client found the gateway, so that it finds it there again."""
    settings = gateway.settings
    if settings.public_url is not None:
        return settings.public_url
    host = request.headers.get("host", "")
    if not _HOST.fullmatch(host):
        raise ApiError(400, "The Host header is no host.", param="Host")
    return f"{request.scope['scheme']}://{host}"
