"""The gateway's process: what it starts in which order, how it is watched, and how it ends.

A first signal ends it in order: nothing more is accepted, what is under way gets its time, then every call, job and stream is ended with a
word. A second one ends it at once. The engine and the trainer process end with it, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any

import typer
import uvicorn

from art_gym.cli import preflight
from art_gym.cli._serve import Plan
from art_gym.cli._serve_config import job_config
from art_gym.engine import AttachedEngine, Engine
from art_gym.errors import EngineError
from art_gym.gateway import _jobs_checkpoints as checkpoints
from art_gym.gateway._jobs_batch import Bounds
from art_gym.gateway._logs import configure_logs
from art_gym.gateway._protocol import guarded_protocol
from art_gym.gateway._trainer import Message, TrainerProcess
from art_gym.gateway.app import create_app
from art_gym.gateway.jobs import Jobs
from art_gym.gateway.policy import PolicyState
from art_gym.gateway.settings import GatewaySettings

_WATCH_SECONDS = 1.0
_STOP_SECONDS = 5.0


def serve(plan: Plan) -> None:
    """Serve until a signal.

    Raises:
        EngineError: The engine could not be started, or died.
    """
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None  # type: ignore[assignment]  # asyncio's own then
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(plan))


async def _serve(plan: Plan) -> None:
    async with AsyncExitStack() as stack:
        engine: AttachedEngine | Engine = (
            preflight.attached_engine(plan.config.engine)
            if plan.engine is None
            else Engine(plan.engine, log=plan.folder / "engine.log", progress=say)
        )
        trainer = _trainer(plan, engine) if plan.request.train else None
        if trainer is not None:
            stack.push_async_callback(trainer.stop)
            # Before the engine, which reads what is prepared.
            say("preparing the model")
            await trainer.run({"do": "prepare"})
        await stack.enter_async_context(_started(engine))
        step, model = 0, engine.model
        if trainer is not None:
            await trainer.change(engine={"url": engine.base_url, "model": engine.model, "key": engine.api_key})
            step, model = await first_version(plan, trainer, engine.model)
        values = plan.settings.model_dump() | {"upstream": engine.base_url, "upstream_key": engine.api_key}
        settings = GatewaySettings.of(**values)
        policy = PolicyState(plan.name, model, step=step, drain_seconds=settings.drain_seconds, aliases=settings.aliases)
        server: Server
        jobs = None

        def broken(reason: str) -> None:
            server.fail(reason)

        if trainer is not None:
            grace = max(1.0, plan.request.shutdown_seconds - 2 * _STOP_SECONDS)
            bounds = Bounds(
                vocabulary=_vocabulary(plan),
                longest=None if plan.engine is None else plan.config.engine.max_model_len,
                temperature=plan.request.temperature,
                check=lambda options, temperature, groups: job_config(plan.config, options, temperature=temperature, groups=groups),
            )
            jobs = Jobs(
                policy,
                trainer,
                plan.folder,
                in_place=not plan.adapters,
                bounds=bounds,
                grace_seconds=grace,
                cancel_seconds=_STOP_SECONDS,
                on_broken=broken,
            )
        host, port = plan.listener.getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        told = f"{policy.current.version} is served at {address}/v1; its API is described at {address}/docs"
        server = Server(_server_config(settings, policy, jobs, plan.request.shutdown_seconds), jobs, lambda: typer.echo(told))
        # What is captured from here on isn't thrown away with a folder that came to nothing.
        (plan.folder / "checkpoints").mkdir(exist_ok=True)
        watching = asyncio.create_task(watch(engine, server.fail))
        configure_logs([key.get_secret_value() for key in (*settings.api_keys, settings.upstream_key) if key is not None])
        try:
            await server.serve([plan.listener])
        finally:
            watching.cancel()
        if server.failure:
            raise EngineError(server.failure)


class Server(uvicorn.Server):
    """uvicorn, with jobs that end before streams are waited for, and signals that end it without ending what comes after it.

    Attributes:
        failure: Why it stopped by itself; empty if it didn't.
    """

    def __init__(self, config: uvicorn.Config, jobs: Jobs | None, on_start: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._jobs, self._on_start = jobs, on_start
        self.failure = ""

    async def startup(self, sockets: Any = None) -> None:
        """Begin to answer, and only then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def fail(self, reason: str) -> None:
        """Stop in order, since nothing can be served any more."""
        self.failure = self.failure or reason
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order at a first signal, at once at a second one."""
        if self.should_exit:
            # Whatever was told is on disk; the engine and the trainer process end when this process has.
            os._exit(128 + sig)
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        """Accept nothing more, end jobs and with them the streams of their events, wait for the rest."""
        ending = None if self._jobs is None else asyncio.ensure_future(self._jobs.close())
        await super().shutdown(sockets)
        if ending is not None:
            await ending


def _server_config(settings: GatewaySettings, policy: PolicyState, jobs: Jobs | None, shutdown_seconds: float) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(settings, policy=policy, jobs=jobs),
        http=guarded_protocol(settings.limits),
        ws="none",
        lifespan="on",
        # Longer than proxies keep theirs, so that these never send into a connection that is being closed.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(shutdown_seconds)),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )


async def watch(engine: AttachedEngine | Engine, fail: Callable[[str], None]) -> None:
    """Notice when the engine dies."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        try:
            await asyncio.to_thread(engine.check)
        except EngineError as error:
            fail(str(error))
            return


@asynccontextmanager
async def _started(engine: AttachedEngine | Engine) -> AsyncIterator[None]:
    starting = asyncio.get_running_loop().run_in_executor(None, engine.start)
    try:
        await asyncio.shield(starting)
        yield
    finally:
        # Ctrl-C, say: what is starting is stopped rather than waited for.
        while not starting.done():
            await asyncio.to_thread(engine.stop)
            await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.stop)


def _trainer(plan: Plan, engine: AttachedEngine | Engine) -> TrainerProcess:
    settings = {
        "config": plan.config.model_dump(mode="json"),
        "folder": str(plan.folder.resolve()),
        "model_folder": str(plan.model_folder),
        "name": plan.name,
        "adapters": plan.adapters,
        "dtype": "auto" if plan.engine is None else plan.engine.dtype,
    }
    # Threads that wait by spinning would take the engine's cores.
    return TrainerProcess(settings, plan.folder / "trainer.log", environment={"OMP_WAIT_POLICY": "PASSIVE"}, stop_seconds=_STOP_SECONDS)


async def first_version(plan: Plan, trainer: TrainerProcess, model: str) -> tuple[int, str]:
    """Put the newest version in front, or the one that was put there by hand; returns its number and what the engine calls it."""
    step = checkpoints.first(plan.folder)
    if not plan.resumed and plan.request.adapter is None:
        return step, model  # The engine has just loaded it.
    say(f"publishing {plan.name}@{step}")
    told: list[Message] = []
    async for message in trainer.work({"do": "publish", "from": step}):
        told.append(message)
        if message["event"] == "ready_to_publish":
            await trainer.tell({"do": "go", "drop": []})
    return step, str(told[-1]["model"])


def _vocabulary(plan: Plan) -> int | None:
    """How many tokens the model knows; None where its configuration doesn't say."""
    if plan.model_folder is None:
        return None
    try:
        config = json.loads((plan.model_folder / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return int(size) if size else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def say(line: str) -> None:
    """Tell the user what takes a while."""
    typer.echo(line, err=True)
