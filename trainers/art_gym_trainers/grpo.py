"""GRPO: TRL's trainer, fed with recorded episodes instead of prompts.

TRL keeps the loss, the optimiser, callbacks, trackers and accelerate. Ours: where rows come from (recorded tokens, never rendered again),
micro-batches by token budget, log-probabilities at sampled tokens only, and figures weighted by token.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase, PrinterCallback

from art_gym.errors import UsageError
from art_gym_trainers.lora import fuse_lora
from art_gym_trainers.rows import Row, collate, micro_batches
from art_gym_trainers.scoring import TreeBatch, add_scoring

# Losses that average over rows or tokens of a micro-batch, and so need its share of the optimiser step as a weight.
_ROW_MEAN_LOSSES = ("grpo", "dr_grpo")
_TOKEN_MEAN_LOSSES = ("bnpo",)
_STEP_TOTAL_LOSSES = ("dapo",)
LOSS_TYPES = (*_STEP_TOTAL_LOSSES, *_ROW_MEAN_LOSSES, *_TOKEN_MEAN_LOSSES)


def grpo_config(
    output_dir: Path,
    *,
    learning_rate: float = 1e-4,
    max_steps: int = 1_000_000,
    temperature: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_grad_norm: float = 1.0,
    loss_type: str = "dapo",
    seed: int = 0,
    **overrides: Any,
) -> trl.GRPOConfig:
    """TRL's configuration for training on recorded episodes; `overrides` are any of `trl.GRPOConfig`'s own fields.

    The defaults are those of a run that learned on a 135M model: Adam with beta 0.9 and 0.99 and no decay, a constant rate, and the clip range
    0.2/0.28 of DAPO (arXiv 2503.14476). `top_p` and `top_k` are off, since the recorded log-probabilities are of the whole distribution.

    Raises:
        UsageError: The loss type isn't one of `LOSS_TYPES`.
    """
    if loss_type not in LOSS_TYPES:
        raise UsageError(f"unknown loss_type {loss_type!r}; it is one of: {', '.join(LOSS_TYPES)}")
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
        "epsilon": clip_low,
        "epsilon_high": clip_high,
        "loss_type": loss_type,
        "beta": 0.0,
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
        "ignore_data_skip": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.GRPOConfig(**(settings | overrides))


@dataclass(slots=True)
class BatchStatistics:
    """Sums over the sampled tokens of one batch of optimiser steps; the properties are means by token."""

    steps: int = 0
    tokens: int = 0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    clipped: int = 0
    first_step_tokens: int = 0
    first_step_difference_sum: float = 0.0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, float | None]:
        """Means by token; None where nothing was trained.

        `logprob_difference` is of the first optimiser step alone, where trainer and sampler hold the same weights.
        """
        if not self.tokens:
            means = ("loss", "gradient_norm", "entropy", "kl_sampler", "clip_fraction", "logprob_difference")
            return {**dict.fromkeys(means), "optimiser_steps": self.steps}
        tokens = self.tokens
        return {
            "loss": _mean(self.losses),
            "gradient_norm": _mean(self.gradient_norms),
            "entropy": self.entropy_sum / tokens,
            "kl_sampler": self.kl_sum / tokens,
            "clip_fraction": self.clipped / tokens,
            "logprob_difference": self.first_step_difference_sum / self.first_step_tokens,
            "optimiser_steps": self.steps,
        }


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPO on recorded rows.

    Args:
        model: A policy with a trainable adapter (`art_gym_trainers.policy.load_policy`).
        args: `grpo_config(...)`.
        steps: Yields the rows of one optimiser step at a time. It is asked for the next only when the step before has been taken, so that it
            may publish the policy and play new episodes in between; training ends when it ends.
        processing_class: The model's tokenizer.
        token_budget: Most tokens, padding included, of one forward and backward pass.
    """

    def __init__(
        self,
        model: PeftModel,
        args: trl.GRPOConfig,
        steps: Iterable[list[Row]],
        processing_class: PreTrainedTokenizerBase,
        token_budget: int = 4096,
        **kwargs: Any,
    ) -> None:
        # TRL asks for prompts and a reward function, neither of which is used: rows arrive with tokens and advantages.
        prompts = Dataset.from_dict({"prompt": [""]})
        super().__init__(model, _no_reward, args, train_dataset=prompts, processing_class=processing_class, **kwargs)
        self._batch = add_scoring(self.model.get_base_model())
        fuse_lora(self.model)
        self.remove_callback(PrinterCallback)
        self.steps = steps
        self.token_budget = token_budget
        self._statistics = BatchStatistics()
        self._inputs: dict[str, torch.Tensor] = {}
        self._save_into: Path | None = None

    def take_statistics(self) -> BatchStatistics:
        """The figures since the last call; starts new ones."""
        statistics, self._statistics = self._statistics, BatchStatistics()
        return statistics

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not prepared by accelerate, whose loader fetches one batch ahead: the next rows must be played by the updated policy.
        return DataLoader(_Steps(self.steps), batch_size=None)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            self.control.should_training_stop = True
        return samples, items

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        # 6 operations a parameter and token, forward and backward: arXiv 2001.08361, section 2.1.
        return 6.0 * sum(len(row.sequence) for row in inputs["rows"]) * self.model.num_parameters()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One optimiser step's gradients, however many micro-batches it takes: the sum doesn't depend on how the rows are cut."""
        model.train()
        rows: list[Row] = inputs["rows"]
        sampled = sum(sum(row.sequence.sampled) for row in rows)
        batches = micro_batches(rows, self.token_budget, shared=self._batch is TreeBatch)
        total = torch.zeros((), device=self.args.device)
        for index, batch in enumerate(batches):
            tensors = collate(batch, self.processing_class.pad_token_id, sampled, self.args.device)
            self._scored = self._batch.build(
                [row.sequence.token_ids for row in batch], [row.sequence.sampled for row in batch], self.args.device
            )
            last = index == len(batches) - 1
            with self.accelerator.no_sync(model) if not last else contextlib.nullcontext(), self.compute_loss_context_manager():
                loss = self.compute_loss(model, tensors) * self._share(batch, rows)
                self.accelerator.backward(loss)
            total += loss.detach()
        self._step += 1
        self._statistics.steps += 1
        self._statistics.losses.append(float(total))
        return total

    def save(self, folder: Path) -> None:
        """Write all that training needs to go on into an existing folder: adapter, optimiser, scheduler, random states, trainer state.

        `train(resume_from_checkpoint=str(folder))` goes on from there.
        """
        self._save_into = folder
        # Straight to transformers: TRL's override only adds a model card, which the run's report stands for.
        super(trl.GRPOTrainer, self)._save_checkpoint(self.model, trial=None)
        written = folder / f"checkpoint-{self.state.global_step}"
        for path in written.iterdir():
            path.replace(folder / path.name)
        written.rmdir()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._save_into or super()._get_output_dir(trial))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs:
            self._statistics.gradient_norms.append(float(logs["grad_norm"]))
        super().log(logs, start_time)

    def _share(self, batch: list[Row], rows: list[Row]) -> float:
        """The weight of a micro-batch's loss in its optimiser step's; 1 for losses that already divide by the step's total."""
        if self.loss_type in _ROW_MEAN_LOSSES:
            return len(batch) / len(rows)
        if self.loss_type in _TOKEN_MEAN_LOSSES:
            return sum(sum(row.sequence.sampled) for row in batch) / sum(sum(row.sequence.sampled) for row in rows)
        return 1.0

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        # TRL passes only ids to the log-probability computation, which is also asked what was sampled, and when.
        self._inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities and entropies (B, T) of the completion, zero where nothing was sampled."""
        mask = self._inputs["tool_mask"].bool()
        with self.accelerator.autocast():
            logprobs, entropies = model(batch=self._scored, temperature=self.temperature)
        # Both list the sampled tokens row by row.
        empty = torch.zeros(mask.shape, dtype=logprobs.dtype, device=logprobs.device)
        self._count(logprobs.detach(), entropies, mask)
        return empty.masked_scatter(mask, logprobs), empty.masked_scatter(mask, entropies), None

    def _count(self, logprobs: torch.Tensor, entropies: torch.Tensor, mask: torch.Tensor) -> None:
        statistics = self._statistics
        log_ratio = logprobs - self._inputs["old_per_token_logps"][mask]
        advantages = self._inputs["advantages"][:, None].expand(mask.shape)[mask]
        ratio = log_ratio.exp()
        clipped = ((ratio < 1 - self.epsilon_low) & (advantages < 0)) | ((ratio > 1 + self.epsilon_high) & (advantages > 0))
        statistics.tokens += logprobs.numel()
        statistics.entropy_sum += float(entropies.sum())
        # KL(sampler || trainer) by the k3 estimator, on tokens drawn from the sampler: http://joschu.net/blog/kl-approx.html
        statistics.kl_sum += float((ratio - 1 - log_ratio).sum())
        statistics.clipped += int(clipped.sum())
        if statistics.steps == 0:
            statistics.first_step_tokens += logprobs.numel()
            statistics.first_step_difference_sum += float(log_ratio.abs().sum())


class _Steps(IterableDataset[Any]):
    def __init__(self, steps: Iterable[list[Row]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[dict[str, list[Row]]]:
        for rows in self.steps:
            yield {"rows": rows}


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards come with the episodes; TRL must not ask for them")


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
