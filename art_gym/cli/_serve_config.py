"""A job's configuration: what its request set, over what the gateway was started with. Loads no torch: requests are checked by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from art_gym.cli.config import RunConfig
from art_gym.errors import UsageError

_NAMES = {"loss": "loss_type", "optimiser_steps": "steps_per_batch"}
"""Options of a job that a run's configuration has under another name in its section `grpo`."""


def job_config(base: RunConfig, options: Mapping[str, Any], *, temperature: float, groups: int) -> RunConfig:
    """Lay a job's options over a configuration.

    Args:
        base: The gateway's.
        options: Fields of `art_gym.gateway.train_schemas.TrainConfig`, those that were set.
        temperature: What the job's episodes were sampled at.
        groups: How many it has.

    Raises:
        UsageError: They contradict each other.
    """
    values = base.model_dump()
    grpo = values["grpo"]
    grpo |= {_NAMES.get(key, key): value for key, value in options.items() if key != "temperature"}
    grpo |= {"batches": 1, "groups_per_batch": max(groups, grpo["steps_per_batch"])}
    if grpo["credit"] == "episode" and "discount" not in options:
        grpo["discount"] = 1.0
    values["rollout"]["temperature"] = temperature
    # Else the trainer process would refuse these, when the job has begun.
    if grpo["loss_type"] == "cispo" and grpo["clip_high"] < 1:
        raise UsageError(f"config.clip_high is {grpo['clip_high']}, and with loss cispo it is the largest ratio; give at least 1, such as 5")
    if grpo["loss_type"] == "vespo" and grpo["importance_correction"].startswith("sequence"):
        raise UsageError("config.loss vespo weights whole episodes itself; set importance_correction to token_truncate, or to none")
    return RunConfig.from_values(values, source="config")
