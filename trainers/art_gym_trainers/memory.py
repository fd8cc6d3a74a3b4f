"""What a training pass takes of memory, worked out before the first one.

Autograd keeps some tensors of the forward pass for the backward pass; what it keeps is measured on two short passes of the model itself, so
that nothing has to be assumed about its layers, its adapter or gradient checkpointing. Both grow in proportion to the tokens, as fused
attention keeps no scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from art_gym.engine import available_bytes
from art_gym.errors import UsageError
from art_gym_trainers.policy import base_model
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, head_rows

GIB = 2**30

MOST_TOKENS = 16384
"""Longest pass that is chosen for a machine with memory to spare: beyond it nothing gets faster."""

_LEAST_TOKENS = 512

_SLACK = 1.5
"""Kept tensors times this is their share of the peak: gradients and temporary tensors of the layer at work come on top. Measured, as the next:
tests/benchmarks/train_throughput.py prints both."""

_RUNTIME_BYTES = 300 * 10**6
"""What libraries keep for themselves once a pass was computed: reordered weights, buffers of threads."""

_SHARE = 0.8
"""Of the free memory, so much is planned with."""


@dataclass(frozen=True, slots=True)
class PassMemory:
    """What passes through a model take.

    Attributes:
        token_bytes: Each token of a pass.
        head_bytes: The head's logits and what is computed from them, whatever the pass's length.
        optimiser_bytes: Gradients and the optimiser's state, once training has begun.
        pair_bytes: Each pair of tokens, where attention takes a dense mask or keeps its scores.
        other_bytes: What else is held while training: a reference model, copies of the weights in the passes' dtype.
    """

    token_bytes: float
    head_bytes: int
    optimiser_bytes: int
    pair_bytes: float = 0.0
    other_bytes: int = 0

    def peak(self, tokens: int) -> int:
        """Bytes that training with passes of so many tokens adds at its peak."""
        return int(self.token_bytes * tokens * _SLACK + self.pair_bytes * tokens**2) + self._fixed

    def most_tokens(self, free: int) -> int:
        """The longest pass that fits into so many bytes."""
        rest, linear = free - self._fixed, self.token_bytes * _SLACK
        if rest <= 0:
            return 0
        if not self.pair_bytes:
            return int(rest / linear)
        return int((math.sqrt(linear**2 + 4 * self.pair_bytes * rest) - linear) / (2 * self.pair_bytes))

    @property
    def _fixed(self) -> int:
        return self.head_bytes + self.optimiser_bytes + self.other_bytes + _RUNTIME_BYTES


def measure(
    model: torch.nn.Module, kind: type[TreeBatch] | type[PaddedBatch], *, vocabulary: int, autocast: bool = False, reference: bool = False
) -> PassMemory:
    """Find out what passes take by two short ones.

    Args:
        model: As it is trained.
        kind: What it scores, as `art_gym_trainers.scoring.add_scoring` says.
        vocabulary: Number of different tokens.
        autocast: Whether passes are computed in bfloat16 by autocast, which keeps copies of the weights.
        reference: Whether a second whole model, in float32, is still to be loaded.
    """
    short, long = 32, 160
    device = next(model.parameters()).device

    def per_token() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return (_kept_bytes(model, kind, long, device) - _kept_bytes(model, kind, short, device)) / (long - short)

    token_bytes = per_token()
    recomputed: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    if recomputed:
        for module in recomputed:
            module.gradient_checkpointing = False
        # Backward, the layer at work keeps what all of them would.
        token_bytes += per_token() / max(1, sum(isinstance(module, GradientCheckpointingLayer) for module in recomputed))
        for module in recomputed:
            module.gradient_checkpointing = True
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return PassMemory(
        token_bytes=token_bytes,
        # The logits in the model's dtype and in float32, their exponentials and a product of the two, and the former in the model's dtype.
        head_bytes=head_rows(device) * vocabulary * (2 + 4 + 4 + 4 + 2),
        # A gradient and Adam's two moments, in float32.
        optimiser_bytes=12 * trained,
        other_bytes=(2 * trained if autocast else 0) + (4 * sum(weight.numel() for weight in model.parameters()) if reference else 0),
        pair_bytes=_pair_bytes(base_model(model), kind),
    )


def choose_budget(memory: PassMemory, wanted: int | None, free: int | None) -> int:
    """Choose the most tokens of a pass, or check the number that is wanted.

    A number is chosen with room to spare; one that is wanted has to fit, and no more.

    Args:
        memory: What passes take.
        wanted: A number of tokens; None to choose one.
        free: Bytes that are free; None where that is unknown.

    Raises:
        UsageError: So many tokens don't fit, or none at all do.
    """
    if free is None:
        return MOST_TOKENS if wanted is None else wanted
    if wanted is None:
        fits = memory.most_tokens(int(free * _SHARE))
        if fits >= _LEAST_TOKENS:
            return min(fits, MOST_TOKENS)
        raise UsageError(
            f"training needs about {memory.peak(_LEAST_TOKENS) / GIB:.1f} GiB for a pass of {_LEAST_TOKENS} tokens, and "
            f"{free / GIB:.1f} GiB are free; end other programs, lower engine.kv_cache_gib, or take a smaller model"
        )
    fits = memory.most_tokens(free)
    if wanted > fits:
        raise UsageError(
            f"a pass of grpo.token_budget={wanted} tokens needs about {memory.peak(wanted) / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free; "
            f"set grpo.token_budget to {'auto' if fits < 1 else f'at most {fits}, or to auto'}, or end other programs"
        )
    return wanted


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on a device, in bytes; None if unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return available_bytes()


def _pair_bytes(model: PreTrainedModel, kind: type[TreeBatch] | type[PaddedBatch]) -> float:
    """Bytes a pair of tokens where layers have a sliding window or capped logits, which the fused kernels don't compute."""
    config = model.config.get_text_config()
    if kind is not TreeBatch:
        return 0.0
    if getattr(config, "attn_logit_softcapping", None):
        # Scores, their cap and their softmax, of every head and layer.
        return 12.0 * config.num_attention_heads * config.num_hidden_layers
    # A mask for all layers, and its form in floats for the one at work.
    return 5.0 if getattr(config, "sliding_window", None) else 0.0


def _kept_bytes(model: torch.nn.Module, kind: type[TreeBatch] | type[PaddedBatch], tokens: int, device: torch.device) -> int:
    """Bytes of what autograd keeps of a pass, parameters left out and shared storages once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # All tokens are scored by a pass of one: the head's share is counted apart.
    scored = [[False] * (tokens - 1) + [True]]
    batch = kind.build([[1 + place % 7 for place in range(tokens)]], scored, device)
    training = model.training
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = model(batch=batch)
        del logprobs
    model.train(training)
    return sum(kept.values())
