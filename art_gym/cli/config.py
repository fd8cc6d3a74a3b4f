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
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from art_gym._files import write_text
from art_gym._hardware import Precision, fast_precision
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
    method: Literal["lora", "qlora", "full"] = "lora"
    """What is trained: a LoRA adapter, one on a base of 4 bits (on a GPU), or all weights."""
    dtype: Precision = Field(default_factory=fast_precision)
    """Precision of the base weights in the trainer, or with method full of its passes; what is trained is always kept in float32. If not given,
    bfloat16 where the machine is fast in it (a GPU, a processor with avx512_bf16, amx_bf16 or Arm's bf16), else float32."""
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
    isolation: Literal["auto", "loop", "thread", "process", "ray"] = "auto"
    """Where environments live: auto takes the event loop for those that declare themselves instant, and threads for others."""
    max_failure_rate: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's episodes that may fail (of at least 20); beyond it the run ends, and says of what they failed."""
    oversample: NonNegativeInt = 0
    """Episodes of each scenario that GRPO plays beside grpo.group_size; when that many have finished, the slowest are cut."""
    branch: dict[PositiveInt, PositiveInt] = {}
    """How many more episodes branch off each of a group's in GRPO, by the turn before which they do: {1: 2} lets three go on from turn 1."""

    @model_validator(mode="after")
    def _cut_or_branch(self) -> Self:
        if self.oversample and self.branch:
            raise ValueError("oversample cuts a group's slowest episodes, whose branches others share; give either oversample or branch")
        return self


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
    loss_type: Literal["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo", "bnpo"] = "dapo"
    """The loss, by TRL's name: how terms are cut, and what they are averaged over (see "How it learns")."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Whether the probability ratio is each token's own, or the episode's geometric mean (GSPO)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the model without its adapter; 0 saves the pass that it costs."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of the sampled tokens' distributions, which is added to what is maximised."""
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Whether the ratio is taken to the trainer's own probabilities, at the cost of a pass, and the sampler's difference corrected apart."""
    importance_max: PositiveFloat = 3.0
    """Where that correction is cut, or its token or episode left out."""
    trl: dict[str, Any] = {}
    """Further fields of trl.GRPOConfig, by their names, such as delta or top_entropy_quantile."""
    advantage: Literal["group_std", "group_mean", "batch_std", "leave_one_out"] = "group_std"
    """Return minus the group's mean, divided by the standard deviation of the group (group_std), of the batch (batch_std) or by nothing
    (group_mean); or minus the mean of the group's others (leave_one_out)."""
    credit: Literal["episode", "turn", "tree"] = "episode"
    """Whether all tokens have the advantage of their episode, or that of their turn: of the rewards from it on; or where episodes branch
    (rollout.branch), of what the turns between two branches did for the outcome."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """What a reward is worth one turn earlier, with credit turn."""
    dynamic_sampling: bool = False
    """Whether further scenarios are played until a batch has groups_per_batch groups whose returns aren't all equal."""
    max_sampling_rounds: PositiveInt = 4
    """How many times scenarios are played for one batch at most, with dynamic_sampling."""
    realign: bool = False
    """Whether a turn whose prompt only spells the context in other tokens is appended all the same, rather than forked."""
    token_budget: PositiveInt | Literal["auto"] = "auto"
    """Most different tokens in one forward and backward pass, which bounds the memory; auto takes as many as fit, up to 16384."""
    publisher: Literal["auto", "lora", "merged"] = "auto"
    """How a new policy reaches the engine: as a LoRA adapter, as merged weights, or what suits the device."""

    @model_validator(mode="after")
    def _steps_have_groups(self) -> Self:
        if self.steps_per_batch > self.groups_per_batch:
            raise ValueError(f"steps_per_batch ({self.steps_per_batch}) must be at most groups_per_batch ({self.groups_per_batch})")
        return self

    @model_validator(mode="after")
    def _discount_has_turns(self) -> Self:
        if self.discount != 1 and self.credit != "turn":
            raise ValueError(f"discount ({self.discount}) acts on the rewards of turns; set credit to turn, or leave discount at 1")
        if self.credit == "tree" and self.advantage == "leave_one_out":
            raise ValueError("credit tree takes a place's value from the episodes through it; set advantage to another than leave_one_out")
        return self


class EvaluationSection(Section):
    """How the policy is measured before, between and after."""

    split: Literal["validation", "test"] = "test"
    """Scenarios that are played; those of the train split are trained on."""
    n: PositiveInt = 200
    """How many scenarios of the split are played for the before/after table."""
    every: NonNegativeInt = 0
    """Batches between extra evaluations during GRPO; 0 for none."""


class CheckpointsSection(Section):
    """Which checkpoints are kept; the newest always is. A resumed run may change this."""

    keep_last: PositiveInt = 2
    """So many of the newest."""
    keep_best: NonNegativeInt = 1
    """So many of those whose policy played best, whatever their age."""
    metric: Literal["success_rate", "reward", "turns", "invalid_call_rate", "entropy"] = "success_rate"
    """The figure that says which is best; it is that of the batch which the checkpoint's policy played, the one after it."""
    goal: Literal["max", "min"] = "max"
    """Whether high or low figures are good."""
    keep_every: NonNegativeInt = 0
    """Each checkpoint whose batch is a multiple of this, for good; 0 for none."""
    max_age_hours: PositiveFloat | None = None
    """Hours after which a checkpoint that is only among the newest is dropped; null for never."""


class AlarmLimits(Section):
    """Beyond what value a figure raises its alarm."""

    warn: float | None = Field(default=None, ge=0)
    """The run says so and goes on; null for never."""
    stop: float | None = Field(default=None, ge=0)
    """The run ends after the batch's checkpoint; null for never."""


class AlarmsSection(Section):
    """Figures of a batch that tell of a run going wrong. A resumed run may change this."""

    logprob_difference: AlarmLimits = AlarmLimits(warn=0.02)
    """Mean difference between sampler and trainer in nats a token; healthy runs stay well under 0.01."""
    kl_sampler: AlarmLimits = AlarmLimits(warn=0.05)
    """Divergence of the policy from the one that played the batch, in nats a token; healthy runs stay under 0.02."""
    entropy: AlarmLimits = AlarmLimits(warn=0.005)
    """Entropy of the policy in nats a token, which must not fall below; a policy that calls tools reliably has 0.02 to 0.1."""
    entropy_share: AlarmLimits = AlarmLimits(warn=0.1)
    """The same as a share of the first batch's; runs that learn fall to a fifth."""
    invalid_call_rate: AlarmLimits = AlarmLimits(warn=0.2)
    """Share of the tool calls that were refused."""
    fork_rate: AlarmLimits = AlarmLimits(warn=0.25)
    """Share of the token sequences that began in mid-episode."""
    not_finite: AlarmLimits = AlarmLimits(warn=0.0, stop=0.0)
    """Optimiser steps whose loss or gradient was no finite number; the policy is broken after one."""

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, values: Any) -> Any:
        # One limit of an alarm can be given without the other.
        if not isinstance(values, Mapping):
            return values
        defaults = {name: field.default.model_dump() for name, field in cls.model_fields.items()}
        return {
            name: {**defaults[name], **given} if name in defaults and isinstance(given, Mapping) else given for name, given in values.items()
        }

    @model_validator(mode="after")
    def _warned_before_stopped(self) -> Self:
        for name, limits in self:
            below = name in ("entropy", "entropy_share")
            if limits.warn is None or limits.stop is None:
                continue
            if limits.stop > limits.warn if below else limits.stop < limits.warn:
                raise ValueError(f"{name}.stop ({limits.stop}) must be {'at most' if below else 'at least'} {name}.warn ({limits.warn})")
        return self


CHANGEABLE = ("checkpoints", "alarms", "grpo.token_budget")
"""What a resumed run may set otherwise: nothing that it computes depends on it, rounding apart."""


class RunConfig(Section):
    """A whole training run."""

    env: EnvironmentSection
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    rollout: RolloutSection = RolloutSection()
    warm_start: WarmStartSection = WarmStartSection()
    grpo: GRPOSection = GRPOSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoints: CheckpointsSection = CheckpointsSection()
    alarms: AlarmsSection = AlarmsSection()
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

    @model_validator(mode="after")
    def _method_is_published(self) -> Self:
        if self.model.method == "full" and (self.grpo.publisher == "lora" or self.engine.attach is not None):
            raise ValueError(
                "model.method full has no adapter to publish, and an attached engine or grpo.publisher lora takes nothing else; use lora"
            )
        if self.model.method == "qlora" and self.grpo.publisher == "merged":
            raise ValueError("model.method qlora can't be merged, as the engine's base is not of 4 bits; use grpo.publisher lora")
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
        """Dotted names of the settings that differ, but for those that a resumed run may change (`CHANGEABLE`).

        >>> config = RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}})
        >>> config.differences(config.model_copy(update={"seed": 3}))
        ['seed']
        """
        ours, theirs = flatten(self.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
        differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        return [key for key in differing if not f"{key}.".startswith(tuple(f"{name}." for name in CHANGEABLE))]


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
