"""What pytest needn't import when it collects."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# They import torch, and have no doctests.
collect_ignore = ["art_gym/cli/_train.py", "art_gym/cli/_serving.py", "tests/benchmarks"]

_WHOLLY_TRAINING = re.compile(r"^pytestmark = .*pytest\.mark\.train\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files whose every test is deselected by `-m "… not train"`: importing torch and TRL for nothing takes ten seconds."""
    if "not train" not in config.option.markexpr or not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return True if _WHOLLY_TRAINING.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    """Forget the environments that a test or an example registers; those of the bundled package stay."""
    import gymnasium

    import art_gym_envs  # noqa: F401  registers them, once in a process
    from art_gym import registration

    registry, ours = dict(gymnasium.registry), set(registration._registered)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(registry)
    registration._registered.clear()
    registration._registered.update(ours)
