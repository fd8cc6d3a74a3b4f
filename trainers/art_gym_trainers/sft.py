"""Supervised warm start: teach the call format from scripted episodes, before reinforcement learning."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym_trainers.lora import fuse_lora
from art_gym_trainers.policy import base_model, keep_trained_in_float32
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, add_scoring

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


def episode_examples(episodes: Sequence[Episode], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[int]]]:
    """Render scripted episodes into `input_ids` and `labels`, equally long.

    The label of what the assistant says, its end token included, is the token itself; everything else is -100, which the loss leaves out.

    Scripted episodes have no sampled tokens to keep, so rendering them is right here, and only here.

    Raises:
        UsageError: The chat template marks nothing as the assistant's (it lacks `{% generation %}`).
    """
    examples = []
    for episode in episodes:
        rendered = tokenizer.apply_chat_template(
            # After the last action nothing is left to learn.
            replace(episode, final_observation=[]).messages,
            tools=episode.tools or None,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
        if not any(mask):
            raise UsageError(
                "the model's chat template marks no assistant tokens, so a warm start can't tell what to learn; "
                "wrap the assistant's part of the template in {% generation %} … {% endgeneration %}"
            )
        # The template's line break after the last end token isn't learned either.
        last = max(index for index, flag in enumerate(mask) if flag) + 1
        labels = [token if flag else IGNORED for token, flag in zip(ids, mask, strict=True)]
        examples.append({"input_ids": ids[:last], "labels": labels[:last]})
    return examples


def warm_start(
    model: PeftModel | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    *,
    output_dir: Path,
    learning_rate: float = 5e-4,
    batch_size: int = 4,
    epochs: float = 1.0,
    seed: int = 0,
    bf16: bool = False,
    token_budget: int | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> float:
    """Train a policy on scripted episodes, in place, with TRL's SFTTrainer.

    Args:
        model: A policy, as `load_policy` gives it.
        tokenizer: Its tokenizer, with a chat template that marks what the assistant says.
        episodes: Played by a scripted agent; failed ones are left out.
        output_dir: A scratch folder for the trainer.
        learning_rate: Peak of a linear decay to zero.
        batch_size: Episodes an optimiser step.
        epochs: Passes over the episodes.
        seed: Of the order of the episodes.
        bf16: Whether passes are computed in bfloat16, by autocast; for a model all of whose weights are trained.
        token_budget: Most tokens of one forward and backward pass, padding included; a longer episode goes alone. An optimiser step is the same
            however it is cut. None computes each step in one pass.
        on_step: Called after each optimiser step with its number, the number of all, and the loss.

    Returns:
        The mean loss of the last quarter of the steps, in nats a token.

    Raises:
        UsageError: No episode is usable.
    """
    usable = [episode for episode in episodes if episode.failure is None and episode.turns]
    if not usable:
        raise UsageError("no scripted episode finished, so there is nothing to warm up on; run the script with `art-gym eval` to see why")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    examples = episode_examples(usable, tokenizer)
    config = trl.SFTConfig(
        output_dir=str(output_dir),
        learning_rate=learning_rate,
        per_device_train_batch_size=batch_size,
        num_train_epochs=epochs,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_length=None,
        seed=seed,
        use_cpu=not torch.cuda.is_available(),
        bf16=bf16,
        fp16=False,
        gradient_checkpointing=torch.cuda.is_available(),
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    losses = _Losses(on_step)
    fuse_lora(model)
    trainer = _SFTTrainer(model, config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer, callbacks=[losses])
    if isinstance(model, PeftModel):
        keep_trained_in_float32(model)
    trainer.batch = add_scoring(base_model(model))
    trainer.token_budget = token_budget
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    tail = losses.values[-max(1, len(losses.values) // 4) :]
    return sum(tail) / len(tail)


def passes(lengths: Sequence[int], token_budget: int | None) -> list[list[int]]:
    """Cut rows of these lengths into passes whose padded size, rows times the longest, fits the budget; a longer row goes alone.

    >>> passes([4, 9, 3, 30], token_budget=10)
    [[2, 0], [1], [3]]
    >>> passes([4, 9, 3, 30], token_budget=None)
    [[0, 1, 2, 3]]
    """
    if token_budget is None:
        return [list(range(len(lengths)))]
    cut: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        # In this order, the row at hand is the longest so far.
        if cut and (len(cut[-1]) + 1) * lengths[index] <= token_budget:
            cut[-1].append(index)
        else:
            cut.append([index])
    return cut


class _SFTTrainer(trl.SFTTrainer):
    """Scores only what the assistant says; TRL's own loss sends every position through the head on a CPU."""

    batch: type[TreeBatch] | type[PaddedBatch]
    token_budget: int | None

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Gradients of a step, pass by pass; each divides by the step's learned tokens, so that they add up to the mean over all of these."""
        if num_items_in_batch is None:
            num_items_in_batch = (inputs["labels"] != IGNORED).sum()
        total = torch.zeros((), device=self.args.device)
        for rows in passes(inputs["attention_mask"].sum(1).tolist(), self.token_budget):
            total += super().training_step(model, {name: values[rows] for name, values in inputs.items()}, num_items_in_batch)
        return total

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        lengths = inputs["attention_mask"].sum(1).tolist()
        rows = [ids[:length] for ids, length in zip(inputs["input_ids"].tolist(), lengths, strict=True)]
        scored = [[label != IGNORED for label in labels[:length]] for labels, length in zip(inputs["labels"].tolist(), lengths, strict=True)]
        logprobs, _ = model(batch=self.batch.build(rows, scored, inputs["input_ids"].device))
        loss = -logprobs.sum() / (len(logprobs) if num_items_in_batch is None else num_items_in_batch)
        return (loss, {}) if return_outputs else loss


class _Losses(TrainerCallback):
    def __init__(self, on_step: Callable[[int, int, float], None] | None) -> None:
        self.values: list[float] = []
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.values.append(float(logs["loss"]))
            if self._on_step is not None:
                self._on_step(state.global_step, state.max_steps, self.values[-1])
