"""Losses and gradients of optimiser steps against a few lines of torch of our own; and that cutting a step differently changes nothing."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from art_gym.errors import UsageError  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.losses import LOSS_TYPES, clipped  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.rows import Row  # noqa: E402
from art_gym_trainers.sequences import TokenSequence  # noqa: E402

pytestmark = pytest.mark.train

TEMPERATURE = 0.7
BUDGETS = (10_000, 150, 1)
"""Most tokens of a pass: a whole step's, a few episodes', one episode's."""

tokenizer = functools.cache(load_tokenizer)


def random_rows(count: int = 6, seed: int = 0, shared: int = 0, forked: bool = False) -> list[Row]:
    """Rows of unequal shape, as multi-turn episodes leave them: `shared` equal tokens, prompt, reply, tool result, reply.

    With `forked`, every other episode is of two sequences.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(20, 1000) for _ in range(shared)]
    rows = []
    for index in range(count):
        for part in range(2 if forked and index % 2 else 1):
            token_ids, sampled, turns = list(prefix), [False] * shared, [-1] * shared
            for length, turn in (
                (0 if shared else rng.randint(3, 12), -1),
                (rng.randint(1, 6), 2 * part),
                (rng.randint(1, 8), -1),
                (rng.randint(1, 6), 2 * part + 1),
            ):
                token_ids += [rng.randrange(20, 1000) for _ in range(length)]
                sampled += [turn >= 0] * length
                turns += [turn] * length
            logprobs = [-6.5 + rng.random() if flag else 0.0 for flag in sampled]
            sequence = TokenSequence(f"e{index}", token_ids, sampled, logprobs, turns, fork="context" if part else None)
            rows.append(Row.by_turn(sequence, [rng.gauss(0, 1) for _ in range(2 * part + 2)]))
    return rows


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    """A policy whose adapter does something: a fresh one adds nothing, and half of its gradients are zero."""
    policy = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)
    torch.manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


def trainer_of(policy: Any, tiny_model: Path, tmp_path: Path, *, token_budget: int = 4096, **options: Any) -> GRPOTrainer:
    config = grpo_config(tmp_path, temperature=TEMPERATURE, **options)
    trainer = GRPOTrainer(policy, config, batches=[], processing_class=tokenizer(tiny_model), token_budget=token_budget)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def scores(model: Any, row: Row) -> tuple[Any, Any]:
    """Log-probabilities and entropies of a row's sampled tokens, by the plain model."""
    logits = model(input_ids=torch.tensor([row.sequence.token_ids])).logits[0] / TEMPERATURE
    distribution = torch.log_softmax(logits, -1)
    places = [place for place, sampled in enumerate(row.sequence.sampled) if sampled]
    logprobs = torch.stack([distribution[place - 1, row.sequence.token_ids[place]] for place in places])
    entropies = torch.stack([-(distribution[place - 1].exp() * distribution[place - 1]).sum() for place in places])
    return logprobs, entropies


class Episode:
    """An episode's sampled tokens: all that a loss may see of it."""

    def __init__(self, model: Any, rows: list[Row], old: list[Any] | None) -> None:
        scored = [scores(model, row) for row in rows]
        self.new = torch.cat([logprobs for logprobs, _ in scored])
        self.entropies = torch.cat([entropies for _, entropies in scored])
        self.sampled, self.advantages = (
            torch.tensor([value for row in rows for value, flag in zip(values(row), row.sequence.sampled, strict=True) if flag])
            for values in (lambda row: row.sequence.logprobs, lambda row: row.advantages)
        )
        self.old = self.sampled if old is None else torch.cat(old)
        with model.disable_adapter(), torch.no_grad():
            self.reference = torch.cat([scores(model, row)[0] for row in rows])


def ratios(episode: Episode, level: str) -> Any:
    log_ratio = episode.new - episode.old
    return log_ratio.exp() if level == "token" else log_ratio.mean().exp().expand(len(log_ratio))


def policy_terms(
    episode: Episode,
    loss_type: str,
    level: str,
    low: float,
    high: float,
    correction: Callable[[Any], Any] | None = None,
    delta: float | None = None,
) -> Any:
    ratio, advantages = ratios(episode, level), episode.advantages
    if loss_type == "cispo":
        return -ratio.clamp(max=high).detach() * advantages * episode.new
    if loss_type == "sapo":
        sharpness = torch.where(advantages > 0, 1.0, 1.05)
        return -torch.sigmoid(sharpness * (ratio - 1)) * 4 / sharpness * advantages
    if loss_type == "vespo":
        # The whole episode's weight, the sampler's difference included: the product of its tokens' weights (arXiv 2602.10693).
        corrected = 0.0 if correction is None else correction(episode.old - episode.sampled).log().sum()
        log_w = ((episode.new.detach() - episode.old).sum() + corrected).clamp(math.log(1e-8), 20)
        k, rate = torch.where(advantages >= 0, 2.0, 3.0), torch.where(advantages >= 0, 3.0, 2.0)
        return -torch.exp(rate + k * log_w - rate * log_w.exp()) * advantages * episode.new
    # arXiv 2505.07291, section 3.4: a negative advantage's ratio, which the minimum alone bounds only below, is at most delta.
    bounded = ratio if delta is None else torch.where(advantages < 0, ratio.clamp(max=delta), ratio)
    return -torch.min(bounded * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def average(terms: list[Any], loss_type: str) -> Any:
    if loss_type in ("grpo", "sapo"):
        return torch.stack([values.mean() for values in terms]).mean()
    if loss_type == "luspo":
        return torch.stack([values.sum() for values in terms]).mean()
    if loss_type == "dr_grpo":
        # TRL divides by its max_completion_length, 512 unless set.
        return torch.cat(terms).sum() / (len(terms) * 512)
    return torch.cat(terms).mean()


def independent_loss(
    model: Any,
    rows: list[Row],
    loss_type: str = "dapo",
    *,
    level: str = "token",
    kl_coef: float = 0.0,
    correction: Callable[[Any], Any] | None = None,
    old: list[Any] | None = None,
    off_policy: float | None = None,
    entropy_coef: float = 0.0,
    keep_uncertain: float = 1.0,
    delta: float | None = None,
    low: float = 0.2,
    high: float = 0.28,
) -> Any:
    """The loss from the recorded tokens, one row at a time, without padding, trees, micro-batches or TRL."""
    numbers: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        numbers.setdefault(row.sequence.episode_id, []).append(index)
    episodes = [Episode(model, [rows[i] for i in own], None if old is None else [old[i] for i in own]) for own in numbers.values()]
    entropies = torch.cat([episode.entropies for episode in episodes])
    floor = torch.quantile(entropies.detach(), 1 - keep_uncertain) if keep_uncertain < 1 else -math.inf
    terms = []
    for episode in episodes:
        values = policy_terms(episode, loss_type, level, low, high, correction, delta)
        if off_policy is not None:
            far = (episode.sampled - episode.new.detach()).mean() > off_policy
            values = values * ~((episode.advantages < 0) & far)
        values = values * (episode.entropies.detach() >= floor)
        if correction is not None and loss_type != "vespo":
            values = values * correction(episode.old - episode.sampled)
        if kl_coef:
            gap = episode.reference - episode.new
            # TRL weights the KL by the probability ratio (arXiv 2512.02556).
            values = values + kl_coef * (gap.exp() - gap - 1) * ratios(episode, level)
        terms.append(values)
    return average(terms, loss_type) - entropy_coef * entropies[entropies >= floor].mean()


def sampled_nearby(policy: Any, rows: list[Row], shift: float = 0.0) -> list[Any]:
    """Record log-probabilities near the policy's own, as a sampler's are; gives the policy's."""
    with torch.no_grad():
        own = [scores(policy, row)[0] for row in rows]
    for row, values in zip(rows, own, strict=True):
        flags = torch.tensor(row.sequence.sampled)
        near = torch.zeros(len(row.sequence)).masked_scatter(flags, values + shift + 0.2 * torch.randn(len(values)))
        row.sequence.logprobs[:] = near.tolist()
    return own


def move(policy: Any) -> None:
    """Change the policy a little, as an optimiser step does."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))


def gradients_of(policy: Any) -> Any:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.requires_grad])


def compare(trainer: GRPOTrainer, policy: Any, rows: list[Row], expected_loss: Any, terms: float = 0.0) -> None:
    """Take a step; `terms` is the size of what cancels out in the loss, whose rounding stays."""
    policy.zero_grad()
    expected_loss.backward(retain_graph=True)
    expected = gradients_of(policy)
    policy.zero_grad()
    loss = trainer.training_step(policy, {"rows": rows})
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5, abs=1e-7 + 1e-5 * terms)
    assert torch.linalg.norm(gradients_of(policy) - expected) <= 1e-5 * torch.linalg.norm(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("shared", "forked"), [(0, False), (40, False), (40, True)], ids=["nothing shared", "prompt shared", "forks"])
def test_loss_and_gradients_equal_an_independent_computation_however_the_step_is_cut(
    policy: Any, tiny_model: Path, tmp_path: Path, loss_type: Any, shared: int, forked: bool
) -> None:
    rows = random_rows(shared=shared, forked=forked)
    # For cispo it is the largest ratio itself.
    high = 1.5 if loss_type == "cispo" else 0.28
    expected = independent_loss(policy, rows, loss_type, high=high)
    for token_budget in BUDGETS:
        trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, loss_type=loss_type, clip_high=high)
        compare(trainer, policy, rows, expected)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo", "sapo", "bnpo"])
@pytest.mark.parametrize("token_budget", [10_000, 1])
def test_ratios_of_whole_episodes_are_taken_over_all_their_sequences(
    policy: Any, tiny_model: Path, tmp_path: Path, loss_type: Any, token_budget: int
) -> None:
    rows = random_rows(shared=20, forked=True)
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, loss_type=loss_type, importance_sampling_level="sequence")
    compare(trainer, policy, rows, independent_loss(policy, rows, loss_type, level="sequence"))


@pytest.mark.parametrize("token_budget", [10_000, 1])
def test_the_kl_is_taken_to_the_model_without_its_adapter(policy: Any, tiny_model: Path, tmp_path: Path, token_budget: int) -> None:
    rows = random_rows(forked=True)
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, kl_coef=0.3)
    compare(trainer, policy, rows, independent_loss(policy, rows, kl_coef=0.3))
    kl = trainer.take_statistics().to_dict()["kl_reference"]
    gaps = torch.cat([Episode(policy, [row], None).reference - scores(policy, row)[0] for row in rows])
    assert kl == pytest.approx((gaps.exp() - gaps - 1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("token_budget", [10_000, 1])
@pytest.mark.parametrize(
    ("importance_correction", "correction"),
    [
        ("token_truncate", lambda gap: gap.exp().clamp(max=1.1)),
        ("token_mask", lambda gap: gap.exp() * (gap.exp() <= 1.1)),
        ("sequence_truncate", lambda gap: gap.sum().exp().clamp(max=1.1)),
        ("sequence_mask", lambda gap: gap.sum().exp() * (gap.sum().exp() <= 1.1)),
    ],
)
def test_the_samplers_difference_is_corrected_from_the_policy_at_the_batchs_start(
    policy: Any, tiny_model: Path, tmp_path: Path, token_budget: int, importance_correction: Any, correction: Any
) -> None:
    rows = random_rows(forked=True)
    trainer = trainer_of(
        policy, tiny_model, tmp_path, token_budget=token_budget, importance_correction=importance_correction, importance_max=1.1
    )
    old = sampled_nearby(policy, rows)
    scored = trainer.score(rows)
    move(policy)
    compare(trainer, policy, scored, independent_loss(policy, rows, correction=correction, old=old))


@pytest.mark.parametrize(("loss_type", "level"), [("vespo", "token"), ("cispo", "token"), ("dr_grpo", "token"), ("luspo", "sequence")])
def test_every_kind_of_loss_is_corrected(policy: Any, tiny_model: Path, tmp_path: Path, loss_type: Any, level: str) -> None:
    rows = random_rows(shared=20, forked=True)
    high = 1.05 if loss_type == "cispo" else 0.28
    options = {"importance_correction": "token_truncate", "importance_max": 1.1, "importance_sampling_level": level}
    trainer = trainer_of(policy, tiny_model, tmp_path, loss_type=loss_type, clip_high=high, **options)
    old = sampled_nearby(policy, rows)
    scored = trainer.score(rows)
    move(policy)
    expected = independent_loss(policy, rows, loss_type, level=level, correction=lambda gap: gap.exp().clamp(max=1.1), old=old, high=high)
    for trainer.token_budget in BUDGETS:
        compare(trainer, policy, scored, expected)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo"])
def test_the_kl_of_whole_episodes_is_weighted_by_their_ratio(policy: Any, tiny_model: Path, tmp_path: Path, loss_type: Any) -> None:
    rows = random_rows(shared=20, forked=True)
    expected = independent_loss(policy, rows, loss_type, level="sequence", kl_coef=0.3)
    options = {"importance_sampling_level": "sequence", "kl_coef": 0.3, "loss_type": loss_type}
    trainer = trainer_of(policy, tiny_model, tmp_path, **options)
    for trainer.token_budget in BUDGETS:
        compare(trainer, policy, rows, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_delta_bounds_the_ratio_of_negative_advantages(policy: Any, tiny_model: Path, tmp_path: Path, level: str) -> None:
    rows = random_rows(shared=20, forked=True)
    sampled_nearby(policy, rows, shift=-0.5)
    expected = independent_loss(policy, rows, level=level, delta=1.4)
    assert expected.item() != pytest.approx(independent_loss(policy, rows, level=level).item(), rel=1e-3)
    trainer = trainer_of(policy, tiny_model, tmp_path, importance_sampling_level=level, delta=1.4)
    for trainer.token_budget in BUDGETS:
        compare(trainer, policy, rows, expected)


@pytest.mark.parametrize("token_budget", [10_000, 1])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_entropy_is_a_mean_over_the_steps_tokens(policy: Any, tiny_model: Path, tmp_path: Path, token_budget: int, loss_type: Any) -> None:
    rows = random_rows(forked=True)
    with torch.no_grad():  # a random model's distributions are all but uniform, so that rounding decides which are the most uncertain
        policy.get_base_model().model.norm.weight.mul_(10)
    options = {"entropy_coef": 0.05, "top_entropy_quantile": 0.4}
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, loss_type=loss_type, **options)
    compare(trainer, policy, rows, independent_loss(policy, rows, loss_type, entropy_coef=0.05, keep_uncertain=0.4), terms=0.5)


@pytest.mark.parametrize("token_budget", [10_000, 1])
def test_episodes_far_off_the_policy_are_left_out_whole(policy: Any, tiny_model: Path, tmp_path: Path, token_budget: int) -> None:
    rows = random_rows(forked=True)
    with torch.no_grad():
        gaps = [float((Episode(policy, [row], None).sampled - scores(policy, row)[0]).mean()) for row in rows]
    threshold = sorted(gaps)[len(gaps) // 2]
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=token_budget, off_policy_mask_threshold=threshold)
    compare(trainer, policy, rows, independent_loss(policy, rows, off_policy=threshold))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "ppo"}, "unknown loss_type 'ppo'; it is one of: dapo, "),
        ({"importance_correction": "some"}, "unknown importance_correction 'some'; it is one of: none, token_truncate"),
        ({"lerning_rate": 1}, "trl.GRPOConfig has no field 'lerning_rate'"),
        ({"gradient_accumulation_steps": 4}, "is decided by the episodes"),
        ({"num_iterations": 2}, "give more optimiser steps a batch instead"),
        ({"use_liger_kernel": True}, "replaces the model's forward pass"),
        ({"top_p": 0.9}, "would make the trainer's distribution another than the sampler's"),
        ({"use_adaptive_entropy": True}, "gives each micro-batch"),
        ({"loss_type": "cispo"}, "clip_high=0.28 would cut every ratio"),
        ({"loss_type": "vespo", "importance_correction": "sequence_mask"}, "vespo weights whole episodes itself"),
        ({"delta": 1.28}, "delta=1.28 is no more than 1 \\+ clip_high=1.28"),
        ({"loss_type": "cispo", "clip_high": 5.0, "delta": 7.0}, "delta isn't part of cispo"),
        ({"save_only_model": True}, "would leave out what a run goes on from"),
        ({"push_to_hub": True}, "would upload in the middle of a run"),
        ({"neftune_noise_alpha": 5.0}, "others than the sampler's"),
        ({"disable_dropout": False}, "others than the sampler's"),
        ({"beta": 0.1}, "beta is called kl_coef here"),
        ({"epsilon_high": 0.1}, "epsilon_high is called clip_high here"),
        ({"logging_steps": 10}, "would leave out figures that a run reports and is stopped by"),
        ({"eval_strategy": "steps"}, "would make TRL generate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_would_distort_are_refused_with_a_reason(tmp_path: Path, options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        grpo_config(tmp_path, **options)


def test_the_figures_are_means_by_token(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    rows = random_rows()
    with torch.no_grad():
        scored = [scores(policy, row) for row in rows]
    gaps = torch.cat([logprobs for logprobs, _ in scored]) - torch.cat([Episode(policy, [row], None).sampled for row in rows])
    trainer = trainer_of(policy, tiny_model, tmp_path, token_budget=64)
    trainer.training_step(policy, {"rows": rows})
    figures = trainer.take_statistics().to_dict()
    assert figures["entropy"] == pytest.approx(torch.cat([entropies for _, entropies in scored]).mean().item(), rel=1e-4)
    assert figures["logprob_difference"] == pytest.approx(gaps.abs().mean().item(), rel=1e-4)
    assert figures["kl_sampler"] == pytest.approx((gaps.exp() - 1 - gaps).mean().item(), rel=1e-4)
    assert figures["kl_reference"] is None


def test_what_is_cut_follows_the_loss() -> None:
    log_ratio = torch.tensor([[0.5, -0.5, 0.0], [0.1, 2.0, 9.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0]])

    def cut(loss_type: str, level: str = "token", high: float = 0.28) -> Any:
        found = clipped(loss_type, log_ratio, mask, advantages, level=level, low=0.2, high=high)
        return None if found is None else found.tolist()

    assert cut("dapo") == [True, True, False, False, True]
    # Means 0 and 1.05: e^1.05 is above 1.28.
    assert cut("grpo", "sequence") == [False, False, False, True, True]
    assert cut("cispo", high=5.0) == [False, False, False, False, True]
    assert cut("sapo") is cut("vespo") is None


def test_two_episodes_of_one_id_are_told(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two episodes of an optimiser step have the id 'e0'; give the runner a journal"):
        trainer_of(policy, tiny_model, tmp_path).training_step(policy, {"rows": random_rows(2) + random_rows(1, seed=3)})


def test_a_row_whose_scores_would_depend_on_the_pass_is_told(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(policy, tiny_model, tmp_path)
    trainer._longest_row = 20
    with pytest.raises(UsageError, match=r"a row has \d+ tokens, and beyond 20 this model's rotary embedding"):
        trainer.training_step(policy, {"rows": random_rows(2, shared=30)})


def test_without_a_step_there_are_no_figures_rather_than_zeros(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    figures = trainer_of(policy, tiny_model, tmp_path).take_statistics().to_dict()
    assert figures.pop("optimiser_steps") == 0
    assert set(figures.values()) == {None}


def test_training_ends_with_the_batches_and_asks_for_each_only_after_the_one_before(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    seen: list[list[float]] = []
    probe = list(range(20, 40))

    def batches() -> Any:
        for seed in range(3):
            seen.append(token_logprobs(policy, probe))
            yield [random_rows(seed=seed), random_rows(seed=seed + 10)]

    trainer = trainer_of(policy, tiny_model, tmp_path, learning_rate=1e-2)
    trainer.batches = batches()
    trainer.train()
    assert trainer.state.global_step == 6
    # The policy had changed each time that the next rows were asked for.
    assert seen[0] != seen[1] != seen[2]
