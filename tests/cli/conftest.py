"""What the tests of the command line share: an empty working folder, and wrong requests."""

import pytest

from art_gym.cli import main


@pytest.fixture
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capsys, tmp_path):
    """Run a wrong request; it must end with code 2 and one line, and leave everything as it was. Gives the line."""

    def run(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(arguments) == 2
        output = capsys.readouterr()
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("error: ")
        assert sorted(tmp_path.rglob("*")) == before
        return line.removeprefix("error: ")

    return run
