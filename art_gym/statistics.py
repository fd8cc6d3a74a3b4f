"""Statistics of outcomes: how sure a measured rate or mean is, and whether two agents differ by more than chance.

Everything is exact or seeded: the same outcomes give the same figures. Where k episodes are played of each scenario they resemble one another,
so that what counts as one observation is always the scenario, never the episode. No interval is a point: where all outcomes are alike they say
little about those that weren't seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import atan, comb, exp, lgamma, log, pi, sqrt, tan
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
"""How often a bootstrap resamples: the bounds of a 95% interval then vary by a few percent of its width from seed to seed."""

FLIPS = 20_000
"""How many random sign patterns a permutation test tries where it can't try all."""

_ALL_SIGNS = 20
"""Up to so many differences all their sign patterns are tried: a million."""

_CAUTION = 2
"""So many scenarios in which two agents have nothing in common are reckoned with where they seem alike; chosen by simulation."""

_EXACT = 1000
"""Up to so many trials a binomial coefficient is reckoned in whole numbers; beyond that by logarithms, to a millionth at a million trials."""

_NEGLIGIBLE = 1e-17
"""Terms of a sum that are smaller by this factor change nothing of it."""

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
    return _score_bounds(successes / n, n, confidence)


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


def effective_size(successes: Figures, episodes: Figures) -> float:
    """How many independent episodes say as much about the success rate as those that were played, some of each scenario.

    It is the variance p(1-p) of one episode by the variance of the rate that the scenarios' differences give (Kish's design effect; L. Kish,
    "Survey Sampling", 1965), at most the number of episodes. Since few scenarios tell little about how much they differ, half a scenario that
    always succeeds and half a one that never does are added to those that were played: where all went alike, so many scenarios count as played
    and no more, and the more there are, the less the addition weighs. That half was chosen by simulation, see `rate_interval`.

    Args:
        successes: Of each scenario.
        episodes: Of each scenario; those of none are left out.

    Raises:
        ValueError: The lengths differ.

    >>> effective_size([1, 0, 1, 1], [1, 1, 1, 1])
    4.0
    >>> round(effective_size([8, 0] * 50, [8] * 100))  # all of a scenario's went alike
    100
    """
    won, played = _clusters(successes, episodes)
    if not won.size:
        return 0.0
    total, extra = played.sum(), played.mean() / 2
    rate = (won.sum() + extra) / (total + 2 * extra)
    # Half a scenario of 2·extra episodes: weight 1/2, deviation 2·extra·(1 - p) and 2·extra·p.
    squares = ((won - rate * played) ** 2).sum() + 2 * extra**2 * ((1 - rate) ** 2 + rate**2)
    # The addition is no observation: it counts in the ratio of the variances, and not in the number of episodes.
    effect = squares / ((total + 2 * extra) * rate * (1 - rate))
    return float(total / max(effect, 1.0))


def rate_interval(successes: Figures, episodes: Figures, confidence: float = 0.95) -> Interval | None:
    """The interval of a success rate from some episodes of each scenario: Wilson's, with the effective number of episodes.

    With one episode of each it is Wilson's. In simulations of 5 to 200 scenarios with 4 to 16 episodes, rates from 1% to 50%, and episodes of a
    scenario from independent to all alike, 94% to over 99% of such intervals held the rate.

    Args:
        successes: Of each scenario.
        episodes: Of each scenario.
        confidence: The share of such intervals that hold the true rate, about; in (0, 1).

    Returns:
        The bounds; None where nothing was played.

    >>> [round(bound, 4) for bound in rate_interval([0] * 60, [8] * 60)] == [round(bound, 4) for bound in wilson(0, 60)]
    True
    """
    size = effective_size(successes, episodes)
    if not size:
        return None
    rate = min(max(float(np.sum(successes) / np.sum(episodes)), 0.0), 1.0)
    return Interval(*_score_bounds(rate, size, confidence))


def bootstrap(values: Figures, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval | None:
    """The percentile bootstrap interval of a mean over scenarios, of each of which there is one estimate.

    Each resample draws as many scenarios as there are, with replacement. Source: B. Efron, R. J. Tibshirani, "An Introduction to the Bootstrap"
    (1993), section 13.3. For estimates whose distribution isn't known, such as pass@k.

    Args:
        values: An estimate of each scenario.
        confidence: The share of such intervals that hold the true mean, about; in (0, 1).
        resamples: How many.
        seed: Of the draws.

    Returns:
        The bounds; None of fewer than two scenarios, and where all are alike: the bootstrap knows of no outcome that it hasn't seen.

    Raises:
        ValueError: The confidence is out of its range.
    """
    _check_confidence(confidence)
    figures = np.asarray(values, dtype=np.float64)
    if figures.size < 2 or np.ptp(figures) == 0:
        return None
    rng = np.random.default_rng(seed)
    means = [figures[rng.integers(figures.size, size=(rows, figures.size))].mean(axis=1) for rows in _blocks(resamples, figures.size)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Interval(float(low), float(high))


def mean_interval(totals: Figures, counts: Figures | None = None, *, confidence: float = 0.95) -> Interval | None:
    """Student's interval of a mean over scenarios, each of which has some figures.

    The variance is that of the scenarios' totals around the mean, by the ratio estimator (W. G. Cochran, "Sampling Techniques", 1977, section
    6.3).

    Args:
        totals: The sum of each scenario's figures.
        counts: How many figures each sum is of; 1 each if not given. Scenarios of none are left out.
        confidence: The share of such intervals that hold the true mean, about; in (0, 1).

    Returns:
        The bounds; None of fewer than two scenarios, and where all are alike, which says nothing of how they differ.

    Raises:
        ValueError: An argument is out of its range, or `counts` is of another length.

    >>> [round(bound, 3) for bound in mean_interval([1.0, 2.0, 3.0])]  # 2 ± 4.303 · 1/√3
    [-0.484, 4.484]
    """
    _check_confidence(confidence)
    sums, sizes = _clusters(totals, np.ones(len(totals)) if counts is None else counts)
    if sums.size < 2:
        return None
    mean = sums.sum() / sizes.sum()
    deviations = sums - mean * sizes
    # Equal figures differ by rounding.
    if np.abs(deviations).max() <= 1e-12 * np.abs(sums).max():
        return None
    error = sqrt(sums.size / (sums.size - 1) * float((deviations**2).sum())) / sizes.sum()
    half = t_quantile((1 + confidence) / 2, sums.size - 1) * error
    return Interval(float(mean - half), float(mean + half))


def difference_interval(first: Figures, second: Figures, first_bounds: Interval, second_bounds: Interval) -> Interval:
    """The interval of the difference of two paired rates, from the interval of each.

    Source: R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired data", Statistics in
    Medicine 17 (1998), method 8, and for other estimates G. Y. Zou, A. Donner, "Construction of confidence limits about effect measures",
    Statistics in Medicine 27 (2008): the distances to the bounds are added like standard deviations of correlated figures.

    Args:
        first: The first agent's rate in each scenario.
        second: The second's, in the same scenarios.
        first_bounds: The interval of the first's mean.
        second_bounds: The interval of the second's mean.

    Returns:
        The bounds of the second's mean less the first's.
    """
    before, after = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    spread = before.std() * after.std()
    correlation = float(np.mean((before - before.mean()) * (after - after.mean())) / spread) if spread > 1e-12 else 0.0
    # Few scenarios overstate how alike the agents are, and the interval would be too narrow.
    correlation *= before.size / (before.size + _CAUTION) if correlation > 0 else 1.0
    one, two = float(before.mean()), float(after.mean())

    def distance(towards_one: float, towards_two: float) -> float:
        return sqrt(max(towards_one**2 + towards_two**2 - 2 * correlation * towards_one * towards_two, 0.0))

    return Interval(
        max(two - one - distance(first_bounds.high - one, two - second_bounds.low), -1.0),
        min(two - one + distance(one - first_bounds.low, second_bounds.high - two), 1.0),
    )


def t_quantile(p: float, freedom: int) -> float:
    """The quantile of Student's distribution; within about 0.1% for p up to 0.99.

    Source: M. Abramowitz, I. A. Stegun, "Handbook of Mathematical Functions" (1964), 26.7.5; for up to three degrees of freedom exact.

    >>> [round(t_quantile(0.975, freedom), 2) for freedom in (1, 2, 4, 30)]
    [12.71, 4.3, 2.78, 2.04]
    """
    if freedom == 1:
        return tan(pi * (p - 0.5))
    if freedom == 2:
        share = 2 * p - 1
        return share * sqrt(2 / (1 - share * share))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    quantile = z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
    # The series is too rough there; Newton's method on the distribution function, which has a closed form.
    for _ in range(3 if freedom == 3 else 0):
        x = quantile / sqrt(3)
        share = 0.5 + (x / (1 + x * x) + atan(x)) / pi
        quantile -= (share - p) * pi * sqrt(3) * (1 + x * x) ** 2 / 2
    return quantile


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
    n, fewer = first_only + second_only, min(first_only, second_only)
    if 2 * fewer == n:
        return 1.0
    # The likeliest outcome of the tail first; each one before it is less likely by a known ratio, and soon too unlikely to count.
    tail = term = 1.0
    for count in range(fewer, 0, -1):
        term *= count / (n - count + 1)
        tail += term
        if term < _NEGLIGIBLE * tail:
            break
    if n <= _EXACT:
        return min(1.0, tail * (comb(n, fewer) / (1 << (n - 1))))
    return min(1.0, tail * exp(lgamma(n + 1) - lgamma(fewer + 1) - lgamma(n - fewer + 1) - (n - 1) * log(2)))


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


def _score_bounds(p: float, n: float, confidence: float) -> tuple[float, float]:
    """Wilson's bounds for a rate out of n trials, which may be a broken number."""
    _check_confidence(confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    # Exact at the ends, where rounding would leave ±1e-17.
    low = 0.0 if p == 0 else centre - half
    high = 1.0 if p == 1 else centre + half
    return low, high


def _clusters(totals: Figures, counts: Figures) -> tuple[Any, Any]:
    """The scenarios of which there are figures."""
    sums, sizes = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if sums.shape != sizes.shape or sums.ndim != 1:
        raise ValueError(f"expected one count for each of the {sums.size} totals, got {sizes.size}")
    return sums[sizes > 0], sizes[sizes > 0]


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
