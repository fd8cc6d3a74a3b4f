"""The loss that TRL computes on our rows, against a few lines of torch of our own; and that cutting a step differently changes nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from art_gym_trainers.grpo import LOSS_TYPES, GRPOTrainer, grpo_config  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.rows import Row  # noqa: E402
from art_gym_trainers.sequences import TokenSequence  # noqa: E402

pytestmark = pytest.mark.train

TEMPERATURE = 0.7


def random_rows(count: int = 6, seed: int = 0, shared: int = 0) -> list[Row]:
    """Rows of unequal shape, as multi-turn episodes leave them: `shared` equal tokens, prompt, reply, tool result, reply."""
    rng = random.Random(seed)
    prefix = [rng.randrange(20, 1000) for _ in range(shared)]
    rows = []
    for index in range(count):
        token_ids, sampled = list(prefix), [False] * shared
        for length, flag in (
            (0 if shared else rng.randint(3, 12), False),
            (rng.randint(1, 6), True),
            (rng.randint(1, 8), False),
            (rng.randint(1, 6), True),
        ):
            token_ids += [rng.randrange(20, 1000) for _ in range(length)]
            sampled += [flag] * length
        logprobs = [-6.5 + rng.random() if flag else 0.0 for flag in sampled]
        turns = [0 if flag else -1 for flag in sampled]
        rows.append(Row(TokenSequence(f"e{index}", token_ids, sampled, logprobs, turns), rng.gauss(0, 1)))
    return rows


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    return load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)


def trainer_of(policy: Any, tiny_model: Path, tmp_path: Path, *, token_budget: int = 4096, **options: Any) -> GRPOTrainer:
    config = grpo_config(tmp_path, temperature=TEMPERATURE, **options)
    trainer = GRPOTrainer(policy, config, steps=[], processing_class=load_tokenizer(tiny_model), token_budget=token_budget)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def independent_loss(model: Any, rows: list[Row], loss_type: str, clip_low: float = 0.2, clip_high: float = 0.28) -> Any:
    """PPO's clipped surrogate on the recorded tokens, one row at a time, without padding, masks or TRL."""
    per_row: list[Any] = []
    for row in rows:
        ids = torch.tensor([row.sequence.token_ids])
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / TEMPERATURE, -1)
        terms = []
        for position, sampled in enumerate(row.sequence.sampled):
            if not sampled:
                continue
            new = logprobs[position - 1, row.sequence.token_ids[position]]
            ratio = torch.exp(new - row.sequence.logprobs[position])
            terms.append(-torch.min(ratio * row.advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * row.advantage))
        per_row.append(torch.stack(terms))
    tokens = torch.cat(per_row)
    if loss_type == "grpo":
        return torch.stack([row.mean() for row in per_row]).mean()
    if loss_type == "dr_grpo":
        # TRL divides by its max_completion_length, 512 unless set.
        return tokens.sum() / (len(rows) * 512)
    return tokens.mean()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("token_budget", [10_000, 150, 1])
@pytest.mark.parametrize("shared", [0, 40], ids=["nothing shared", "prompt shared"])
def test_loss_and_gradients_equal_an_independent_computation_however_the_step_is_cut(
    policy: Any, tiny_model: Path, tmp_path: Path, loss_type: str, token_budget: int, shared: int
) -> None:
    rows = random_rows(shared=shared)
    # A fresh adapter adds nothing, and half of its gradients are zero.
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    expected_loss = independent_loss(policy, rows, loss_type)
    expected_loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.requires_grad])
    policy.zero_grad()

    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, loss_type=loss_type)
    loss = trainer.training_step(policy, {"rows": rows})
    gradients = torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.requires_grad])

    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    assert torch.linalg.norm(gradients - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_the_figures_are_means_by_token(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    rows = random_rows()
    with torch.no_grad():
        entropies, differences, kl = [], [], []
        for row in rows:
            logprobs = torch.log_softmax(policy(input_ids=torch.tensor([row.sequence.token_ids])).logits[0] / TEMPERATURE, -1)
            for position, sampled in enumerate(row.sequence.sampled):
                if sampled:
                    entropies.append(-(logprobs[position - 1].exp() * logprobs[position - 1]).sum().item())
                    log_ratio = logprobs[position - 1, row.sequence.token_ids[position]].item() - row.sequence.logprobs[position]
                    differences.append(abs(log_ratio))
                    kl.append(torch.tensor(log_ratio).exp().item() - 1 - log_ratio)
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=64)
    trainer.training_step(policy, {"rows": rows})
    figures = trainer.take_statistics().to_dict()
    assert figures["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert figures["logprob_difference"] == pytest.approx(sum(differences) / len(differences), rel=1e-4)
    assert figures["kl_sampler"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)


def test_without_a_step_there_are_no_figures_rather_than_zeros(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    figures = trainer_of(policy, tiny_model, tmp_path).take_statistics().to_dict()
    assert figures.pop("optimiser_steps") == 0
    assert set(figures.values()) == {None}


def test_training_ends_with_the_rows_and_asks_for_each_step_only_after_the_one_before(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[list[float]] = []
    probe = list(range(20, 40))

    def steps() -> Any:
        for seed in range(3):
            seen.append(token_logprobs(policy, probe))
            yield random_rows(seed=seed)

    trainer = trainer_of(policy, tiny_model, tmp_path, learning_rate=1e-2)
    trainer.steps = steps()
    trainer.train()
    assert trainer.state.global_step == 3
    # The policy had changed each time that the next rows were asked for.
    assert seen[0] != seen[1] != seen[2]


def test_a_saved_step_restores_adapter_and_optimiser(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    def run(model: Any, steps: list[list[Row]], resume: Path | None, save: Path | None) -> list[float]:
        def feed() -> Any:
            yield from steps
            if save:
                trainer.save(save)

        trainer = trainer_of(model, tiny_model, tmp_path, learning_rate=1e-2)
        trainer.steps = feed()
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return token_logprobs(model, list(range(20, 40)))

    first, second = [random_rows(seed=1)], [random_rows(seed=2)]
    saved = tmp_path / "saved"
    saved.mkdir()
    run(policy, first, None, saved)
    resumed = run(load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8), second, saved, None)
    whole = run(load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8), first + second, None, None)
    assert resumed == pytest.approx(whole, abs=1e-6)
