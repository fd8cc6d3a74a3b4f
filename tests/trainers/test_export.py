"""Exports of a real checkpoint: plain PEFT and plain transformers load them, and they score as the policy did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from peft import AutoPeftModelForCausalLM, PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig  # noqa: E402

from art_gym.errors import UsageError  # noqa: E402
from art_gym_trainers import checkpoints  # noqa: E402
from art_gym_trainers.checkpoints import Checkpoint  # noqa: E402
from art_gym_trainers.export import export  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.publish import merged_state  # noqa: E402

pytestmark = pytest.mark.train

PROBE = list(range(20, 60))


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    policy = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy


@pytest.fixture
def saved(policy: Any, tmp_path: Path) -> Checkpoint:
    with checkpoints.writing(tmp_path / "checkpoints", 1, {}) as scratch:
        policy.save_pretrained(scratch)
    return checkpoints.read(tmp_path / "checkpoints", 1)


def test_an_adapter_loads_in_plain_peft(policy: Any, saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    export(saved, tiny_model, tmp_path / "out")
    expected = token_logprobs(policy, PROBE)
    assert token_logprobs(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "out"), PROBE) == expected
    # The base is found by its name.
    assert token_logprobs(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"), PROBE) == expected


def test_merged_weights_load_in_plain_transformers(policy: Any, saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    export(saved, tiny_model, tmp_path / "out", form="merged", base_dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert token_logprobs(model, PROBE) == pytest.approx(token_logprobs(policy, PROBE), abs=1e-4)
    assert not list((tmp_path / "out").glob("adapter*"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_those_that_a_publisher_gives_the_engine(saved: Checkpoint, tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    export(saved, tiny_model, tmp_path / "out", form="merged", dtype=dtype, base_dtype="bfloat16")
    expected = merged_state(load_policy(tiny_model, dtype="bfloat16", saved=saved.folder), dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensor, written[name]), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == getattr(torch, dtype)


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_prompts_are_written_as_they_were_trained_on(saved: Checkpoint, tiny_model: Path, tmp_path: Path, form: Any) -> None:
    export(saved, tiny_model, tmp_path / "out", form=form)
    tokenizer, base = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tiny_model)
    messages = [{"role": "user", "content": "Hello."}]
    assert tokenizer.apply_chat_template(messages) == base.apply_chat_template(messages)


def test_a_merged_model_has_its_generation_config(saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    export(saved, tiny_model, tmp_path / "out", form="merged")
    assert GenerationConfig.from_pretrained(tmp_path / "out") == GenerationConfig.from_pretrained(tiny_model)


def test_a_model_that_was_trained_whole_is_exported_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.nn.init.normal_(model.model.norm.weight)
    with checkpoints.writing(tmp_path / "checkpoints", 1, {}) as scratch:
        model.save_pretrained(scratch)
    saved = checkpoints.read(tmp_path / "checkpoints", 1)
    export(saved, tiny_model, tmp_path / "out", form="merged")
    assert token_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), PROBE) == token_logprobs(model, PROBE)
    with pytest.raises(UsageError, match="export it with --form merged"):
        export(saved, tiny_model, tmp_path / "other")


def test_weights_in_other_formats_stay_behind(saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    for name in ("pytorch_model.bin", "model.gguf", "pytorch_model.bin.index.json"):
        (base / name).touch()
    (base / "LICENSE").write_text("free")
    export(saved, base, tmp_path / "out", form="merged")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "config.json", "model.safetensors"} <= names
    assert not names & {"pytorch_model.bin", "model.gguf", "pytorch_model.bin.index.json"}


def test_a_failure_on_the_way_leaves_nothing(saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    (saved.folder / "adapter_model.safetensors").write_bytes(b"broken")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Exception, match="deserializing"):
        export(saved, tiny_model, tmp_path / "out", form="merged")
    assert sorted(tmp_path.iterdir()) == before


def test_the_adapters_settings_are_kept(saved: Checkpoint, tiny_model: Path, tmp_path: Path) -> None:
    export(saved, tiny_model, tmp_path / "out", base_name="owner/base", card="# A card\n")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "owner/base"
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert (tmp_path / "out" / "README.md").read_text() == "# A card\n"
