"""Episodes as tables: exactly what was journaled comes back, and other readers find their way in them."""

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_gym import Scenario, call
from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import FAILURE_KINDS, MissingExtra
from art_gym.store import EpisodeStore, Stored, _columns, _parquet, encode, write_parquet
from art_gym.store._parquet import ParquetEpisodes

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


PAGE = Path(__file__).parents[1] / "docs" / "episodes.md"


def episode(number: int = 0, **details) -> Episode:
    turns = [
        Turn(
            [{"role": "user", "content": "Äh? 猫"}],
            call("guess", number=3),
            reward=0.1,
            rewards={"found": 0.1},
            policy="tiny@0",
            prompt_ids=[1, 2],
            completion_ids=[3],
            logprobs=[-0.1],
        ),
        Turn([{"role": "tool", "tool_call_id": "call_0", "content": "No."}], {"role": "assistant", "content": None}, reward=number),
    ]
    details = {"turns": turns, "terminated": True, "metrics": {"steps": 2.0}, **details}
    return Episode(f"train-0003/{number}/0", "test/Echo-v0", Scenario(f"s{number}", seed=number, options={"size": 4}), **details)


def written(path, *episodes, label="train-0003"):
    with path.open("wb") as file:
        assert write_parquet(file, (Stored(label, each) for each in episodes)) == len(episodes)
    return path


def read(path) -> list[Episode]:
    return list(ParquetEpisodes(path).read())


def as_journaled(episode: Episode) -> Episode:
    return Episode.from_dict(json.loads(encode(episode)))


# Anything that JSON holds, lone surrogates and integers of any size included; no NaN, which no journal takes.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
REAL = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | REAL | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=2)
TOKENS = st.none() | st.lists(st.integers(0, 2**31 - 1) | st.integers(), max_size=3)
NUMBERS = st.dictionaries(TEXT, REAL, max_size=2)
TURNS = st.builds(
    Turn,
    observation=MESSAGES,
    action=st.dictionaries(TEXT, JSON, max_size=3),
    # Their sum is a number that JSON holds, too.
    reward=st.floats(-1e9, 1e9) | st.integers(-(2**70), 2**70),
    rewards=NUMBERS,
    finish_reason=TEXT,
    policy=TEXT,
    prompt_ids=TOKENS,
    completion_ids=TOKENS,
    logprobs=st.none() | st.lists(REAL, max_size=3),
    invalid_calls=st.integers(),
    policy_seconds=REAL,
    environment_seconds=REAL,
)
FAILURES = st.builds(Failure, kind=st.sampled_from(FAILURE_KINDS), message=TEXT, traceback=TEXT, action=st.none() | st.dictionaries(TEXT, JSON))
EPISODES = st.builds(
    Episode,
    id=TEXT,
    env_id=TEXT,
    scenario=st.builds(Scenario, id=TEXT, seed=st.integers(), options=st.dictionaries(TEXT, JSON, max_size=3)),
    member=st.integers(),
    tools=MESSAGES,
    turns=st.lists(TURNS, max_size=3),
    final_observation=MESSAGES,
    terminated=st.booleans(),
    truncated=st.booleans(),
    truncation=st.none() | st.sampled_from(["max_turns", "environment"]),
    metrics=NUMBERS,
    failure=st.none() | FAILURES,
    seconds=REAL,
    abandoned=st.booleans(),
    parent=st.none() | TEXT,
    shared_turns=st.integers(),
    branches=st.lists(st.integers(), max_size=3),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(episodes=st.lists(EPISODES, max_size=3))
def test_every_episode_reads_back_as_from_its_journal(tmp_path, episodes):
    episodes = [as_journaled(each) for each in episodes]
    assert read(written(tmp_path / "a.parquet", *episodes)) == episodes


def test_an_ordinary_episode_is_all_in_its_columns(tmp_path):
    failed = episode(1, failure=Failure("environment", "broke", "Traceback", call("guess", number=1)), terminated=False)
    rows = pq.read_table(written(tmp_path / "a.parquet", episode(), failed)).to_pylist()
    assert [row["record"] for row in rows] == [None, None]
    assert rows[0]["turns"][0]["prompt_ids"] == [1, 2]
    assert json.loads(rows[0]["turns"][0]["observation"]) == [{"role": "user", "content": "Äh? 猫"}]
    assert "猫" in rows[0]["turns"][0]["observation"]
    facts = {name: rows[1][name] for name in ("label", "step", "scenario_id", "seed", "reward", "success", "failure_kind", "failure_message")}
    assert facts == {
        "label": "train-0003", "step": 3, "scenario_id": "s1", "seed": 1, "reward": 1.1, "success": False,
        "failure_kind": "environment", "failure_message": "broke",
    }  # fmt: skip


def test_none_and_empty_stay_apart(tmp_path):
    unknown, empty = Turn([], {}), Turn([], {}, prompt_ids=[], completion_ids=[], logprobs=[])
    (found,) = read(written(tmp_path / "a.parquet", episode(turns=[unknown, empty])))
    assert [(turn.prompt_ids, turn.completion_ids, turn.logprobs) for turn in found.turns] == [(None, None, None), ([], [], [])]


def test_logprobs_keep_every_bit(tmp_path):
    odd = [-0.1, -1e-300, -0.0, math.nextafter(-1.0, 0.0)]
    (found,) = read(written(tmp_path / "a.parquet", episode(turns=[Turn([], {}, logprobs=odd)])))
    assert [value.hex() for value in found.turns[0].logprobs or []] == [value.hex() for value in odd]


def test_a_row_that_the_columns_cannot_hold_spoils_no_other(tmp_path):
    odd = [episode(1, member=2**40), episode(2, turns=[Turn([], {}, completion_ids=[2**31])]), replace(episode(3), id="\ud800")]
    path = written(tmp_path / "a.parquet", episode(0), *odd, episode(4))
    assert read(path) == [episode(0), *odd, episode(4)]
    rows = pq.read_table(path).to_pylist()
    assert [row["record"] is None for row in rows] == [True, False, False, False, True]
    # What fits is in its column all the same.
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]
    assert (rows[1]["member"], rows[3]["id"]) == (None, "\\ud800")


def test_a_field_without_a_column_is_kept_all_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(_columns, "_failure", lambda row: None)
    failed = episode(failure=Failure("policy", "gone"))
    row = _columns.to_row(Stored("a", failed))
    assert Episode.from_dict(json.loads(row["record"])) == failed


def test_every_field_has_a_column():
    columns = _columns.schema(pa)
    named = {"scenario": {"scenario_id", "seed", "options"}, "failure": {f"failure_{field.name}" for field in fields(Failure)}}
    wanted = set().union(*(named.get(field.name, {field.name}) for field in fields(Episode)))
    # What is derived or the store's own comes on top.
    assert set(columns.names) - wanted == {"label", "step", "reward", "success", "superseded", "record"}
    assert wanted <= set(columns.names)
    turn = columns.field("turns").type.value_type
    assert [turn.field(place).name for place in range(turn.num_fields)] == [field.name for field in fields(Turn)]


def test_every_column_is_documented():
    page = PAGE.read_text()
    columns = _columns.schema(pa)
    turn = columns.field("turns").type.value_type
    names = [*columns.names, *(turn.field(place).name for place in range(turn.num_fields))]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("label", "step"),
    [
        ("train-0012", 12),
        ("train-12345", 12345),
        ("train-0003-from-0008", 3),
        ("eval-grpo-5", 5),
        ("eval-grpo", None),
        ("eval-untrained", None),
        ("eval-warm_start", None),
        ("warm-start", None),
        # What a model, an address or a user calls itself.
        ("eval-smollm2-135m", None),
        ("eval-Qwen2.5-0.5B", None),
        ("eval-gpt-4", None),
        ("127.0.0.1-8000", None),
        ("train-2", None),
        ("my-train-0003", None),
        ("train-0003-again", None),
        ("train-00000000000003", None),
        ("train-٣٣٣٣", None),
    ],
)
def test_the_step_is_the_batch_of_a_label_that_a_training_run_gives(label, step):
    assert _columns.step_of(label) == step


def test_row_groups_are_bounded_whatever_the_number_of_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr(_parquet, "BATCH_BYTES", 1000)
    monkeypatch.setattr(_parquet, "GROUP_BYTES", 10_000)
    episodes = [episode(number) for number in range(200)]
    path = written(tmp_path / "a.parquet", *episodes)
    groups = pq.ParquetFile(path).metadata.num_row_groups
    assert groups > 5
    assert read(path) == episodes
    found = ParquetEpisodes(path)
    # Also from the middle, back and forth.
    assert [found.load(number) for number in (199, 0, 100, 99, 100)] == [episodes[number] for number in (199, 0, 100, 99, 100)]
    assert len(found._held) == 2


def test_no_episode_makes_an_empty_table(tmp_path):
    path = written(tmp_path / "a.parquet")
    assert read(path) == []
    assert pq.read_table(path).num_rows == 0


def test_a_damaged_file_names_itself(tmp_path):
    path = written(tmp_path / "a.parquet", *[episode(number) for number in range(50)])
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"PAR1", b"", b"no Parquet at all"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a\.parquet is damaged: "):
            read(path)
    # A single bit among the data, which only a checksum tells.
    path.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    with pytest.raises(ValueError, match=r"a\.parquet is damaged: "):
        read(path)


def test_a_table_of_something_else_is_told(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is no file of episodes that this version of art_gym reads: it has no format"):
        read(tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata({"art_gym.format": "99"}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="it has format 99, and this version of art_gym reads format 1"):
        read(tmp_path / "a.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", episode())
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"reading .*a\.parquet needs the package 'pyarrow', .*: pip install 'art-gym\[data\]'"):
        read(path)
    with pytest.raises(MissingExtra, match="writing Parquet files needs the package 'pyarrow'"):
        written(tmp_path / "b.parquet", episode())


# --------------------------------------------------------------------------- other readers


@pytest.fixture
def compacted(tmp_path):
    """Two labels of a run, compacted: three episodes, whose second was played again after a failure."""
    failed = episode(1, failure=Failure("policy", "gone"), turns=[], terminated=False)
    with EpisodeStore(tmp_path) as store:
        store.journal("train-0003").append(episode(0), failed, episode(1))
        store.journal("eval-untrained").append(replace(episode(5), id="eval-untrained/5/0"))
        assert store.compact("train-0003", "eval-untrained") == ["train-0003", "eval-untrained"]
    return tmp_path / "episodes"


def test_pandas_reads_the_files(compacted):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(compacted, columns=["label", "step", "scenario_id", "reward", "success", "failure_kind", "superseded", "turns"])
    frame = frame[~frame.superseded].sort_values("reward")
    assert list(frame.scenario_id) == ["s0", "s1", "s5"]
    assert frame.groupby("label").success.mean().to_dict() == {"eval-untrained": 1.0, "train-0003": 1.0}
    assert frame.turns.map(len).to_list() == [2, 2, 2]
    assert frame.turns.iloc[0][0]["logprobs"].tolist() == [-0.1]


def test_duckdb_reads_the_files(compacted):
    duckdb = pytest.importorskip("duckdb")
    source = f"read_parquet('{compacted}/*.parquet')"
    query = f"select label, count(*), sum(failure_kind is not null), max(seed) from {source} where not superseded group by label order by label"
    assert duckdb.sql(query).fetchall() == [("eval-untrained", 1, 0, 5), ("train-0003", 2, 0, 1)]
    query = f"select sum(len(turn.completion_ids)) from (select unnest(turns) as turn from {source} where step = 3 and not superseded)"
    assert duckdb.sql(query).fetchall() == [(2,)]
    query = f"select metrics->>'$.steps', turns[1].action->>'$.tool_calls[0].function.name' from {source} where seed = 5"
    assert duckdb.sql(query).fetchall() == [("2.0", "guess")]


def test_the_documented_queries_answer(tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    with EpisodeStore(tmp_path / "runs" / "first") as store:
        branch = replace(episode(0), id="train-0012/0/0~0", parent="train-0012/0/0", shared_turns=1)
        store.journal("train-0012").append(episode(0), episode(1), branch)
        store.compact("train-0012")
        # A batch that is being played.
        store.journal("train-0013").append(replace(episode(2), id="train-0013/0/0"))
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    answers = [duckdb.sql(query).fetchall() for query in block.split(";") if query.strip()]
    # Each episode has one turn of the policy that sampled one token, and one that sampled none. The branch shares the first.
    assert sorted(answers[0]) == [("", None, None), ("tiny@0", 2, -0.1)]
    assert answers[1] == [("guess", 2)]


@pytest.mark.train
def test_datasets_reads_the_files(compacted, tmp_path):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("parquet", data_files=str(compacted / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache"))
    rows = {row["id"]: row for row in found if not row["superseded"]}
    assert rows.keys() == {"train-0003/0/0", "train-0003/1/0", "eval-untrained/5/0"}
    assert rows["train-0003/0/0"]["turns"][0]["completion_ids"] == [3]
    assert json.loads(rows["eval-untrained/5/0"]["metrics"]) == {"steps": 2.0}


def test_what_was_superseded_is_marked_and_kept(compacted):
    table = pq.read_table(compacted / "train-0003.parquet", columns=["id", "superseded", "failure_kind"])
    assert table.to_pylist() == [
        {"id": "train-0003/0/0", "superseded": False, "failure_kind": None},
        {"id": "train-0003/1/0", "superseded": True, "failure_kind": "policy"},
        {"id": "train-0003/1/0", "superseded": False, "failure_kind": None},
    ]
