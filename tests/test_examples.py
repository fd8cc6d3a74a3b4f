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


def test_every_example_is_tested() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py")] == ["play_with_peft.py"]
