"""What those who run a gateway look at: /health, /ready and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from art_gym._version import __version__
from art_gym.gateway._errors import ApiError
from art_gym.gateway._state import Gateway, gateway_of
from art_gym.gateway.schemas import SCHEMA_VERSION

_CHECK_SECONDS = 2.0
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
# From the gateway's own answers, in milliseconds, to generations of half an hour.
_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    """The process answers."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    schema_: Literal[1] = Field(default=SCHEMA_VERSION, alias="schema", examples=[SCHEMA_VERSION])
    """The version of this schema."""
    status: Literal["ok"] = Field(default="ok", examples=["ok"])
    """Always `ok`."""
    version: str = Field(examples=["0.1.0"])
    """Of art_gym."""


class Readiness(BaseModel):
    """Whether calls can be answered; each check is `ok` or says what is wrong."""

    model_config = ConfigDict(use_attribute_docstrings=True, populate_by_name=True)

    schema_: Literal[1] = Field(default=SCHEMA_VERSION, alias="schema", examples=[SCHEMA_VERSION])
    """The version of this schema."""
    ready: bool = Field(examples=[True])
    """Whether all checks are `ok`."""
    upstream: str = Field(examples=["ok"])
    """The model server answers."""
    store: str = Field(examples=["ok"])
    """Episodes can be written."""
    draining: bool = Field(examples=[False])
    """The gateway is being shut down."""
    policy: str = Field(examples=["policy@3"])
    """The version that answers."""


@router.get("/health", response_model=Health, summary="Whether the process answers")
async def health() -> Response:
    """For a liveness probe. It needs no key."""
    return JSONResponse({"schema": SCHEMA_VERSION, "status": "ok", "version": __version__})


@router.get(
    "/ready",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Calls can't be answered; the checks say why."}},
    summary="Whether calls can be answered",
)
async def ready(request: Request) -> Response:
    """For a readiness probe. It needs no key."""
    gateway = gateway_of(request)
    upstream, store = await asyncio.gather(_check_upstream(gateway), _check_store(gateway))
    draining = bool(getattr(request.app.state, "draining", False))
    data = {
        "schema": SCHEMA_VERSION,
        "ready": upstream == store == "ok" and not draining,
        "upstream": upstream,
        "store": store,
        "draining": draining,
        "policy": gateway.policy.current.version,
    }
    return JSONResponse(data, 200 if data["ready"] else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "In Prometheus's text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    summary="Figures for Prometheus",
)
async def metrics(request: Request) -> Response:
    """Counts of requests, calls, tokens, episodes and jobs. It needs a key where the gateway has keys."""
    found: Metrics = request.app.state.metrics
    return Response(generate_latest(found.registry), media_type=CONTENT_TYPE_LATEST)


async def _check_upstream(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            answer = await gateway.upstream.send("/models", method="GET")
            answer.close()
    except TimeoutError:
        return f"it didn't answer within {_CHECK_SECONDS:g} seconds"
    except ApiError as error:
        return error.message
    return "ok" if answer.status < 400 else f"it answers with {answer.status}"


async def _check_store(gateway: Gateway) -> str:
    try:
        async with asyncio.timeout(_CHECK_SECONDS):
            await gateway.store.check()
    except TimeoutError:
        return f"it didn't write within {_CHECK_SECONDS:g} seconds"
    except ApiError as error:
        return error.message
    return "ok"


class Metrics:
    """A gateway's figures, in a registry of their own, so that several gateways fit into one process.

    Args:
        app: Whose store, policy and jobs are looked at when the figures are asked for.
    """

    def __init__(self, app: FastAPI) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("art_gym_requests", "Requests, by route and status.", ("method", "route", "status"), registry=self.registry)
        self._seconds = Histogram(
            "art_gym_request_seconds", "From a request's head to the end of its answer.", ("route",), buckets=_BUCKETS, registry=self.registry
        )
        self.under_way = Gauge("art_gym_requests_under_way", "Requests that are being answered.", registry=self.registry)
        self._children: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        self.registry.register(_Figures(app))

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is its template, so that there are few."""
        method = method if method in _METHODS else "other"
        key = (method, route, status)
        if (children := self._children.get(key)) is None:
            children = self._children[key] = (self._requests.labels(method, route, str(status)), self._seconds.labels(route))
        children[0].inc()
        children[1].observe(seconds)


class _Figures(Collector):
    """What is known elsewhere, read when it is asked for."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._began = time.time()

    def describe(self) -> Iterator[Metric]:
        """Nothing: there is no gateway yet when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The figures of now."""
        gateway: Gateway | None = getattr(self._app.state, "gateway", None)
        yield GaugeMetricFamily("art_gym_start_time_seconds", "When the gateway was made, in seconds since 1970.", self._began)
        if gateway is None:
            return
        store, policy = gateway.store, gateway.policy
        yield GaugeMetricFamily("art_gym_calls_in_flight", "Calls of the policy that are under way.", policy.running)
        yield CounterMetricFamily("art_gym_captured_calls", "Calls that were captured.", store.captured_calls)
        yield CounterMetricFamily("art_gym_sampled_tokens", "Tokens that were sampled in captured calls.", store.captured_tokens)
        yield GaugeMetricFamily("art_gym_policy_step", "The version that answers.", policy.current.step)
        episodes = GaugeMetricFamily("art_gym_episodes", "Episodes in the store, by state.", labels=("state",))
        for state, count in store.states().items():
            episodes.add_metric((state,), count)
        yield episodes
        if gateway.jobs is not None:
            jobs = GaugeMetricFamily("art_gym_jobs", "Training jobs, by state.", labels=("state",))
            for state, count in gateway.jobs.describe().items():
                jobs.add_metric((state,), count)
            yield jobs
