"""The routes of training: jobs, their events, and the checkpoints that they make."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from art_gym.gateway import _jobs_checkpoints as kept
from art_gym.gateway._errors import ApiError
from art_gym.gateway._state import gateway_of
from art_gym.gateway.jobs import Jobs, Record
from art_gym.gateway.train_schemas import (
    TERMINAL,
    TRAIN_SCHEMA_VERSION,
    Batch,
    Checkpoint,
    CheckpointList,
    DryRun,
    Event,
    Job,
    JobList,
    JobState,
    TrainRequest,
)

router = APIRouter(tags=["train"])


class _Lines(StreamingResponse):
    """Documents the media type of a stream's lines."""

    media_type = "application/x-ndjson"


SSE, NDJSON = "text/event-stream", "application/x-ndjson"

JobId = Annotated[str, Path(max_length=100, description="The job's id.", examples=["job-5f0c0f2e5c0b4a0f9d0a3f0d3d1b2a4c"])]
Step = Annotated[int, Path(ge=0, le=10**9, description="The version's number.", examples=[1])]

_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Event,
        "description": "The events, as they come, up to the terminal one. Server-sent events carry the number as `id` and the type as `event`.",
        "content": {
            SSE: {"schema": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"description": "As NDJSON."}}}
        },
    },
    204: {"description": "There is no event after that one, and there will be none."},
    406: {"description": f"`Accept` allows neither {SSE} nor {NDJSON}."},
}


@router.post(
    "/train",
    status_code=202,
    response_model=Job,
    responses={200: {"model": DryRun, "description": "With `dry_run`: what would be trained on."}},
    summary="Train on groups of episodes",
)
async def create_job(
    request: Request,
    body: TrainRequest,
    idempotency_key: Annotated[
        str | None, Header(min_length=1, max_length=255, description="The same key with the same request gives the same job.")
    ] = None,
) -> Response:
    """Start a training job, or queue it behind the others.

    Everything is checked before the answer: what can't be trained on is refused with 422.
    """
    found, _ = await _jobs(request).submit(body, idempotency_key)
    if isinstance(found, Batch):
        return JSONResponse(DryRun(batch=found).model_dump(by_alias=True))
    shown = _shown(found)
    return JSONResponse(shown, 202, {"Location": f"/train/{found['id']}"})


@router.get("/train", response_model=JobList, summary="List jobs")
async def list_jobs(
    request: Request,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most so many.")] = 100,
) -> Response:
    """The newest jobs first."""
    jobs = [_shown(record) for record in _jobs(request).list(state=state, limit=limit)]
    return JSONResponse({"schema": TRAIN_SCHEMA_VERSION, "jobs": jobs})


@router.get("/train/{job}", response_model=Job, summary="Fetch a job")
async def get_job(request: Request, job: JobId) -> Response:
    """Where a job stands."""
    return JSONResponse(_shown(_jobs(request).get(job)))


@router.get("/train/{job}/events", response_class=_Lines, response_model=None, responses=_STREAMS, summary="Follow a job")
async def job_events(
    request: Request,
    job: JobId,
    accept: Annotated[str, Header(description=f"{SSE} (the default) or {NDJSON}.")] = "*/*",
    last_event_id: Annotated[int, Header(ge=0, le=10**9, description="Go on after the event of this number.")] = 0,
    after: Annotated[int, Query(ge=0, le=10**9, description="The same, for clients that can't set headers.")] = 0,
) -> Response:
    """Stream a job's events: those that there were, then those that come, to the terminal one."""
    jobs, form = _jobs(request), _form(accept)
    record, begin = jobs.get(job), max(last_event_id, after)
    if record["state"] in TERMINAL and begin >= record["last_event"]:
        # An EventSource that reconnects after the end stops at this, and at nothing else.
        return Response(status_code=204)
    written = _sse(jobs, job, begin) if form == SSE else _ndjson(jobs, job, begin)
    # Proxies that collect answers would keep events back.
    return StreamingResponse(written, media_type=form, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


@router.post("/train/{job}/cancel", response_model=Job, summary="Cancel a job")
async def cancel_job(request: Request, job: JobId) -> Response:
    """Cancel a job that is queued or training; its last event says that it was. Once its version is being published it's too late (409)."""
    return JSONResponse(_shown(await _jobs(request).cancel(job)))


@router.get("/checkpoints", response_model=CheckpointList, summary="List checkpoints")
async def list_checkpoints(request: Request) -> Response:
    """The versions that are kept, and which one answers."""
    jobs = _jobs(request)
    found = await anyio.to_thread.run_sync(lambda: [_checkpoint(jobs, step) for step in [0, *kept.steps(jobs.folder)]])
    return JSONResponse({"schema": TRAIN_SCHEMA_VERSION, "active": jobs.policy.current.step, "checkpoints": found})


@router.post("/checkpoints/{step}/activate", response_model=Checkpoint, summary="Put a version in front")
async def activate_checkpoint(request: Request, step: Step) -> Response:
    """Let calls under the public name be answered by this version; answered when they are. The next job trains on from it."""
    jobs = _jobs(request)
    await jobs.versions.activate(step)
    return JSONResponse(_checkpoint(jobs, step))


@router.delete("/checkpoints/{step}", status_code=204, response_model=None, summary="Delete a checkpoint")
async def delete_checkpoint(request: Request, step: Step) -> Response:
    """Remove it from disk. The one that answers is refused (409)."""
    await _jobs(request).versions.delete(step)
    return Response(status_code=204)


@router.get(
    "/checkpoints/{step}/adapter",
    response_model=None,
    responses={200: {"description": "A zip file with the adapter, as PEFT and vLLM load it.", "content": {"application/zip": {}}}},
    summary="Download an adapter",
)
async def download_adapter(request: Request, step: Step) -> Response:
    """Fetch a version's LoRA adapter: `adapter_config.json` and `adapter_model.safetensors`."""
    jobs = _jobs(request)
    if step not in kept.steps(jobs.folder):
        raise ApiError(404, f"There is no checkpoint {step} to download.")
    file = await anyio.to_thread.run_sync(kept.adapter, jobs.folder, step)
    if file is None:
        raise ApiError(409, f"Checkpoint {step} holds no adapter, since all weights are trained; `art-gym export` writes them as a model.")
    name = f"{jobs.policy.name.rpartition('/')[2]}-{step:04d}.zip"
    headers = {"Content-Length": str(file.seek(0, os.SEEK_END)), "Content-Disposition": f'attachment; filename="{name}"'}
    file.seek(0)
    return StreamingResponse(_chunks(file), media_type="application/zip", headers=headers)


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    with file:
        while chunk := await anyio.to_thread.run_sync(file.read, 2**20):
            yield chunk


def _jobs(request: Request) -> Jobs:
    jobs = gateway_of(request).jobs
    if jobs is None:
        raise ApiError(409, "This gateway can't train: it was started without a trainer. `art-gym serve` starts one with.")
    return jobs


def _shown(record: Record) -> dict[str, Any]:
    job = Job.model_validate({**record, "events_url": f"/train/{record['id']}/events"})
    return job.model_dump(by_alias=True)


def _checkpoint(jobs: Jobs, step: int) -> dict[str, Any]:
    manifest = kept.manifest(jobs.folder, step) if step else {}
    details = manifest.get("details") or {}
    found = Checkpoint(
        step=step,
        version=jobs.policy.version(step),
        active=jobs.policy.current.step == step,
        served=step in jobs.policy.steps,
        created=manifest.get("time"),
        job=details.get("job"),
        figures=details.get("metrics") or {},
    )
    return found.model_dump(by_alias=True)


def _form(accept: str) -> str:
    """Which of the two forms a client prefers."""
    best: tuple[float, str] = (0.0, "")
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        form = {NDJSON: NDJSON, "application/*": NDJSON, SSE: SSE, "text/*": SSE, "*/*": SSE}.get(media)
        if form and quality > best[0]:
            best = quality, form
    if not best[1]:
        raise ApiError(406, f"Events come as {SSE} or {NDJSON}; ask for one of them in Accept, not for {accept:.100}.")
    return best[1]


async def _sse(jobs: Jobs, job: str, after: int) -> AsyncIterator[bytes]:
    # At once, so that a client knows that it is connected.
    yield b"retry: 2000\n\n"
    async for event in jobs.events(job, after):
        if event is None:
            yield b": heartbeat\n\n"
        else:
            yield f"id: {event['number']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


async def _ndjson(jobs: Jobs, job: str, after: int) -> AsyncIterator[bytes]:
    async for event in jobs.events(job, after):
        line = event or {"type": "heartbeat", "schema": TRAIN_SCHEMA_VERSION, "job": job, "time": time.time()}
        yield json.dumps(line).encode() + b"\n"
