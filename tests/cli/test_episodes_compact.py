"""`art-gym episodes compact`."""

import sys
from pathlib import Path

import pytest

from art_gym import Scenario
from art_gym.cli import main
from art_gym.episodes import Episode
from art_gym.store import EpisodeStore

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture
def run():
    """Three labels of an episode each."""
    pytest.importorskip("pyarrow")
    with EpisodeStore("run") as store:
        for label in ("eval-a", "train-0001", "train-0002"):
            store.journal(label).append(Episode(f"{label}/0/0", "x/Y-v0", Scenario("s", 1)))
    return Path("run/episodes")


def printed(capsys, *arguments) -> list[str]:
    assert main(["episodes", "compact", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_journals_of_a_run_become_tables_and_read_as_before(run, capsys):
    before = list(EpisodeStore("run").read())
    sizes = {path.stem: path.stat().st_size for path in run.iterdir()}
    lines = printed(capsys, "run")
    assert names(run) == ["eval-a.parquet", "train-0001.parquet", "train-0002.parquet"]
    assert lines == [f"{path.stem}: {sizes[path.stem]:,} bytes are now {path.stat().st_size:,}" for path in sorted(run.iterdir())]
    assert list(EpisodeStore("run").read()) == before
    assert printed(capsys, "run") == ["nothing to compact"]


def test_only_the_labels_that_are_named(run, capsys):
    assert len(printed(capsys, "run", "--label", "train-0002", "--label", "train-0002")) == 1
    assert names(run) == ["eval-a.jsonl", "train-0001.jsonl", "train-0002.parquet"]


def test_a_journal_that_is_being_written_is_left(run, capsys):
    with EpisodeStore("run") as writer:
        writer.journal("train-0001").append(Episode("train-0001/1/0", "x/Y-v0", Scenario("s", 1)))
        assert printed(capsys, "run")[1] == "train-0001: left as it is, since it is being written"
        assert names(run) == ["eval-a.parquet", "train-0001.jsonl", "train-0002.parquet"]
        assert printed(capsys, "run", "--label", "train-0001") == ["train-0001: left as it is, since it is being written"]
    assert len(printed(capsys, "run")) == 1


def test_a_damaged_journal_is_named_and_keeps_none_of_the_others_back(run, capsys):
    damaged = "no episode\n" + (run / "train-0001.jsonl").read_text()
    (run / "eval-a.jsonl").write_text(damaged)
    assert main(["episodes", "compact", "run"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: run/episodes/eval-a.jsonl")
    assert [line.split(":")[0] for line in output.out.splitlines()] == ["train-0001", "train-0002"]
    assert names(run) == ["eval-a.jsonl", "train-0001.parquet", "train-0002.parquet"]
    assert (run / "eval-a.jsonl").read_text() == damaged


def test_what_cannot_be_is_refused(run, refused, monkeypatch):
    assert refused("episodes", "compact", "none") == "none is not the folder of a run: it holds no folder episodes/"
    told = "run has no episodes of the label 'train-9'; it has eval-a, train-0001, train-0002"
    assert refused("episodes", "compact", "run", "--label", "train-9") == told
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    told = "compacting episodes needs the package 'pyarrow', which isn't installed: pip install 'art-gym[data]'"
    assert refused("episodes", "compact", "run") == told
