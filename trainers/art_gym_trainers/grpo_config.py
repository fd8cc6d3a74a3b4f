"""TRL's configuration for training on recorded episodes, and which of its fields would distort that."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

import torch
import trl

from art_gym.errors import UsageError
from art_gym_trainers.losses import LOSS_TYPES, ImportanceCorrection, LossType


def grpo_config(
    output_dir: Path,
    *,
    learning_rate: float = 1e-4,
    max_steps: int = 1_000_000,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_grad_norm: float = 1.0,
    loss_type: LossType = "dapo",
    kl_coef: float = 0.0,
    importance_correction: ImportanceCorrection = "none",
    importance_max: float = 3.0,
    seed: int = 0,
    **overrides: Any,
) -> trl.GRPOConfig:
    """TRL's configuration for training on recorded episodes; `overrides` are any of `trl.GRPOConfig`'s own fields.

    The defaults are those of a run that learned on a 135M model: Adam with beta 0.9 and 0.99 and no decay, a constant rate, and the clip range
    0.2/0.28 of DAPO (arXiv 2503.14476). `top_p` and `top_k` are off, since the recorded log-probabilities are of the whole distribution.

    Args:
        output_dir: Where TRL may write.
        learning_rate: Constant, unless `lr_scheduler_type` says otherwise.
        max_steps: Most optimiser steps.
        temperature: What the tokens were sampled at.
        clip_low: How far below 1 the probability ratio may go before its gradient is cut.
        clip_high: How far above 1; for `cispo` the ratio's largest value, and so at least 1.
        max_grad_norm: Gradients are scaled down to this norm.
        loss_type: See `art_gym_trainers.losses.LossType`. With `importance_sampling_level="sequence"` it is GSPO's (arXiv 2507.18071).
        kl_coef: Weight of the KL divergence from the reference, which is the model without its adapter; TRL's `beta`.
        importance_correction: Whether the ratio is taken to the trainer's own probabilities at the batch's start, at the cost of another
            forward pass, and the sampler's difference from these corrected apart; "none" takes the ratio to the sampler's, which corrects both
            at once.
        importance_max: Where that correction is cut.
        seed: Of what TRL draws.
        **overrides: TRL's own names, such as `delta`, `off_policy_mask_threshold`, `top_entropy_quantile`, `entropy_coef`, `fsdp`, `deepspeed`.

    Raises:
        UsageError: A setting is unknown, or distorts what is trained.
    """
    if loss_type not in LOSS_TYPES:
        raise UsageError(f"unknown loss_type {loss_type!r}; it is one of: {', '.join(LOSS_TYPES)}")
    if importance_correction not in get_args(ImportanceCorrection):
        raise UsageError(f"unknown importance_correction {importance_correction!r}; it is one of: {', '.join(get_args(ImportanceCorrection))}")
    if loss_type == "cispo" and clip_high < 1:
        raise UsageError(f"clip_high={clip_high} would cut every ratio, as for cispo it is the largest one; give at least 1, such as 5")
    if loss_type == "vespo" and importance_correction.startswith("sequence"):
        raise UsageError(
            f"vespo weights whole episodes itself, so that importance_correction can't be {importance_correction}; take token_truncate"
        )
    delta = overrides.get("delta")
    if delta is not None and loss_type in ("cispo", "sapo", "vespo"):
        raise UsageError(f"delta isn't part of {loss_type}, which bounds ratios in its own way; leave it out")
    if delta is not None and delta <= 1 + clip_high:
        raise UsageError(
            f"delta={delta} is no more than 1 + clip_high={1 + clip_high:g}, so that it would bound what clip_high should; give more, such as 4"
        )
    for name, own in _OWN_NAMES.items():
        if name in overrides:
            raise UsageError(f"{name} is called {own} here; give that instead")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    if unknown := sorted(set(overrides) - known):
        raise UsageError(f"trl.GRPOConfig has no field {unknown[0]!r}; its fields are listed in TRL's documentation of GRPOConfig")
    for name, (wrong, reason) in _REFUSED.items():
        if name in overrides and wrong(overrides[name]):
            raise UsageError(f"{name}={overrides[name]!r} {reason}")
    # TRL sends usage figures unless told not to.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "max_steps": max_steps,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": max_grad_norm,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "disable_dropout": True,
        "epsilon": clip_low,
        "epsilon_high": clip_high,
        "loss_type": loss_type,
        "beta": kl_coef,
        "vllm_importance_sampling_correction": importance_correction != "none",
        "vllm_importance_sampling_clip_max": importance_max,
        "seed": seed,
        "use_cpu": not torch.cuda.is_available(),
        # The base's dtype is chosen when it is loaded; autocast on top would round the adapter.
        "bf16": False,
        "fp16": False,
        "gradient_checkpointing": torch.cuda.is_available(),
        # TRL wants groups; ours are made from episodes, whose number it never sees.
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "ignore_data_skip": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if importance_correction != "none":
        settings["vllm_importance_sampling_mode"] = importance_correction
    return trl.GRPOConfig(**(settings | overrides))


_OURS = "is decided by the episodes and by how their steps are cut; leave it out"
_OWN_NAMES = {
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "beta": "kl_coef",
    "vllm_importance_sampling_correction": "importance_correction",
    "vllm_importance_sampling_mode": "importance_correction",
    "vllm_importance_sampling_clip_max": "importance_max",
    "vllm_importance_sampling_cap": "importance_max",
}
"""Fields of TRL's configuration that are parameters of `grpo_config` by other names."""

_FIGURES = "would leave out figures that a run reports and is stopped by"
_KEPT = "is decided by the run, which writes its own checkpoints"
_REFUSED: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (lambda value: value != 1, _OURS),
    "per_device_train_batch_size": (lambda value: True, _OURS),
    "num_generations": (lambda value: True, _OURS),
    "steps_per_generation": (lambda value: value != 1, _OURS),
    "num_iterations": (lambda value: value != 1, "would train on a step's rows again; give more optimiser steps a batch instead"),
    "use_adaptive_entropy": (bool, "gives each micro-batch a say in the coefficient, so that the cut would matter; set entropy_coef"),
    "logging_steps": (lambda value: value != 1, _FIGURES),
    "logging_strategy": (lambda value: value != "steps", _FIGURES),
    "save_only_model": (bool, "would leave out what a run goes on from"),
    "push_to_hub": (bool, "would upload in the middle of a run; `art-gym export --push` does so from a checkpoint"),
    "neftune_noise_alpha": (lambda value: value is not None, "would make the trainer's log-probabilities others than the sampler's"),
    "disable_dropout": (lambda value: not value, "would make the trainer's log-probabilities others than the sampler's, and each time others"),
    "save_strategy": (lambda value: value != "no", _KEPT),
    "save_steps": (lambda value: True, _KEPT),
    "eval_strategy": (lambda value: value != "no", "would make TRL generate; measure with `art-gym eval` or evaluation.every"),
    "use_vllm": (bool, "would make TRL generate; episodes come from art_gym's runner"),
    "mask_truncated_completions": (bool, "is about completions that TRL generates; leave truncated episodes out of the groups instead"),
    "scale_rewards": (lambda value: True, "is about rewards that TRL computes; choose the advantages of the rows instead"),
    "use_liger_kernel": (bool, "replaces the model's forward pass, which computes shared tokens once here"),
    "router_aux_loss_coef": (bool, "isn't computed on token trees"),
    "sync_ref_model": (bool, "would move the reference, which stays what the model was without training"),
    "top_p": (lambda value: value != 1.0, "would make the trainer's distribution another than the sampler's; the recorded one is whole"),
    "top_k": (lambda value: value != 0, "would make the trainer's distribution another than the sampler's; the recorded one is whole"),
}
"""Fields of TRL's configuration that forks, micro-batches or recorded tokens would distort, and why."""
