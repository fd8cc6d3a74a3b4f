"""The set-up script: what it refuses, and that it does nothing twice. That it installs is shown by `.ci/run`."""

import fcntl
import os
import shutil
import subprocess
import time
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    """What the script looks at, in a folder of its own, without a .venv."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # No GPU, whatever this machine has.
    program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 1\n")
    return tmp_path


def setup(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": f"{clone / 'bin'}:/usr/bin:/bin", "HOME": str(clone)}
    return subprocess.run([str(clone / "scripts" / "setup.sh")], env=path | environment, capture_output=True, text=True, check=False)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def finish(clone: Path) -> None:
    """Make it look as if the set-up had been done."""
    content = (clone / "pyproject.toml").read_bytes() + (clone / "scripts" / "setup.sh").read_bytes()
    (clone / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    program(clone / ".venv" / "bin" / "python", "#!/bin/sh\nexit 1\n")
    (clone / ".venv" / "setup.stamp").write_text(f"cpu {sha256(content).hexdigest()}\n")


def test_a_python_that_is_not_there_is_named_with_the_way_out(clone):
    done = setup(clone, PYTHON="python9.9")
    assert done.returncode == 1
    assert done.stderr == "setup: no 'python9.9' found; name a Python of 3.11 or newer: make setup PYTHON=/path/to/python\n"
    assert not (clone / ".venv").exists()


def test_an_old_python_is_named_with_the_way_out(clone):
    program(clone / "bin" / "old-python", '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n')
    done = setup(clone, PYTHON="old-python")
    assert done.returncode == 1
    assert done.stderr == "setup: Python 3.9.1 is too old; name a Python of 3.11 or newer: make setup PYTHON=/path/to/python\n"
    assert not (clone / ".venv").exists()


def test_a_failure_shows_the_end_of_the_log_and_how_to_go_on(clone):
    program(clone / "bin" / "python3", '#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "the disk is full"\nexit 1\n')
    done = setup(clone)
    assert done.returncode == 1
    assert "the disk is full" in done.stderr
    assert "run make setup again to go on" in done.stderr
    assert not (clone / ".venv" / "setup.stamp").exists()


def test_what_is_done_is_not_done_again(clone):
    finish(clone)
    done = setup(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_another_pyproject_is_set_up_anew(clone):
    (clone / ".venv" / "bin").mkdir(parents=True)
    program(clone / ".venv" / "bin" / "python", "#!/bin/sh\nexit 1\n")
    program(clone / "bin" / "python3", '#!/bin/sh\n[ "$1" = -c ] && exit 0\nexit 1\n')
    (clone / ".venv" / "setup.stamp").write_text("cpu of-another-time\n")
    done = setup(clone)
    assert done.returncode == 1
    assert "making .venv" in done.stdout
    assert not (clone / ".venv" / "setup.stamp").exists()


def test_what_is_done_needs_no_python_to_make_it_from(clone):
    finish(clone)
    done = setup(clone, PYTHON="python9.9")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_begun_needs_no_python_to_make_it_from(clone):
    (clone / ".venv" / "bin").mkdir(parents=True)
    program(clone / ".venv" / "bin" / "python", '#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho "no network"\nexit 1\n')
    done = setup(clone, PYTHON="python9.9")
    assert done.returncode == 1
    assert "no network" in done.stderr
    assert "python9.9" not in done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_two_at_once_take_turns_and_the_second_finds_it_done(clone):
    environment = {"PATH": f"{clone / 'bin'}:/usr/bin:/bin", "HOME": str(clone), "PYTHON": "python9.9"}
    with (clone / "scripts" / "setup.sh").open() as script:
        fcntl.flock(script, fcntl.LOCK_EX)
        with subprocess.Popen([str(clone / "scripts" / "setup.sh")], env=environment, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "setup: another set-up is at work here; waiting for it …\n"
            finish(clone)
            time.sleep(0.2)
            assert second.poll() is None
            fcntl.flock(script, fcntl.LOCK_UN)
            assert second.wait(10) == 0
            assert second.stdout.read() == ""


def test_the_shells_own_env_is_no_task():
    # Environment Modules and POSIX shells set ENV to a file of theirs.
    environment = os.environ | {"ENV": "/usr/share/modules/init/profile.sh"}
    shown = subprocess.run(["make", "-n", "train"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert "art-gym train art_gym/Lookup-v0 --seed 0 --run-dir runs/Lookup-v0-seed0" in shown
    shown = subprocess.run(["make", "-n", "train", "TASK=a/B-v1"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "art-gym train a/B-v1 --seed 0 --run-dir runs/B-v1-seed0" in shown
