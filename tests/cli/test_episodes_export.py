"""`art-gym episodes` over a whole run: its labels listed, whether journals or compacted, and its episodes exported."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from art_gym import Scenario, call
from art_gym.cli import main
from art_gym.episodes import Episode, Failure, Turn
from art_gym.evaluation import evaluate
from art_gym.store import EpisodeStore
from art_gym_agents import ScriptedAgent

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

FILE = Path("run/episodes/train-0001.jsonl")
GONE = Failure("policy", "gone")


def turn(reward=0.0, **details) -> Turn:
    observation = details.pop("observation", [{"role": "user", "content": "Go on."}])
    return Turn(observation, call("look"), reward=reward, policy="tiny@0", prompt_ids=[1], completion_ids=[2], logprobs=[-0.5], **details)


def episode(id, *turns, **details) -> Episode:
    label, place, member = id.split("/")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    details = {"terminated": "failure" not in details, "tools": tools, **details}
    return Episode(id, "x/Y-v0", Scenario(f"{label}{place}", 3), int(member), turns=list(turns), **details)


def write(*episodes):
    with EpisodeStore("run") as store:
        for each in episodes:
            store.journal(each.id.split("/")[0]).append(each)


def compact(*labels):
    pytest.importorskip("pyarrow")
    with EpisodeStore("run") as store:
        assert store.compact(*labels)


@pytest.fixture
def run():
    """Two labels: one of four episodes, of which one succeeded and one failed; and one of two."""
    write(
        episode("train-0001/0/0", turn(1.0)),
        episode("train-0001/0/1", turn()),
        episode("train-0001/1/0", turn()),
        episode("train-0001/1/1", failure=Failure("engine", "gone")),
        episode("train-0002/0/0", turn(1.0)),
        episode("train-0002/0/1", turn()),
    )


def printed(capsys, *arguments) -> list[str]:
    assert main(["episodes", *map(str, arguments)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out.splitlines()


# ------------------------------------------------------------------------------------------------ ls


def test_the_labels_of_a_run_are_listed(run, capsys):
    # Played again, and still failed.
    write(episode("train-0002/0/1", failure=GONE))
    Path("run/episodes/train-0003.jsonl").touch()
    sizes = [path.stat().st_size for path in sorted(Path("run/episodes").iterdir())]
    assert printed(capsys, "ls", "run") == [
        "label       episodes  success  reward  bytes  failures",
        f"train-0001         4    0.250   0.333  {sizes[0]:,}  1 engine",
        f"train-0002         2    0.500   1.000  {sizes[1]:,}  1 policy",
    ]


def test_the_labels_as_json_whatever_form_they_have(run, capsys):
    listed = json.loads("\n".join(printed(capsys, "ls", "run", "--json")))
    size = FILE.stat().st_size
    assert listed[0] == {"label": "train-0001", "episodes": 4, "success": 0.25, "reward": 1 / 3, "bytes": size, "failures": {"engine": 1}}
    compact("train-0001")
    listed[0]["bytes"] = Path("run/episodes/train-0001.parquet").stat().st_size
    assert json.loads("\n".join(printed(capsys, "ls", "run/episodes", "--json"))) == listed


def test_a_failed_episode_is_no_success_as_in_an_evaluation(capsys):
    def act(state):
        if state.scenario.seed % 2:
            raise ValueError("no answer")
        return call("guess", number=8)

    with EpisodeStore("run") as store:
        scenarios = [Scenario(f"s{seed}", seed) for seed in range(4)]
        measured = evaluate("art_gym/GuessNumber-v0", ScriptedAgent(act), scenarios, journal=store.journal("eval-script"))
    assert measured.failures == {"policy": 2}
    (listed,) = json.loads("\n".join(printed(capsys, "ls", "run", "--json")))
    assert (listed["success"], listed["reward"]) == (measured.rate, measured.mean_reward)


def test_a_label_of_which_all_failed_has_no_reward(capsys):
    write(episode("train-0001/0/0", failure=GONE))
    assert printed(capsys, "ls", "run")[1].split() == ["train-0001", "1", "0.000", "-", f"{FILE.stat().st_size}", "1", "policy"]


def test_a_compacted_label_is_listed_and_shown_as_before_by_either_name(run, capsys):
    Path("run/config.yaml").write_text(json.dumps({"env": {"id": "x/Y-v0"}, "grpo": {"group_size": 2, "groups_per_batch": 2}}))
    commands = [("ls",), ("show", "--episode", "train-0001/0/1")]
    before = [printed(capsys, *command, FILE) for command in commands]
    assert any("advantage -" in line for line in before[1])
    compact("train-0001")
    assert not FILE.exists()
    for file in (FILE, FILE.with_suffix(".parquet")):
        assert [printed(capsys, *command, file) for command in commands] == before


def test_a_folder_that_is_no_run(refused):
    Path("empty/episodes").mkdir(parents=True)
    assert refused("episodes", "ls", ".") == ". is not the folder of a run: it holds no folder episodes/"
    assert refused("episodes", "ls", "empty") == "empty/episodes holds no episodes"


def test_a_damaged_table_is_named(refused, run):
    compact("train-0001")
    file = Path("run/episodes/train-0001.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    for arguments in (("ls", "run"), ("ls", str(file)), ("show", str(file)), ("export", "run", "--to", "out.jsonl")):
        assert refused("episodes", *arguments).startswith("run/episodes/train-0001.parquet is damaged: ")


def test_a_compacted_run_without_pyarrow(refused, run, monkeypatch):
    compact("train-0001")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused("episodes", "ls", "run") == (
        "reading run/episodes/train-0001.parquet needs the package 'pyarrow', which isn't installed: pip install 'art-gym[data]'"
    )


# -------------------------------------------------------------------------------------------- export


def exported(path) -> list[Episode]:
    return [Episode.from_dict(json.loads(line)) for line in Path(path).read_text().splitlines()]


def test_a_run_is_exported_whole_and_exactly(run, capsys):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    with EpisodeStore("run") as store:
        wanted = list(store.read())
    assert len(wanted) == 6
    compact("train-0001")
    for name in ("out.jsonl", "out.parquet"):
        assert printed(capsys, "export", "run", "--to", name) == [f"6 episodes in {name}"]
    assert exported("out.jsonl") == wanted
    rows = pyarrow.read_table("out.parquet", columns=["id", "label"]).to_pylist()
    assert rows == [{"id": found.id, "label": found.id.split("/")[0]} for found in wanted]
    Path("copy/episodes").mkdir(parents=True)
    Path("out.parquet").rename("copy/episodes/all.parquet")
    with EpisodeStore("copy") as store:
        assert list(store.read()) == wanted


def test_what_is_exported_is_read_by_the_same_commands(run, capsys):
    pytest.importorskip("pyarrow")
    printed(capsys, "export", "run", "--to", "out.parquet")
    assert len(printed(capsys, "ls", "out.parquet")) == 1 + 6
    assert printed(capsys, "show", "out.parquet", "--episode", "train-0002/0/0")[0].startswith("episode train-0002/0/0 of 6")
    # What lies beside it under the same name is something else.
    printed(capsys, "export", "run", "--to", "out.jsonl", "--successful")
    assert [len(printed(capsys, "ls", name)) for name in ("out.jsonl", "out.parquet")] == [1 + 2, 1 + 6]


def test_only_what_is_asked_for_is_exported(run, capsys):
    lines = printed(capsys, "export", "run", "--label", "train-0002", "--successful", "--to", "out.jsonl")
    assert lines == ["1 episodes in out.jsonl; of the others 1 aren't a success"]
    assert [found.id for found in exported("out.jsonl")] == ["train-0002/0/0"]
    assert printed(capsys, "export", "run", "--label", "train-0001", "--to", "out.jsonl", "--force") == ["4 episodes in out.jsonl"]
    assert len(exported("out.jsonl")) == 4


def test_of_an_episode_that_was_played_again_the_last_is_exported(capsys):
    write(episode("train-0001/0/0", failure=GONE), episode("train-0001/0/0", turn(1.0)))
    printed(capsys, "export", "run", "--to", "out.jsonl")
    assert [found.failure for found in exported("out.jsonl")] == [None]


def test_a_label_that_is_named_twice_is_exported_once(run, capsys):
    lines = printed(capsys, "export", "run", "--label", "train-0002", "--label", "train-0002", "--to", "out.jsonl")
    assert lines == ["2 episodes in out.jsonl"]
    assert [found.id for found in exported("out.jsonl")] == ["train-0002/0/0", "train-0002/0/1"]


def test_an_export_that_cannot_be_is_refused_before_anything_is_written(refused, run):
    Path("there.jsonl").write_text("precious")
    Path("folder").mkdir()
    for arguments, told in [
        (["--to", "there.jsonl"], "--to there.jsonl is there already; --force writes over it"),
        (["--to", "folder"], "--to folder is a folder; give a file, such as folder/episodes.parquet"),
        (["--to", "out.txt"], "--to out.txt: --format episodes is written to a file that ends with .parquet or .jsonl"),
        (["--to", "out.parquet", "--format", "sft"], "--to out.parquet: --format sft is written to a file that ends with .jsonl"),
        (["--to", "no/out.jsonl"], "--to no/out.jsonl: there is no folder no"),
        (["--to", "run/episodes/out.jsonl"], "--to run/episodes/out.jsonl: the run's own episodes are in that folder; give a file elsewhere"),
        (["--to", "out.jsonl", "--label", "train-9"], "run has no episodes of the label 'train-9'; it has train-0001, train-0002"),
    ]:
        assert refused("episodes", "export", "run", *arguments) == told
    assert Path("there.jsonl").read_text() == "precious"


def test_a_filter_that_leaves_nothing_is_told(refused):
    write(episode("train-0001/0/0", turn()), episode("train-0001/0/1", failure=GONE))
    told = "there is nothing to export: 2 aren't a success"
    assert refused("episodes", "export", "run", "--to", "out.jsonl", "--successful") == told
    Path("there.jsonl").write_text("precious")
    assert refused("episodes", "export", "run", "--to", "there.jsonl", "--successful", "--force") == told
    assert Path("there.jsonl").read_text() == "precious"


def test_an_export_to_parquet_without_pyarrow(refused, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused("episodes", "export", "run", "--to", "out.parquet") == (
        "writing Parquet files needs the package 'pyarrow', which isn't installed: pip install 'art-gym[data]'"
    )


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_full_disk_leaves_no_half_export(run, name):
    program = f"""
import resource, signal, sys
from art_gym.cli import main
import pyarrow.parquet
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sys.exit(main(["episodes", "export", "run", "--to", {name!r}]))
"""
    before = sorted(Path().rglob("*"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {name}: File too large\n")
    assert sorted(Path().rglob("*")) == before


def test_a_label_that_was_compacted_before_the_run_went_on(capsys):
    """The advantage of an episode whose group is partly in the table and partly in the journal beside it."""
    write(episode("train-0001/0/0", turn(1.0)))
    compact("train-0001")
    write(episode("train-0001/0/1", turn()))
    lines = printed(capsys, "show", FILE)
    assert lines[0] == "episode train-0001/0/0 of 2; the others with --episode"
    # Rewards 1 and 0: 0.5 off the mean, deviation sqrt(0.5).
    assert any(line.startswith("turn 0: reward +1, advantage +0.7070") for line in lines)


def test_replacing_a_field_is_seen_in_the_export(run, capsys):
    (first, *_) = EpisodeStore("run").read(["train-0002"])
    write(replace(first, seconds=9.0))
    printed(capsys, "export", "run", "--label", "train-0002", "--to", "out.jsonl")
    assert {found.id: found.seconds for found in exported("out.jsonl")}[first.id] == 9.0
