"""One process and two come to the same policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.train

SCRIPT = Path(__file__).with_name("processes_run.py")


def run(processes: int, model: Path, folder: Path, loss_type: str, budget: int) -> dict[str, Any]:
    folder.mkdir()
    out = folder / "out.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), str(model), str(folder / "scratch"), str(out), loss_type, str(budget)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written: dict[str, Any] = torch.load(out)
    return written


@pytest.mark.parametrize(("loss_type", "budget"), [("dapo", 40), ("grpo", 40), ("bnpo", 0)])
def test_two_processes_take_the_steps_of_one(tiny_model: Path, tmp_path: Path, loss_type: str, budget: int) -> None:
    one, two = (run(count, tiny_model, tmp_path / str(count), loss_type, budget) for count in (1, 2))
    assert one["steps"] == two["steps"] == 3
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
    assert two["figures"] == pytest.approx(one["figures"], rel=1e-3, abs=1e-5)
    for name, weight in one["weights"].items():
        # Adam divides by the gradient's own size, so that its first steps magnify rounding.
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=1e-4)
    saved = sorted(path.name for path in (tmp_path / "2" / "saved").iterdir())
    assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(saved)
