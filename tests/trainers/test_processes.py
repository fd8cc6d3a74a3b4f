"""One process and two come to the same policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.train

SCRIPT = Path(__file__).with_name("processes_run.py")


CASES = {"dapo": 40, "grpo": 40, "bnpo": 0, "dr_grpo": 40, "luspo": 40, "sapo": 40, "cispo": 40, "vespo": 40}
"""Token budget by loss; 0 is none."""


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process wrote, and two."""

    def run(processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"processes-{processes}")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
        cases = [f"{loss_type}:{budget}" for loss_type, budget in CASES.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *launcher, str(SCRIPT), str(tiny_model), str(folder), *cases]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run(1), run(2)


@pytest.mark.parametrize("loss_type", CASES)
def test_two_processes_take_the_steps_of_one(runs: tuple[Path, Path], loss_type: str) -> None:
    one, two = (torch.load(folder / loss_type / "out.pt") for folder in runs)
    assert one["steps"] == two["steps"] == 3
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
    assert two["gradient_norms"] == pytest.approx(one["gradient_norms"], rel=1e-3)
    # Some losses cut nothing, and have no figure for it.
    known = {name: value for name, value in one["figures"].items() if value is not None}
    assert {name for name, value in two["figures"].items() if value is not None} == set(known)
    assert {name: two["figures"][name] for name in known} == pytest.approx(known, rel=1e-3, abs=1e-5)
    for name, weight in one["weights"].items():
        # Adam divides by the gradient's own size, so that its first steps magnify rounding.
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-3, atol=1e-4)
    saved = sorted(path.name for path in (runs[1] / loss_type / "saved").iterdir())
    assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= set(saved)
