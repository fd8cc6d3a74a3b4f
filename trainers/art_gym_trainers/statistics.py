"""Figures of training: sums over the sampled tokens of a batch, and the means that a run reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class BatchStatistics:
    """Sums over the sampled tokens of one batch of optimiser steps.

    Attributes:
        steps: Optimiser steps taken.
        tokens: Sampled tokens trained on.
        entropy_sum: Of the distributions that they were drawn from, in nats.
        kl_sum: Of the policy from its sampler, by the k3 estimator.
        reference_tokens: Sampled tokens that were compared with the reference.
        reference_kl_sum: Of the policy from the reference, by the k3 estimator.
        clipped: Tokens whose probability ratio was cut.
        first_step_tokens: Sampled tokens of the first optimiser step, where trainer and sampler hold the same weights.
        first_step_difference_sum: The difference of their log-probabilities there.
        losses: Of each optimiser step.
        gradient_norms: Of each optimiser step, before they were cut.
    """

    steps: int = 0
    tokens: int = 0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    reference_tokens: int = 0
    reference_kl_sum: float = 0.0
    clipped: int = 0
    first_step_tokens: int = 0
    first_step_difference_sum: float = 0.0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)

    def count(
        self,
        *,
        logprobs: torch.Tensor,
        sampled: torch.Tensor,
        old: torch.Tensor,
        advantages: torch.Tensor,
        entropies: torch.Tensor,
        reference: torch.Tensor | None,
        clip: tuple[float, float],
    ) -> None:
        """Add the tokens of a micro-batch; all tensors (N,).

        Args:
            logprobs: Of the policy as it is.
            sampled: Of the engine, when the tokens were drawn.
            old: What the probability ratio is taken to.
            advantages: Of the tokens.
            entropies: In nats.
            reference: Of the reference model, if there is one.
            clip: How far below and above 1 a ratio may go.
        """
        ratio = (logprobs - old).exp()
        clipped = ((ratio < 1 - clip[0]) & (advantages < 0)) | ((ratio > 1 + clip[1]) & (advantages > 0))
        self.tokens += logprobs.numel()
        self.entropy_sum += float(entropies.sum())
        self.kl_sum += float(k3(logprobs - sampled).sum())
        self.clipped += int(clipped.sum())
        if reference is not None:
            self.reference_tokens += logprobs.numel()
            self.reference_kl_sum += float(k3(reference - logprobs).sum())
        if self.steps == 0:
            self.first_step_tokens += logprobs.numel()
            self.first_step_difference_sum += float((logprobs - sampled).abs().sum())

    def to_dict(self) -> dict[str, float | None]:
        """Means by token; None where nothing was trained.

        `logprob_difference` is of the first optimiser step alone, where trainer and sampler hold the same weights. `kl_reference` is None where
        no reference is kept.
        """
        return {
            "loss": _mean(self.losses),
            "gradient_norm": _mean(self.gradient_norms),
            "entropy": _over(self.entropy_sum, self.tokens),
            "kl_sampler": _over(self.kl_sum, self.tokens),
            "kl_reference": _over(self.reference_kl_sum, self.reference_tokens),
            "clip_fraction": _over(self.clipped, self.tokens),
            "logprob_difference": _over(self.first_step_difference_sum, self.first_step_tokens),
            "optimiser_steps": self.steps,
        }


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(p || q) from log q - log p, on tokens drawn from p: http://joschu.net/blog/kl-approx.html."""
    return log_ratio.exp() - 1 - log_ratio


def _over(total: float, count: int) -> float | None:
    return total / count if count else None


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
