"""What a model needs and what there is."""

import json
from pathlib import Path

import pytest

from art_gym.engine import EngineConfig
from art_gym.engine._memory import available_bytes, check_memory, needed_bytes, weight_bytes
from art_gym.errors import UsageError

MIB, GIB = 2**20, 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """2 MiB of bfloat16 weights in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (folder / name).write_bytes(bytes(MIB))
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize(
    ("dtype", "fast", "expected"),
    [
        ("auto", "bfloat16", 2 * MIB),
        ("auto", "float32", 4 * MIB),
        ("bfloat16", "float32", 2 * MIB),
        ("float32", "bfloat16", 4 * MIB),
    ],
)
def test_weights_count_in_the_type_they_are_loaded_in(model: Path, monkeypatch, dtype, fast, expected):
    monkeypatch.setattr("art_gym.engine.config.fast_precision", lambda: fast)
    assert weight_bytes(EngineConfig(model=str(model), dtype=dtype)) == expected


def test_older_configurations_name_the_type_otherwise(model: Path):
    (model / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert weight_bytes(EngineConfig(model=str(model), dtype="bfloat16")) == MIB


def test_a_hub_id_counts_no_weights():
    assert weight_bytes(EngineConfig(model="owner/name", dtype="float32")) == 0


def test_cache_and_runtime_are_added(model: Path):
    small, large = (needed_bytes(EngineConfig(model=str(model), kv_cache_gib=gib)) for gib in (1, 3))
    assert large - small == 2 * GIB
    assert small > GIB + 2 * MIB


def machine(tmp_path: Path, available_kib: int) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    return tmp_path


def test_available_memory_is_the_machines(tmp_path: Path):
    assert available_bytes(machine(tmp_path, 1024), tmp_path / "no-cgroup") == MIB


def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path):
    (tmp_path / "memory.max").write_text(f"{3 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {MIB // 2}\n")
    assert available_bytes(machine(tmp_path, 10_240), tmp_path) == MIB + MIB // 2
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(machine(tmp_path, 10_240), tmp_path) == 10 * MIB


def test_unknown_memory_refuses_nothing(tmp_path: Path, monkeypatch):
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None
    monkeypatch.setattr("art_gym.engine._memory.available_bytes", lambda: None)
    check_memory(EngineConfig(model="m", device="cpu", kv_cache_gib=100_000))


def test_too_little_memory_says_what_is_needed_and_what_there_is(model: Path, monkeypatch):
    monkeypatch.setattr("art_gym.engine._memory.available_bytes", lambda: 2 * GIB)
    with pytest.raises(UsageError, match=r"needs about \d\.\d GiB .* and 2\.0 GiB are available; .* lower kv_cache_gib"):
        check_memory(EngineConfig(model=str(model), device="cpu", kv_cache_gib=2))
    check_memory(EngineConfig(model=str(model), device="cuda"))
