"""Losses: which of TRL's there are, and what a micro-batch's share in its optimiser step is for each.

TRL computes the loss of a micro-batch; summed up over a step's micro-batches it must not depend on how the step was cut. Losses differ in what
they average over, and so in the weight that a micro-batch's loss needs.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch

LossType = Literal["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo", "bnpo"]
"""By what TRL averages over:

- the sampled tokens of the whole optimiser step: `dapo` (arXiv 2503.14476), `cispo` (arXiv 2506.13585), `vespo` (arXiv 2602.10693);
- episodes: `grpo` (arXiv 2402.03300) and `sapo` (arXiv 2511.20347) each episode's mean over its tokens, `dr_grpo` (arXiv 2503.20783) its sum
  over a constant length, `luspo` (arXiv 2602.05261) its sum;
- the sampled tokens of a micro-batch, which is made to be those of the step: `bnpo`.
"""

LOSS_TYPES: tuple[LossType, ...] = get_args(LossType)

_STEP_TOTAL = frozenset({"dapo", "cispo", "vespo"})
_TOKEN_MEAN = frozenset({"bnpo"})

ImportanceCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
"""How the difference between the sampler's and the trainer's probabilities is corrected: the ratio of the two, per token or over the whole
episode, cut to a largest value (`truncate`) or left out beyond it (`mask`)."""


class StepSize(NamedTuple):
    """What a step, or a micro-batch of it, holds: episodes, and their sampled tokens."""

    episodes: int
    tokens: int


def share(loss_type: str, batch: StepSize, step: StepSize, processes: int = 1) -> float:
    """The weight of a micro-batch's loss in its optimiser step's.

    >>> share("grpo", StepSize(2, 10), StepSize(8, 100)), share("bnpo", StepSize(2, 10), StepSize(8, 100))
    (0.25, 0.1)
    >>> share("dapo", StepSize(2, 10), StepSize(8, 100), processes=2)  # TRL divides by the step's tokens, and knows of the processes
    1.0

    Args:
        loss_type: One of `LOSS_TYPES`.
        batch: The micro-batch's size.
        step: The whole step's, over all processes.
        processes: How many average their gradients.
    """
    if loss_type in _STEP_TOTAL:
        return 1.0
    part, whole = (batch.tokens, step.tokens) if loss_type in _TOKEN_MEAN else (batch.episodes, step.episodes)
    return part / whole * processes


def importance_ratio(
    log_ratio: torch.Tensor, mask: torch.Tensor, correction: str, largest: float | None, smallest: float | None = None
) -> torch.Tensor:
    """The weights that correct the sampler's difference from the trainer, (B, T) or (B, 1), as TRL's `vllm_importance_sampling_mode` has them.

    Args:
        log_ratio: (B, T) log-probabilities of the trainer minus those of the sampler.
        mask: (B, T) which are there.
        correction: One of `ImportanceCorrection` but "none".
        largest: The ratio is cut to this value, or left out beyond it; None for no limit.
        smallest: The same below.
    """
    level, _, way = correction.partition("_")
    differences = log_ratio * mask
    ratio = torch.exp(differences.sum(-1, keepdim=True) if level == "sequence" else differences)
    low, high = smallest or 0.0, math.inf if largest is None else largest
    return ratio.clamp(low, high) if way == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def clipped(
    loss_type: str, log_ratio: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, *, level: str, low: float, high: float
) -> torch.Tensor | None:
    """Which sampled tokens lose their gradient, or for `cispo` a part of their weight, as their ratio is cut; None for losses that cut none.

    Args:
        loss_type: One of `LOSS_TYPES`.
        log_ratio: (B, T) of the policy to what the ratio is taken to.
        mask: (B, T) which are there.
        advantages: (B, T).
        level: "token", or "sequence" for the episode's mean log ratio.
        low: How far below 1 a ratio may go.
        high: How far above 1; for `cispo` the largest ratio itself.

    Returns:
        (N,), in the order of the mask's true places.
    """
    if loss_type in ("sapo", "vespo"):
        return None
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).expand(mask.shape)
    ratio = log_ratio.exp()
    above = ratio > (high if loss_type == "cispo" else 1 + high)
    below = (ratio < 1 - low) & (advantages < 0)
    cut = above & (advantages > 0)
    return (cut if loss_type == "cispo" else cut | below)[mask.bool()]
