"""What a run's configuration says to TRL's: the arguments of `art_gym_trainers.grpo.GRPOTrainer`. Loads torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_gym.cli.config import RunConfig
from art_gym.errors import UsageError
from art_gym_trainers.grpo_config import grpo_config

if TYPE_CHECKING:
    from trl import GRPOConfig


def computes_in_bfloat16(config: RunConfig) -> bool:
    """Whether by autocast: under an adapter the base has the dtype of the passes already."""
    return config.model.method == "full" and config.model.dtype == "bfloat16"


def grpo_arguments(config: RunConfig, folder: Path) -> GRPOConfig:
    """TRL's configuration for a run.

    Args:
        config: The run's.
        folder: Where TRL may write.

    Raises:
        UsageError: One of `grpo.trl` is unknown, or has a setting of its own.
    """
    settings = config.grpo
    chosen: dict[str, Any] = {
        "learning_rate": settings.learning_rate,
        # The batches decide when it ends: those without a useful group take fewer steps.
        "max_steps": settings.batches * settings.steps_per_batch + 1,
        "temperature": config.rollout.temperature,
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
        "max_grad_norm": settings.max_grad_norm,
        "loss_type": settings.loss_type,
        "importance_sampling_level": settings.ratio_level,
        "kl_coef": settings.kl_coef,
        "entropy_coef": settings.entropy_coef,
        "importance_correction": settings.importance_correction,
        "importance_max": settings.importance_max,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "seed": config.seed,
        "bf16": computes_in_bfloat16(config),
    }
    if twice := sorted(set(settings.trl) & set(chosen)):
        raise UsageError(f"grpo.trl.{twice[0]} has a setting of its own; set that instead (`--show-config` prints them)")
    try:
        return grpo_config(folder, **chosen, **settings.trl)
    except (TypeError, ValueError) as error:
        raise UsageError(f"grpo.trl: {error}") from None
