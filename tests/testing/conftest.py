"""What the tests of `art_gym.testing` share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

# No tests are in it, and pytest would load its modules a second time to look for doctests.
collect_ignore = ["planted"]


def load_planted() -> Any:
    """Import the package of planted bugs: the tests' folders are no packages, so that it is found only by its own folder."""
    if "planted" not in sys.modules:
        sys.path.insert(0, str(Path(__file__).parent))
    return importlib.import_module("planted")


@pytest.fixture(scope="session")
def planted() -> Any:
    """The package of planted bugs and correct environments."""
    return load_planted()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise over the classes of `planted` by name."""
    for argument, names in (
        ("planted_bug", [cls.__name__ for cls in load_planted().PLANTED]),
        ("correct_env", [cls.__name__ for cls in load_planted().CORRECT]),
    ):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, names)
