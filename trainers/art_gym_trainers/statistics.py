"""Figures of training: sums over the sampled tokens of a batch, and the means that a run reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_NAMES = (
    "tokens",
    "entropy_sum",
    "kl_sum",
    "reference_tokens",
    "reference_kl_sum",
    "clippable",
    "clipped",
    "first_step_tokens",
    "first_step_difference_sum",
)
_SUMS = len(_NAMES)


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
        clippable: Sampled tokens whose probability ratio may be cut; none where the loss cuts none.
        clipped: Those whose ratio was.
        first_step_tokens: Sampled tokens of the first optimiser step, where trainer and sampler hold the same weights.
        first_step_difference_sum: The difference of their log-probabilities there.
        losses: Of each optimiser step.
        gradient_norms: Of each optimiser step, before they were cut.
    """

    steps: int = 0
    tokens: float = 0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    reference_tokens: float = 0
    reference_kl_sum: float = 0.0
    clippable: float = 0
    clipped: float = 0
    first_step_tokens: float = 0
    first_step_difference_sum: float = 0.0
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    _step: list[float] = field(default_factory=lambda: [0.0] * _SUMS)

    def count(
        self,
        *,
        logprobs: torch.Tensor,
        sampled: torch.Tensor,
        entropies: torch.Tensor,
        clipped: torch.Tensor | None,
        reference: torch.Tensor | None,
    ) -> None:
        """Add the tokens of a micro-batch of the step that is being taken; all tensors (N,).

        Args:
            logprobs: Of the policy as it is.
            sampled: Of the engine, when the tokens were drawn.
            entropies: In nats.
            clipped: Whether the loss cut their ratios; None for losses that cut none.
            reference: Log-probabilities of the reference model, if there is one.
        """
        count, difference = logprobs.numel(), logprobs - sampled
        sums = [count, float(entropies.sum()), float(k3(difference).sum())]
        sums += [0, 0.0] if reference is None else [count, float(k3(reference - logprobs).sum())]
        sums += [0, 0] if clipped is None else [count, int(clipped.sum())]
        sums += [count, float(difference.abs().sum())] if self.steps == 0 else [0, 0.0]
        self._step = [old + new for old, new in zip(self._step, sums, strict=True)]

    def step_sums(self) -> list[float]:
        """What was counted since the step began, to be added up over processes; begins the next."""
        sums, self._step = self._step, [0.0] * _SUMS
        return sums

    def end_step(self, sums: Sequence[float], loss: float) -> None:
        """Take a step's sums over all processes, and its loss."""
        for name, value in zip(_NAMES, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)
        self.steps += 1
        self.losses.append(loss)

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
            "clip_fraction": _over(self.clipped, self.clippable),
            "logprob_difference": _over(self.first_step_difference_sum, self.first_step_tokens),
            "optimiser_steps": self.steps,
        }


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimator of KL(p || q) from log q - log p, on tokens drawn from p: http://joschu.net/blog/kl-approx.html."""
    return log_ratio.exp() - 1 - log_ratio


def _over(total: float, count: float) -> float | None:
    return total / count if count else None


def _mean(values: list[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None
