"""Training jobs: one at a time, the others in a queue, each with numbered events and always a last one.

What a job trains on is checked by `_jobs_batch` before it is accepted; the trainer process (`_trainer`) does the work, and `_jobs_versions`
puts what it made in front. A job either makes a new version, which answers from then on, or changes nothing. Jobs and events are on disk: a
gateway that was killed tells the jobs that ran then as failed, and goes on with those that were queued.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_gym.gateway import _jobs_checkpoints as checkpoints
from art_gym.gateway._errors import ApiError
from art_gym.gateway._jobs_batch import Bounds, write_batch
from art_gym.gateway._jobs_versions import Versions
from art_gym.gateway._trainer import Cancelled, Message, Trainer, TrainerFailed
from art_gym.gateway.train_schemas import TERMINAL, TRAIN_SCHEMA_VERSION, Batch, TrainRequest

if TYPE_CHECKING:
    from art_gym.gateway.policy import PolicyState
    from art_gym.gateway.store import SessionStore

Record = dict[str, Any]

_RESTARTED = "the gateway was restarted while the job ran; nothing was changed"
_SHUT_DOWN = "the gateway was shut down before the job was done; nothing was changed"
_AGAIN = "send the request again"


@dataclass(slots=True, eq=False)
class _Job:
    """A job, and what of it isn't on disk.

    Attributes:
        record: What is.
        news: Set, and replaced, with each event.
        committed: The version is being kept; there is no way back but to fail.
        cancelling: Why it is to end without a result; empty unless it is.
        touched: The engine's weights may no longer be those of the version that answers.
        drained: Seconds that the publish waited for calls.
        published: Whether its version answers.
    """

    record: Record
    news: asyncio.Event = field(default_factory=asyncio.Event)
    committed: bool = False
    cancelling: str = ""
    touched: bool = False
    drained: float = 0.0
    published: bool = False

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def over(self) -> bool:
        return self.record["state"] in TERMINAL


class Jobs:
    """Runs training jobs, and owns the versions that they make.

    Args:
        policy: Told of each new version.
        trainer: Does the work.
        folder: The gateway's: checkpoints lie in it, and what queued jobs train on.
        in_place: Whether a version is written over the one before, so that calls have to wait.
        bounds: Of what can be trained on.
        queue: Most jobs that may wait.
        heartbeat_seconds: How often a stream says that it is alive.
        cancel_seconds: How long the trainer process may take to cancel before it is killed.
        grace_seconds: How long a job may go on when the gateway is shut down.
        on_broken: Called with a reason when the engine can't be brought back to the version that answers: nothing may be served then.
    """

    def __init__(
        self,
        policy: PolicyState,
        trainer: Trainer,
        folder: Path,
        *,
        in_place: bool,
        bounds: Bounds | None = None,
        queue: int = 64,
        heartbeat_seconds: float = 15.0,
        cancel_seconds: float = 10.0,
        grace_seconds: float = 30.0,
        on_broken: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.policy, self.folder = policy, folder
        self.versions = Versions(policy, trainer, folder, in_place=in_place, on_broken=on_broken)
        self._trainer, self._bounds, self._most = trainer, bounds or Bounds(), queue
        self._heartbeat, self._cancel_seconds, self._grace = heartbeat_seconds, cancel_seconds, grace_seconds
        self._jobs: dict[str, _Job] = {}
        self._queue: list[_Job] = []
        self._wanted = asyncio.Event()
        self._accepting = asyncio.Lock()
        self._closing = False
        self._closed: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._running: _Job | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._store: SessionStore

    # ------------------------------------------------------- begin and end

    async def open(self, store: SessionStore) -> None:
        """Take up where the last gateway in the folder ended."""
        self._store = store
        for record in await store.jobs():
            job = self._jobs[record["id"]] = _Job(dict(record))
            events = await store.events(job.id, int(record.get("last_event") or 0))
            for event in events:
                # A kill came between an event and the record that counts it.
                self._note(job, event)
            if job.record["state"] == "running":
                await self._take_up(job)
            elif job.record["state"] == "queued":
                if self._file(job).exists():
                    self._queue.append(job)
                else:
                    await self._fail(job, "what the job was to train on is gone", _AGAIN)
            elif events:
                await store.put_job(job.record)
        self._runner = asyncio.create_task(self._run())
        if self._queue:
            self._wanted.set()

    async def _take_up(self, job: _Job) -> None:
        """End a job that ran when the gateway was killed: as done, where its checkpoint was whole."""
        # 0 is no job's.
        step = int(job.record.get("target") or 0)
        noted = checkpoints.manifest(self.folder, step).get("details", {})
        if noted.get("job") == job.id and self.policy.current.step == step:
            figures = noted.get("metrics") or {}
            seconds = time.time() - float(job.record["started"] or job.record["created"])
            steps = int(figures.get("optimiser_steps") or 0)
            version = self.policy.version(step)
            warning = "the gateway was restarted while the version was published; it answers since then"
            await self._end(job, "finished", _finished(step, version, steps, [warning], figures, seconds))
        else:
            if noted.get("job") == job.id:
                await asyncio.to_thread(checkpoints.remove, self.folder, step)
            await self._fail(job, _RESTARTED, _AGAIN)

    async def close(self) -> None:
        """Take no more jobs, let the one that runs end within the grace, fail it otherwise, and end every stream. Twice does no harm."""
        if self._closed is None:
            self._closing = True
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._wanted.set()
        if self._runner is not None:
            done, _ = await asyncio.wait({self._runner}, timeout=self._grace)
            if not done:
                if (job := self._running) is not None and not job.cancelling:
                    job.cancelling = _SHUT_DOWN
                await self._trainer.stop()
                await asyncio.wait({self._runner}, timeout=self._cancel_seconds + 10)
                self._runner.cancel()
                with suppress(asyncio.CancelledError):
                    await self._runner
        await self._trainer.stop()
        for job in self._jobs.values():
            self._announce(job)

    # ------------------------------------------------------------- requests

    async def submit(self, request: TrainRequest, key: str | None = None) -> tuple[Record | Batch, bool]:
        """Accept a job, or with `dry_run` only tell what it would train on.

        Args:
            request: What to train on, and how.
            key: The same key gives the same job, so that a request whose answer was lost can be sent again.

        Returns:
            The job's record or the batch, and whether it is new.

        Raises:
            ApiError: The request can't be trained on, or no more jobs are taken.
        """
        if self._closing:
            raise ApiError(503, "The gateway is being shut down; send the request again once it is back.", headers={"Retry-After": "10"})
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        if request.dry_run:
            return await write_batch(request, self._store, None, self._bounds), False
        # One at a time: two requests with one key make one job.
        async with self._accepting:
            if key is not None and (known := next((job for job in self._jobs.values() if job.record.get("key") == key), None)) is not None:
                if known.record.get("digest") != digest:
                    raise ApiError(409, "This Idempotency-Key came with another request before; use a new key.", param="Idempotency-Key")
                return known.record, False
            if len(self._queue) >= self._most:
                raise ApiError(429, f"{self._most} jobs are waiting already; send the request again later.", headers={"Retry-After": "60"})
            id = f"job-{uuid.uuid4().hex}"
            batch = await write_batch(request, self._store, self._path(id), self._bounds)
            record: Record = {
                "id": id,
                "state": "queued",
                "created": time.time(),
                "started": None,
                "ended": None,
                "config": request.config.model_dump(exclude_none=True),
                "batch": batch.model_dump(),
                "step": None,
                "version": None,
                "reason": None,
                "advice": None,
                "last_event": 0,
                "key": key,
                "digest": digest,
            }
            job = _Job(record)
            await self._store.put_job(record)
            self._jobs[id] = job
            await self._emit(job, "queued", ahead=len(self._queue) + (self._running is not None))
            self._queue.append(job)
            self._wanted.set()
        return record, True

    def get(self, id: str) -> Record:
        """A job's record.

        Raises:
            ApiError: There is none.
        """
        return self._found(id).record

    def list(self, *, state: str | None = None, limit: int = 100) -> list[Record]:
        """The newest jobs first."""
        found = [job.record for job in reversed(self._jobs.values()) if state is None or job.record["state"] == state]
        return found[:limit]

    def describe(self) -> dict[str, int]:
        """How many jobs there are in each state."""
        return dict(Counter(job.record["state"] for job in self._jobs.values()))

    async def events(self, id: str, after: int = 0) -> AsyncIterator[Record | None]:
        """Yield a job's events after a number, as they come, to the terminal one; None where a stream should say that it's alive."""
        job = self._found(id)
        while True:
            news, over = job.news, job.over
            for event in await self._store.events(id, after):
                after = event["number"]
                yield event
                over = over or event["type"] in TERMINAL
            if over or (self._closed is not None and self._closed.done()):
                return
            try:
                async with asyncio.timeout(self._heartbeat):
                    await news.wait()
            except TimeoutError:
                yield None

    async def cancel(self, id: str) -> Record:
        """Cancel a job that hasn't made a version yet.

        Raises:
            ApiError: There is none, or it is too late.
        """
        job = self._found(id)
        if job.record["state"] == "cancelled" or (job.cancelling and not job.over):
            return job.record
        if job.over:
            raise ApiError(409, f"Job {job.id} is {job.record['state']} already.")
        if job in self._queue:
            self._queue.remove(job)
            await self._end(job, "cancelled", {"reason": "cancelled by request, before it began"})
            return job.record
        if job.committed:
            raise ApiError(409, f"Job {job.id} has taken its last step, and its version is being published; activate another one afterwards.")
        job.cancelling = "cancelled by request"
        await self._trainer.tell({"do": "cancel"})
        # Kept, or it could be collected before it ran.
        task = asyncio.create_task(self._kill_later(job))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return job.record

    async def _kill_later(self, job: _Job) -> None:
        await asyncio.sleep(self._cancel_seconds)
        if self._running is job and not job.committed:
            await self._trainer.stop()

    def _found(self, id: str) -> _Job:
        if (job := self._jobs.get(id)) is None:
            raise ApiError(404, f"There is no job {id:.100}.")
        return job

    # ----------------------------------------------------------------- work

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            if self._closing:
                return
            if not self._queue:
                self._wanted.clear()
                continue
            job = self._queue.pop(0)
            async with self.versions.working:
                self._running, self.versions.busy = job, True
                try:
                    await self._work(job)
                except Exception as error:  # noqa: BLE001  whatever it was, the job has to have an end, and the next one its turn
                    await self._fail(job, f"{type(error).__name__}: {error}", "this is a fault of the gateway; its log says where")
                finally:
                    self._running, self.versions.busy = None, False

    async def _work(self, job: _Job) -> None:
        made = max((job.record.get("step") or 0 for job in self._jobs.values()), default=0)
        start, step, began = self.policy.current.step, await self.versions.next_step(made), time.time()
        job.record.update(state="running", started=began, target=step)
        await self._store.put_job(job.record)
        await self._emit(job, "started", version=self.policy.version(start), step=step, batch=job.record["batch"])
        told: dict[str, Message] = {}
        task = {"do": "train", "job": job.id, "file": str(self._file(job)), "from": start, "step": step}
        task["serving"] = self.policy.current.upstream_model
        options = {"config": job.record["config"], "temperature": job.record["batch"]["temperature"]}
        async with AsyncExitStack() as gate:
            try:
                async for message in self._trainer.work(task | options):
                    told[message["event"]] = message
                    await self._hear(job, message, gate)
            except Cancelled:
                await self._end(job, "cancelled", {"reason": job.cancelling})
                return
            except TrainerFailed as error:
                if not job.published:
                    await self._undo(job, error, start, step)
                    return
        seconds = time.time() - began
        if (nothing := told.get("nothing")) is not None:
            end = _finished(None, self.policy.current.version, 0, [], nothing["figures"], seconds)
            end |= {"reason": nothing["reason"], "advice": nothing["advice"]}
        else:
            kept = told["kept"]
            end = _finished(step, self.policy.version(step), kept["optimiser_steps"], kept["warnings"], kept["figures"], seconds)
        await self._end(job, "finished", end)

    async def _hear(self, job: _Job, message: Message, gate: AsyncExitStack) -> None:
        """Act on what the trainer process tells of a job."""
        match message["event"]:
            case "step":
                await self._emit(job, "step", **{key: value for key, value in message.items() if key != "event"})
            case "trained":
                if job.cancelling:
                    await self._trainer.tell({"do": "cancel"})
                else:
                    job.committed = True
                    await self._trainer.tell({"do": "commit"})
            case "ready_to_publish":
                job.touched = True
                job.drained = await self.versions.let_publish(gate)
            case "published":
                await self.versions.serve(message, gate)
                job.published = True
                fields = {key: message[key] for key in ("step", "version", "difference", "seconds")}
                await self._emit(job, "published", **fields, drained_seconds=job.drained)

    async def _undo(self, job: _Job, error: TrainerFailed, start: int, step: int) -> None:
        """End a job that failed, with everything as it was before; the gate is still closed where the engine was touched."""
        await asyncio.to_thread(checkpoints.remove, self.folder, step)
        if job.cancelling:
            if job.cancelling == _SHUT_DOWN:
                await self._fail(job, _SHUT_DOWN, _AGAIN)
            else:
                await self._end(job, "cancelled", {"reason": job.cancelling})
            return
        await self._fail(job, error.reason, error.advice)
        if job.touched and self.versions.in_place and not self._closing:
            await self.versions.restore(start)

    # --------------------------------------------------------------- events

    async def _emit(self, job: _Job, type: str, **fields: Any) -> None:
        event = {"type": type, "number": job.record["last_event"] + 1, "job": job.id, "time": time.time(), "schema": TRAIN_SCHEMA_VERSION}
        event |= _finite(fields)
        await self._store.append_event(job.id, event)
        self._note(job, event)
        await self._store.put_job(job.record)
        if job is self._running and job.over:
            # Whoever hears of the end may change versions at once.
            self.versions.busy = False
        self._announce(job)

    @staticmethod
    def _note(job: _Job, event: Record) -> None:
        """Let the record say what an event says."""
        job.record["last_event"] = event["number"]
        if event["type"] in TERMINAL:
            job.record.update(state=event["type"], ended=event["time"])
            for key in ("reason", "advice", "step", "version"):
                if event.get(key) is not None and not (key == "version" and event.get("step") is None):
                    job.record[key] = event[key]

    @staticmethod
    def _announce(job: _Job) -> None:
        news, job.news = job.news, asyncio.Event()
        news.set()

    async def _end(self, job: _Job, type: str, fields: Record) -> None:
        if not job.over:
            self._file(job).unlink(missing_ok=True)
            await self._emit(job, type, **fields)

    async def _fail(self, job: _Job, reason: str, advice: str) -> None:
        await self._end(job, "failed", {"reason": reason, "advice": advice})

    def _file(self, job: _Job) -> Path:
        return self._path(job.id)

    def _path(self, id: str) -> Path:
        return self.folder / "jobs" / f"{id}.jsonl"


def _finished(step: int | None, version: str, optimiser_steps: int, warnings: list[str], figures: Record, seconds: float) -> Record:
    return {
        "step": step,
        "version": version,
        "optimiser_steps": optimiser_steps,
        "warnings": warnings,
        "figures": figures,
        "seconds": seconds,
    }


def _finite(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
