"""A few optimiser steps of the tiny model, by as many processes as torchrun starts: `processes_run.py MODEL FOLDER LOSS_TYPE:BUDGET …`.

For each loss and token budget (0: none), the main process writes the adapter and the figures to FOLDER/LOSS_TYPE/out.pt.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from art_gym.errors import UsageError
from art_gym_trainers.grpo import GRPOTrainer
from art_gym_trainers.grpo_config import grpo_config
from art_gym_trainers.policy import load_policy, load_tokenizer
from art_gym_trainers.rows import Row
from art_gym_trainers.sequences import TokenSequence


def group(number: int, size: int, rng: random.Random) -> list[Row]:
    prompt = [rng.randrange(20, 1000) for _ in range(15)]
    rows = []
    for member in range(size):
        own = [rng.randrange(20, 1000) for _ in range(rng.randint(2, 9))]
        sampled = [False] * len(prompt) + [True] * len(own)
        logprobs = [-10.5 if flag else 0.0 for flag in sampled]
        turns = [0 if flag else -1 for flag in sampled]
        rows.append(Row.uniform(TokenSequence(f"{number}-{member}", prompt + own, sampled, logprobs, turns), rng.gauss(0, 1)))
    # Two sequences that have nothing in common: longer together than a pass of 40 tokens.
    first = rows[0].sequence
    forked = dataclasses.replace(first, token_ids=[1000 + place for place in range(len(first))], fork="context")
    return [rows[0], Row.uniform(forked, rows[0].advantages[-1]), *rows[1:]]


def figures(trainer: GRPOTrainer) -> dict[str, Any]:
    statistics = trainer.take_statistics()
    return {"losses": statistics.losses, "gradient_norms": statistics.gradient_norms, "figures": statistics.to_dict()}


def train(model: Path, folder: Path, loss_type: Any, budget: int) -> None:
    policy = load_policy(model, dtype="float32", lora_rank=4, lora_alpha=8)
    options: dict[str, Any] = {
        "kl_coef": 0.1,
        "importance_correction": "token_truncate",
        "entropy_coef": 0.01,
        "top_entropy_quantile": 0.8,
    }
    if loss_type == "cispo":
        options["clip_high"] = 5.0
    config = grpo_config(folder / "scratch", learning_rate=1e-2, loss_type=loss_type, **options)
    rng = random.Random(0)
    # The second step is one micro-batch, of which one of two processes has none; the third batch is empty.
    batches = [[group(0, 4, rng) + group(1, 3, rng), group(2, 1, rng)], [], [group(3, 4, rng)]]
    asked, saved = [], folder / "saved"

    def feed() -> Any:
        for batch in batches:
            asked.append(1)
            yield batch
        saved.mkdir(parents=True)
        yield saved

    trainer = GRPOTrainer(policy, config, batches=feed(), processing_class=load_tokenizer(model), token_budget=budget or None)
    trainer.train()
    if trainer.accelerator.num_processes > 1:
        with pytest.raises(UsageError, match="let batches yield the folder"):
            trainer.save(saved)
    if trainer.accelerator.is_main_process:
        weights = {name: parameter.detach().clone() for name, parameter in policy.named_parameters() if parameter.requires_grad}
        torch.save({"weights": weights, "steps": trainer.state.global_step, **figures(trainer)}, folder / "out.pt")
    else:
        assert not asked


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[3:]:
        loss_type, _, budget = case.partition(":")
        train(Path(sys.argv[1]), Path(sys.argv[2]) / loss_type, loss_type, int(budget))
