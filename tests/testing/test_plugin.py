"""The pytest plugin, in sessions of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ENVIRONMENTS = '''
from art_gym import ToolEnv, register, tool


class Door(ToolEnv):
    """Opens when it is pushed."""

    max_turns = 3

    @tool
    def push(self) -> str:
        self.finish(reward=1.0)
        return "It opens."


class Stuck(Door):
    """Yields the same scenario twice."""

    def scenarios(self, split, count=None):
        first = next(super().scenarios(split))
        return iter([first, first])


register("house/Door-v0", "house:Door")
register("house/Stuck-v0", "house:Stuck")
'''


@pytest.fixture
def session(tmp_path: Path):
    """Run pytest in a folder with the module `house` and a test of its own."""
    (tmp_path / "house.py").write_text(ENVIRONMENTS)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nluck')")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Another package's plugin, which loads Hypothesis by itself.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--color=no", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})

    return run


def test_every_environment_and_check_is_an_item(session):
    done = session("--art-gym-envs", "house", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["gymnasium", "spec", "pickling", "vector", "wrappers", "scenarios", "transitions", "replay"]
    expected = [f"house::house/{env}-v0::{name}" for env in ("Door", "Stuck") for name in names]
    assert [line for line in done.stdout.splitlines() if "::" in line] == ["test_own.py::test_own", *expected]
    assert "17 tests collected" in done.stdout


def test_items_are_chosen_by_keyword(session):
    done = session("--art-gym-envs", "house", "-v", "-k", "Door and (spec or wrappers)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"house::house/Door-v0::spec PASSED +\[ 50%\]", done.stdout)
    assert "2 passed, 15 deselected" in done.stdout


def test_a_failure_is_the_text_of_the_check(session):
    done = session("--art-gym-envs", "house", "-k", "scenarios")
    assert done.returncode == 1
    assert "_ house::house/Stuck-v0::scenarios _" in done.stdout
    assert "\ntwo of the first 1000 scenarios of each split have the same id: 'train-0'\n" in done.stdout
    assert "conformance.py" not in done.stdout
    assert "1 failed, 1 passed, 15 deselected" in done.stdout


def test_number_of_examples_and_seed_reach_the_transitions(session, tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_runtest_setup(item):\n    print('given:', item.check.keywords)\n")
    done = session("--art-gym-envs", "house", "--art-gym-examples", "7", "--art-gym-seed", "3", "-s", "-k", "Door and transitions")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "given: {'examples': 7, 'seed': 3}" in done.stdout


def test_what_is_skipped_is_shown_as_such(session):
    done = session(
        "--art-gym-envs", "house", "-v", "--art-gym-skip", "scenarios", "--art-gym-skip", "spec", "-k", "Stuck and (scenarios or spec)"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "house::house/Stuck-v0::scenarios SKIPPED (--art-gym-skip)" in done.stdout
    assert "2 skipped, 15 deselected" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--art-gym-envs", "no_such_package"],
            "ERROR: --art-gym-envs: can't import 'no_such_package' (No module named 'no_such_package'): is it installed?",
        ),
        (["--art-gym-envs", "broken"], "ERROR: --art-gym-envs: can't import 'broken': RuntimeError: no luck"),
        (["--art-gym-envs", "json"], "ERROR: --art-gym-envs: importing 'json' registers no environment; register one there: "),
        (["--art-gym-envs", "house", "--art-gym-examples", "0"], "ERROR: --art-gym-examples is 0; it must be at least 1"),
        (["--art-gym-envs", "house", "--art-gym-seed", "-1"], "ERROR: --art-gym-seed is -1; it must be at least 0"),
        (
            ["--art-gym-envs", "house", "--art-gym-skip", "pickle"],
            "ERROR: --art-gym-skip: there is no check 'pickle' to skip; the checks are: ",
        ),
    ],
)
def test_a_wrong_request_is_told_in_one_line(session, arguments, line):
    done = session(*arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (told,) = [text for text in (done.stderr + done.stdout).splitlines() if text.startswith("ERROR")]
    assert told.startswith(line)
    assert "Traceback" not in done.stdout + done.stderr


def test_a_session_that_asks_for_nothing_loads_nothing_more(session, tmp_path):
    names = ("hypothesis", "art_gym.testing.conformance", "torch", "openai")
    (tmp_path / "conftest.py").write_text(
        f"import sys\ndef pytest_sessionfinish():\n    print('loaded:', [name for name in {names} if name in sys.modules])\n"
    )
    done = session("-q", "-s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded: []" in done.stdout
