"""A whole training run with a real vLLM and a tiny random model: files, proof of each publish, exact loss, and going on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from art_gym.cli.config import RunConfig  # noqa: E402
from art_gym.cli.report import read_evaluations, read_metrics  # noqa: E402
from art_gym.episodes import EpisodeGroup  # noqa: E402
from art_gym.store import EpisodeStore  # noqa: E402
from art_gym_trainers import checkpoints  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.rows import batch_rows  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.train, pytest.mark.timeout(600)]

# The environment has to be known to the process that trains, which is started from here.
PROGRAM = '''
import sys
from pathlib import Path
import gymnasium
from art_gym import ToolEnv, tool

class Vowels(ToolEnv):
    """Rewards what even a random model does now and then, so that groups differ."""
    instructions = "Say something."
    max_turns = 2
    instant = True
    def start(self):
        return "Speak."
    @tool
    def hush(self) -> str:
        """Say nothing."""
        return "Hush."
    def on_text(self, text):
        self.reward("vowels", (sum(letter in "aeiou" for letter in text) % 7) / 7)
        return "More."

gymnasium.register("test/Vowels-v0", entry_point=Vowels)
from art_gym.cli._train import run_training
from art_gym.cli.config import RunConfig
from art_gym.cli.live import LiveTable
folder, model = Path(sys.argv[1]), Path(sys.argv[2])
with LiveTable("test") as live:
    run_training(RunConfig.load(folder / "config.yaml"), folder, model_folder=model, live=live)
'''


def start(folder: Path, model: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(model)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(timeout=420)
    assert process.returncode == 0, output.decode()[-4000:]


SERVED: dict[str, dict[str, Any]] = {
    "engine": {"max_model_len": 512, "kv_cache_gib": 0.5},
    "rollout": {"max_tokens": 12, "concurrency": 8},
    "evaluation": {"n": 4},
}


@pytest.fixture(scope="module")
def finished_run(tiny_model: Path, configured: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed once after its first batch, and then went on to its end."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    configured(folder, "test/Vowels-v0", **SERVED, grpo={"batches": 3, "token_budget": 400})
    process = start(folder, tiny_model)
    deadline = time.monotonic() + 300
    while not (folder / "checkpoints" / "step-0001").exists():
        assert process.poll() is None, process.communicate()[0].decode()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finish(start(folder, tiny_model))
    return folder


def test_a_killed_run_goes_on_where_it_stood_and_ends_whole(finished_run: Path) -> None:
    rows = read_metrics(finished_run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["policy"] for row in rows] == ["tiny@0", "tiny@1", "tiny@2"]
    assert list(read_evaluations(finished_run)) == ["untrained", "grpo"]
    saved = checkpoints.latest(finished_run / "checkpoints")
    assert saved is not None
    assert saved.step == 3
    assert (finished_run / "report.md").exists()
    assert (finished_run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_each_batch_is_played_by_the_version_before_it_and_on_its_own_scenarios(finished_run: Path) -> None:
    with EpisodeStore(finished_run) as store:
        played = {label: list(store.journal(label).latest().values()) for label in store.labels() if label.startswith("train-")}
    assert list(played) == ["train-0001", "train-0002", "train-0003"]
    scenarios: set[str] = set()
    for number, episodes in enumerate(played.values()):
        assert len(episodes) == 8
        assert {turn.policy for episode in episodes for turn in episode.turns} == {f"tiny@{number}"}
        own = {episode.scenario.id for episode in episodes}
        assert len(own) == 2
        assert not own & scenarios
        scenarios |= own


def test_sampler_and_trainer_agree_in_float32(finished_run: Path) -> None:
    for row in read_metrics(finished_run):
        assert row["logprob_difference"] < 1e-4
        assert row["publish_difference"] < 1e-4
        assert row["entropy"] > 0


def test_the_loss_of_a_real_batch_equals_an_independent_computation(finished_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    with EpisodeStore(finished_run) as store:
        episodes = list(store.journal("train-0001").latest().values())
    scenarios = {episode.scenario.id: episode.scenario for episode in episodes}
    groups = [EpisodeGroup(scenario, [episode for episode in episodes if episode.scenario.id == id]) for id, scenario in scenarios.items()]
    kept, _ = batch_rows(groups)
    rows = [row for group in kept for row in group]
    assert rows

    # From the journal's ids alone: no sequences, rows, masks or padding of ours.
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    terms = []
    for group in groups:
        rewards = torch.tensor([episode.reward for episode in group.episodes])
        if rewards.max() - rewards.min() < 1e-9:
            continue
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            for turn in episode.turns:
                assert turn.prompt_ids
                assert turn.completion_ids
                assert turn.logprobs
                ids = turn.prompt_ids + turn.completion_ids
                with torch.no_grad():
                    scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
                for offset, (token, old) in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
                    ratio = (scores[len(turn.prompt_ids) + offset - 1, token] - old).exp()
                    terms.append(-torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    expected = torch.stack(terms).mean().item()
    # Before the first step all ratios are near 1, and a group's advantages add up to 0: what is left of the terms is their rounding.
    rounding = 1e-6 * torch.stack(terms).abs().mean().item()

    trainer = GRPOTrainer(
        load_policy(tiny_model, dtype="float32"),
        grpo_config(tmp_path),
        batches=[],
        processing_class=load_tokenizer(tiny_model),
        token_budget=300,
    )
    trainer.current_gradient_accumulation_steps = 1
    assert trainer.training_step(trainer.model, {"rows": rows}).item() == pytest.approx(expected, rel=1e-5, abs=rounding)


def test_the_adapter_loads_in_plain_peft_and_equals_the_merged_weights(finished_run: Path, tiny_model: Path) -> None:
    saved = checkpoints.latest(finished_run / "checkpoints")
    assert saved is not None
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), saved.folder)
    merged = AutoModelForCausalLM.from_pretrained(finished_run / "weights")
    probe = list(range(20, 80))
    assert token_logprobs(adapted, probe) == pytest.approx(token_logprobs(merged, probe), abs=1e-4)
    assert token_logprobs(adapted, probe) != pytest.approx(token_logprobs(AutoModelForCausalLM.from_pretrained(tiny_model), probe), abs=1e-3)


def test_a_finished_run_that_goes_on_changes_nothing(finished_run: Path, tiny_model: Path) -> None:
    before = {path: path.read_bytes() for path in (finished_run / "metrics.jsonl", finished_run / "evaluations.json")}
    finish(start(finished_run, tiny_model))
    assert {path: path.read_bytes() for path in before} == before


def test_the_lora_publisher_trains_the_same_way_after_a_warm_start(
    tiny_model: Path, configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    folder = tmp_path / "lora"
    grpo = {"batches": 2, "publisher": "lora", "token_budget": 400}
    configured(folder, "art_gym/GuessNumber-v0", **SERVED, warm_start={"enabled": True, "steps": 2}, grpo=grpo)
    finish(start(folder, tiny_model))
    rows = read_metrics(folder)
    assert [row["policy"] for row in rows] == ["tiny@0", "tiny@1"]
    assert all(row["publish_difference"] < 1e-3 for row in rows)
    assert list(read_evaluations(folder)) == ["untrained", "warm_start", "grpo"]
    assert [path.name for path in (folder / "adapters").iterdir()] == ["tiny@2"]
    assert json.loads((folder / "evaluations.json").read_text())["grpo"]["n"] == 4
