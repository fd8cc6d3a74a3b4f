"""Intervals and tests against values published by others, counted by hand, or computed in another way."""

import itertools
import math

import numpy as np
import pytest

from art_gym.statistics import bootstrap, holm, mcnemar, pass_at_k, pass_hat_k, sign_flip_test, wilson


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


@pytest.mark.parametrize("estimate", [pass_at_k, pass_hat_k])
def test_impossible_draws_are_refused(estimate):
    with pytest.raises(ValueError, match="k must be from 1 to n = 3, but is 4"):
        estimate(3, 1, 4)
    with pytest.raises(ValueError, match="k must be from 1"):
        estimate(3, 1, 0)
    with pytest.raises(ValueError, match="from 0 to n"):
        estimate(3, 4, 1)


def test_the_bootstrap_of_two_clusters_has_the_quantiles_of_its_three_means():
    # Two scenarios of 0 and 1 resample to 00, 01, 10, 11: means 0, 1/2, 1/2, 1, a quarter each at the ends.
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)
    assert bootstrap([0.0, 1.0], confidence=0.4) == (0.5, 0.5)


def test_the_bootstrap_resamples_scenarios_and_not_episodes():
    # 40 scenarios of 8 episodes, half all successes and half none: 20 heads of 40 coins, however many episodes each stands for.
    low, high = bootstrap([8.0] * 20 + [0.0] * 20, [8] * 40)
    # The binomial's standard deviation is √(1/4/40) = 0.079, and 1.96 of them 0.155; 320 coins would have 0.055.
    assert high - low == pytest.approx(2 * 0.155, abs=0.03)
    assert (low + high) / 2 == pytest.approx(0.5, abs=0.02)


def test_the_bootstrap_weighs_scenarios_by_their_episodes():
    # Always 3 of one episode each and 1 of none: without the empty one, all means are (1 + 1 + 1) / 3.
    assert bootstrap([1.0, 1.0, 1.0, 0.0], [1, 1, 1, 0]) == (1.0, 1.0)
    # One scenario of 9 zeros and one of a single 1: drawn twice each 0 or 1, together 1/10.
    assert bootstrap([0.0, 1.0], [9, 1], confidence=0.4) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_bootstrap_is_the_same_for_the_same_seed():
    values = [0.1, 0.5, 0.7, 0.2, 0.9]
    assert bootstrap(values, resamples=50, seed=3) == bootstrap(values, resamples=50, seed=3)
    assert len({bootstrap(values, resamples=50, seed=seed) for seed in range(10)}) > 1


def test_the_bootstrap_of_many_scenarios_is_that_of_numpy_alone():
    # Blocks of draws are an implementation's matter: 3,000 scenarios take several.
    values = np.random.default_rng(0).random(3000)
    low, high = bootstrap(values, resamples=2000)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.001)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 3000**0.5, rel=0.1)


def test_the_bootstrap_of_nothing_is_nothing():
    assert bootstrap([]) is None
    assert bootstrap([0.0, 0.0], [0, 0]) is None


def test_wrong_counts_are_refused():
    with pytest.raises(ValueError, match="one count for each of the 2 totals, got 3"):
        bootstrap([1.0, 2.0], [1, 1, 1])


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
