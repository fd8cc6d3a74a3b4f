"""Trained policies on disk, as `art-gym eval` plays them: a run's best or newest checkpoint, one that is named, or a bare adapter.

How the engine serves one is the same as while it was trained: on a GPU the adapter beside its base, else merged into it in float32, since in
bfloat16 most of a small update would be rounded away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from art_gym.cli import preflight
from art_gym.cli._eval_digests import digest_of
from art_gym.cli._eval_settings import Settings
from art_gym.cli.config import EngineSection, RunConfig
from art_gym.cli.run_folder import CONFIG
from art_gym.errors import UsageError

if TYPE_CHECKING:
    from art_gym.engine import Engine, EngineConfig

Progress = Callable[[str], None]

_ADAPTER = "adapter_config.json"
_CHECKPOINTS, _MANIFEST = "checkpoints", "manifest.json"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that was trained.

    Attributes:
        name: What it is served as, such as "first@10".
        checkpoint: Where its weights are (`art_gym_trainers.checkpoints.Checkpoint`).
        base: The model that it was trained on, by name.
        base_dtype: Of the base's weights meanwhile; None for the model's own.
        step: Batches trained; None of a bare adapter.
        engine: How the run's engine was set up.
    """

    name: str
    checkpoint: Any
    base: str
    base_dtype: str | None
    step: int | None
    engine: EngineSection

    def facts(self) -> dict[str, Any]:
        """What is noted of it: which one it is, and by what its weights are known again."""
        return {"model": self.name, "base": self.base, "step": self.step, "digest": digest_of(self.checkpoint.folder)}

    def check(self, settings: Settings, *, progress: Progress) -> None:
        """Look whether it can be served, and start nothing; the base may be fetched or converted into its cache.

        Raises:
            UsageError: It can't.
        """
        for package in ("torch", "transformers", "peft", "safetensors"):
            preflight.check_package("playing a checkpoint", package, extra="train")
        preflight.check_launch(self._config(Path(self.base), settings))
        preflight.check_launch(self._config(preflight.resolve_model(self.base, progress), settings))

    @contextmanager
    def served(self, settings: Settings, *, log: Path | None, progress: Progress) -> Iterator[Engine]:
        """Serve it until the block ends.

        Raises:
            EngineError: The engine could not be started, or refused the adapter.
        """
        from art_gym.engine import Engine

        base = preflight.resolve_model(self.base, progress)
        config = self._config(base, settings)
        with ExitStack() as stack:
            if not config.enable_lora:
                progress(f"merging {self.name} into {self.base}")
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="art_gym-"))) / "policy"
                import_module("art_gym_trainers.export").export(
                    self.checkpoint, base, folder, form="merged", dtype=config.dtype, base_dtype=self.base_dtype or _own_dtype(base)
                )
                config = config.model_copy(update={"model": str(folder)})
            engine = stack.enter_context(Engine(config, log=log, progress=progress))
            if config.enable_lora:
                engine.load_adapter(self.name, self.checkpoint.folder)
                engine.model = self.name
            yield engine

    def _config(self, base: Path, settings: Settings) -> EngineConfig:
        section = self.engine.model_copy(update={"port": settings.port, "max_model_len": settings.max_model_len, "attach": None})
        config = preflight.engine_config(section, folder=base, dtype="auto", max_num_seqs=settings.concurrency)
        adapter, on_cpu = self.checkpoint.folder / _ADAPTER, config.resolved_device() == "cpu"
        dtype: str = self.engine.dtype
        if dtype == "auto":
            dtype = "float32" if on_cpu else self.base_dtype or ("auto" if adapter.is_file() else "bfloat16")
        if on_cpu or not adapter.is_file():
            return config.model_copy(update={"served_name": self.name, "dtype": dtype})
        return config.model_copy(update={"dtype": dtype, "enable_lora": True, "max_lora_rank": int(_read(adapter).get("r", 32))})


def find(folder: Path, *, step: int | None = None) -> Policy | None:
    """Find the policy in a folder: a run's, a checkpoint's, or an adapter's. None if it holds none, as a model's.

    Args:
        folder: The folder.
        step: Which of a run's checkpoints it is; by default its best, or newest.

    Raises:
        UsageError: The run has no checkpoint yet, or what is there is damaged.
    """
    folder = folder.resolve()
    if (folder / CONFIG).is_file():
        return _of_run(folder, None if step is None else f"step-{step:04d}")
    if (folder / _MANIFEST).is_file() and folder.parent.name == _CHECKPOINTS:
        run = folder.parents[1]
        if not (run / CONFIG).is_file():
            raise UsageError(f"{folder} is a checkpoint without its run: {run} holds no {CONFIG}; move it back, or `art-gym export` it there")
        return _of_run(run, folder.name)
    if (folder / _ADAPTER).is_file():
        base = _read(folder / _ADAPTER).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UsageError(f"{folder / _ADAPTER} names no base model; write its folder or hub id there as base_model_name_or_path")
        checkpoint = import_module("art_gym_trainers.checkpoints").Checkpoint(folder, 0, {})
        return Policy(folder.name, checkpoint, base, None, None, EngineSection())
    return None


def _of_run(run: Path, name: str | None) -> Policy:
    config = RunConfig.load(run / CONFIG)
    checkpoints, parent = import_module("art_gym_trainers.checkpoints"), run / _CHECKPOINTS
    steps = checkpoints.steps(parent)
    if not steps:
        raise UsageError(f"{run} has no checkpoint yet; the first is written after the first batch of GRPO")
    if name is None:
        from art_gym.cli import _standing

        step = checkpoints.best(parent, _standing.scores(config, run), config.checkpoints.goal)
        step = steps[-1] if step is None else step
    else:
        step = next((step for step in steps if f"step-{step:04d}" == name), None)
        if step is None:
            raise UsageError(f"{parent / name} is no whole checkpoint; there are those of: {', '.join(map(str, steps))}")
    return Policy(f"{run.name}@{step}", checkpoints.read(parent, step), config.model.name, config.model.dtype, step, config.engine)


def _own_dtype(model: Path) -> str:
    """The type of a model's own weights, as far as the trainers know it."""
    settings = _read(model / "config.json")
    return "bfloat16" if settings.get("dtype", settings.get("torch_dtype")) == "bfloat16" else "float32"


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise UsageError(f"{path} is damaged; it must hold a JSON object")
    return settings
