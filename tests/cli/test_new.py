"""`art-gym new`: what it writes works as written, and a wrong request leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_gym.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=variables)


@pytest.mark.slow
def test_the_generated_tests_pass_as_generated(tmp_path, capsys):
    assert main(["new", "my_task"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "my_task holds the environment my_task/MyTask-v0, in my_task/env.py. What next:",
        "  cd my_task",
        "  pip install -e '.[dev]'",
        "  python -m pytest",
        "  art-gym check my_task:my_task/MyTask-v0",
    ]
    began = time.monotonic()
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path / "my_task")
    assert done.returncode == 0, done.stdout + done.stderr
    # One for each of the eight checks, and one for what the task rewards.
    assert "9 passed" in done.stdout
    assert time.monotonic() - began < 20


def test_it_holds_what_a_package_needs_and_nothing_else(tmp_path):
    assert main(["new", "my_task", "--dir", str(tmp_path)]) == 0
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "my_task/.gitignore",
        "my_task/README.md",
        "my_task/pyproject.toml",
        "my_task/my_task/__init__.py",
        "my_task/my_task/env.py",
        "my_task/tests/test_my_task.py",
    }
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and ("{{" in path.read_text() or "}}" in path.read_text())]


def test_the_environment_takes_about_fifteen_lines(tmp_path):
    assert main(["new", "my_task"]) == 0
    text = (tmp_path / "my_task" / "my_task" / "env.py").read_text()
    body = [line for line in text.partition("class MyTask")[2].splitlines() if line.strip()]
    assert len(body) <= 16


def test_the_generated_code_is_clean(tmp_path):
    assert main(["new", "my_task"]) == 0
    project = tmp_path / "my_task"
    for arguments in (["format", "--check"], ["check", "--select", "E,W,F,I,UP,B,D100,D101,D104"]):
        done = python("-m", "ruff", *arguments, "--isolated", "--no-cache", ".", folder=project)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_it_can_be_installed_and_made_by_its_id(tmp_path):
    assert main(["new", "my_task"]) == 0
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target), "."]
    done = python(*install, folder=tmp_path / "my_task")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (target / "my_task" / "env.py").is_file()
    assert not (target / "tests").exists()
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import gymnasium;"
        "print(gymnasium.make('my_task:my_task/MyTask-v0').reset(seed=1)[0][1]['content'])"
    )
    done = python("-W", "error", "-c", program, folder=tmp_path)
    assert done.stdout == "The boxes are closed.\n", done.stderr


@pytest.mark.parametrize(("name", "class_name"), [("door", "Door"), ("find_the_coin", "FindTheCoin"), ("MyTask", "MyTask"), ("task2", "Task2")])
def test_the_class_is_named_after_the_package(tmp_path, name, class_name):
    assert main(["new", name]) == 0
    assert f"class {class_name}(ToolEnv):" in (tmp_path / name / name / "env.py").read_text()
    assert f'register("{name}/{class_name}-v0", "{name}.env:{class_name}")' in (tmp_path / name / name / "__init__.py").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my-task", "'my-task' can't name a package: letters, digits and '_', the first a letter and the last no '_'; did you mean 'my_task'?"),
        ("My Task", "did you mean 'my_task'?"),
        ("2nd", "'2nd' can't name a package: letters, digits and '_', the first a letter and the last no '_'"),
        ("_task", "did you mean 'task'?"),
        ("a/b", "did you mean 'a_b'?"),
        ("..", "'..' can't name a package"),
        ("", "'' can't name a package"),
        ("tâche", "can't name a package"),
        ("class", "'class' has a meaning of its own in Python or art_gym"),
        ("none", "'None' has a meaning of its own"),
        ("tool_env", "'ToolEnv' has a meaning of its own"),
        ("tests", "the folder of the project's tests has that name"),
        ("Tests", "the folder of the project's tests has that name"),
        *(
            (name, f"'{name}' can't name a package: the project's .gitignore leaves folders of that name out")
            for name in ("runs", "dist", "build")
        ),
        ("Runs", "'Runs' can't name a package: the project's .gitignore leaves folders of that name out"),
        ("json", "'json' can't name a package: there is a module or package of that name, a module of Python's standard library"),
        ("numpy", "'numpy' can't name a package: there is a module or package of that name, installed already; choose another name"),
        ("art_gym", "installed already"),
        ("pyyaml", "installed already"),
    ],
)
def test_a_name_that_can_not_be_used(refused, name, text):
    assert text in refused("new", "--", name)


def test_nothing_that_git_ignores_can_name_a_package(refused, tmp_path, capsys):
    assert main(["new", "my_task"]) == 0
    capsys.readouterr()
    lines = (tmp_path / "my_task" / ".gitignore").read_text().split()
    names = [line.strip("/") for line in lines if line.strip("/").isidentifier()]
    assert {"runs", "dist", "build"} <= {*names}
    for name in names:
        assert "can't name a package" in refused("new", "--", name)
        assert not (tmp_path / name).exists()


def test_a_folder_that_is_there(refused, tmp_path):
    (tmp_path / "my_task").mkdir()
    assert refused("new", "my_task") == "my_task exists already; choose another name, or another folder with --dir"
    (tmp_path / "other_task").symlink_to("nowhere")
    assert "other_task exists already" in refused("new", "other_task")


def test_a_folder_that_is_not_there(refused, tmp_path):
    assert refused("new", "my_task", "--dir", "nowhere") == "there is no folder nowhere; make it first, or give another --dir"
    (tmp_path / "file").write_text("")
    assert refused("new", "my_task", "--dir", "file") == "there is no folder file; make it first, or give another --dir"


def test_a_folder_that_can_not_be_written(refused):
    line = refused("new", "my_task", "--dir", "/proc")
    assert line.startswith("can't write the folder /proc/my_task: ")
    assert line.endswith("; give another --dir")


def test_nothing_half_made_is_left(refused, monkeypatch):
    write_text = Path.write_text

    def fail_later(path, *arguments, **options):
        if path.name.startswith("test_"):
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", fail_later)
    assert refused("new", "my_task") == "can't write the folder my_task: No space left on device; give another --dir"
