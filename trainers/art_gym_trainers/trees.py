"""Token trees: sequences that begin alike, laid out so that every token is computed once.

The sequences of a group share their first prompt, often their first turns too, and a fork shares what came before it. Laid out as a tree in
depth-first order, each shared run of tokens appears once, and whatever continues a token lies behind it in one contiguous stretch. That stretch
is all that attention needs to know: a token is attended to by itself and by what lies behind it up to the end of its subtree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of tokens without a branch: `start` to `end` in the tree's order; all that continues it follows, up to `subtree_end`."""

    start: int
    end: int
    subtree_end: int


@dataclass(slots=True)
class TokenTree:
    """Sequences as a tree of N tokens in depth-first order.

    Attributes:
        token_ids: The N tokens.
        positions: Each token's position in its sequences, from 0.
        parents: Index of the token before each; -1 for a first one.
        nodes: The runs between branches, in order.
        paths: For each sequence, in the order given, where in the tree its tokens lie.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    nodes: list[TreeNode] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]]) -> TokenTree:
        """Lay sequences out as a tree.

        >>> tree = TokenTree.build([[7, 8, 9], [7, 8, 5, 6]])
        >>> tree.token_ids, tree.paths
        ([7, 8, 5, 6, 9], [[0, 1, 4], [0, 1, 2, 3]])
        >>> tree.nodes
        [TreeNode(start=0, end=2, subtree_end=5), TreeNode(start=2, end=4, subtree_end=4), TreeNode(start=4, end=5, subtree_end=5)]
        """
        tree = cls(paths=[[] for _ in sequences])
        order = sorted((index for index, sequence in enumerate(sequences) if sequence), key=lambda index: list(sequences[index]))
        # What is left to lay out: sequences that are equal up to `depth`, and the token that they hang on; None marks the end of an open node.
        todo: list[tuple[list[int], int, int] | int] = [(members, 0, -1) for members in reversed(_by_token(order, sequences, 0))]
        while todo:
            entry = todo.pop()
            if isinstance(entry, int):
                node = tree.nodes[entry]
                tree.nodes[entry] = TreeNode(node.start, node.end, len(tree))
                continue
            members, depth, parent = entry
            first, last = sequences[members[0]], sequences[members[-1]]
            # Sorted, the first and the last have in common what all have.
            end = depth + common_prefix(first, last, depth)
            start = len(tree)
            run = range(start, start + end - depth)
            tree.token_ids += first[depth:end]
            tree.positions += range(depth, end)
            tree.parents += [parent, *run[:-1]]
            for member in members:
                tree.paths[member] += run
            todo.append(len(tree.nodes))
            tree.nodes.append(TreeNode(start, run[-1] + 1, run[-1] + 1))
            longer = [member for member in members if len(sequences[member]) > end]
            todo += [(branch, end, run[-1]) for branch in reversed(_by_token(longer, sequences, end))]
        return tree


def common_prefix(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """How many tokens two sequences have in common from `start` on.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = min(len(left), len(right)) - start
    return next((place for place in range(length) if left[start + place] != right[start + place]), length)


def _by_token(members: list[int], sequences: Sequence[Sequence[int]], place: int) -> list[list[int]]:
    return [list(branch) for _, branch in itertools.groupby(members, key=lambda member: sequences[member][place])]
