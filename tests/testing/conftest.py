"""What the tests of `art_gym.testing` share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PLANTED = Path(__file__).with_name("planted.py")


def load_planted() -> Any:
    """Import the planted bugs, once in a process, from their file: the tests' folders are no packages."""
    if "planted" not in sys.modules:
        spec = importlib.util.spec_from_file_location("planted", PLANTED)
        module = importlib.util.module_from_spec(spec)
        sys.modules["planted"] = module
        spec.loader.exec_module(module)
    return sys.modules["planted"]


@pytest.fixture(scope="session")
def planted() -> Any:
    """The module of planted bugs and correct environments."""
    return load_planted()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise over the classes of `planted.py` by name."""
    for argument, names in (
        ("planted_bug", [cls.__name__ for cls in load_planted().PLANTED]),
        ("correct_env", [cls.__name__ for cls in load_planted().CORRECT]),
    ):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, names)
