"""A run that goes on from a checkpoint takes bit for bit the steps that it would have taken."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from art_gym_trainers import checkpoints  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer  # noqa: E402
from art_gym_trainers.rows import Row  # noqa: E402
from art_gym_trainers.sequences import TokenSequence  # noqa: E402

pytestmark = pytest.mark.train

Steps = list[list[Row]]


def rows(seed: int) -> list[Row]:
    rng = random.Random(seed)
    made = []
    for index in range(4):
        count = rng.randint(8, 16)
        sampled = [place >= 4 for place in range(count)]
        logprobs = [-6.5 + rng.random() if flag else 0.0 for flag in sampled]
        turns = [0 if flag else -1 for flag in sampled]
        made.append(
            Row.uniform(TokenSequence(f"e{index}", [rng.randrange(20, 1000) for _ in range(count)], sampled, logprobs, turns), rng.gauss(0, 1))
        )
    return made


class Session:
    """One process's part of a run: batches of two steps each, and a draw of every generator between them, as playing episodes makes."""

    def __init__(self, tiny_model: Path, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.model = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)
        config = grpo_config(folder, learning_rate=1e-2, **options)
        self.trainer = GRPOTrainer(self.model, config, batches=[], processing_class=load_tokenizer(tiny_model))
        self.draws: list[tuple[float, float, float]] = []

    def train(self, numbers: range, *, save: bool = False) -> Session:
        saved = checkpoints.latest(self.folder)
        self.trainer.batches = self._batches(numbers, save=save)
        self.trainer.train(resume_from_checkpoint=str(saved.folder) if saved else None)
        return self

    def _batches(self, numbers: range, *, save: bool) -> Iterator[Steps]:
        for number in numbers:
            self.draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
            yield [rows(10 * number), rows(10 * number + 1)]
            if save:
                with checkpoints.writing(self.folder, number, {}, needs=checkpoints.GRPO_STATE) as scratch:
                    self.trainer.save(scratch)

    @property
    def weights(self) -> dict[str, Any]:
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_resumed_run_takes_the_same_steps_to_the_bit(tiny_model: Path, tmp_path: Path, schedule: str) -> None:
    options = {"lr_scheduler_type": schedule, "max_steps": 20}
    whole = Session(tiny_model, tmp_path / "whole", **options).train(range(1, 4))
    Session(tiny_model, tmp_path / "parts", **options).train(range(1, 2), save=True)
    # Another process would begin with other states.
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    resumed = Session(tiny_model, tmp_path / "parts", **options).train(range(2, 4))

    assert resumed.draws == whole.draws[1:]
    assert set(resumed.weights) == set(whole.weights)
    for name, value in whole.weights.items():
        assert torch.equal(value, resumed.weights[name]), name
    ours, theirs = (session.trainer.optimizer.state_dict() for session in (resumed, whole))
    assert ours["param_groups"] == theirs["param_groups"]
    for key, state in theirs["state"].items():
        for name, value in state.items():
            assert torch.equal(value, ours["state"][key][name]), (key, name)
    assert resumed.trainer.lr_scheduler.state_dict() == whole.trainer.lr_scheduler.state_dict()
    assert resumed.trainer.state.global_step == whole.trainer.state.global_step == 6


def test_saving_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    plain = Session(tiny_model, tmp_path / "plain").train(range(1, 3))
    saving = Session(tiny_model, tmp_path / "saving").train(range(1, 3), save=True)
    assert saving.draws == plain.draws
    for name, value in plain.weights.items():
        assert torch.equal(value, saving.weights[name]), name


def test_all_that_training_needs_is_in_the_folder(tiny_model: Path, tmp_path: Path) -> None:
    Session(tiny_model, tmp_path / "run").train(range(1, 2), save=True)
    saved = checkpoints.read(tmp_path / "run", 1)
    assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} <= {
        path.name for path in saved.folder.iterdir()
    }
    states = torch.load(saved.folder / "rng_state.pth", weights_only=False)
    assert {"python", "numpy", "cpu"} | ({"cuda"} if torch.cuda.is_available() else set()) == set(states)
