"""Every example runs as its own text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.train


def test_an_adapter_plays_in_plain_transformers_and_peft(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from art_gym_trainers.policy import load_policy

    load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8).save_pretrained(tmp_path / "adapter")
    command = [sys.executable, EXAMPLES / "play_with_peft.py", tmp_path / "adapter", "--model", tiny_model, "--env", "topics=2", "--n", "3"]
    played = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert played.returncode == 0, played.stderr[-2000:]
    assert re.search(r"^transformers \+ PEFT: \d+\.\d% of 3 \(95% interval", played.stdout, re.MULTILINE)


def test_recorded_episodes_are_trained_on(tiny_model: Path, tmp_path: Path) -> None:
    from art_gym import Episode, Scenario, Turn, say
    from art_gym.store import EpisodeStore

    with EpisodeStore(tmp_path / "run") as store:
        journal = store.journal("train-0001")
        for member in range(4):
            turn = Turn(
                [], say(""), prompt_ids=[30, 31, 32], completion_ids=[40 + member, 50], logprobs=[-10.0, -10.0], reward=float(member % 2)
            )
            journal.append(Episode(f"e{member}", "example/Any-v0", Scenario("s", seed=0), member, turns=[turn], terminated=True))
    journal_file = tmp_path / "run" / "episodes" / "train-0001.jsonl"
    command = [sys.executable, EXAMPLES / "train_recorded.py", journal_file, "--model", tiny_model, "--to", tmp_path / "adapter"]
    trained = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert "train-0001.jsonl: 1 of 1 groups say something, 8 sampled tokens" in trained.stdout
    assert "1 steps; the adapter is in" in trained.stdout
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == ["play_with_peft.py", "train_recorded.py"]
