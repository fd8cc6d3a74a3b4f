"""Wilson's interval against values published by others."""

import pytest

from art_gym.statistics import wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # R. G. Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_agrees_with_newcombe_1998(successes, n, low, high):
    assert wilson(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_bounds_solve_the_score_equation():
    # By definition a bound b solves (p - b)² = z²·b(1 - b)/n, with z = 1.959964 for 95%.
    for bound in wilson(30, 200):
        assert (30 / 200 - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / 200, rel=1e-6)


def test_confidence_widens_the_interval():
    # z = 1.644854 at 90%: with p = 1/2 and n = 10 the half width is z·√(0.025 + z²/400)/(1 + z²/10) = 0.230728.
    low, high = wilson(5, 10, confidence=0.90)
    assert high - 0.5 == pytest.approx(0.230728, abs=1e-5)
    assert 0.5 - low == pytest.approx(0.230728, abs=1e-5)


def test_all_and_none_reach_the_ends_exactly():
    assert wilson(0, 50)[0] == 0.0
    assert wilson(50, 50)[1] == 1.0
    assert wilson(0, 50)[1] == pytest.approx(1 - wilson(50, 50)[0])


def test_no_trials_say_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10)])
def test_impossible_counts_are_refused(successes, n):
    with pytest.raises(ValueError, match="from 0 to n"):
        wilson(successes, n)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95])
def test_impossible_confidence_is_refused(confidence):
    with pytest.raises(ValueError, match="confidence"):
        wilson(5, 10, confidence)
