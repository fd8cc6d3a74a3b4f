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


def run(processes: int, model: Path, folder: Path, loss_type: str) -> dict[str, Any]:
    folder.mkdir()
    out = folder / "out.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), str(model), str(folder / "scratch"), str(out), loss_type]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written: dict[str, Any] = torch.load(out)
    return written


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_two_processes_take_the_steps_of_one(tiny_model: Path, tmp_path: Path, loss_type: str) -> None:
    one, two = (run(count, tiny_model, tmp_path / str(count), loss_type) for count in (1, 2))
    assert one["steps"] == two["steps"] == 3
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
    for name, weight in one["weights"].items():
        # Adam divides by the gradient's own size, so that its first steps magnify rounding.
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=1e-4)
