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
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from art_gym_trainers.trees import TokenTree, TreeNode

NAME = "art_gym_tree"
"""What the attention is registered as: without a tree it is SDPA, with capped logits where the model has them."""

_FEW = 512
"""Keys below which the CPU's kernel is up to three times faster backward in float32 than in bfloat16."""

_BLOCK = 128
"""Tokens of a block of FlexAttention."""

_FILLED = 1.2
"""Runs are batched while filling the shorter ones up makes them this much larger."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeLayout:
    """A token tree as attention needs it, on one device.

    Attributes:
        runs: The tree's runs of tokens, in batches of the CPU's kernel.
        branches: For each run that is continued, where it lies, and where all that continues it does.
        positions: (N,) each token's position in its sequences.
        subtree_ends: (N,) where each token's subtree ends.
        depth: One more than the largest position.
        windowed: Identities of the layers that attended within a window, however wide.
    """

    def __init__(self, tree: TokenTree, device: torch.device | str = "cpu") -> None:
        self.positions = torch.tensor(tree.positions, device=device)
        ends = [end for node in tree.nodes for end in _token_ends(node)]
        self.subtree_ends = torch.tensor(ends, device=device)
        self.depth = max(tree.positions, default=-1) + 1
        self.runs = [_Runs(nodes) for nodes in _alike(tree.nodes)]
        self.branches = [(slice(node.start, node.end), slice(node.end, node.subtree_end)) for node in tree.nodes if node.subtree_end > node.end]
        self.windowed: set[int] = set()
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None = None) -> torch.Tensor:
        """(N, N), True where the token of a row attends to that of a column; within `window` positions if given. Made once for all layers."""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> torch.Tensor:
        index = torch.arange(len(self.positions), device=self.positions.device)
        seen = (index[None] <= index[:, None]) & (index[:, None] < self.subtree_ends[None])
        if window is not None:
            seen &= self.positions[:, None] - self.positions[None] < window
        return seen

    @functools.cached_property
    def block_mask(self) -> BlockMask:
        """The same rule for FlexAttention, whose kernel leaves out blocks of tokens that don't see each other.

        Which these are follows from where subtrees end, so that the mask over pairs of tokens is never made.
        """
        ends, size = self.subtree_ends, len(self.subtree_ends)

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key <= query) & (query < ends[key])

        blocks = -(-size // _BLOCK)
        padded = torch.zeros(blocks * _BLOCK, dtype=ends.dtype, device=ends.device)
        padded[:size] = ends
        first = torch.arange(blocks, device=ends.device) * _BLOCK
        last = first + _BLOCK - 1
        by_block = padded.view(blocks, _BLOCK)
        # The last of a block's queries that any of the keys, and all of them, are seen by.
        any_end, all_end = by_block.amax(1), by_block.amin(1)
        below = first[:, None] > first[None]
        # A query sees itself, and no block with its own diagonal is seen wholly.
        some = (below & (first[:, None] < any_end[None])) | (first[:, None] == first[None])
        whole = below & (last[:, None] < all_end[None])
        return BlockMask.from_kv_blocks(*_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=seen, seq_lengths=(size, size))


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries, of how many blocks of keys it is True, and which these are, in front: (1, 1, Q) and (1, 1, Q, K)."""
    order = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32)[None, None], order.to(torch.int32)[None, None]


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
        raise TypeError(f"attention with {unknown[0]} has no form for token trees")
    # Under autocast the rotary embedding leaves queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    groups = query.size(1) // key.size(1)
    if layout is None:
        # transformers' SDPA leaves the cap out, without a word.
        seen = attention_mask
        if seen is None:  # queries are the last of the keys
            lengths = query.size(2), key.size(2)
            seen = torch.ones(lengths, dtype=torch.bool, device=query.device).tril(lengths[1] - lengths[0])
        out = _dense(query, repeat_kv(key, groups), repeat_kv(value, groups), seen, scale, cap, dropout)
        return out.transpose(1, 2).contiguous(), None
    window = kwargs.get("sliding_window")
    if window is not None:
        layout.windowed.add(id(module))
    window = window if window is not None and window < layout.depth else None
    if window is not None or cap is not None or dropout:
        out = _dense(query, repeat_kv(key, groups), repeat_kv(value, groups), layout.mask(window), scale, cap, dropout)
    elif query.device.type == "cpu":
        out = _TreeAttention.apply(query, repeat_kv(key, groups), repeat_kv(value, groups), layout, scale)
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
    """Every block of queries and keys by the CPU's fused kernel, put together by log-sum-exp; (1, heads, N, width) each."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: TreeLayout, scale: float) -> torch.Tensor:
        # Tokens first: runs of them are slices, and sets of them rows.
        tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        out = torch.empty(tokens[0].shape, dtype=torch.float32)
        total = torch.empty(out.shape[:2], dtype=torch.float32)
        for runs in layout.runs:
            part, part_sum = _flash(*(runs.take(tensor) for tensor in tokens), 0.0, True, scale=scale)
            runs.put(out, part)
            runs.put(total, part_sum)
        for own, below in layout.branches:
            part, part_sum = _flash(
                *(_batch(tensor[place]) for tensor, place in zip(tokens, (below, own, own), strict=True)), 0.0, False, scale=scale
            )
            before, added = total[below], part_sum[0].transpose(0, 1)
            after = torch.logaddexp(before, added)
            out[below] = out[below] * (before - after).exp()[..., None] + part[0].transpose(0, 1) * (added - after).exp()[..., None]
            total[below] = after
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        ctx.layout, ctx.scale = layout, scale
        return result.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, out, total = ctx.saved_tensors
        tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        grad = grad[0].transpose(0, 1)
        sums = [torch.empty(tensor.shape, dtype=torch.float32) for tensor in tokens]
        # With the whole softmax's output and log-sum-exp the kernel gives each block's share of the whole gradient.
        for runs in ctx.layout.runs:
            inputs = [runs.take(grad, zero_rest=True), *map(runs.take, tokens), runs.take(out)]
            shares = _flash_backward(*_in_a_fast_dtype(inputs), runs.take(total), 0.0, True, scale=ctx.scale)
            for whole, part in zip(sums, shares, strict=True):
                runs.put(whole, part)
        for own, below in ctx.layout.branches:
            inputs = [_batch(tensor[place]) for tensor, place in zip((grad, *tokens, out), (below, below, own, own, below), strict=True)]
            shares = _flash_backward(*_in_a_fast_dtype(inputs), total[below].transpose(0, 1)[None], 0.0, False, scale=ctx.scale)
            for whole, part, place in zip(sums, shares, (below, own, own), strict=True):
                whole[place] += part[0].transpose(0, 1)
        query_grad, key_grad, value_grad = (whole.to(query.dtype).transpose(0, 1)[None] for whole in sums)
        return query_grad, key_grad, value_grad, None, None


class _Runs:
    """Runs of tokens that attend to themselves, causally, as one batch of the kernel: shorter ones are filled up behind their ends.

    What fills a run up lies behind all of its queries, so that none of them attends to it.
    """

    def __init__(self, nodes: Sequence[TreeNode]) -> None:
        self.width = max(node.end - node.start for node in nodes)
        self.whole = slice(nodes[0].start, nodes[0].end) if len(nodes) == 1 else None
        self.count = len(nodes)
        self.places = torch.tensor([min(node.start + step, node.end - 1) for node in nodes for step in range(self.width)])
        self.inside = torch.tensor([node.start + step < node.end for node in nodes for step in range(self.width)])
        self.inside_places = self.places[self.inside]

    def take(self, tensor: torch.Tensor, zero_rest: bool = False) -> torch.Tensor:
        """Give the runs of a tensor (N, heads, …) as (runs, heads, width, …)."""
        if self.whole is not None:
            return tensor[self.whole].transpose(0, 1)[None]
        taken = tensor.index_select(0, self.places)
        if zero_rest:
            taken[~self.inside] = 0
        return taken.view(self.count, self.width, *tensor.shape[1:]).transpose(1, 2)

    def put(self, tensor: torch.Tensor, runs: torch.Tensor) -> None:
        """Write runs (runs, heads, width, …) to their places of a tensor (N, heads, …)."""
        flat = runs.transpose(1, 2).flatten(0, 1)
        if self.whole is not None:
            tensor[self.whole] = flat
        else:
            tensor[self.inside_places] = flat[self.inside].to(tensor.dtype)


def _in_a_fast_dtype(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gradient, queries, keys, values and output of a block, as the kernel's backward pass is fastest."""
    return [tensor.float() for tensor in inputs] if inputs[2].size(2) < _FEW else inputs


def _batch(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.transpose(0, 1)[None]


def _alike(nodes: Sequence[TreeNode]) -> list[list[TreeNode]]:
    """Put nodes together whose lengths are so much alike that filling them up costs little."""
    batches: list[list[TreeNode]] = []
    for node in sorted(nodes, key=lambda node: node.end - node.start):
        length, last = node.end - node.start, batches[-1] if batches else []
        together = sum(other.end - other.start for other in last) + length
        if last and length * (len(last) + 1) <= _FILLED * together:
            last.append(node)
        else:
            batches.append([node])
    return batches


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
