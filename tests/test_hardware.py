"""What a machine computes fast in, by what it says of itself."""

from pathlib import Path

import pytest

from art_gym import _hardware
from art_gym.cli.config import ModelSection
from art_gym.engine import EngineConfig

INTEL = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs\t\t: spectre_v1\n"
AMD = "processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: avx512_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.mark.parametrize(
    ("said", "gpu", "expected"),
    [
        (INTEL, False, "bfloat16"),
        (INTEL.replace("avx512_bf16", "amx_bf16"), False, "bfloat16"),
        (INTEL.replace(" avx512_bf16", ""), False, "float32"),
        (ARM, False, "bfloat16"),
        (AMD, False, "float32"),
        (AMD, True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_bfloat16_is_for_machines_that_are_fast_in_it(tmp_path: Path, monkeypatch, said, gpu, expected):
    file = tmp_path / "cpuinfo"
    if said is not None:
        file.write_text(said)
    flags = _hardware.processor_flags(file)
    monkeypatch.setattr(_hardware, "processor_flags", lambda: flags)
    monkeypatch.setattr(_hardware, "has_nvidia_gpu", lambda: gpu)
    assert _hardware.fast_precision() == expected
    # Fixed when the configuration is made, so that a run that goes on elsewhere stays what it is.
    assert ModelSection().model_dump()["dtype"] == expected


def test_no_gpu_is_seen_where_it_is_hidden(monkeypatch):
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not _hardware.has_nvidia_gpu()


@pytest.mark.parametrize(
    ("device", "dtype", "fast", "told"),
    [
        ("cpu", "auto", "float32", "float32"),
        ("cpu", "auto", "bfloat16", "auto"),
        ("cpu", "bfloat16", "float32", "bfloat16"),
        ("cuda", "auto", "float32", "auto"),
    ],
)
def test_an_engine_on_a_slow_processor_serves_float32_unless_told_otherwise(monkeypatch, device, dtype, fast, told):
    monkeypatch.setattr("art_gym.engine.config.fast_precision", lambda: fast)
    command = EngineConfig(model="m", device=device, dtype=dtype).command(8000)
    assert command[command.index("--dtype") + 1] == told
