"""Token trees: every shared token once, every path whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym_trainers.trees import TokenTree, TreeNode, common_prefix

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=8)


@given(SEQUENCES)
def test_paths_spell_their_sequences_and_every_prefix_is_there_once(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(sequences)
    prefixes = {tuple(sequence[: length + 1]) for sequence in sequences for length in range(len(sequence))}
    assert len(tree) == len(prefixes)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert [tree.token_ids[place] for place in path] == sequence
        assert [tree.positions[place] for place in path] == list(range(len(sequence)))
        assert [tree.parents[place] for place in path] == [-1, *path[:-1]][: len(path)]


@given(SEQUENCES)
def test_what_continues_a_run_is_what_lies_behind_it_in_its_subtree(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(sequences)
    assert [place for node in tree.nodes for place in range(node.start, node.end)] == list(range(len(tree)))
    for node in tree.nodes:
        for place in range(node.start, node.end):
            behind = {other for path in tree.paths if place in path for other in path[path.index(place) :]}
            assert behind == {*range(place, node.end), *range(node.end, node.subtree_end)}


def test_a_tree_by_hand() -> None:
    tree = TokenTree.build([[1, 2, 3], [1, 2], [], [1, 2, 4, 5], [9]])
    assert tree.token_ids == [1, 2, 3, 4, 5, 9]
    assert tree.parents == [-1, 0, 1, 1, 3, -1]
    assert tree.nodes == [TreeNode(0, 2, 5), TreeNode(2, 3, 3), TreeNode(3, 5, 5), TreeNode(5, 6, 6)]
    assert tree.paths == [[0, 1, 2], [0, 1], [], [0, 1, 3, 4], [5]]


@pytest.mark.parametrize(
    ("left", "right", "start", "length"), [([], [], 0, 0), ([1], [1], 0, 1), ([1, 2, 3], [7, 2, 3, 4], 1, 2), ([1], [2], 0, 0)]
)
def test_common_prefixes(left: list[int], right: list[int], start: int, length: int) -> None:
    assert common_prefix(left, right, start) == length


@pytest.mark.slow
def test_a_chain_of_thousands_of_branches_needs_no_stack() -> None:
    sequences = [[*range(length), -1] for length in range(3000)]
    assert len(TokenTree.build(sequences)) == 2999 + 3000
