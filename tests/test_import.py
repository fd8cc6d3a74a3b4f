"""Importing the framework is cheap: no heavy package comes with it."""

import json
import subprocess
import sys

HEAVY = (
    "torch",
    "vllm",
    "trl",
    "peft",
    "transformers",
    "openai",
    "datasets",
    "accelerate",
    "matplotlib",
    "ray",
    "pyarrow",
    "fastapi",
    "aiohttp",
)


MODULES = ("art_gym", "art_gym.rollout", "art_gym.engine", "art_gym.store", "art_gym.cli", "art_gym_envs", "art_gym_agents")


def test_no_heavy_package_is_loaded():
    program = f"import json, sys, {', '.join(MODULES)}; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_every_public_name_is_there():
    import art_gym

    assert [name for name in art_gym.__all__ if not hasattr(art_gym, name)] == []


def test_every_error_is_a_public_name():
    import art_gym
    from art_gym import errors

    named = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.ArtGymError)]
    assert [name for name in named if name not in art_gym.__all__] == []
