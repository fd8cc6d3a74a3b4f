"""Scores of token trees against the plain model, one sequence at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from art_gym_trainers import scoring  # noqa: E402
from art_gym_trainers.lora import fuse_lora  # noqa: E402
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, add_scoring, longest_row  # noqa: E402
from art_gym_trainers.tree_attention import NAME  # noqa: E402

pytestmark = pytest.mark.train

VOCABULARY = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
FULL, SLIDING = "full_attention", "sliding_attention"
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "mistral, window of 6": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, attn_logit_softcapping=2.0, sliding_window=6, layer_types=[SLIDING, FULL])
    ),
    "gemma3, window of 6": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=[SLIDING, FULL])),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)),
}
# They do more to their logits than their heads do, and so compute them themselves.
SCALED: dict[str, Callable[[], Any]] = {
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
}
# Their tokens see their past by other means than attention, or know their place by its mask.
UNFIT: dict[str, Callable[[], Any]] = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2)),
    "lfm2, short convolutions": lambda: Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])),
    # It sees its window by the mask alone, which is wider than what a trial of two short sequences would show.
    "qwen2 moe, window of 40": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            **SIZES,
            use_sliding_window=True,
            sliding_window=40,
            max_window_layers=2,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
}


def small(name: str) -> Any:
    torch.manual_seed(0)
    model = {**MODELS, **SCALED, **UNFIT}[name]()
    for parameter in model.parameters():  # attention that hardly matters would hide a mistake in it
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    if name.startswith("gemma2"):
        model.set_attn_implementation("eager")  # transformers' SDPA leaves out the cap
    return model.eval()


@pytest.fixture(scope="module", params=[*MODELS, *SCALED])
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    plain, scoring_model = small(request.param), small(request.param)
    assert add_scoring(scoring_model) is TreeBatch
    return plain, scoring_model


def one_by_one(model: Any, sequences: list[list[int]], scored: list[list[bool]], temperature: float) -> tuple[Any, Any]:
    logprobs, entropies = [], []
    for ids, flags in zip(sequences, scored, strict=True):
        rows = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float() / temperature, -1)
        for place, flag in enumerate(flags):
            if flag:
                logprobs.append(rows[place - 1, ids[place]])
                entropies.append(-(rows[place - 1].exp() * rows[place - 1]).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def gradients(model: Any, values: Any, weights: Any) -> Any:
    model.zero_grad()
    (values * weights).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[list[bool]]]:
    """Sequences that branch from one another in random places, as groups and forks do; some with another root."""
    sequences = [draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=16))]
    for _ in range(draw(st.integers(0, 5))):
        parent = draw(st.sampled_from(sequences))
        own = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
        sequences.append((parent[: draw(st.integers(0, len(parent)))] + own)[:30])
    sequences = [sequence if len(sequence) > 1 else [*sequence, 0] for sequence in sequences]
    scored = [[False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))] for ids in sequences]
    scored[0][-1] = True
    return sequences, scored


@given(trees(), st.sampled_from([1.0, 0.6]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scores_and_gradients_of_a_tree_are_those_of_its_sequences(
    models: tuple[Any, Any], drawn: tuple[list[list[int]], list[list[bool]]], temperature: float
) -> None:
    plain, tree_model = models
    sequences, scored = drawn
    expected, expected_entropies = one_by_one(plain, sequences, scored, temperature)
    weights = torch.linspace(-1, 1.5, len(expected))
    expected_gradients = gradients(plain, expected, weights)
    for kind in (TreeBatch, PaddedBatch):
        values, entropies = tree_model(batch=kind.build(sequences, scored), temperature=temperature)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entropies, expected_entropies.detach(), rtol=1e-4, atol=1e-4)
        assert not entropies.requires_grad
        actual = gradients(tree_model, values, weights)
        assert torch.nn.functional.cosine_similarity(actual, expected_gradients, 0) >= 0.99999
        assert abs(actual.norm() / expected_gradients.norm() - 1) <= 1e-4


def adapted(seed: int, dtype: Any = torch.float32) -> Any:
    """A small Llama with a LoRA adapter that does something, as it is trained."""
    model = get_peft_model(small("llama").to(dtype), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@given(trees())
@settings(max_examples=25, deadline=None)
def test_trees_train_an_adapter_as_sequences_do_with_recomputed_layers_too(drawn: tuple[list[list[int]], list[list[bool]]]) -> None:
    sequences, scored = drawn
    plain, fused, recomputed = (adapted(0) for _ in range(3))
    expected, _ = one_by_one(plain, sequences, scored, 1.0)
    weights = torch.linspace(-1, 1.5, len(expected))
    expected_gradients = gradients(plain, expected, weights)
    recomputed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (fused, recomputed):
        assert add_scoring(model.get_base_model()) is TreeBatch
        fuse_lora(model)
        model.train()
        values, _ = model(batch=TreeBatch.build(sequences, scored))
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        actual = gradients(model, values, weights)
        assert torch.nn.functional.cosine_similarity(actual, expected_gradients, 0) >= 0.99999
        assert abs(actual.norm() / expected_gradients.norm() - 1) <= 1e-4


@given(trees())
@settings(max_examples=25, deadline=None)
def test_in_bfloat16_trees_are_as_near_to_the_truth_as_padded_rows(drawn: tuple[list[list[int]], list[list[bool]]]) -> None:
    sequences, scored = drawn
    truth, _ = one_by_one(adapted(0), sequences, scored, 1.0)
    model = adapted(0, torch.bfloat16)
    assert add_scoring(model.get_base_model()) is TreeBatch
    with torch.no_grad():
        tree, padded = (model(batch=kind.build(sequences, scored))[0] for kind in (TreeBatch, PaddedBatch))
    assert (tree - truth).abs().mean() <= 2 * (padded - truth).abs().mean() + 0.05


def test_each_token_of_a_tree_is_computed_once(models: tuple[Any, Any]) -> None:
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]]
    batch = TreeBatch.build(sequences, [[False, False, True, True]] * 2 + [[False, True, True]])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    # 3 is scored in two sequences and computed in one place.
    assert (len(batch.predictors), len(batch.picks)) == (5, 6)


def test_without_a_batch_a_model_does_what_it_did(models: tuple[Any, Any]) -> None:
    plain, tree_model = models
    ids, mask = torch.tensor([[0, 5, 6, 7], [1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(tree_model(input_ids=ids, attention_mask=mask).logits[1], plain(input_ids=ids, attention_mask=mask).logits[1])
    written = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert tree_model.generate(ids[1:], **written).tolist() == plain.generate(ids[1:], **written).tolist()


@pytest.mark.parametrize("name", UNFIT)
def test_where_attention_allows_no_tree_rows_are_padded_and_that_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain, model = small(name), small(name)
    with caplog.at_level(logging.WARNING):
        assert add_scoring(model) is PaddedBatch
    assert "tokens that sequences share are computed once for each" in caplog.text
    assert add_scoring(model) is PaddedBatch
    assert model.config._attn_implementation != NAME
    sequences, scored = [[1, 2, 3, 4], [1, 2, 6]], [[False, False, True, True], [False, True, True]]
    expected, entropies = one_by_one(plain, sequences, scored, 0.7)
    actual = model(batch=PaddedBatch.build(sequences, scored), temperature=0.7)
    torch.testing.assert_close(actual, (expected, entropies), rtol=1e-4, atol=1e-4)


def test_a_first_token_can_not_be_scored() -> None:
    for kind in (TreeBatch, PaddedBatch):
        with pytest.raises(ValueError, match="first token can't be scored"):
            kind.build([[1, 2], [3, 4]], [[False, True], [True, True]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cached_reply_reads_all_of_its_past(dtype: Any) -> None:
    plain, model = small("gemma2, capped").to(dtype), small("gemma2, capped").to(dtype)
    assert add_scoring(model) is TreeBatch
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    written = [one.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None).tolist() for one in (plain, model)]
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_an_adapted_model_takes_batches_too(name: str) -> None:
    plain, model = small(name), small(name)
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    kind = add_scoring(adapted.get_base_model())
    sequences, scored = [[1, 2, 3, 4], [1, 2, 6]], [[False, False, True, True], [False, True, True]]
    # A fresh adapter adds nothing.
    expected = one_by_one(plain, sequences, scored, 1.0)
    for batch in {kind, PaddedBatch}:
        torch.testing.assert_close(adapted(batch=batch.build(sequences, scored)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 20])
def test_a_head_whose_logits_come_in_pieces(monkeypatch: pytest.MonkeyPatch, frozen: bool, count: int) -> None:
    monkeypatch.setattr(scoring, "head_rows", lambda device: 8)
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY, bias=False)
    head.requires_grad_(not frozen)
    states = torch.randn(count, 16, requires_grad=True)
    targets = torch.randint(VOCABULARY, (count,))
    weights = torch.randn(count)
    logprobs, entropies = scoring.score_states(head, states, targets, 0.7)
    if not count:
        assert (logprobs.shape, entropies.shape) == ((0,), (0,))
        return
    expected = torch.distributions.Categorical(logits=head(states) / 0.7)
    torch.testing.assert_close(logprobs, expected.log_prob(targets))
    torch.testing.assert_close(entropies, expected.entropy().detach())
    wanted = [states] if frozen else [states, head.weight]
    actual = torch.autograd.grad((logprobs * weights).sum(), wanted)
    torch.testing.assert_close(actual, torch.autograd.grad((expected.log_prob(targets) * weights).sum(), wanted))


ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 128),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0, **ORIGINAL}, 64),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_rows_are_bounded_where_positions_depend_on_the_longest(rope: dict[str, Any], limit: int | None) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    assert longest_row(model) == limit
    kind = add_scoring(model)
    short = [place % VOCABULARY for place in range(20)]

    def beside(length: int) -> Any:
        rows = [short, [3 * place % VOCABULARY for place in range(length)]]
        return model(batch=kind.build(rows, [[False] + [True] * 19, [False] * length]))[0]

    with torch.no_grad():
        torch.testing.assert_close(beside(limit or 128), beside(5), rtol=1e-4, atol=1e-4)
        if limit is not None:
            assert not torch.allclose(beside(4 * limit), beside(5), rtol=1e-2, atol=1e-2)
