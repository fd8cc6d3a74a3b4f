"""Statistics of outcomes: how sure a measured success rate is."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist


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
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be from 0 to n, but are {successes} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, but is {confidence}")
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
