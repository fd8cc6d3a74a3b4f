"""What a token sees of its tree, and the CPU's kernel in the dtype that is fastest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from art_gym_trainers import tree_attention  # noqa: E402
from art_gym_trainers.tree_attention import TreeLayout, tree_attention_forward  # noqa: E402
from art_gym_trainers.trees import TokenTree  # noqa: E402

pytestmark = pytest.mark.train

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=8).filter(any)


def seen_by_paths(tree: TokenTree) -> Any:
    """Who sees whom, worked out path by path."""
    seen = torch.zeros(len(tree), len(tree), dtype=torch.bool)
    for path in tree.paths:
        for step, place in enumerate(path):
            seen[place, path[: step + 1]] = True
    return seen


@given(SEQUENCES)
def test_a_token_sees_its_path(sequences: list[list[int]]) -> None:
    tree = TokenTree.build(sequences)
    assert torch.equal(TreeLayout(tree).mask(), seen_by_paths(tree))


@given(SEQUENCES, st.integers(1, 60))
@settings(max_examples=50)
def test_the_blocks_of_flex_attention_are_those_of_the_whole_mask(sequences: list[list[int]], repeats: int) -> None:
    # Runs of up to 700 tokens, so that blocks of 128 are seen wholly, in part, and not at all.
    tree = TokenTree.build([[token for token in sequence for _ in range(repeats)] for sequence in sequences])
    seen = seen_by_paths(tree)

    def rule(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return seen[query, key]

    expected = create_block_mask(rule, None, None, len(tree), len(tree), device="cpu")
    found = TreeLayout(tree).block_mask
    assert found.seq_lengths == expected.seq_lengths
    for kind in ("kv", "full_kv"):
        counts, wanted = getattr(found, f"{kind}_num_blocks"), getattr(expected, f"{kind}_num_blocks")
        assert torch.equal(counts, wanted)
        for row, count in enumerate(counts[0, 0].tolist()):
            listed = [getattr(mask, f"{kind}_indices")[0, 0, row, :count].tolist() for mask in (found, expected)]
            assert sorted(listed[0]) == sorted(listed[1])
    place = torch.arange(len(tree))
    assert torch.equal(found.mask_mod(0, 0, place[:, None], place[None]), seen)


@pytest.mark.parametrize("few", [1, 10_000], ids=["bfloat16", "float32"])
def test_the_dtype_of_the_backward_pass_changes_only_rounding(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(tree_attention, "_FEW", few)
    rng = random.Random(0)
    shared = [rng.randrange(9) for _ in range(70)]
    tree = TokenTree.build([shared + [rng.randrange(9) for _ in range(length)] for length in (30, 45, 60)])
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, heads, len(tree), 16) for heads in (4, 2, 2, 4))
    mask = seen_by_paths(tree)

    def run(dtype: Any) -> list[Any]:
        leaves = [tensor.to(torch.bfloat16).to(dtype).requires_grad_() for tensor in (query, key, value)]
        if dtype is torch.bfloat16:
            out = tree_attention_forward(torch.nn.Module(), *leaves, None, layout=TreeLayout(tree))[0].transpose(1, 2)
        else:
            wide = [leaves[0], *(leaf.repeat_interleave(2, 1) for leaf in leaves[1:])]
            out = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=mask)
        out.backward(grad.to(torch.bfloat16).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for found, expected in zip(run(torch.bfloat16), run(torch.float64), strict=True):
        assert torch.linalg.norm(found.double() - expected) < 0.01 * torch.linalg.norm(expected)
