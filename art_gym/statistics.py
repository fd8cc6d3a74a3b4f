"""Statistics of outcomes: how sure a measured rate or mean is, and whether two agents differ by more than chance.

Everything is exact or seeded: the same outcomes give the same figures. Where k episodes are played of each scenario they resemble one another,
so that what is resampled and what is flipped is always the scenario, never the episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
"""How often a bootstrap resamples: the bounds of a 95% interval then vary by a few percent of its width from seed to seed."""

FLIPS = 20_000
"""How many random sign patterns a permutation test tries where it can't try all."""

_ALL_SIGNS = 20
"""Up to so many differences all their sign patterns are tried: a million."""

_BLOCK = 1 << 20
"""How many random numbers are drawn at once, which bounds the memory."""

Figures = Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]


class Interval(NamedTuple):
    """An interval, both ends included."""

    low: float
    high: float


class PermutationTest(NamedTuple):
    """The outcome of a permutation test.

    Attributes:
        p: The two-sided p-value.
        patterns: How many sign patterns it was counted over.
        exact: Whether these were all there are. If not, p is known to about one part in `patterns`, and never below it.
    """

    p: float
    patterns: int
    exact: bool


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for the probability of success, given `successes` out of `n` independent trials.

    Unlike the textbook interval p ± z·√(p(1-p)/n) it stays within [0, 1] and covers well at rates near 0 and 1, which is where an untrained
    and a well-trained policy are.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the American Statistical
    Association 22 (1927), without continuity correction: with z the normal quantile of (1 + confidence) / 2,
    (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n).

    Args:
        successes: How many trials succeeded, from 0 to `n`.
        n: How many trials there were. None at all says nothing: the interval is (0, 1).
        confidence: The share of such intervals that hold the true probability, in (0, 1).

    Returns:
        The lower and the upper bound.

    Raises:
        ValueError: An argument is out of its range.

    >>> [round(bound, 4) for bound in wilson(15, 148)]
    [0.0624, 0.1605]
    """
    _check_successes(successes, n)
    _check_confidence(confidence)
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # Exact at the ends, where rounding would leave ±1e-17.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Estimate the probability that at least one of k episodes succeeds, from `successes` out of `n` of the same scenario; without bias.

    Source: M. Chen et al., "Evaluating large language models trained on code", arXiv 2107.03374 (2021), equation 1: 1 - C(n-c, k) / C(n, k).

    Raises:
        ValueError: k isn't from 1 to `n`, or `successes` not from 0 to `n`.

    >>> pass_at_k(4, 1, 2)  # of the 6 pairs of episodes, 3 hold the one that succeeded
    0.5
    """
    _check_draw(n, successes, k)
    return 1 - comb(n - successes, k) / comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """Estimate the probability that all of k episodes succeed, from `successes` out of `n` of the same scenario; without bias.

    Source: S. Yao et al., "τ-bench", arXiv 2406.12045 (2024), pass^k: C(c, k) / C(n, k).

    Raises:
        ValueError: k isn't from 1 to `n`, or `successes` not from 0 to `n`.

    >>> pass_hat_k(4, 3, 2)  # of the 6 pairs of episodes, 3 hold none but those that succeeded
    0.5
    """
    _check_draw(n, successes, k)
    return comb(successes, k) / comb(n, k)


def bootstrap(
    totals: Figures, counts: Figures | None = None, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval | None:
    """The percentile bootstrap interval of a mean over clusters, which are resampled whole.

    Each resample draws as many scenarios as there are, with replacement, and takes the mean over the episodes of all of them. Source:
    B. Efron, R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), section 13.3. Where all clusters are alike, the interval is a point:
    the bootstrap knows of no outcome that it hasn't seen.

    Args:
        totals: The sum of each scenario's figures.
        counts: How many figures each sum is of; 1 each if not given. Scenarios of none are left out.
        confidence: The share of such intervals that hold the true mean, about; in (0, 1).
        resamples: How many.
        seed: Of the draws.

    Returns:
        The bounds; None where there is no figure at all.

    Raises:
        ValueError: An argument is out of its range, or `counts` is of another length.
    """
    _check_confidence(confidence)
    sums = np.asarray(totals, dtype=np.float64)
    sizes = np.ones_like(sums) if counts is None else np.asarray(counts, dtype=np.float64)
    if sums.shape != sizes.shape or sums.ndim != 1:
        raise ValueError(f"expected one count for each of the {sums.size} totals, got {sizes.size}")
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    if not sums.size:
        return None
    rng = np.random.default_rng(seed)
    means: list[Any] = []
    for rows in _blocks(resamples, sums.size):
        drawn = rng.integers(sums.size, size=(rows, sums.size))
        means.append(sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Interval(float(low), float(high))


def mcnemar(first_only: int, second_only: int) -> float:
    """The exact two-sided p-value of McNemar's test: whether two agents succeed equally often on the same scenarios.

    Only the scenarios count on which one of them succeeded and the other didn't: if the agents are equal, each of these is as likely to be the
    first's as the second's, so that their number is binomial with probability 1/2. Source: Q. McNemar, "Note on the sampling error of the
    difference between correlated proportions or percentages", Psychometrika 12 (1947), with the binomial distribution instead of its
    approximation.

    Args:
        first_only: Scenarios on which only the first agent succeeded.
        second_only: Scenarios on which only the second did.

    Raises:
        ValueError: A number is negative.

    >>> mcnemar(0, 5)  # 2 · (1/2)⁵
    0.0625
    """
    if min(first_only, second_only) < 0:
        raise ValueError(f"numbers of scenarios are at least 0, but are {first_only} and {second_only}")
    n = first_only + second_only
    tail = sum(comb(n, count) for count in range(min(first_only, second_only) + 1))
    return min(1.0, tail / 2 ** (n - 1)) if n else 1.0


def sign_flip_test(differences: Figures, *, flips: int = FLIPS, seed: int = 0) -> PermutationTest:
    """The paired permutation test: whether the mean of paired differences is further from 0 than their signs alone would bring it.

    If two agents are equal, then each scenario's difference could as well have had the other sign. The p-value is the share of the sign
    patterns whose sum is at least as far from 0 as the one observed. All are tried where at most 20 differences aren't 0; else random ones, and
    the pattern observed counts as one of them, so that p is never 0. Sources: R. A. Fisher, "The Design of Experiments" (1935), section 21;
    B. Phipson, G. K. Smyth, "Permutation p-values should never be zero", Statistical Applications in Genetics and Molecular Biology 9 (2010).

    Args:
        differences: One for each scenario.
        flips: How many random sign patterns are tried.
        seed: Of these.
    """
    values = np.asarray(differences, dtype=np.float64)
    values = values[values != 0]
    # Sums of the same figures in another order differ by rounding.
    least = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if values.size <= _ALL_SIGNS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate((sums + value, sums - value))
        return PermutationTest(float(np.mean(np.abs(sums) >= least)), sums.size, exact=True)
    rng = np.random.default_rng(seed)
    as_far = 1
    for rows in _blocks(flips, values.size):
        signs = 2.0 * rng.integers(2, size=(rows, values.size), dtype=np.int8) - 1.0
        as_far += int(np.count_nonzero(np.abs(signs @ values) >= least))
    return PermutationTest(as_far / (flips + 1), flips + 1, exact=False)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several tests, so that the chance of even one false alarm among them stays below the level; in the same order.

    Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979): the smallest of m
    is multiplied by m, the next by m - 1, and so on, and none is less than the one before it.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = so_far
    return adjusted


def _blocks(rows: int, columns: int) -> Iterator[int]:
    """Divide the rows of a matrix into blocks that fit the memory."""
    block = max(_BLOCK // columns, 1)
    yield from (min(block, rows - start) for start in range(0, rows, block))


def _check_successes(successes: int, n: int) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be from 0 to n, but are {successes} of {n}")


def _check_draw(n: int, successes: int, k: int) -> None:
    _check_successes(successes, n)
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to n = {n}, but is {k}")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, but is {confidence}")
