"""Publishing: merged weights equal the adapted policy, and a publish that didn't take effect is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from art_gym.errors import EngineError  # noqa: E402
from art_gym_trainers.policy import load_policy, token_logprobs  # noqa: E402
from art_gym_trainers.publish import LoraPublisher, MergedPublisher, Probe, merged_state, prepare_weights  # noqa: E402

pytestmark = pytest.mark.train

PROBE = list(range(20, 60))


class FolderEngine:
    """Answers from the weights in a folder as they were when it last loaded them, read by plain transformers and PEFT."""

    def __init__(self, folder: Path, *, stale: bool = False) -> None:
        self.folder, self.stale = folder, stale
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.adapters: dict[str, Any] = {}
        self.unloaded: list[str] = []

    def reload_weights(self) -> None:
        if not self.stale:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder)

    def load_adapter(self, name: str, path: Path) -> None:
        from peft import PeftModel

        self.adapters[name] = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(self.folder), path)

    def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)
        del self.adapters[name]

    def models(self) -> list[str]:
        return ["base", *self.adapters]

    def prompt_logprobs(self, token_ids: list[int], model: str | None = None) -> list[float]:
        return token_logprobs(self.adapters[model] if model else self.model, token_ids)


@pytest.fixture
def policy(tiny_model: Path) -> Any:
    return load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8)


def disturb(policy: Any, std: float = 0.3) -> None:
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=std)


def test_merged_weights_load_in_plain_transformers_and_score_like_the_adapted_policy(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    disturb(policy)
    weights = tmp_path / "weights"
    prepare_weights(tiny_model, weights)
    before = token_logprobs(policy, PROBE)
    published = MergedPublisher(policy, FolderEngine(weights), weights, "tiny", Probe(PROBE)).publish(3)
    assert (published.model, published.version) == ("tiny", "tiny@3")
    assert published.difference < 1e-5
    assert token_logprobs(AutoModelForCausalLM.from_pretrained(weights), PROBE) == pytest.approx(before, abs=1e-4)
    assert token_logprobs(policy, PROBE) == before, "publishing changed the policy"


def test_a_fresh_adapter_merges_to_the_base_unchanged(policy: Any, tiny_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    merged = merged_state(policy)
    assert set(merged) == set(base) - {"lm_head.weight"}
    for name, tensor in merged.items():
        assert torch.equal(tensor, base[name].float()), name


def test_an_engine_that_goes_on_answering_with_the_version_before_is_caught(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    prepare_weights(tiny_model, weights)
    publisher = MergedPublisher(policy, FolderEngine(weights, stale=True), weights, "tiny", Probe(PROBE, tolerance=100.0))
    publisher.publish(0)
    disturb(policy)
    with pytest.raises(EngineError, match="version before tiny@1"):
        publisher.publish(1)


def test_a_stale_engine_is_caught_although_the_step_was_small(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    prepare_weights(tiny_model, weights)
    publisher = MergedPublisher(policy, FolderEngine(weights, stale=True), weights, "tiny", Probe(PROBE))
    publisher.publish(0)
    disturb(policy, std=0.02)
    with pytest.raises(EngineError, match="version before tiny@1"):
        publisher.publish(1)


def test_an_adapter_that_a_stopped_run_left_in_the_engine_is_replaced(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    engine = FolderEngine(tiny_model)
    LoraPublisher(policy, engine, tmp_path / "first", "tiny", Probe(PROBE)).publish(0)
    disturb(policy)
    assert LoraPublisher(policy, engine, tmp_path / "second", "tiny", Probe(PROBE)).publish(0).difference < 1e-5


def test_an_engine_with_other_weights_is_caught_at_the_first_publish(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    prepare_weights(tiny_model, weights)
    engine = FolderEngine(weights, stale=True)
    disturb(policy)
    with pytest.raises(EngineError, match=r"publish of tiny@0 not proven: .* differ from the trainer's by"):
        MergedPublisher(policy, engine, weights, "tiny", Probe(PROBE)).publish(0)


def test_the_lora_publisher_loads_each_version_under_a_fresh_name_and_drops_the_one_before(
    policy: Any, tiny_model: Path, tmp_path: Path
) -> None:
    engine = FolderEngine(tiny_model)
    publisher = LoraPublisher(policy, engine, tmp_path / "adapters", "tiny", Probe(PROBE))
    for step in (0, 1):
        disturb(policy)
        published = publisher.publish(step)
        assert published.model == published.version == f"tiny@{step}"
        assert published.difference < 1e-5
    assert (list(engine.adapters), engine.unloaded) == (["tiny@1"], ["tiny@0"])
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["tiny@1"]


def test_the_lora_publisher_drops_what_a_run_left_that_was_killed(policy: Any, tiny_model: Path, tmp_path: Path) -> None:
    engine = FolderEngine(tiny_model)
    LoraPublisher(policy, engine, tmp_path / "adapters", "tiny", Probe(PROBE)).publish(3)
    LoraPublisher(policy, engine, tmp_path / "adapters of another run", "tiny", Probe(PROBE)).publish(7)
    (tmp_path / "adapters" / "tiny@2").mkdir()
    LoraPublisher(policy, engine, tmp_path / "adapters", "tiny", Probe(PROBE)).publish(4)
    assert sorted(engine.adapters) == ["tiny@4", "tiny@7"]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["tiny@4"]


def test_weights_are_prepared_once_and_keep_the_small_files(tiny_model: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    prepare_weights(tiny_model, weights)
    stamp = (weights / "model.safetensors").stat().st_mtime_ns
    prepare_weights(tiny_model, weights)
    assert (weights / "model.safetensors").stat().st_mtime_ns == stamp
    assert (weights / "config.json").exists()
    assert (weights / "tokenizer.json").exists()
