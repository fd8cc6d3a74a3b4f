"""The configuration of a training run: every setting, its default, its bounds and what it means.

A configuration is one YAML file with the sections below. It is validated whole before anything starts and saved in the run's folder, so that
the run can be repeated and resumed. Whether the machine can do what it says is `art_gym.cli.preflight`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from art_gym.cli.files import write_text
from art_gym.cli.values import describe, flatten, read_yaml
from art_gym.errors import UsageError


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors, so that a mistyped one is never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True, allow_inf_nan=False)


class EnvironmentSection(Section):
    """Which task is learned."""

    id: str
    """Registered id of the environment, such as art_gym/Lookup-v0 (`art-gym envs` lists them)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the environment, such as its size."""


class ModelSection(Section):
    """Which model learns it, and the adapter that is trained."""

    name: str = "smollm2-135m"
    """The alias smollm2-135m, a local folder, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the base weights in the trainer; the adapter itself is always in float32."""
    lora_rank: int = Field(default=16, ge=1, le=512)
    """Rank of the LoRA matrices."""
    lora_alpha: PositiveInt = 32
    """The adapter's scale is lora_alpha / lora_rank."""


class EngineSection(Section):
    """The vLLM server that plays the episodes."""

    attach: str | None = None
    """Base URL of a running server, such as http://127.0.0.1:8000/v1; nothing is launched then."""
    model: str | None = None
    """Name under which the attached server serves the model; needed only where it serves several."""
    api_key_env: str | None = None
    """Environment variable that holds the attached server's API key, which itself is never saved."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the launched server runs; auto looks for an NVIDIA GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the launched server; auto is float32 on the CPU, where bfloat16 would round merged updates away, else model.dtype."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the launched server; 0 picks a free one."""
    python: Path | None = None
    """Interpreter that has vLLM; this one if not given."""
    kv_cache_gib: PositiveFloat = 2.0
    """Memory for the server's key-value cache on the CPU, in GiB."""
    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    """Share of the GPU's memory that the server may take; the trainer needs the rest."""
    max_model_len: int = Field(default=2048, ge=16)
    """Longest conversation in tokens, prompt and reply together."""
    tool_parser: str = "hermes"
    """The launched vLLM's parser for tool calls; it must suit what the model writes."""
    start_timeout: PositiveFloat = 300.0
    """Seconds until the server must be healthy."""

    @model_validator(mode="after")
    def _attached_only(self) -> Self:
        if self.attach is None and self.model is not None:
            raise ValueError("model is the name that an attached server serves; without attach give model.name instead")
        if self.attach is None and self.api_key_env is not None:
            raise ValueError("api_key_env is for an attached server; give attach too, or leave it out")
        return self


class RolloutSection(Section):
    """How episodes are played."""

    concurrency: PositiveInt = 32
    """Episodes at the same time."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; the trainer uses the same."""
    max_tokens: PositiveInt = 64
    """Most tokens of one reply."""
    turn_timeout: PositiveFloat = 120.0
    """Seconds for one reply of the model."""
    tool_timeout: PositiveFloat = 30.0
    """Seconds for one step of the environment."""
    episode_timeout: PositiveFloat = 600.0
    """Seconds for one episode."""


class WarmStartSection(Section):
    """Supervised steps on episodes of a script that knows how to call the tools and nothing about how to win."""

    enabled: bool = True
    """Whether there is a warm start. A model that already calls tools needs none."""
    steps: PositiveInt = 45
    """Optimiser steps."""
    batch_size: PositiveInt = 4
    """Episodes in one step; each is used once, so that steps × batch_size episodes are scripted."""
    learning_rate: PositiveFloat = 5e-4
    """Peak learning rate."""


class GRPOSection(Section):
    """Group relative policy optimisation."""

    batches: PositiveInt = 16
    """Batches of rollouts; each is played by the newest policy."""
    groups_per_batch: PositiveInt = 8
    """Scenarios in one batch."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of each scenario; they are compared with one another."""
    steps_per_batch: PositiveInt = 8
    """Optimiser steps on one batch; its groups are dealt out to them as evenly as can be."""
    learning_rate: PositiveFloat = 1e-4
    """Learning rate, constant."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the probability ratio may go before its gradient is cut."""
    clip_high: PositiveFloat = 0.28
    """How far above 1 the probability ratio may go before its gradient is cut."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's mean of the gradients."""
    adam_beta2: float = Field(default=0.99, ge=0, lt=1)
    """Decay of Adam's mean of the squared gradients."""
    advantage: Literal["group_std", "group_mean"] = "group_std"
    """Reward minus the group's mean, divided by the group's standard deviation (group_std) or not (group_mean)."""
    token_budget: PositiveInt = 8192
    """Most tokens, padding included, in one forward and backward pass; it bounds the memory."""
    publisher: Literal["auto", "lora", "merged"] = "auto"
    """How a new policy reaches the engine: as a LoRA adapter, as merged weights, or what suits the device."""

    @model_validator(mode="after")
    def _steps_have_groups(self) -> Self:
        if self.steps_per_batch > self.groups_per_batch:
            raise ValueError(f"steps_per_batch ({self.steps_per_batch}) must be at most groups_per_batch ({self.groups_per_batch})")
        return self


class EvaluationSection(Section):
    """How the policy is measured before, between and after."""

    split: Literal["validation", "test"] = "test"
    """Scenarios that are played; those of the train split are trained on."""
    n: PositiveInt = 200
    """How many scenarios of the split are played for the before/after table."""
    every: NonNegativeInt = 0
    """Batches between extra evaluations during GRPO; 0 for none."""


class RunConfig(Section):
    """A whole training run."""

    env: EnvironmentSection
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    warm_start: WarmStartSection = WarmStartSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()
    seed: NonNegativeInt = 0
    """Seed of the model's adapter, the scenarios' order and the sampling."""

    @model_validator(mode="after")
    def _replies_fit(self) -> Self:
        if self.rollout.max_tokens >= self.engine.max_model_len:
            raise ValueError(f"rollout.max_tokens ({self.rollout.max_tokens}) must be below engine.max_model_len ({self.engine.max_model_len})")
        return self

    @model_validator(mode="after")
    def _attached_weights_stay(self) -> Self:
        if self.engine.attach is not None and self.grpo.publisher == "merged":
            raise ValueError("grpo.publisher merged writes the engine's weights, which an attached engine keeps to itself; use lora")
        return self

    @classmethod
    def load(cls, path: Path) -> RunConfig:
        """Read and validate a YAML file.

        Raises:
            UsageError: The file can't be read, isn't YAML, or isn't a valid configuration.
        """
        return cls.from_values(read_yaml(path), source=str(path))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "configuration") -> RunConfig:
        """Validate plain values, in one line of text if they are wrong.

        >>> RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}, "grpo": {"batchs": 12}})
        Traceback (most recent call last):
        art_gym.errors.UsageError: configuration: unknown key 'grpo.batchs'; did you mean 'grpo.batches'?
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UsageError(f"{source}: {describe(error, cls)}") from None

    def save(self, path: Path) -> None:
        """Write the whole configuration, defaults included, atomically."""
        header = "# The configuration of this run, whole; `art-gym train --config` takes it again.\n"
        text = header + yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        write_text(path, text)

    def differences(self, other: RunConfig) -> list[str]:
        """Dotted names of the settings that differ.

        >>> config = RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}})
        >>> config.differences(config.model_copy(update={"seed": 3}))
        ['seed']
        """
        ours, theirs = flatten(self.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
        return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


def recipe(env_id: str) -> dict[str, Any]:
    """Give the bundled settings that were tuned for an environment; only its id where there are none.

    The id may have the package that registers it in front, as in "package:namespace/Name-v0".

    >>> recipe("somewhere/Else-v0")
    {'env': {'id': 'somewhere/Else-v0'}}
    """
    folder = resources.files("art_gym.cli") / "recipes"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml"):
            values: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
            if values["env"]["id"] == env_id.rpartition(":")[2]:
                values["env"]["id"] = env_id
                return values
    return {"env": {"id": env_id}}
