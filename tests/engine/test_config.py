"""The command line and environment that the options stand for."""

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from art_gym.engine import EngineConfig


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_cpu_command_uses_the_module_and_an_explicit_cache():
    command = EngineConfig(model="/models/tiny", device="cpu", kv_cache_gib=0.5, max_model_len=1024).command(8123)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert value(command, "--model") == "/models/tiny"
    assert value(command, "--served-model-name") == "tiny"
    assert value(command, "--port") == "8123"
    assert value(command, "--kv-cache-memory-bytes") == "536870912"
    assert value(command, "--block-size") == "32"
    assert value(command, "--max-model-len") == "1024"
    assert value(command, "--logprobs-mode") == "processed_logprobs"
    assert value(command, "--tool-call-parser") == "hermes"
    assert {"--enforce-eager", "--enable-auto-tool-choice"} <= set(command)
    assert not {"--enable-lora", "--gpu-memory-utilization"} & set(command)


def test_the_gpu_command_compiles_and_takes_a_share_of_memory():
    command = EngineConfig(model="m", device="cuda", enable_sleep=True, gpu_memory_utilization=0.5).command(1)
    assert value(command, "--gpu-memory-utilization") == "0.5"
    assert "--enable-sleep-mode" in command
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--block-size"} & set(command)
    assert value(EngineConfig(model="m", device="cuda", block_size=64).command(1), "--block-size") == "64"


def test_the_model_does_not_choose_how_its_tokens_are_sampled():
    assert value(EngineConfig(model="m").command(1), "--generation-config") == "vllm"


def test_adapters_need_options_and_a_variable(tmp_path: Path):
    config = EngineConfig(model="m", enable_lora=True, max_lora_rank=8)
    assert value(config.command(1), "--max-lora-rank") == "8"
    assert config.environment(tmp_path)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_extra_options_and_variables_come_last(tmp_path: Path):
    config = EngineConfig(model="m", extra_args=["--block-size", "32"], extra_env={"VLLM_NO_USAGE_STATS": "0"}, python="/other/python")
    assert config.command(1)[-2:] == ["--block-size", "32"]
    assert config.command(1)[0] == "/other/python"
    assert config.environment(tmp_path)["VLLM_NO_USAGE_STATS"] == "0"


def test_a_local_model_is_never_looked_up_in_a_hub(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert EngineConfig(model=str(tmp_path)).environment(tmp_path)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in EngineConfig(model="owner/name").environment(tmp_path)


def test_both_cores_are_used_on_the_cpu(tmp_path: Path):
    assert EngineConfig(model="m", device="cpu").environment(tmp_path)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in EngineConfig(model="m", device="cuda").environment(tmp_path)


def test_nothing_is_reported_to_anyone(tmp_path: Path):
    environment = EngineConfig(model="m").environment(tmp_path)
    assert environment["VLLM_NO_USAGE_STATS"] == environment["DO_NOT_TRACK"] == environment["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_temporary_files_go_to_the_scratch_folder_and_compiled_kernels_do_not(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    environment = EngineConfig(model="m").environment(tmp_path)
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == str(tmp_path)
    assert not environment["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_auto_takes_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr("art_gym.engine.config._is_installed", lambda name: name == "vllm")
    monkeypatch.setattr("art_gym.engine.config.has_nvidia_gpu", lambda: True)
    assert EngineConfig(model="m").resolved_device() == "cuda"
    assert EngineConfig(model="m", device="cpu").resolved_device() == "cpu"
    monkeypatch.setattr("art_gym.engine.config.has_nvidia_gpu", lambda: False)
    assert EngineConfig(model="m").resolved_device() == "cpu"


def test_auto_takes_the_cpu_where_only_the_cpu_build_is_installed(monkeypatch):
    monkeypatch.setattr("art_gym.engine.config.has_nvidia_gpu", lambda: True)
    monkeypatch.setattr("art_gym.engine.config._is_installed", lambda name: name == "vllm-cpu")
    assert EngineConfig(model="m").resolved_device() == "cpu"
    assert EngineConfig(model="m", python="/other/python").resolved_device() == "cuda"


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"dtype": "int4"}, {"max_num_seqs": 0}, {"kv_cache_gib": 0}, {"modell": "x"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValidationError):
        EngineConfig(model="m", **wrong)


def test_every_option_is_described():
    assert all(field.description for field in EngineConfig.model_fields.values())


@pytest.mark.parametrize(("rank", "reserved"), [(1, "1"), (4, "8"), (16, "16"), (33, "64"), (512, "512")])
def test_the_largest_rank_is_rounded_up_to_one_that_vllm_takes(rank, reserved):
    command = EngineConfig(model="m", device="cpu", enable_lora=True, max_lora_rank=rank).command(8000)
    assert command[command.index("--max-lora-rank") + 1] == reserved
