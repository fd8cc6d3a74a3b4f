"""Policies: an adapter, or all weights; what is trained is float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from art_gym.errors import UsageError  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.policy import load_policy, load_saved, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.publish import merged_state  # noqa: E402
from art_gym_trainers.rows import Row  # noqa: E402
from art_gym_trainers.sequences import TokenSequence  # noqa: E402
from art_gym_trainers.sft import warm_start  # noqa: E402

pytestmark = pytest.mark.train

PROBE = list(range(20, 60))


def rows() -> list[Row]:
    return [
        Row.uniform(TokenSequence(f"e{n}", [30, 31, 32 + n, 40], [False, False, True, True], [0.0, 0.0, -10.0, -10.0], [-1, -1, 0, 0]), n - 1.0)
        for n in range(3)
    ]


def trained(policy: Any, tiny_model: Path, tmp_path: Path, **options: Any) -> None:
    config = grpo_config(tmp_path / "scratch", learning_rate=1e-3, **options)
    GRPOTrainer(policy, config, batches=[[rows()]] * 3, processing_class=load_tokenizer(tiny_model)).train()


def test_an_adapter_leaves_the_base_alone(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype="bfloat16")
    assert isinstance(policy, PeftModel)
    before = policy.get_base_model().model.embed_tokens.weight.clone()
    trained(policy, tiny_model, tmp_path)
    assert torch.equal(policy.get_base_model().model.embed_tokens.weight, before)
    assert {parameter.dtype for parameter in policy.parameters() if parameter.requires_grad} == {torch.float32}


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_checkpointing": True}], ids=str)
def test_all_weights_are_trained_in_float32(tiny_model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    policy = load_policy(tiny_model, method="full", dtype="bfloat16")
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    trained(policy, tiny_model, tmp_path, **options)
    unchanged = [name for name, parameter in policy.named_parameters() if torch.equal(parameter, before[name])]
    assert unchanged == []


def test_a_warm_start_and_grpo_train_all_weights_in_bfloat16_passes(tiny_model: Path, tmp_path: Path) -> None:
    from art_gym import Episode, Scenario, Turn, say

    policy = load_policy(tiny_model, method="full")
    turn = Turn([{"role": "user", "content": "Hi."}], say("Hello."))
    episodes = [Episode(f"e{n}", "example/Any-v0", Scenario("s", seed=0), turns=[turn], terminated=True) for n in range(2)]
    warm_start(policy, load_tokenizer(tiny_model), episodes, output_dir=tmp_path / "warm", batch_size=2, bf16=True)
    trained(policy, tiny_model, tmp_path, bf16=True)
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_under_autocast_a_float32_base_with_an_adapter_trains(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, dtype="float32")
    trained(policy, tiny_model, tmp_path, bf16=True)


def test_the_reference_of_a_whole_model_is_what_it_was_at_first(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, method="full")
    config = grpo_config(tmp_path / "scratch", learning_rate=1e-3, kl_coef=0.1)
    trainer = GRPOTrainer(policy, config, batches=[[rows()]] * 2, processing_class=load_tokenizer(tiny_model))
    trainer.train()
    assert token_logprobs(trainer.ref_model, PROBE) == token_logprobs(AutoModelForCausalLM.from_pretrained(tiny_model), PROBE)
    kl = trainer.take_statistics().to_dict()["kl_reference"]
    # Nothing at the first step, something at the second.
    assert kl is not None
    assert kl > 1e-9


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_was_saved_comes_back(tiny_model: Path, tmp_path: Path, method: Any) -> None:
    policy = load_policy(tiny_model, method=method, dtype="float32")
    trained(policy, tiny_model, tmp_path)
    policy.save_pretrained(tmp_path / "saved")
    expected = token_logprobs(policy, PROBE)
    assert token_logprobs(load_policy(tiny_model, method=method, dtype="float32", saved=tmp_path / "saved"), PROBE) == expected
    other = load_policy(tiny_model, method=method, dtype="float32")
    assert token_logprobs(other, PROBE) != expected
    load_saved(other, tmp_path / "saved")
    assert token_logprobs(other, PROBE) == expected


def test_a_whole_model_is_published_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model, method="full")
    state = merged_state(policy)
    assert "lm_head.weight" not in state
    for name, tensor in AutoModelForCausalLM.from_pretrained(tiny_model).state_dict().items():
        if name in state:
            assert torch.equal(state[name], tensor)


def test_a_folder_without_weights_is_told(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no weights of this model"):
        load_saved(load_policy(tiny_model, method="full"), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_four_bits_need_a_gpu(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.method qlora needs an NVIDIA GPU; use lora here"):
        load_policy(tiny_model, method="qlora")
