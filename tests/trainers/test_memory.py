"""What a pass is predicted to take, and what is done about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from art_gym.errors import UsageError  # noqa: E402
from art_gym_trainers import memory  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.memory import GIB, PassMemory, choose_budget, measure  # noqa: E402
from art_gym_trainers.passes import prepare_passes  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer  # noqa: E402
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, add_scoring  # noqa: E402

pytestmark = pytest.mark.train


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    policy = load_policy(tiny_model, dtype="float32")
    assert add_scoring(policy.get_base_model()) is TreeBatch
    return policy


def saved_bytes(policy: Any, tokens: int) -> int:
    """What autograd keeps of a pass, counted here."""
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = TreeBatch.build([list(range(tokens))], [[False] * (tokens - 1) + [True]])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = policy(batch=batch)
    del held
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    return sum(size for place, size in kept.items() if place not in own)


def test_a_long_pass_keeps_what_two_short_ones_say(policy: Any) -> None:
    found = measure(policy, TreeBatch, vocabulary=49152)
    growth = saved_bytes(policy, 900) - saved_bytes(policy, 300)
    assert found.token_bytes * 600 == pytest.approx(growth, rel=0.03)


def test_recomputed_layers_keep_their_inputs_and_one_layers_rest(policy: Any) -> None:
    plain = measure(policy, TreeBatch, vocabulary=49152)
    policy.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    found = measure(policy, TreeBatch, vocabulary=49152)
    # Two layers: half of what both keep, and the inputs of both, which are 64 floats wide.
    assert plain.token_bytes / 2 < found.token_bytes < 0.8 * plain.token_bytes
    assert all(module.gradient_checkpointing for module in policy.modules() if hasattr(module, "gradient_checkpointing"))


def test_padded_rows_are_measured_too(policy: Any) -> None:
    assert measure(policy, PaddedBatch, vocabulary=49152).token_bytes > 0


def test_copies_of_weights_and_a_reference_are_counted(tiny_model: Path) -> None:
    whole = load_policy(tiny_model, method="full")
    kind, count = add_scoring(whole), sum(parameter.numel() for parameter in whole.parameters())
    plain = measure(whole, kind, vocabulary=10)
    halved = measure(whole, kind, vocabulary=10, autocast=True, reference=True)
    assert plain.other_bytes == 0
    assert halved.other_bytes == 2 * count + 4 * count
    assert halved.peak(0) - plain.peak(0) == 6 * count
    # Of the products' inputs, all but the norms' are kept in half the size.
    assert 0.4 * plain.token_bytes < halved.token_bytes < plain.token_bytes


def test_a_plan_is_not_refused_once_the_run_goes_on(policy: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = grpo_config(tmp_path)
    plan = prepare_passes(policy, arguments, 500)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1)
    trainer = GRPOTrainer(policy, arguments, batches=[], processing_class=load_tokenizer(tiny_model), passes=plan)
    assert trainer.token_budget == 500
    with pytest.raises(UsageError, match=r"grpo\.token_budget=500"):
        prepare_passes(policy, arguments, 500)


def test_the_optimiser_keeps_a_gradient_and_two_moments(policy: Any) -> None:
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert measure(policy, TreeBatch, vocabulary=49152).optimiser_bytes == 12 * trained


NEEDS = PassMemory(token_bytes=1e6, head_bytes=2 * 10**8, optimiser_bytes=10**8)


@pytest.mark.parametrize(
    ("wanted", "free", "chosen"),
    [
        # (0.8 * 10e9 - 0.3e9 - 0.3e9) / 1.5e6 = 4933.3
        (None, 10 * 10**9, 4933),
        (None, 10**12, memory.MOST_TOKENS),
        (None, None, memory.MOST_TOKENS),
        # Wanted, all that is free may be taken: (10e9 - 0.6e9) / 1.5e6 = 6266.7
        (6266, 10 * 10**9, 6266),
        (100, 10 * 10**9, 100),
        (20_000, 10**12, 20_000),
    ],
)
def test_passes_are_as_long_as_memory_allows(wanted: int | None, free: int | None, chosen: int) -> None:
    assert choose_budget(NEEDS, wanted, free) == chosen


def test_pairs_of_tokens_count_where_attention_keeps_them() -> None:
    needs = PassMemory(token_bytes=1e6, head_bytes=0, optimiser_bytes=0, pair_bytes=100.0)
    tokens = needs.most_tokens(10**10)
    assert needs.peak(tokens) <= 10**10 < needs.peak(tokens + 1)
    assert choose_budget(needs, None, 10**10) < tokens


@pytest.mark.parametrize(
    ("wanted", "free", "text"),
    [
        (6267, 10 * 10**9, r"grpo.token_budget=6267 tokens needs about 9.3 GiB, and 9.3 GiB are free; set grpo.token_budget to at most 6266"),
        (None, GIB, r"training needs about 1.3 GiB for a pass of 512 tokens, and 1.0 GiB are free; end other programs"),
    ],
)
def test_what_does_not_fit_is_told_with_the_way_out(wanted: int | None, free: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        choose_budget(NEEDS, wanted, free)


def test_a_policy_that_is_prepared_twice_is_measured_alike(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype="float32")
    args = grpo_config(tmp_path, gradient_checkpointing=True)
    first, again = (prepare_passes(policy, args, 600, free=lambda: 10**12) for _ in range(2))
    assert first == again
    assert (first.kind, first.token_budget, first.free) == (TreeBatch, 600, 10**12)
    assert policy.is_gradient_checkpointing
