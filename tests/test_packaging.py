"""The wheel holds the four packages and what they need at run time, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"art_gym": ".", "art_gym_envs": "envs", "art_gym_agents": "agents", "art_gym_trainers": "trainers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> list[str]:
    """The names of the files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    # hatchling directly: `pip wheel` would make an environment of its own, from the network.
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("art_gym-*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.mark.parametrize(("package", "folder"), PACKAGES.items())
def test_every_file_of_a_package_is_in_it(wheel, package, folder):
    sources = [path for path in (ROOT / folder / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT / folder).as_posix() for path in sources} <= set(wheel)
    assert f"{package}/py.typed" in wheel


def test_templates_and_recipes_are_in_it(wheel):
    assert "art_gym/cli/recipes/lookup.yaml" in wheel
    assert "art_gym/cli/recipes/guess_number.yaml" in wheel
    assert any(name.startswith("art_gym_trainers/") and name.endswith(".jinja") for name in wheel)


def test_nothing_else_is_in_it(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_command_is_declared(wheel):
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel)
    assert any(name.endswith("LICENSE") for name in wheel)
