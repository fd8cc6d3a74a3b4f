"""`art-gym serve`: from the options to a checked configuration, a claimed folder, an engine, a trainer process, and the gateway before them.

The folder is that of a run: `config.yaml`, checkpoints, `metrics.jsonl`, and what the gateway stores. A gateway that starts again in it goes on
with the newest version there. What the gateway does is `art_gym.gateway`'s business; how it begins and ends, `art_gym.cli._serve_process`'s.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from art_gym._files import sync_all
from art_gym.cli import preflight, run_folder
from art_gym.cli.config import RunConfig
from art_gym.cli.values import merge, parse_assignments
from art_gym.errors import UsageError

if TYPE_CHECKING:
    from art_gym.engine import EngineConfig
    from art_gym.gateway.settings import GatewaySettings

ENV_ID = "gateway"
"""What the configuration of such a folder names in the place of an environment."""

_PACKAGES = ("fastapi", "uvicorn", "httptools", "aiohttp", "msgspec", "prometheus_client")
_TRAINER_PACKAGES = tuple(package for package in preflight.TRAINER_PACKAGES if package != "matplotlib")
_KEYS = "ART_GYM_API_KEYS"


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, as the command line gave it; None and empty where nothing was said."""

    model: str | None = None
    adapter: Path | None = None
    folder: Path | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    attach: str | None = None
    public_url: str | None = None
    api_keys: Path | None = None
    aliases: Sequence[str] = ()
    capture_all: bool = False
    temperature: float = 1.0
    client_sampling: bool = False
    train: bool = True
    limits: Sequence[str] = ()
    assignments: Sequence[str] = ()
    shutdown_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is going to be served; checked.

    Attributes:
        request: The user's.
        config: How the model is served and trained.
        folder: The gateway's.
        model_folder: The base model; None with an attached engine and without training.
        settings: The gateway's, with an upstream that is still to be named.
        name: The policy's.
        adapters: Whether versions are published as adapters rather than merged weights.
        engine: How to launch it; None for an attached one.
        resumed: Whether a gateway was served from the folder before.
        listener: The socket that the gateway listens on.
    """

    request: Request
    config: RunConfig
    folder: Path
    model_folder: Path | None
    settings: GatewaySettings
    name: str
    adapters: bool
    engine: EngineConfig | None
    resumed: bool
    listener: socket.socket = field(repr=False)


def run(request: Request) -> None:
    """Check everything, then serve until a signal.

    Raises:
        UsageError: It can't be done; nothing was started and nothing is left.
        EngineError: The engine could not be started, or died.
    """
    for package in _PACKAGES:
        preflight.check_package("art-gym serve", package, extra="gateway")
    config, folder = configure(request)
    resumed = (folder / run_folder.CONFIG).is_file()
    name = str(config.env.kwargs["name"])
    settings = _settings(request, name, folder)
    model_folder = _check(request, config)
    # Bound now, so that a port that is taken is told before a minute is spent on the engine.
    with listening(request.host, request.port) as listener, _held(folder, config):
        # The weights of an attached engine aren't ours.
        adapters = config.engine.attach is not None or preflight.publishes_adapters(config)
        if request.adapter is not None:
            take_adapter(request.adapter, folder)
        engine = None if config.engine.attach else _engine(config, folder, model_folder, name, adapters=adapters, train=request.train)
        plan = Plan(request, config, folder, model_folder, settings, name, adapters, engine, resumed, listener)
        from art_gym.cli import _serve_process

        _serve_process.serve(plan)


def configure(request: Request) -> tuple[RunConfig, Path]:
    """Work out the configuration, over the one that the folder has, and the folder.

    Raises:
        UsageError: Something is missing, unknown or not valid, or contradicts what the folder holds.
    """
    options = parse_assignments(request.assignments)
    if request.model is not None:
        options = merge(options, {"model": {"name": request.model}})
    if request.attach is not None:
        options = merge(options, {"engine": {"attach": request.attach}})
    if request.name is not None:
        options = merge(options, {"env": {"kwargs": {"name": request.name}}})
    if request.adapter is not None:
        options = merge({"model": adapter_size(request.adapter)}, options)
    folder = request.folder
    if folder is None:
        if request.model is None:
            raise UsageError("say what to serve: a model, such as smollm2-135m, or with --dir the folder of a gateway that goes on")
        folder = Path("serve") / (request.name or _short(request.model))
    folder = run_folder.named(folder)
    base: dict[str, Any] = {
        "env": {"id": ENV_ID},
        "warm_start": {"enabled": False},
        "rollout": {"concurrency": 64, "temperature": request.temperature},
        "checkpoints": {"keep_last": 5},
    }
    if not (folder / run_folder.CONFIG).is_file():
        if request.model is None:
            raise UsageError(f"there is no gateway to go on with in {folder}; name the model to serve, such as smollm2-135m")
        base["env"]["kwargs"] = {"name": _short(request.model)}
        return RunConfig.from_values(merge(base, options)), folder
    saved = run_folder.saved_config(folder)
    if saved.env.id != ENV_ID:
        raise UsageError(f"{folder} is the folder of a training run; serve its policy with --adapter {folder}/checkpoints/step-NNNN")
    kept = saved.model_dump(mode="json")
    if request.attach is None:
        kept["engine"] |= {"attach": None, "model": None, "api_key_env": None}
    kept["rollout"]["temperature"] = request.temperature
    config = RunConfig.from_values(merge(kept, options))
    # The checkpoints there depend on these.
    if differing := [key for key in saved.differences(config) if key.startswith(("model.", "env.")) or key == "seed"]:
        raise UsageError(
            f"the gateway in {folder} has other settings than you ask for: {', '.join(differing)}; leave them out, or give another --dir"
        )
    return config, folder


@contextmanager
def _held(folder: Path, config: RunConfig) -> Iterator[None]:
    """Hold the folder for this process, with the configuration in it."""
    resume = (folder / run_folder.CONFIG).is_file()
    try:
        with run_folder.claim(folder, run_folder.saved_config(folder) if resume else config, resume=resume, fresh=False):
            if resume:
                config.save(folder / run_folder.CONFIG)
            yield
    except UsageError as error:
        raise UsageError(str(error).replace("--run-dir", "--dir")) from error


def adapter_size(adapter: Path) -> dict[str, Any]:
    """Rank and scale of an adapter that PEFT saved.

    Raises:
        UsageError: It isn't one.
    """
    path = adapter / "adapter_config.json"
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        size = {"lora_rank": int(noted["r"]), "lora_alpha": int(noted["lora_alpha"])}
    except FileNotFoundError:
        raise UsageError(
            f"{adapter} is no adapter: it holds no adapter_config.json; give the folder that PEFT or a checkpoint was saved to"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} can't be used ({type(error).__name__}: {error}); give a LoRA adapter that PEFT saved") from None
    if not (adapter / "adapter_model.safetensors").is_file():
        raise UsageError(f"{adapter} holds no adapter_model.safetensors; save the adapter with safetensors")
    return size


def take_adapter(adapter: Path, folder: Path) -> None:
    """Copy the adapter that version 0 has into the gateway's folder, where it is read from then on.

    Raises:
        UsageError: The folder has another one.
    """
    checkpoints = folder / "checkpoints"
    taken, weights = checkpoints / "warm-start", "adapter_model.safetensors"
    if taken.exists():
        if not filecmp.cmp(adapter / weights, taken / weights, shallow=False):
            raise UsageError(f"the gateway in {folder} began with another adapter than {adapter}; leave --adapter out, or give another --dir")
        return
    if any(checkpoints.glob("step-*")):
        raise UsageError(f"the gateway in {folder} began without an adapter, and has trained since; leave --adapter out, or give another --dir")
    scratch = checkpoints / ".warm-start.part"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in ("adapter_config.json", weights):
        shutil.copy(adapter / name, scratch / name)
    sync_all(scratch)
    scratch.rename(taken)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Take the gateway's address; nobody is answered yet.

    Raises:
        UsageError: It is taken, or none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"port {port} of {host} can't be used ({reason}); free it, or give another --port (0 picks a free one)") from None
    with listener:
        yield listener


def _settings(request: Request, name: str, folder: Path) -> GatewaySettings:
    from art_gym.gateway.settings import GatewaySettings, Sampling

    return GatewaySettings.of(
        # Known once the engine runs.
        upstream="http://127.0.0.1:1/v1",
        model=name,
        folder=folder,
        host=request.host,
        port=request.port,
        public_url=request.public_url,
        api_keys=_keys(request.api_keys),
        aliases=tuple(request.aliases),
        capture_all=request.capture_all,
        sampling=None if request.client_sampling else Sampling(temperature=request.temperature),
        limits=parse_assignments(request.limits, "--limit"),  # type: ignore[arg-type]  # only named in its errors
    )


def _keys(path: Path | None) -> tuple[str, ...]:
    """The API keys: of a file, a line each, or of the environment; never of the command line, which others can read."""
    text = os.environ.get(_KEYS, "").replace(",", "\n")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"the API keys can't be read from {path} ({error}); give a text file with a key in each line") from None
        if not text.strip():
            raise UsageError(f"{path} holds no API key; write one into it (`openssl rand -hex 32` makes one)")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _check(request: Request, config: RunConfig) -> Path | None:
    """Check that this machine can do it, and find the model's folder."""
    if not request.train and request.adapter is not None:
        raise UsageError("--no-train serves the model as it is; leave --adapter out, or leave --no-train out")
    if request.train:
        for package in _TRAINER_PACKAGES:
            preflight.check_package("training", package, extra="train")
    if config.engine.attach:
        preflight.attached_engine(config.engine).start()
        return preflight.resolve_model(config.model.name, _say) if request.train else None
    engine = preflight.engine_config(config.engine, folder=Path(config.model.name), dtype=config.engine.dtype)
    preflight.check_launch(engine)
    folder = preflight.resolve_model(config.model.name, _say)
    preflight.check_launch(engine.model_copy(update={"model": str(folder)}))
    return folder


def _engine(config: RunConfig, folder: Path, model_folder: Path | None, name: str, *, adapters: bool, train: bool) -> EngineConfig:
    """How to launch the engine; without adapters it reads a folder of the gateway's own, which each version is written over."""
    weights = folder / "weights" if train and not adapters else model_folder or Path()
    # The version that answers, and the one before it while its calls end; version 0 may be a third.
    launched = preflight.policy_engine(config, weights, name, adapters=adapters and train, max_loras=3)
    if not train and config.engine.dtype == "auto":
        # Nothing is merged into it.
        return launched.model_copy(update={"dtype": config.model.dtype})
    return launched


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _say(line: str) -> None:
    typer.echo(line, err=True)
