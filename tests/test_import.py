"""Importing the framework is cheap: no heavy package comes with it."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "trl", "peft", "transformers", "openai", "datasets", "accelerate", "matplotlib", "ray", "fastapi")


@pytest.mark.parametrize(
    "module", ["art_gym", "art_gym.rollout", "art_gym.engine", "art_gym.store", "art_gym.cli", "art_gym_envs", "art_gym_agents"]
)
def test_no_heavy_package_is_loaded(module):
    program = f"import json, sys, {module}; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_every_public_name_is_there():
    import art_gym

    assert [name for name in art_gym.__all__ if not hasattr(art_gym, name)] == []
