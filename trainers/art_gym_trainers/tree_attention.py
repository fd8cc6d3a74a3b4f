"""Attention over a token tree: each token attends to those before it on its path, and to nothing else of the tree.

In depth-first order a node's keys are seen by its own tokens, causally, and by everything in its subtree, wholly. Both are dense blocks, so
that the fused kernel of the CPU computes them without a mask; the parts of one query are put together by their log-sum-exp, forward and
backward, as ring attention does (arXiv 2310.01889). On CUDA FlexAttention takes the same rule as a mask. A layer with more than causal
attention (a sliding window that is shorter than the sequences, capped logits) takes a dense mask instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from art_gym_trainers.trees import TokenTree, TreeNode

NAME = "art_gym_tree"
"""What the attention is registered as: without a tree it is SDPA, with capped logits where the model has them."""

_SMALL = 128
"""Queries below which the CPU's kernel is several times faster backward in float32 than in bfloat16."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeLayout:
    """A token tree as attention needs it, on one device.

    Attributes:
        nodes: The tree's runs of tokens.
        positions: (N,) each token's position in its sequences.
        subtree_ends: (N,) where each token's subtree ends.
        depth: One more than the largest position.
    """

    def __init__(self, tree: TokenTree, device: torch.device | str = "cpu") -> None:
        self.nodes: Sequence[TreeNode] = tree.nodes
        self.positions = torch.tensor(tree.positions, device=device)
        ends = [end for node in tree.nodes for end in _token_ends(node)]
        self.subtree_ends = torch.tensor(ends, device=device)
        self.depth = max(tree.positions, default=-1) + 1

    def mask(self, window: int | None = None) -> torch.Tensor:
        """(N, N), True where the token of a row attends to that of a column; within `window` positions if given."""
        index = torch.arange(len(self.positions), device=self.positions.device)
        seen = (index[None] <= index[:, None]) & (index[:, None] < self.subtree_ends[None])
        if window is not None:
            seen &= self.positions[:, None] - self.positions[None] < window
        return seen

    @functools.cached_property
    def block_mask(self) -> Any:
        """The same rule for FlexAttention."""
        ends = self.subtree_ends

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < ends[key])

        size = len(ends)
        return create_block_mask(seen, None, None, size, size, device=ends.device)


def _token_ends(node: TreeNode) -> list[int]:
    return [node.subtree_end] * (node.end - node.start)


def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers calls: (1, heads, N, width) each, gives (1, N, heads, width)."""
    cap = kwargs.get("softcap")
    if layout is None and cap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    unknown = [name for name in ("s_aux", "position_bias", "score_mod") if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {unknown[0]} has no form for token trees")
    # Under autocast the rotary embedding leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    groups = query.size(1) // key.size(1)
    if layout is None:
        # transformers' SDPA leaves the cap out, without a word.
        seen = (
            attention_mask
            if attention_mask is not None
            else torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
        )
        out = _dense(query, repeat_kv(key, groups), repeat_kv(value, groups), seen, scale, cap, dropout)
        return out.transpose(1, 2).contiguous(), None
    window = kwargs.get("sliding_window")
    window = window if window is not None and window < layout.depth else None
    if window is not None or cap is not None or dropout:
        out = _dense(query, repeat_kv(key, groups), repeat_kv(value, groups), layout.mask(window), scale, cap, dropout)
    elif query.device.type == "cpu":
        out = _TreeAttention.apply(query, repeat_kv(key, groups), repeat_kv(value, groups), layout.nodes, scale)
    elif query.device.type == "cuda":
        out = _flex()(query, key, value, block_mask=layout.block_mask, scale=scale, enable_gqa=groups > 1)
    else:
        out = _dense(query, repeat_kv(key, groups), repeat_kv(value, groups), layout.mask(), scale, None, 0.0)
    return out.transpose(1, 2).contiguous(), None


@functools.cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float, cap: float | None, dropout: float
) -> torch.Tensor:
    if cap is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=scale)
    scores = torch.tanh(query @ key.transpose(-1, -2) * scale / cap) * cap
    # Not minus infinity: a padded position sees nothing at all.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value


class _TreeAttention(torch.autograd.Function):
    """Every block of queries and keys by the CPU's fused kernel, put together by log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, nodes: Sequence[TreeNode], scale: float) -> torch.Tensor:
        # The kernel wants its last dimension contiguous, and nothing else.
        out = torch.zeros(query.shape, dtype=torch.float32)
        total = torch.full(query.shape[:-1], -torch.inf, dtype=torch.float32)
        for queries, keys, causal in _blocks(nodes):
            part, part_sum = _flash(query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale)
            before = total[:, :, queries]
            after = torch.logaddexp(before, part_sum)
            out[:, :, queries] = out[:, :, queries] * (before - after).exp()[..., None] + part * (part_sum - after).exp()[..., None]
            total[:, :, queries] = after
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.nodes, ctx.scale = nodes, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, out, total = ctx.saved_tensors
        sums = [torch.zeros(tensor.shape, dtype=torch.float32) for tensor in (query, key, value)]
        for queries, keys, causal in _blocks(ctx.nodes):
            # With the whole softmax's output and log-sum-exp the kernel gives this block's share of the whole gradient.
            places = (grad, queries), (query, queries), (key, keys), (value, keys), (out, queries)
            small = queries.stop - queries.start < _SMALL
            shares = _flash_backward(
                *(tensor[:, :, place].float() if small else tensor[:, :, place] for tensor, place in places),
                total[:, :, queries],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for whole, share, place in zip(sums, shares, (queries, keys, keys), strict=True):
                whole[:, :, place] += share
        gradients = [whole.to(tensor.dtype) for whole, tensor in zip(sums, (query, key, value), strict=True)]
        return gradients[0], gradients[1], gradients[2], None, None


def _blocks(nodes: Sequence[TreeNode]) -> list[tuple[slice, slice, bool]]:
    """Queries, keys, and whether causal: for each node its own tokens, then its subtree's."""
    blocks = []
    for node in nodes:
        own = slice(node.start, node.end)
        blocks.append((own, own, True))
        if node.subtree_end > node.end:
            blocks.append((slice(node.end, node.subtree_end), own, False))
    return blocks


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
