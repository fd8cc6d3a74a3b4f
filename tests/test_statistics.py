"""Intervals and tests against values published by others, counted by hand, or computed in another way."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from art_gym.statistics import (
    Interval,
    bootstrap,
    difference_interval,
    effective_size,
    holm,
    mcnemar,
    mean_interval,
    pass_at_k,
    pass_hat_k,
    rate_interval,
    sign_flip_test,
    t_quantile,
    wilson,
)


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


def test_pass_at_k_counts_the_draws_that_hold_a_success():
    # By hand: of the C(5, 2) = 10 pairs out of 5 episodes of which 2 succeeded, C(3, 2) = 3 hold none of these.
    assert pass_at_k(5, 2, 2) == pytest.approx(7 / 10)
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    # Of 4 drawn out of 5 one success at least is always among them.
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0


def test_pass_hat_k_counts_the_draws_of_nothing_but_successes():
    # By hand: C(3, 2) = 3 of the 10 pairs out of 5 of which 3 succeeded.
    assert pass_hat_k(5, 3, 2) == pytest.approx(3 / 10)
    assert pass_hat_k(5, 3, 4) == 0.0
    assert pass_hat_k(5, 5, 5) == 1.0


@pytest.mark.parametrize(("n", "successes"), [(1, 0), (1, 1), (4, 1), (5, 3), (6, 6)])
def test_both_agree_with_drawing_every_subset(n, successes):
    outcomes = [place < successes for place in range(n)]
    for k in range(1, n + 1):
        draws = list(itertools.combinations(outcomes, k))
        assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))
        assert pass_hat_k(n, successes, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_pass_at_large_n_is_finite_and_right():
    # 1 - (1 - c/n)^k overestimates; exactly: 1 - C(199, 100)/C(200, 100) = 100/200.
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)


def test_the_bootstrap_of_two_scenarios_has_the_quantiles_of_its_three_means():
    # 0 and 1 resample to 00, 01, 10, 11: means 0, 1/2, 1/2, 1, a quarter each at the ends.
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap([0.0, 1.0], confidence=0.4) == (0.5, 0.5)


def test_the_bootstrap_of_many_scenarios_is_normal():
    # Blocks of draws are an implementation's matter: 3,000 scenarios take several.
    values = np.random.default_rng(0).random(3000)
    low, high = bootstrap(values, resamples=2000)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.001)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 3000**0.5, rel=0.1)


def test_the_bootstrap_is_the_same_for_the_same_seed():
    values = [0.1, 0.5, 0.7, 0.2, 0.9]
    assert bootstrap(values, resamples=50, seed=3) == bootstrap(values, resamples=50, seed=3)
    assert len({bootstrap(values, resamples=50, seed=seed) for seed in range(10)}) > 1


@pytest.mark.parametrize("values", [[], [0.3], [0.3, 0.3, 0.3]])
def test_the_bootstrap_knows_nothing_of_what_never_differs(values):
    assert bootstrap(values) is None


@pytest.mark.parametrize("estimate", [pass_at_k, pass_hat_k])
def test_impossible_draws_are_refused(estimate):
    with pytest.raises(ValueError, match="k must be from 1 to n = 3, but is 4"):
        estimate(3, 1, 4)
    with pytest.raises(ValueError, match="k must be from 1"):
        estimate(3, 1, 0)
    with pytest.raises(ValueError, match="from 0 to n"):
        estimate(3, 4, 1)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 60), (60, 60), (15, 148), (1, 2)])
def test_played_once_the_interval_is_wilsons(successes, n):
    outcomes = [1] * successes + [0] * (n - successes)
    assert effective_size(outcomes, [1] * n) == pytest.approx(n)
    assert rate_interval(outcomes, [1] * n) == pytest.approx(wilson(successes, n), abs=1e-12)


def test_episodes_that_all_go_alike_count_as_their_scenarios():
    # Every scenario all or none: eight episodes of it say no more than one.
    assert effective_size([8, 0] * 50, [8] * 100) == pytest.approx(100)
    assert rate_interval([8, 0] * 50, [8] * 100) == pytest.approx(wilson(50, 100))
    for successes in (0, 8):
        assert rate_interval([successes] * 60, [8] * 60) == pytest.approx(wilson(60 * successes // 8, 60))


def test_episodes_that_differ_no_more_within_than_between_count_each():
    # Exactly half of each scenario's: no scenario differs from another, and never is an episode worth more than one.
    assert effective_size([4] * 1000, [8] * 1000) == 8000
    assert rate_interval([], []) is None
    assert rate_interval([0, 0], [0, 0]) is None


@pytest.mark.parametrize(
    ("k", "rate", "alike"),
    [(1, 0.1, 0.0), (1, 0.5, 0.0), (8, 0.1, 0.0), (8, 0.1, 0.3), (8, 0.5, 0.3), (8, 0.5, 0.8), (8, 0.3, 1.0)],
)
def test_the_interval_holds_the_rate_as_often_as_it_says(k, rate, alike):
    # Each scenario's own rate is beta-distributed, with that correlation of its episodes: 1 is all or none.
    rng, scenarios, simulations = np.random.default_rng(5), 60, 1000
    held = naive = 0
    for _ in range(simulations):
        if alike == 1:
            rates = (rng.random(scenarios) < rate).astype(float)
        else:
            strength = (1 - alike) / alike if alike else 0
            rates = rng.beta(rate * strength, (1 - rate) * strength, scenarios) if alike else np.full(scenarios, rate)
        won = rng.binomial(k, rates)
        low, high = rate_interval(won, [k] * scenarios)
        held += low <= rate <= high
        low, high = wilson(int(won.sum()), k * scenarios)
        naive += low <= rate <= high
    # Nominal 95%; the standard error of a share of 1,000 is 0.7 points, and lattice effects of one episode each are about as large.
    assert 0.93 <= held / simulations <= 0.995
    if alike >= 0.3:
        assert naive / simulations < 0.85


def test_the_interval_of_a_mean_is_students():
    # 2 ± t(0.975, 2 degrees) · 1/√3 with t = 4.302653.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-5)
    # As sums of two episodes each: the same means.
    assert mean_interval([2.0, 4.0, 6.0], [2, 2, 2]) == pytest.approx(mean_interval([1.0, 2.0, 3.0]))
    # Scenarios of which none finished count for nothing.
    assert mean_interval([1.0, 2.0, 3.0, 0.0], [1, 1, 1, 0]) == mean_interval([1.0, 2.0, 3.0])


def test_there_is_no_interval_where_nothing_tells_how_scenarios_differ():
    assert mean_interval([]) is None
    assert mean_interval([1.0]) is None
    assert mean_interval([0.1, 0.1, 0.1]) is None


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="one count for each of the 2 totals, got 3"):
        mean_interval([1.0, 2.0], [1, 1, 1])
    with pytest.raises(ValueError, match="one count for each of the 2 totals, got 3"):
        rate_interval([1, 2], [1, 1, 1])


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_students_quantiles_agree_with_printed_tables(freedom, expected):
    assert t_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-3)
    assert t_quantile(0.99, 3) == pytest.approx(4.5407, rel=1e-4)


def test_the_difference_of_two_rates_agrees_with_newcombe_1998():
    # "…based on paired data", Statistics in Medicine 17, table II, method 8: a=36, b=12, c=2, d=0.
    first, second = [1.0] * 48 + [0.0] * 2, [1.0] * 36 + [0.0] * 12 + [1.0] * 2
    low, high = difference_interval(first, second, Interval(*wilson(48, 50)), Interval(*wilson(38, 50)))
    p, q, phi = 48 / 50, 38 / 50, (36 * 0 - 12 * 2) / math.sqrt(48 * 2 * 38 * 12)
    (l1, u1), (l2, u2) = wilson(48, 50), wilson(38, 50)
    down = math.sqrt((u1 - p) ** 2 - 2 * phi * (u1 - p) * (q - l2) + (q - l2) ** 2)
    up = math.sqrt((p - l1) ** 2 - 2 * phi * (p - l1) * (u2 - q) + (u2 - q) ** 2)
    assert (low, high) == (pytest.approx(q - p - down), pytest.approx(q - p + up))
    # Printed there, for the first less the second: 0.0569 to 0.3404.
    assert (-high, -low) == (pytest.approx(0.0569, abs=5e-4), pytest.approx(0.3404, abs=5e-4))


@pytest.mark.parametrize(
    ("first_only", "second_only", "p"),
    [
        # Approval ratings in A. Agresti, "Categorical Data Analysis" (1990), table 10.1; the exact p as R's exact2x2 gives it.
        (150, 86, 3.716e-05),
        # By hand: 2 · (C(10, 0) + C(10, 1)) / 2¹⁰.
        (1, 9, 22 / 1024),
        (0, 5, 2 / 32),
        # Both tails overlap in the middle.
        (4, 4, 1.0),
        (0, 0, 1.0),
    ],
)
def test_mcnemar_is_the_exact_binomial(first_only, second_only, p):
    assert mcnemar(first_only, second_only) == pytest.approx(p, rel=1e-3)
    assert mcnemar(second_only, first_only) == mcnemar(first_only, second_only)


@pytest.mark.parametrize(("fewer", "n"), [(400, 1000), (470, 1001), (9_800, 20_000), (9_999, 20_000), (5_000, 20_001)])
def test_mcnemar_agrees_with_whole_numbers(fewer, n):
    # Every coefficient from the one before it, exactly; below and above where logarithms are taken.
    tail = term = 1
    for count in range(fewer):
        term = term * (n - count) // (count + 1)
        tail += term
    assert mcnemar(fewer, n - fewer) == pytest.approx(float(Fraction(tail, 2 ** (n - 1))), rel=1e-7)


@pytest.mark.parametrize("fewer", [499_950, 499_000, 498_000])
def test_mcnemar_of_a_million(fewer):
    # The normal distribution with the continuity correction, whose error is of the order of 1/n for a symmetric binomial in the middle.
    n = 10**6
    deviations = (n / 2 - fewer - 0.5) / math.sqrt(n / 4)
    assert mcnemar(fewer, n - fewer) == pytest.approx(math.erfc(deviations / math.sqrt(2)), rel=1e-4)
    # And every term by its logarithm.
    logs = np.cumsum(np.log((n - np.arange(fewer)) / (np.arange(fewer) + 1.0)))
    assert mcnemar(fewer, n - fewer) == pytest.approx(math.fsum(np.exp(logs - (n - 1) * math.log(2))), rel=1e-6)


def test_mcnemar_of_a_million_that_agree_or_differ_wholly():
    assert mcnemar(500_000, 500_000) == 1.0
    assert mcnemar(0, 10**6) == 0.0


def test_mcnemar_refuses_negative_numbers():
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar(-1, 2)


DARWIN = (49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48)
"""Differences in height of Darwin's crossed and self-fertilised maize, in eighths of an inch."""


def test_sign_flips_agree_with_fisher_1935():
    # "The Design of Experiments", section 21: 863 of the 2¹⁵ patterns have a sum of 314 or more, and as many one of -314 or less.
    assert sign_flip_test(DARWIN) == (pytest.approx(2 * 863 / 2**15), 2**15, True)


def test_differences_of_zero_change_nothing():
    assert sign_flip_test([*DARWIN, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]) == sign_flip_test(DARWIN)
    assert sign_flip_test([0.0, 0.0]).p == 1.0
    assert sign_flip_test([]).p == 1.0


def test_sums_that_are_equal_but_for_rounding_count_as_equal():
    # 0.1 + 0.2 is a little more than 0.3: of the 8 patterns the two of equal signs reach 0.6, and these alone, whatever their order.
    for differences in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]):
        assert sign_flip_test(differences).p == 2 / 8


def test_many_differences_are_flipped_at_random_with_the_resolution_told():
    # 30 differences of 1, of which 22 are won: two-sided binomial 2 · P(X ≥ 22 of 30) = 0.016125.
    found = sign_flip_test([1.0] * 22 + [-1.0] * 8)
    expected = 2 * sum(math.comb(30, won) for won in range(22, 31)) / 2**30
    assert (found.patterns, found.exact) == (20_001, False)
    # Four standard deviations of a share of 20,000.
    assert found.p == pytest.approx(expected, abs=4 * math.sqrt(expected / 20_000))
    assert found == sign_flip_test([1.0] * 22 + [-1.0] * 8)
    assert found != sign_flip_test([1.0] * 22 + [-1.0] * 8, seed=1)


def test_random_flips_never_give_zero():
    assert sign_flip_test([1.0] * 60).p == 1 / 20_001


def test_holm_agrees_with_the_method_by_hand():
    # Sorted 0.005·4 = 0.02, 0.01·3 = 0.03, 0.03·2 = 0.06, and 0.04·1 is no less than the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_the_tests_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    assert mcnemar(3, 11) == pytest.approx(stats.binomtest(3, 14).pvalue)
    result = stats.permutation_test(
        (np.asarray(DARWIN), np.zeros(15)), lambda x, y, axis: np.sum(x - y, axis=axis), permutation_type="samples", vectorized=True
    )
    assert sign_flip_test(DARWIN).p == pytest.approx(result.pvalue, rel=0.1)


@pytest.mark.parametrize(("won", "lost"), [(0, 1), (3, 3), (5, 2), (12, 4)])
def test_sign_flips_of_single_wins_are_mcnemars_test(won, lost):
    assert sign_flip_test([1.0] * won + [-1.0] * lost).p == pytest.approx(mcnemar(lost, won))
