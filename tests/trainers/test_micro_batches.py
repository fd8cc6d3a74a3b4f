"""Micro-batches: what is cut where, and how it is laid out for the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from art_gym_trainers.micro_batches import collate, deal, episodes_of, micro_batches, passes_of, sampled_tokens  # noqa: E402
from art_gym_trainers.rows import Row  # noqa: E402
from art_gym_trainers.sequences import TokenSequence  # noqa: E402

pytestmark = pytest.mark.train


def row_of(index: int, token_ids: list[int]) -> Row:
    length = len(token_ids)
    return Row(TokenSequence(f"e{index}", token_ids, [False] * (length - 1) + [True], [0.0] * length, [0] * length), [1.0] * length)


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


EPISODE = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=3)


def forked(episode: str, *sequences: list[int]) -> list[Row]:
    rows = [row_of(0, ids) for ids in sequences]
    forks = [None, *["context"] * (len(rows) - 1)]
    return [replace(row, sequence=replace(row.sequence, episode_id=episode, fork=fork)) for row, fork in zip(rows, forks, strict=True)]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 30)
)
def test_the_sequences_of_an_episode_are_never_parted(episodes: list[list[list[int]]], budget: int) -> None:
    rows = [row for number, sequences in enumerate(episodes) for row in forked(f"e{number}", *sequences)]
    batches = micro_batches(rows, budget)
    assert sum(len(episodes_of(batch)) for batch in batches) == len(episodes)
    assert sorted(map(id, rows)) == sorted(id(row) for batch in batches for row in batch)
    for batch in batches:
        assert len(episodes_of(batch)) == 1 or computed(batch, shared=True) <= budget


@given(EPISODE, st.integers(1, 30), st.booleans())
def test_an_episode_longer_than_the_budget_takes_several_passes(sequences: list[list[int]], budget: int, shared: bool) -> None:
    rows = forked("e", *sequences)
    passes = passes_of(rows, budget, shared=shared)
    assert sorted(map(id, rows)) == sorted(id(row) for part in passes for row in part)
    if computed(rows, shared) <= budget:
        assert passes == [rows]
    for part in passes:
        assert len(part) == 1 or computed(part, shared) <= budget


@given(st.lists(EPISODE, max_size=6), st.integers(1, 30), st.integers(1, 4))
def test_processes_compute_equally_many_micro_batches_and_passes(episodes: list[list[list[int]]], budget: int, processes: int) -> None:
    rows = [row for number, sequences in enumerate(episodes) for row in forked(f"e{number}", *sequences)]
    batches = micro_batches(rows, budget)
    hands = deal(batches, processes, budget)
    assert len(hands) == processes
    assert len({tuple(len(work.passes) + work.idle for work in hand) for hand in hands}) == 1
    done = [work for hand in hands for work in hand if work.weight]
    assert sorted(id(row) for work in done for row in work.rows) == sorted(map(id, rows))
    assert all(sorted(map(id, work.rows)) == sorted(id(row) for part in work.passes for row in part) for work in done)
    if batches and processes == 1:
        assert not any(work.idle or not work.weight for work in hands[0])


def test_the_loss_sees_an_episode_a_row_and_sampled_tokens_only() -> None:
    short = TokenSequence("a", [5, 6], [False, True], [0.0, -0.5], [-1, 0])
    first = TokenSequence("b", [1, 2, 3, 4], [False, False, True, False], [0.0, 0.0, -0.1, 0.0], [-1, -1, 0, -1])
    second = TokenSequence("b", [1, 9, 7, 8], [False, False, True, True], [0.0, 0.0, -0.2, -0.3], [-1, -1, 1, 1], fork="context")
    rows = [Row.by_turn(first, [2.0, 3.0]), Row.uniform(short, -1.0), Row(second, [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, -0.4, -0.6])]
    tensors = collate(rows, total_sampled=4)
    assert tensors["completion_ids"].tolist() == [[3, 7, 8], [6, 0, 0]]
    assert tensors["completion_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert tensors["prompt_ids"].shape == tensors["prompt_mask"].shape == (2, 0)
    torch.testing.assert_close(tensors["sampling_per_token_logps"], torch.tensor([[-0.1, -0.2, -0.3], [-0.5, 0, 0]]))
    torch.testing.assert_close(tensors["old_per_token_logps"], torch.tensor([[-0.1, -0.4, -0.6], [-0.5, 0, 0]]))
    assert tensors["advantages"].tolist() == [[2.0, 3.0, 3.0], [-1.0, 0.0, 0.0]]
    assert tensors["num_items_in_batch"].item() == 4.0
    assert sampled_tokens(rows) == 4
