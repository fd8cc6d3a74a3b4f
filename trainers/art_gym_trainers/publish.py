"""Publishers: how a new policy version gets into the engine, and the proof that it did.

Two ways behind one interface. The LoRA publisher saves the adapter and lets the engine load it under a fresh name (`name@step`): cheap, and the
choice on a GPU. The merged publisher writes the whole weights over the engine's model folder and has them reloaded in place: the choice on a
CPU, where vLLM's LoRA layers decode several times slower.

A publish counts only when the engine's log-probabilities on a probe agree with the trainer's, so that a stale version can't go on answering
unnoticed.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from art_gym.errors import EngineError
from art_gym_trainers.policy import DTYPES, base_model, token_logprobs

_WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Files of a model folder that hold weights, or say where they are."""


class PublishingEngine(Protocol):
    """What a publisher needs of an engine (`art_gym.engine.Engine`)."""

    def reload_weights(self) -> None: ...

    def load_adapter(self, name: str, path: Path) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def models(self) -> list[str]: ...

    def prompt_logprobs(self, token_ids: list[int], model: str | None = None) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class Published:
    """A proven policy version.

    Attributes:
        model: What a request to the engine has to name.
        version: `name@step`, for the record.
        difference: Mean absolute difference in nats between engine and trainer on the probe.
        seconds: Wall time of publishing and proving.
    """

    model: str
    version: str
    difference: float
    seconds: float


class Publisher(Protocol):
    """Puts the trainer's current weights into the engine as version `step`, and proves it."""

    def publish(self, step: int) -> Published: ...


class Probe:
    """Compares engine and trainer on a fixed run of tokens.

    Args:
        token_ids: Tokens on the policy's own ground, such as the first of a recorded episode; a hundred or more tell versions apart well.
        tolerance: Largest mean absolute difference in nats that passes.
    """

    # A version that differs from the one before by more than float noise can't give bit for bit the same answers.
    _CHANGED = 1e-4
    # Versions that differ by less than this can't be told apart by their distances through bfloat16.
    _DISTINCT = 0.01

    def __init__(self, token_ids: Sequence[int], tolerance: float = 0.05) -> None:
        self.token_ids = list(token_ids)
        self.tolerance = tolerance
        self._previous: tuple[list[float], list[float]] | None = None

    def check(self, model: torch.nn.Module, engine: PublishingEngine, engine_model: str | None, version: str) -> float:
        """Return the mean absolute difference.

        Raises:
            EngineError: The engine answers with other weights than the trainer's: a stale version, or a faulty reload.
        """
        expected = token_logprobs(model, self.token_ids)
        actual = engine.prompt_logprobs(self.token_ids, engine_model)
        difference = _distance(actual, expected)
        previous, self._previous = self._previous, (expected, actual)
        if previous is not None:
            old_expected, old_actual = previous
            changed = _distance(old_expected, expected)
            same_answers = changed > self._CHANGED and actual == old_actual
            nearer_to_old = changed > self._DISTINCT and _distance(actual, old_expected) < difference
            if same_answers or nearer_to_old:
                raise EngineError(f"the engine still answers with the version before {version}: the publish did not take effect")
        if not difference <= self.tolerance:  # so that NaN fails
            raise EngineError(
                f"publish of {version} not proven: on a probe of {len(self.token_ids)} tokens the engine's log-probabilities differ from "
                f"the trainer's by {difference:.4f} nats on average (allowed: {self.tolerance}); "
                "check that both use the same model, and their dtypes"
            )
        return difference


class MergedPublisher:
    """Writes base and adapter, merged, or the whole model that is trained, over the engine's model folder, and reloads in place.

    Args:
        model: The policy.
        engine: Serves `folder`.
        folder: A folder made by `prepare_weights`.
        name: Name that the engine serves.
        probe: The proof.
        dtype: Of the written weights; that of the engine. In bfloat16 small updates are rounded away; float32 keeps them.
    """

    def __init__(
        self, model: PeftModel | PreTrainedModel, engine: PublishingEngine, folder: Path, name: str, probe: Probe, dtype: str = "float32"
    ) -> None:
        self.model, self.engine, self.folder, self.name, self.probe, self.dtype = model, engine, folder, name, probe, dtype

    def publish(self, step: int) -> Published:
        started = time.perf_counter()
        version = f"{self.name}@{step}"
        write_weights(merged_state(self.model, self.dtype), self.folder)
        self.engine.reload_weights()
        difference = self.probe.check(self.model, self.engine, None, version)
        return Published(self.name, version, difference, time.perf_counter() - started)


class LoraPublisher:
    """Saves the adapter and loads it into the engine under a fresh name, then drops the one before.

    Args:
        model: The policy.
        engine: Started with LoRA enabled.
        folder: Adapters are written to `folder/name@step`; the current one stays.
        name: The policy's name.
        probe: The proof.
    """

    def __init__(self, model: PeftModel, engine: PublishingEngine, folder: Path, name: str, probe: Probe) -> None:
        self.model, self.engine, self.folder, self.name, self.probe = model, engine, folder, name, probe

    def publish(self, step: int) -> Published:
        started = time.perf_counter()
        version = f"{self.name}@{step}"
        path = self.folder / version
        self.model.save_pretrained(path)
        served = self.engine.models()
        if version in served:
            # An attached server keeps the adapters of a run that was stopped, and refuses a name twice.
            self.engine.unload_adapter(version)
        self.engine.load_adapter(version, path)
        difference = self.probe.check(self.model, self.engine, version, version)
        # By what lies there, not by what was published last: a run that was killed in between goes on in another process.
        for before in self.folder.glob(f"{glob.escape(self.name)}@*"):
            if before.name == version:
                continue
            if before.name in served:
                self.engine.unload_adapter(before.name)
            shutil.rmtree(before, ignore_errors=True)
        return Published(version, version, difference, time.perf_counter() - started)


def prepare_weights(model_folder: Path, folder: Path, dtype: str = "float32") -> None:
    """Make a model folder whose weights may be overwritten: one `model.safetensors` in `dtype`, and copies of all the small files.

    Done already, it is left alone.
    """
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    copy_companions(model_folder, folder)
    write_weights(read_weights(model_folder, dtype), folder)


def copy_companions(model_folder: Path, folder: Path) -> None:
    """Copy what a model folder holds beside its weights: configuration, tokenizer, chat template, licence."""
    for path in model_folder.iterdir():
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _WEIGHTS):
            shutil.copy(path, folder / path.name)


def read_weights(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Read a model folder's safetensors, in one shard or several, in `dtype`."""
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(shard).items()}
    return state


def write_weights(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Replace `model.safetensors` atomically."""
    temporary = folder / "model.safetensors.tmp"
    save_file(state, temporary, metadata={"format": "pt"})
    os.replace(temporary, folder / "model.safetensors")


@torch.no_grad()
def merged_state(model: PeftModel | PreTrainedModel, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The base's state dictionary with the adapter's update added to each adapted weight, in `dtype`; the policy is left as it is.

    A policy without an adapter has nothing to add.

    The sum is taken in float32. A head tied to the embeddings is left out, as `save_pretrained` does.
    """
    base = base_model(model)
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if "lora_" in name:
            continue
        merged = tensor.float()
        owner, _, parameter = name.rpartition(".base_layer.")
        if owner in adapted and parameter == "weight":
            for adapter in adapted[owner].active_adapters:
                merged = merged + adapted[owner].get_delta_weight(adapter).float()
        state[name.replace(".base_layer.", ".")] = merged.to(DTYPES[dtype]).contiguous()
    if base.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
