"""Rows and micro-batches: what is kept, how it is cut, how it is padded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.scenarios import Scenario
from art_gym_trainers.rows import Row, batch_rows, collate, micro_batches, split_steps
from art_gym_trainers.sequences import TokenSequence

pytestmark = pytest.mark.train

SCENARIO = Scenario("s", 0)


def played(member: int, reward: float, *, turns: int = 1, forked: bool = False, failed: bool = False) -> Episode:
    episode = Episode(f"e{member}", "x", SCENARIO, member, failure=Failure("policy", "gone") if failed else None)
    prompt = [1, 2]
    for index in range(turns):
        if forked and index == turns - 1:
            prompt = [9, *prompt[1:]]
        completion = [10 + index]
        episode.turns.append(
            Turn(
                [],
                {"role": "assistant", "content": ""},
                prompt_ids=prompt,
                completion_ids=completion,
                logprobs=[-1.0],
                reward=reward if index == turns - 1 else 0.0,
            )
        )
        prompt = [*prompt, *completion, 3]
    return episode


def test_groups_with_equal_returns_are_dropped_and_counted() -> None:
    useful = EpisodeGroup(SCENARIO, [played(0, 1.0), played(1, 0.0)])
    useless = EpisodeGroup(SCENARIO, [played(2, 0.5), played(3, 0.5)])
    broken = EpisodeGroup(SCENARIO, [played(4, 1.0), played(5, 0.0, failed=True)])
    kept, counts = batch_rows([useful, useless, broken], "none")
    assert [[row.advantage for row in rows] for rows in kept] == [[0.5, -0.5]]
    assert (counts.groups, counts.dropped_groups, counts.failed_episodes) == (3, 2, 1)
    assert (counts.tokens, counts.sampled_tokens) == (6, 2)


def test_both_parts_of_a_fork_carry_the_episodes_advantage() -> None:
    kept, counts = batch_rows([EpisodeGroup(SCENARIO, [played(0, 1.0, turns=2, forked=True), played(1, 0.0)])], "none")
    assert [(row.sequence.episode_id, row.advantage) for row in kept[0]] == [("e0", 0.5), ("e0", 0.5), ("e1", -0.5)]
    assert counts.forks == {"context": 1}


def test_steps_are_dealt_evenly_and_never_empty() -> None:
    groups = [[row] for row in rows_of([3, 4, 5])]
    assert [len(step) for step in split_steps(groups, 8)] == [1, 1, 1]
    assert [len(step) for step in split_steps(groups, 2)] == [2, 1]
    assert split_steps([], 8) == []


def rows_of(lengths: list[int]) -> list[Row]:
    return [
        Row(TokenSequence(f"e{index}", list(range(length)), [False] * (length - 1) + [True], [0.0] * length, [0] * length), 1.0)
        for index, length in enumerate(lengths)
    ]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 400))
def test_micro_batches_keep_every_row_and_the_budget(lengths: list[int], budget: int) -> None:
    rows = rows_of(lengths)
    batches = micro_batches(rows, budget)
    assert sorted(row.sequence.episode_id for batch in batches for row in batch) == sorted(row.sequence.episode_id for row in rows)
    # These rows all begin alike, so that a micro-batch holds the shortest row's prompt once.
    shared = min(lengths) - 1
    for batch in batches:
        computed = shared + len(batch) * (max(len(row.sequence) for row in batch) - shared)
        assert computed <= budget or len(batch) == 1


def test_long_rows_are_cut_off_where_padding_the_short_ones_would_cost_more() -> None:
    # One pass: 10 + 5 * 190 = 960 tokens. Cut after the long row: 10 + 190, and 10 + 4 * 20, which is 290 in all.
    batches = micro_batches(rows_of([30, 200, 30, 30, 11]), 10_000)
    assert [[len(row.sequence) for row in batch] for batch in batches] == [[200], [30, 30, 30, 11]]


def test_rows_alike_in_length_stay_together() -> None:
    assert len(micro_batches(rows_of([40] * 8), 10_000)) == 1


def test_rows_are_padded_prompt_left_and_completion_right() -> None:
    short = TokenSequence("a", [5, 6], [False, True], [0.0, -0.5], [-1, 0])
    long = TokenSequence("b", [1, 2, 3, 4, 7], [False, False, True, False, True], [0.0, 0.0, -0.1, 0.0, -0.2], [-1, -1, 0, -1, 1])
    tensors = collate([Row(short, 2.0), Row(long, -1.0)], pad_token_id=0, total_sampled=3)
    assert tensors["prompt_ids"].tolist() == [[0, 5], [1, 2]]
    assert tensors["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert tensors["completion_ids"].tolist() == [[6, 0, 0], [3, 4, 7]]
    assert tensors["completion_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert tensors["tool_mask"].tolist() == [[1, 0, 0], [1, 0, 1]]
    assert tensors["old_per_token_logps"].flatten().tolist() == pytest.approx([-0.5, 0, 0, -0.1, 0, -0.2])
    assert tensors["advantages"].tolist() == [2.0, -1.0]
    assert tensors["num_items_in_batch"].item() == 3.0
