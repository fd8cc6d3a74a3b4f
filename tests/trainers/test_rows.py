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


def row_of(index: int, token_ids: list[int]) -> Row:
    length = len(token_ids)
    return Row(TokenSequence(f"e{index}", token_ids, [False] * (length - 1) + [True], [0.0] * length, [0] * length), 1.0)


def rows_of(lengths: list[int]) -> list[Row]:
    """Rows that have nothing in common."""
    return [row_of(index, [1000 * index + place for place in range(length)]) for index, length in enumerate(lengths)]


def computed(batch: list[Row], shared: bool) -> int:
    if not shared:
        return len(batch) * max(len(row.sequence) for row in batch)
    return len({tuple(row.sequence.token_ids[: end + 1]) for row in batch for end in range(len(row.sequence))})


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 40), st.booleans())
def test_micro_batches_keep_every_row_and_the_budget(sequences: list[list[int]], budget: int, shared: bool) -> None:
    rows = [row_of(index, token_ids) for index, token_ids in enumerate(sequences)]
    batches = micro_batches(rows, budget, shared=shared)
    assert sorted(row.sequence.episode_id for batch in batches for row in batch) == sorted(row.sequence.episode_id for row in rows)
    for batch in batches:
        assert len(batch) == 1 or computed(batch, shared) <= budget


def test_rows_that_begin_alike_are_computed_together() -> None:
    prompts = [[number] * 50 for number in (1, 2)]
    rows = [row_of(index, [*prompts[index % 2], 10 + index]) for index in range(8)]
    batches = micro_batches(rows, 60)
    assert [sorted(row.sequence.token_ids[0] for row in batch) for batch in batches] == [[1] * 4, [2] * 4]


def test_a_tree_is_cut_only_where_the_budget_asks_for_it() -> None:
    assert len(micro_batches(rows_of([30, 200, 30, 30, 11]), 10_000)) == 1
    assert len(micro_batches(rows_of([40] * 8), 160)) == 2


def test_padded_rows_are_cut_where_padding_the_short_ones_would_cost_more() -> None:
    # One pass: 5 * 200 = 1000 tokens. Cut after the long row: 200 + 4 * 30, and 32 for a pass.
    batches = micro_batches(rows_of([30, 200, 30, 30, 11]), 10_000, shared=False)
    assert [[len(row.sequence) for row in batch] for batch in batches] == [[11, 30, 30, 30], [200]]


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
