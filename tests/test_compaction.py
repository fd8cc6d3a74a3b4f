"""Compaction: a label reads the same before, after and in the middle of it, whatever is killed when."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import MissingExtra, UsageError
from art_gym.rollout import Runner
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore, _parquet
from art_gym.store._journal import Journal
from art_gym_agents import RandomAgent

pytest.importorskip("pyarrow")


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store anew each time, as another process would; closes them all at the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(EpisodeStore(tmp_path))


def episode(name: str, reward: float = 1.0, **details) -> Episode:
    return Episode(name, "x/Y-v0", Scenario("s", 1), turns=[Turn([], {"role": "assistant"}, reward=reward)], terminated=True, **details)


def ids(journal) -> list[str]:
    return [each.id for each in journal.read()]


def files(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "episodes").iterdir())


def test_a_compacted_label_reads_as_before(tmp_path, open_store):
    store = open_store()
    store.journal("a").append(episode("x", 0.0), episode("y"), episode("x", 2.0))
    store.journal("b").append(episode("z"))
    before = list(store.journal("a").read())
    assert store.compact("a", "b") == ["a", "b"]
    assert files(tmp_path) == ["a.parquet", "b.parquet"]
    for again in (store, open_store()):
        assert list(again.journal("a").read()) == before
        assert again.journal("a").latest()["x"].reward == 2.0
        assert again.labels() == ["a", "b"]
        assert [each.id for each in again.read()] == ["y", "x", "z"]
        assert [each.id for each in again.read(["b"])] == ["z"]
        assert again.compact() == []


def test_what_is_appended_to_a_compacted_label_comes_after(tmp_path, open_store):
    store = open_store()
    journal = store.journal("a")
    failed = episode("y", failure=Failure("policy", "gone"))
    journal.append(episode("x"), failed)
    journal.compact()
    journal.append(episode("y", 3.0), episode("z"))
    assert files(tmp_path) == ["a.jsonl", "a.parquet"]
    assert ids(journal) == ["x", "y", "y", "z"]
    assert journal.latest()["y"].reward == 3.0
    assert journal.compact()
    assert files(tmp_path) == ["a.parquet"]
    assert ids(open_store().journal("a")) == ["x", "y", "y", "z"]


def test_a_label_without_episodes_is_left_alone(tmp_path, open_store):
    assert open_store().compact("a") == []
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "a.jsonl").touch()
    assert open_store().compact("a") == []
    assert files(tmp_path) == ["a.jsonl"]


def test_without_labels_only_closed_journals_are_compacted(tmp_path, open_store):
    elsewhere, store = open_store(), open_store()
    elsewhere.journal("busy").append(episode("x"))
    for label in ("mine", "done"):
        store.journal(label).append(episode(label))
    store.journal("done").close()
    assert store.compact() == ["done"]
    assert files(tmp_path) == ["busy.jsonl", "done.parquet", "mine.jsonl"]
    with pytest.raises(UsageError, match="is being written by another process"):
        store.compact("busy")
    assert ids(store.journal("busy")) == ["x"]


def test_a_torn_last_line_is_no_episode_in_the_table_either(tmp_path, open_store):
    with open_store() as store:
        store.journal("a").append(episode("x"))
    with (tmp_path / "episodes" / "a.jsonl").open("ab") as file:
        file.write(b'{"id": "torn')
    open_store().compact("a")
    assert ids(open_store().journal("a")) == ["x"]


def test_a_damaged_journal_is_not_compacted(tmp_path, open_store):
    with open_store() as store:
        store.journal("a").append(episode("x"), episode("y"), episode("z"))
    path = tmp_path / "episodes" / "a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is damaged"):
        open_store().compact("a")
    assert files(tmp_path) == ["a.jsonl"]
    assert path.read_bytes() == before


def test_without_pyarrow_everything_stays_a_journal(tmp_path, open_store, monkeypatch):
    store = open_store()
    store.journal("a").append(episode("x"))
    store.journal("b").append(episode("y"))
    store.compact("b")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert store.compact() == store.compact("a") == []
    store.journal("a").append(episode("z"))
    assert ids(store.journal("a")) == ["x", "z"]
    with pytest.raises(MissingExtra, match=r"reading .*b\.parquet needs the package 'pyarrow'"):
        ids(store.journal("b"))


def test_a_journal_whose_compaction_was_killed_at_the_end_is_not_read_twice(tmp_path, open_store):
    store = open_store()
    journal = store.journal("a")
    journal.append(episode("x"), episode("y"))
    left_over = journal.path.read_bytes()
    journal.compact()
    journal.path.write_bytes(left_over)
    assert ids(journal) == ["x", "y"]
    # A resumed run goes on in it.
    journal.append(episode("z"))
    assert ids(journal) == ["x", "y", "z"]
    assert journal.compact()
    assert ids(journal) == ["x", "y", "z"]
    assert files(tmp_path) == ["a.parquet"]


def test_the_leftover_alone_is_only_removed(tmp_path, open_store, monkeypatch):
    journal = open_store().journal("a")
    journal.append(episode("x"))
    left_over = journal.path.read_bytes()
    journal.compact()
    journal.path.write_bytes(left_over)
    monkeypatch.setattr("art_gym.store._journal.write_parquet", lambda *arguments, **options: pytest.fail("written again"))
    assert journal.compact()
    assert files(tmp_path) == ["a.parquet"]
    assert ids(journal) == ["x"]


def test_a_new_journal_as_long_as_the_old_one_is_no_leftover(open_store):
    journal = open_store().journal("a")
    journal.append(episode("x"))
    journal.compact()
    journal.append(episode("y"))
    assert ids(journal) == ["x", "y"]


def test_who_reads_meanwhile_reads_on(open_store):
    journal = open_store().journal("a")
    journal.append(*(episode(str(number)) for number in range(1000)))
    reading = journal.read()
    index = journal.index()
    assert next(reading).id == "0"
    journal.compact()
    assert [each.id for each in reading] == [str(number) for number in range(1, 1000)]
    assert index["500"].id == "500"
    index.close()


def test_an_appender_that_waited_for_the_lock_writes_into_the_new_journal(tmp_path, open_store, monkeypatch):
    """Its file was opened before the compaction, and locked after."""
    store, other = open_store(), open_store()
    store.journal("a").append(episode("x"))
    store.journal("a").close()
    real = Journal.__module__
    flock = sys.modules[real].fcntl.flock

    def flock_after_a_compaction(file, how):
        monkeypatch.setattr(sys.modules[real].fcntl, "flock", flock)
        assert store.compact("a") == ["a"]
        flock(file, how)

    monkeypatch.setattr(sys.modules[real].fcntl, "flock", flock_after_a_compaction)
    other.journal("a").append(episode("y"))
    assert ids(open_store().journal("a")) == ["x", "y"]


def test_readers_appenders_and_compaction_at_once(open_store):
    """One label, compacted over and over while it is appended to and read: nothing is missing, and nothing is there twice."""
    appended: list[str] = []
    trouble: list[str] = []
    over = threading.Event()

    def read():
        store = open_store()
        while not over.is_set():
            sure = len(appended)
            found = ids(store.journal("a"))
            if found[:sure] != appended[:sure] or len(set(found)) != len(found):
                trouble.append(f"{found} after {appended[:sure]}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    journal = open_store().journal("a")
    for number in range(40):
        journal.append(episode(str(number)))
        appended.append(str(number))
        if number % 3 == 0:
            journal.compact()
    over.set()
    for reader in readers:
        reader.join()
    assert trouble == []
    assert ids(journal) == appended


def test_a_rollout_that_was_compacted_resumes(open_store):
    journal = open_store().journal("a")
    scenarios = [Scenario(f"s{seed}", seed) for seed in range(5)]
    first = Runner("art_gym/GuessNumber-v0", RandomAgent()).collect(scenarios[:3], journal=journal)
    journal.compact()
    with pytest.raises(UsageError, match="already holds episodes"):
        Runner("art_gym/GuessNumber-v0", RandomAgent()).collect(scenarios, journal=journal)
    groups = Runner("art_gym/GuessNumber-v0", RandomAgent()).collect(scenarios, journal=journal, resume=True)
    assert groups[:3] == first
    assert [group.episodes[0].scenario for group in groups] == scenarios
    assert sorted(ids(journal)) == [f"a/{place}/0" for place in range(5)]


# ------------------------------------------------------------------------------ what the disk refuses


SMALL_DISK = """
import os, resource, signal, sys
sys.path[:0] = {path!r}
import pyarrow.parquet
from art_gym.episodes import Episode
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore
journal = EpisodeStore({folder!r}).journal("a")
journal.append(*(Episode(str(number), os.urandom(2000).hex(), Scenario("s", 1)) for number in range(20)))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    journal.compact()
except OSError as error:
    print(error.filename, error.strerror)
"""


def test_a_full_disk_leaves_the_journal_and_no_half_table(tmp_path, open_store):
    code = SMALL_DISK.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{tmp_path}/episodes/a.parquet File too large\n"
    assert files(tmp_path) == ["a.jsonl"]
    assert len(ids(open_store().journal("a"))) == 20


# --------------------------------------------------------------------------------------------- kill -9


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import pyarrow.parquet
from art_gym.store import EpisodeStore
moment, calls = int(sys.argv[1]), 0
def counted(name, when):
    real = getattr(os, name)
    def call(*arguments, **options):
        global calls
        for now in ("before", "after"):
            result = real(*arguments, **options) if now == "after" else None
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(os, name, call)
for name in ("fsync", "replace", "rename", "unlink", "open", "close"):
    counted(name, None)
EpisodeStore({folder!r}).compact("a")
"""


@pytest.mark.slow
def test_a_kill_before_and_after_each_call_of_the_system_leaves_all_readable(tmp_path, open_store):
    """The process kills itself at one moment after the other, until it gets through; each time what it left is compacted further."""
    code = KILLED.format(path=sys.path, folder=str(tmp_path))
    appended: list[str] = []
    seen = set()
    for moment in range(1, 100):
        with open_store() as store:
            store.journal("a").append(episode(str(moment)))
        appended.append(str(moment))
        done = subprocess.run([sys.executable, "-c", code, str(moment)], capture_output=True, text=True, check=False)
        assert ids(open_store().journal("a")) == appended
        seen.add(tuple(files(tmp_path)))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert files(tmp_path) == ["a.parquet"]
    # In the middle of writing, between the table and the removal, and at the end.
    assert {(".a.parquet.part", "a.jsonl"), ("a.jsonl", "a.parquet"), ("a.parquet",)} <= seen


ENDLESS = """
import itertools, sys
sys.path[:0] = {path!r}
import pyarrow.parquet
from art_gym.episodes import Episode
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore
journal = EpisodeStore({folder!r}).journal("a")
for number in itertools.count(int(sys.argv[1])):
    journal.append(Episode(id=str(number), env_id="x" * 20_000, scenario=Scenario("s", 1)))
    print(number, flush=True)
    if number % 4 == 0:
        journal.compact()
"""


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing_and_doubles_nothing(tmp_path, open_store):
    code = ENDLESS.format(path=sys.path, folder=str(tmp_path))
    delays = random.Random(0)
    reported: list[str] = []
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", code, str(len(reported))], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            reported.append(writer.stdout.readline().strip())
            time.sleep(delays.uniform(0, 0.3))
            writer.send_signal(signal.SIGKILL)
            reported += writer.stdout.read().split()
        on_disk = ids(open_store().journal("a"))
        # The kill may fall between the write and the report.
        assert on_disk[: len(reported)] == reported
        assert len(on_disk) <= len(reported) + 1
        reported = on_disk


# ------------------------------------------------------------------------------------------- the index


def indexed(open_store, *, compact):
    journal = open_store().journal("a")
    journal.append(episode("x", 0.5), episode("y", failure=Failure("policy", "gone")), episode("z", failure=Failure("engine", "gone")))
    if compact:
        journal.compact()
    journal.append(episode("y", 2.0))
    return journal


@pytest.mark.parametrize("compact", [False, True])
def test_an_index_knows_each_episode_and_loads_it_when_asked(open_store, compact):
    journal = indexed(open_store, compact=compact)
    with journal.index() as index:
        assert (len(index), list(index)) == (3, ["x", "z", "y"])
        assert ("x" in index, "w" in index) == (True, False)
        assert [index.failure(name) for name in "xyz"] == [None, None, "engine"]
        assert [(head.id, head.reward, head.success) for head in index.heads()] == [("x", 0.5, True), ("z", 1.0, False), ("y", 2.0, True)]
        assert (index["y"].reward, index["z"].failure) == (2.0, Failure("engine", "gone"))
        assert dict(index) == journal.latest()
        assert [each.id for each in index.episodes()] == ["x", "z", "y"]
        with pytest.raises(KeyError):
            index["w"]


@pytest.mark.parametrize("compact", [False, True])
def test_an_index_stays_as_it_was_made_while_the_journal_grows(open_store, compact):
    journal = indexed(open_store, compact=compact)
    with journal.index() as index:
        journal.append(episode("x", 9.0), episode("new"))
        assert [each.reward for each in index.episodes()] == [0.5, 1.0, 2.0]
        assert index["x"].reward == 0.5
        assert "new" not in index


def test_an_index_of_nothing(open_store):
    with open_store().journal("a").index() as index:
        assert (len(index), list(index.episodes())) == (0, [])


def test_an_index_holds_no_episode(open_store):
    journal = open_store().journal("a")
    journal.append(*(episode(str(number)) for number in range(3)))
    with journal.index() as index:
        assert index["0"] is not index["0"]


def test_a_row_whose_id_no_column_holds_is_indexed_too(open_store):
    journal = open_store().journal("a")
    journal.append(episode("\ud800", failure=Failure("policy", "gone")), episode("y"))
    journal.compact()
    with journal.index() as index:
        assert list(index) == ["\ud800", "y"]
        assert index.failure("\ud800") == "policy"
        assert index["\ud800"].id == "\ud800"


def test_an_index_of_many_row_groups(open_store, monkeypatch):
    monkeypatch.setattr(_parquet, "BATCH_BYTES", 500)
    monkeypatch.setattr(_parquet, "GROUP_BYTES", 2000)
    journal = open_store().journal("a")
    journal.append(*(episode(str(number), reward=float(number)) for number in range(100)))
    journal.compact()
    with journal.index() as index:
        assert [index[str(number)].reward for number in reversed(range(100))] == [float(number) for number in reversed(range(100))]


def test_a_journal_written_by_an_earlier_version_reads(tmp_path, open_store):
    """Without the fields that came later."""
    record = episode("x").to_dict()
    for name in ("parent", "shared_turns", "branches"):
        del record[name]
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "a.jsonl").write_text(json.dumps(record) + "\n")
    open_store().compact("a")
    assert list(open_store().journal("a").read()) == [episode("x")]


def test_the_journal_of_a_read_only_run_is_told(tmp_path, open_store, monkeypatch):
    with open_store() as store:
        store.journal("a").append(episode("x"))

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError) as told:
        open_store().compact("a")
    assert told.value.filename == str(tmp_path / "episodes" / "a.parquet")
    assert files(tmp_path) == ["a.jsonl"]
