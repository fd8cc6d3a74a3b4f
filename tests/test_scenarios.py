"""Scenarios made from the rows of a data set: which split a row belongs to, and that it stays there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from art_gym import SPLITS, Scenario, ToolEnv
from art_gym.scenarios import Split, from_rows

ROWS: list[dict[str, Any]] = [{"key": f"q{number}", "question": f"{number} + {number}", "answer": 2 * number} for number in range(1000)]


def ids(rows: Any, split: Split, **options: Any) -> list[str]:
    return [scenario.id for scenario in from_rows(rows, split, id="key", **options)]


def test_a_row_becomes_the_options_of_a_scenario() -> None:
    row = {"key": "q7", "question": "7 + 7", "choices": [13, 14], "hint": None}
    (scenario,) = (scenario for split in SPLITS for scenario in from_rows([row], split, id="key"))
    assert scenario == Scenario("q7", scenario.seed, row)
    assert list(scenario.options) == list(row)
    assert 0 <= scenario.seed < 2**31
    row["choices"].append(15)  # type: ignore[attr-defined]
    assert scenario.options["choices"] == [13, 14]


def test_every_row_is_in_one_split_and_the_shares_are_met() -> None:
    found = {split: ids(ROWS, split) for split in SPLITS}
    assert sorted(id_ for split in SPLITS for id_ in found[split]) == sorted(row["key"] for row in ROWS)
    # Each row is drawn by itself: within four standard deviations of a binomial draw, √(n·p·(1−p)).
    assert abs(len(found["train"]) - 800) < 4 * 12.7
    assert abs(len(found["validation"]) - 100) < 4 * 9.5
    assert abs(len(found["test"]) - 100) < 4 * 9.5


def test_neither_the_order_nor_the_number_of_the_rows_matters() -> None:
    for split in SPLITS:
        whole = {scenario.id: scenario for scenario in from_rows(ROWS, split, id="key")}
        for rows in (ROWS[::-1], ROWS[500:], ROWS[::7]):
            part = [*from_rows(rows, split, id="key")]
            assert [scenario.id for scenario in part] == [row["key"] for row in rows if row["key"] in whole]
            assert all(scenario == whole[scenario.id] for scenario in part)


@pytest.mark.slow
def test_every_process_agrees() -> None:
    code = (
        "import json, sys\n"
        "from art_gym.scenarios import from_rows\n"
        "print(json.dumps([scenario.to_dict() for scenario in from_rows(json.load(sys.stdin), 'test')]))\n"
    )
    here = [scenario.to_dict() for scenario in from_rows(ROWS[:50], "test")]
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(ROWS[:50]),
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
        )
        assert json.loads(run.stdout) == here


def test_the_split_of_a_row_is_the_one_that_its_hash_gives() -> None:
    # An independent formula: the first 16 hexadecimal digits of sha256("0:<id>"), as a fraction of 16^16, are where the row stands from 0 to 1.
    for name in ("q0", "q1", "q2", "q3"):
        position = int(hashlib.sha256(f"0:{name}".encode()).hexdigest()[:16], 16) / 16**16
        expected = "train" if position < 0.5 else "validation" if position < 0.75 else "test"
        assert [split for split in SPLITS if ids([{"key": name}], split, fractions=(0.5, 0.25, 0.25))] == [expected]


def test_another_seed_draws_otherwise() -> None:
    first, other = ids(ROWS, "test"), ids(ROWS, "test", seed=1)
    assert set(first) != set(other)
    assert [s.seed for s in from_rows(ROWS[:9], "train", fractions=(1, 0, 0))] != [
        s.seed for s in from_rows(ROWS[:9], "train", fractions=(1, 0, 0), seed=1)
    ]


@pytest.mark.parametrize(("fractions", "lengths"), [((1, 0, 0), [1000, 0, 0]), ((0, 1, 0), [0, 1000, 0]), ((0.0, 0.0, 1.0), [0, 0, 1000])])
def test_a_split_may_have_everything_or_nothing(fractions: Any, lengths: list[int]) -> None:
    assert [len(ids(ROWS, split, fractions=fractions)) for split in SPLITS] == lengths


def test_ids_may_be_numbers_or_made_by_a_function_or_left_out() -> None:
    rows = [{"n": 1, "m": 2}, {"n": 2, "m": 2}]
    everything: Any = {"fractions": (1, 0, 0)}
    assert [scenario.id for scenario in from_rows(rows, "train", id="n", **everything)] == ["1", "2"]
    assert [scenario.id for scenario in from_rows(rows, "train", id=lambda row: f"{row['n']}/{row['m']}", **everything)] == ["1/2", "2/2"]
    plain = [scenario.id for scenario in from_rows(rows, "train", **everything)]
    turned = [scenario.id for scenario in from_rows([{"m": 2, "n": 1}, {"m": 2, "n": 2}], "train", **everything)]
    assert plain == turned
    assert len({*plain}) == 2


def test_a_row_that_is_there_twice_stays_in_one_split() -> None:
    rows = [{"question": str(number % 50)} for number in range(100)]
    found = {split: [*from_rows(rows, split)] for split in SPLITS}
    assert sum(map(len, found.values())) == 100
    assert len({scenario.id for scenarios in found.values() for scenario in scenarios}) == 100
    questions = [{scenario.options["question"] for scenario in scenarios} for scenarios in found.values()]
    assert sum(map(len, questions)) == 50
    twins = [scenario for scenario in found["train"] if scenario.options == found["train"][0].options]
    assert twins[1].id == f"{twins[0].id}-2"
    assert twins[0].seed != twins[1].seed


def test_rows_are_read_one_at_a_time() -> None:
    def endless() -> Iterator[dict[str, int]]:
        number = 0
        while True:
            yield {"number": number}
            number += 1

    assert len([*islice(from_rows(endless(), "validation"), 20)]) == 20


@pytest.mark.parametrize(
    ("rows", "options", "error", "text"),
    [
        ([{"key": "a"}, {"key": "a"}], {"id": "key"}, ValueError, r"row 1 has the id 'a', as an earlier one has"),
        ([["a"]], {}, TypeError, "row 0 must be a mapping, not list: it becomes the options of a reset"),
        ([{"a": {1, 2}}], {}, TypeError, "row 0 must be a JSON mapping: .*set is not JSON serializable"),
        ([{"a": float("nan")}], {}, TypeError, "row 0 must be a JSON mapping: "),
        ([{1: "a"}], {}, TypeError, "row 0 has a key that is no text"),
        ([{"a": 1}], {"id": "key"}, TypeError, "row 0 has no id: its 'key' must be text or a whole number, not None"),
        ([{"key": ""}], {"id": "key"}, TypeError, "row 0 has no id"),
        ([{"key": True}], {"id": "key"}, TypeError, "row 0 has no id"),
        ([{"key": 1.5}], {"id": lambda row: row["key"]}, TypeError, "row 0 has no id: what id= returned must be text"),
    ],
)
def test_rows_that_are_none_are_told(rows: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        list(from_rows(rows, "train", **options))


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (0.8, 0.1, 0.2), (1.2, -0.1, -0.1), (float("nan"), 0.5, 0.5)], ids=str)
def test_wrong_splits_and_shares_are_told_at_once(fractions: Any) -> None:
    with pytest.raises(ValueError, match=r"fractions must be three shares .* that add up to 1"):
        from_rows(ROWS, "train", fractions=fractions)
    with pytest.raises(ValueError, match="one of train, validation, test, not 'dev'"):
        from_rows(ROWS, "dev")  # type: ignore[arg-type]


def test_an_environment_of_a_data_set() -> None:
    class Sums(ToolEnv):
        def scenarios(self, split: Split, count: int | None = None) -> Iterator[Scenario]:
            return islice(from_rows(ROWS, split, id="key"), count)

        def start(self) -> str:
            return f"What is {self.options['question']}?"

    env = Sums()
    first, second = env.scenarios("test", 2)
    observation, _ = env.reset(seed=second.seed, options=dict(second.options))
    assert observation[0]["content"] == f"What is {second.options['question']}?"
    assert first != second
