"""`art-gym check`: the report, the script, and the exit code."""

import subprocess
import sys
import time

import pytest

from art_gym.cli import main
from art_gym.testing.conformance import CHECKS

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

GUESS = "art_gym/GuessNumber-v0"

LEAKY = '''
from art_gym import ToolEnv, register, tool


class Leaky(ToolEnv):
    """Counts in a list that all instances share."""

    max_turns = 6
    pushed = []

    @tool
    def push(self) -> str:
        """Push [the] door."""
        self.pushed.append(1)
        return f"Pushed {len(self.pushed)} times."


register("leaky/Leaky-v0", "LEAKY:Leaky")
'''


@pytest.fixture
def leaky(tmp_path, monkeypatch, request):
    """The id of an environment with a bug, in a module of its own."""
    name = f"leaky_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(LEAKY.replace("LEAKY", name))
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:leaky/Leaky-v0"


@pytest.mark.slow
def test_a_correct_environment_passes_every_check(capsys, tmp_path):
    assert main(["check", GUESS, "--examples", "5", "--seed", "1", "--script", "repro.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[name, "passed"] for name in CHECKS]
    assert "5 examples, " in next(line for line in lines if line.startswith("transitions"))
    assert not (tmp_path / "repro.py").exists()


@pytest.mark.slow
def test_a_bug_is_reported_with_a_script_that_reproduces_it(capsys, tmp_path, leaky):
    assert main(["check", leaky, "--examples", "30", "--script", "scripts/repro.py"]) == 1
    output = capsys.readouterr().out
    (row,) = [line.split() for line in output.splitlines() if line.startswith("transitions ")]
    assert row[:2] == ["transitions", "failed"]
    assert "\ntransitions: " in output
    assert "The script that reproduces it is in scripts/repro.py" in output
    assert output.splitlines()[-1].endswith(f"of {len(CHECKS)} checks failed")
    done = subprocess.run(
        [sys.executable, "scripts/repro.py"], capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode != 0
    assert "push" in done.stdout + done.stderr


LOCKED = '''
import threading

from art_gym import ToolEnv, register, tool


class Locked(ToolEnv):
    """Holds what can't be pickled."""

    max_turns = 3
    snapshot = restore = None

    def start(self):
        self.lock = threading.Lock()

    @tool
    def push(self) -> str:
        self.finish(reward=1.0)
        return "It opens."


register("locked/Locked-v0", "locked_tasks:Locked")
'''


@pytest.mark.slow
def test_a_check_can_be_skipped(capsys, tmp_path, monkeypatch):
    (tmp_path / "locked_tasks.py").write_text(LOCKED)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["check", "locked_tasks:locked/Locked-v0", "--examples", "5"]
    assert main(options) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"1 of {len(CHECKS)} checks failed"
    assert main([*options, "--skip", "pickling"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.split()[0] in CHECKS]
    assert rows == [[name, "skipped" if name == "pickling" else "passed"] for name in CHECKS]


def test_an_unknown_environment(refused):
    assert refused("check", "art_gym/Lokup-v0") == "unknown environment 'art_gym/Lokup-v0'; did you mean 'art_gym/Lookup-v0'?"
    assert refused("check", "no_such_package:a/B-v0").startswith("can't import 'no_such_package' for 'no_such_package:a/B-v0'")


def test_an_environment_of_another_kind(refused):
    assert refused("check", "CartPole-v1").startswith("CartPole-v1 is no environment of chat messages and tool calls")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([GUESS, "--examples", "0"], "greater than or equal to 1"),
        ([GUESS, "--skip", "pickle"], "there is no check 'pickle' to skip; the checks are: gymnasium, spec, pickling"),
        ([GUESS, "--script", "."], ". is a folder; give a file to --script"),
        ([GUESS, "--script", "/proc/repro.py"], "can't write the folder /proc"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_request(refused, arguments, text):
    assert text in refused("check", *arguments)


@pytest.mark.slow
def test_help_comes_at_once_and_checking_loads_no_torch():
    program = (
        "import sys; from art_gym.cli import main; code = main(sys.argv[1:]);"
        "print(code, sorted({'torch', 'vllm', 'trl', 'peft', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program, "check", "--help"], capture_output=True, text=True, check=True)
    # Half a second here.
    assert time.monotonic() - began < 8
    assert "--examples" in done.stdout
    done = subprocess.run([sys.executable, "-c", program, "check", GUESS, "--examples", "2"], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 []"
