"""Journals: what was appended is on disk and readable, whatever happens next."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import UsageError
from art_gym.messages import call, say
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore, encode


@pytest.fixture
def open_store(tmp_path):
    """Opens the same store anew each time, as another process would; closes them all at the end."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(EpisodeStore(tmp_path))


def episode(name: str = "e", reward: float = 1.0) -> Episode:
    return Episode(
        id=name,
        env_id="test/Echo-v0",
        scenario=Scenario("train-3", seed=3, options={"size": 4}),
        member=1,
        tools=[{"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}],
        turns=[
            Turn(
                observation=[{"role": "user", "content": "Äh? 猫"}],
                action=call("guess", number=3),
                reward=reward,
                rewards={"found": reward},
                prompt_ids=[1, 2],
                completion_ids=[3],
                logprobs=[-0.5],
            )
        ],
        final_observation=[{"role": "tool", "tool_call_id": "call_0", "content": "Correct."}],
        terminated=True,
        metrics={"success": 1.0},
        seconds=0.25,
    )


def test_an_episode_reads_back_equal(open_store):
    failed = Episode(id="f", env_id="x", scenario=Scenario("s", 1), failure=Failure("tool_timeout", "too slow", "Traceback"))
    with open_store() as store:
        store.journal("train-0003").append(episode(), failed)
    assert list(open_store().journal("train-0003").read()) == [episode(), failed]


def test_a_line_shows_the_derived_figures_to_other_readers(tmp_path, open_store):
    open_store().journal("a").append(episode(reward=0.75))
    record = json.loads((tmp_path / "episodes" / "a.jsonl").read_text())
    assert (record["reward"], record["success"], record["format"]) == (0.75, True, 1)


def test_nothing_is_created_before_the_first_episode(tmp_path):
    store = EpisodeStore(tmp_path / "run")
    assert list(store.journal("a").read()) == []
    assert store.labels() == []
    assert not (tmp_path / "run").exists()


def test_labels_and_ids(open_store):
    store = open_store()
    store.journal("train-0002").append(episode("x"), episode("y"))
    store.journal("eval-after").append(episode("z"))
    assert store.labels() == ["eval-after", "train-0002"]
    assert store.journal("train-0002").latest().keys() == {"x", "y"}


def test_the_last_record_of_an_id_stands(open_store):
    journal = open_store().journal("a")
    journal.append(episode("x", reward=0.0), episode("x", reward=1.0))
    assert journal.latest()["x"].reward == 1.0


@pytest.mark.parametrize("label", ["", "../x", "a/b", ".hidden", "a b", "a\n"])
def test_a_label_that_is_no_file_name_is_refused(open_store, label):
    with pytest.raises(UsageError, match="can't label episodes"):
        open_store().journal(label)


def in_the_way_of_the_store(folder):
    folder.write_text("a file")


def in_the_way_of_its_folder(folder):
    folder.mkdir()
    (folder / "episodes").write_text("a file")


def in_the_way_of_the_file(folder):
    (folder / "episodes" / "a.jsonl").mkdir(parents=True)


def a_pipe(folder):
    (folder / "episodes").mkdir(parents=True)
    os.mkfifo(folder / "episodes" / "a.jsonl")


def a_link_to_nowhere(folder):
    folder.symlink_to("nowhere")


@pytest.mark.parametrize("block", [in_the_way_of_the_store, in_the_way_of_its_folder, in_the_way_of_the_file, a_pipe, a_link_to_nowhere])
def test_what_cannot_be_written_is_told_before_anything_is(tmp_path, block):
    block(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=r"episodes can't be written to '.*/run/episodes/a\.jsonl': .*; make that writable, or choose another"):
        EpisodeStore(tmp_path / "run").journal("a").check()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_system_that_takes_nothing_is_told():
    with pytest.raises(UsageError, match=r"episodes can't be written to '/proc/run/episodes/a\.jsonl': .*; make that writable"):
        EpisodeStore("/proc/run").journal("a").check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("part", [".", "episodes", "episodes/a.jsonl"])
def test_what_may_not_be_written_is_told(tmp_path, open_store, part):
    with open_store() as store:
        store.journal("a").append(episode())
    if part != "episodes/a.jsonl":
        store.journal("a").path.unlink()
    if part == ".":
        store.folder.rmdir()
    (tmp_path / part).chmod(0o555)
    with pytest.raises(UsageError, match="Permission denied"):
        open_store().journal("a").check()
    (tmp_path / part).chmod(0o755)
    open_store().journal("a").check()


def test_a_check_leaves_nothing_and_changes_nothing(tmp_path, open_store):
    open_store().journal("a").check()
    assert list(tmp_path.iterdir()) == []
    journal = open_store().journal("a")
    journal.append(episode())
    before = journal.path.stat()
    open_store().journal("a").check()
    open_store().journal("b").check()
    assert journal.path.stat() == before
    assert list(tmp_path.rglob("*.jsonl")) == [journal.path]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold_is_refused_whole(open_store, value):
    journal = open_store().journal("a")
    with pytest.raises(ValueError, match="'bad' can't be written as JSON"):
        journal.append(episode("good"), episode_with(value))
    assert journal.latest().keys() == set()


def episode_with(metric) -> Episode:
    bad = episode("bad")
    bad.metrics["odd"] = metric
    return bad


def test_a_lone_surrogate_survives(open_store):
    odd = episode()
    odd.final_observation = [{"role": "user", "content": "\ud800"}]
    journal = open_store().journal("a")
    journal.append(odd)
    assert list(journal.read()) == [odd]


@pytest.mark.parametrize("tail", [b'{"id": "torn', b"\0\0\0\n", b'{"half":\n', b"\n"])
def test_a_torn_last_line_is_skipped_and_then_removed(tmp_path, open_store, tail):
    with open_store() as store:
        store.journal("a").append(episode("x"))
    path = tmp_path / "episodes" / "a.jsonl"
    with path.open("ab") as file:
        file.write(tail)
    journal = open_store().journal("a")
    assert journal.latest().keys() == {"x"}
    journal.append(episode("y"))
    assert [each.id for each in journal.read()] == ["x", "y"]
    assert len(path.read_bytes().splitlines()) == 2


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path, open_store):
    path = tmp_path / "episodes" / "a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"id": ' + b"1" * 200_000)
    journal = open_store().journal("a")
    assert journal.latest().keys() == set()
    journal.append(episode("x"))
    assert journal.latest().keys() == {"x"}


def test_damage_in_the_middle_is_an_error_that_names_the_line(open_store):
    journal = open_store().journal("a")
    journal.append(episode("x"), episode("y"), episode("z"))
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(ValueError, match="line 2 is damaged"):
        list(journal.read())


@pytest.mark.parametrize(
    "line",
    ["5", "null", "[]", '"text"', "{}", '{"format":1}', '{"format":1,"scenario":3}', None],
    ids=lambda line: line or "a field too many",
)
def test_a_line_that_is_no_episode_is_an_error_that_names_it(open_store, line):
    journal = open_store().journal("a")
    journal.append(episode("x"), episode("y"), episode("z"))
    lines = journal.path.read_text().splitlines()
    lines[1] = lines[1].replace('"reward":', '"more":1,"reward":', 1) if line is None else line
    journal.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=r"/episodes/a\.jsonl, line 2 is no episode that this version of art_gym reads: "):
        list(journal.read())


def test_a_record_of_another_format_is_an_error(open_store):
    journal = open_store().journal("a")
    journal.append(episode())
    journal.path.write_text(journal.path.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1 is no episode .*: an episode record has format 99"):
        list(journal.read())


def test_two_writers_of_one_journal_are_refused(open_store):
    first = open_store().journal("a")
    first.append(episode())
    with pytest.raises(UsageError, match="another process"):
        open_store().journal("a").append(episode())
    first.close()
    open_store().journal("a").append(episode())


def test_threads_append_whole_lines(open_store):
    journal = open_store().journal("a")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: journal.append(episode(str(number))), range(100)))
    assert journal.latest().keys() == {str(number) for number in range(100)}


SMALL_DISK = """
import resource, sys
sys.path[:0] = {path!r}
from art_gym.episodes import Episode
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore, encode
journal = EpisodeStore({folder!r}).journal("a")
def episode(name, length):
    return Episode(id=name, env_id="x" * length, scenario=Scenario("s", 1))
journal.append(episode("before", 10))
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    journal.append(episode("large", 10_000))
except OSError as error:
    print("refused:", error.filename)
journal.append(episode("after", 10))
"""


def test_a_full_disk_leaves_no_half_line_behind(tmp_path, open_store):
    code = SMALL_DISK.format(path=sys.path, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"refused: {tmp_path}/episodes/a.jsonl\n"
    assert [each.id for each in open_store().journal("a").read()] == ["before", "after"]


ENDLESS = """
import itertools, sys
sys.path[:0] = {path!r}
from art_gym.episodes import Episode
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore, encode
journal = EpisodeStore({folder!r}).journal("a")
for number in itertools.count(int(sys.argv[1])):
    journal.append(Episode(id=str(number), env_id="x" * 20_000, scenario=Scenario("s", 1)))
    print(number, flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_no_finished_episode(tmp_path, open_store):
    code = ENDLESS.format(path=sys.path, folder=str(tmp_path))
    delays = random.Random(0)
    reported: list[str] = []
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code, str(len(reported))], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            reported.append(writer.stdout.readline().strip())
            time.sleep(delays.uniform(0, 0.1))
            writer.send_signal(signal.SIGKILL)
            reported += writer.stdout.read().split()
        on_disk = [each.id for each in open_store().journal("a").read()]
        # The kill may fall between the write and the report: one more episode than was reported, never one less.
        assert on_disk[: len(reported)] == reported
        assert len(on_disk) <= len(reported) + 1
        reported = on_disk


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ODD_NUMBERS = st.sampled_from(["1", None, np.float64(0.5), np.int64(3)])
NUMBERS = st.none() | st.lists(st.integers() | st.floats() | st.booleans() | ODD_NUMBERS, max_size=4)


@given(JSON_VALUES, JSON_VALUES, NUMBERS, NUMBERS)
def test_a_line_is_what_json_makes_of_the_episode(options, content, ids, logprobs):
    turn = Turn([{"role": "user", "content": content}], call("go"), prompt_ids=ids, completion_ids=ids, logprobs=logprobs)
    recorded = Episode("e", "x", Scenario("s", 1, {"any": options}), turns=[turn])
    try:
        expected = json.loads(json.dumps(recorded.to_dict(), allow_nan=False))
    except (TypeError, ValueError):
        with pytest.raises(ValueError, match="episode 'e' can't be written as JSON"):
            encode(recorded)
        return
    line = encode(recorded)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert json.loads(line) == expected


def test_figures_whose_sum_is_infinite_are_written():
    huge = [-1e308, -1e308]
    played = Episode("e", "x", Scenario("s", 0), turns=[Turn([], say(""), prompt_ids=[1], completion_ids=[2, 3], logprobs=huge)])
    assert Episode.from_dict(json.loads(encode(played))).turns[0].logprobs == huge
