"""Agents side by side: how much they differ, and whether by more than chance."""

import json
import re
from dataclasses import replace

import pytest

from art_gym.comparison import Comparison
from art_gym.errors import UsageError
from art_gym.evaluation import Evaluation, ScenarioOutcome


def played(agent: str, successes: list[int], *, k: int = 1, rewards: list[float] | None = None, finished: int | None = None) -> Evaluation:
    """An agent that had so many successes in each scenario."""
    finished = k if finished is None else finished
    outcomes = tuple(
        ScenarioOutcome(f"s{number}", number, k, count, finished, reward)
        for number, (count, reward) in enumerate(zip(successes, rewards or map(float, successes), strict=True))
    )
    figures = {"n": k * len(successes), "successes": sum(successes), "low": 0.0, "high": 1.0, "k": k}
    return Evaluation("a/B-v0", agent, **figures, mean_reward=0.0, mean_turns=0.0, invalid_calls=0, scenarios=outcomes)


def test_single_episodes_are_compared_by_mcnemar():
    # Of ten scenarios on which they differ the second wins nine: 2 · (1 + 10) / 2¹⁰.
    first, second = played("old", [1, *[0] * 9, *[1] * 10]), played("new", [0, *[1] * 9, *[1] * 10])
    (difference,) = Comparison.of([first, second]).differences
    assert (difference.first, difference.second, difference.scenarios) == ("old", "new", 20)
    assert difference.success.difference == pytest.approx(8 / 20)
    assert difference.success.p == difference.success.adjusted_p == pytest.approx(22 / 1024)
    assert difference.success.test == "McNemar's exact test, 9 won against 1 lost"
    assert difference.success.low < 0.4 < difference.success.high
    assert difference.success.low > 0


def test_several_episodes_are_compared_by_flipping_scenarios():
    # Differences of the rates: 1/2, 1/2, 1, 0. Only all signs equal reach the sum of 2: two patterns of eight.
    first, second = played("old", [0, 1, 0, 2], k=2), played("new", [1, 2, 2, 2], k=2)
    (difference,) = Comparison.of([first, second]).differences
    assert difference.success.difference == pytest.approx(0.5)
    assert difference.success.p == 2 / 8
    assert difference.success.test == "sign-flip permutation test, all 8 patterns"


def test_rewards_are_compared_over_scenarios_that_both_finished():
    first = failing(played("old", [0] * 60, rewards=[0.1, 0.2, *[0.0] * 58]), 59)
    second = failing(played("new", [0] * 60, rewards=[0.4, 0.3, *[0.0] * 58]), 58)
    (difference,) = Comparison.of([first, second]).differences
    assert (difference.scenarios, difference.success.scenarios) == (60, 60)
    # (0.3 + 0.1) / 58; the last two have no reward of one agent each.
    assert difference.reward.difference == pytest.approx(0.4 / 58)
    assert difference.reward.scenarios == 58
    # Two scenarios differ, both up: two patterns of four.
    assert difference.reward.p == 2 / 4
    assert (difference.left_out, difference.episodes) == ((2, 2), (60, 60))


def test_rewards_are_not_tested_where_one_agent_fails_more_often():
    first, second = played("old", [0] * 60), failing(played("new", [0] * 60), 57, 58, 59)
    (difference,) = Comparison.of([first, second]).differences
    assert (difference.reward.p, difference.reward.low, difference.reward.scenarios) == (None, None, 57)
    assert difference.reward.test == "not tested: 0.0% and 5.0% of the episodes failed, and what failed is seldom like what didn't"
    assert difference.left_out == (3, 3)


def failing(evaluation: Evaluation, *numbers: int) -> Evaluation:
    """The same, with the scenarios of these numbers failed."""
    outcomes = [
        replace(outcome, successes=0, finished=0, reward=0.0) if number in numbers else outcome
        for number, outcome in enumerate(evaluation.scenarios)
    ]
    return replace(evaluation, scenarios=tuple(outcomes))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"env_id": "a/C-v0"}, "env_id is 'a/B-v0' and 'a/C-v0'"),
        ({"env_kwargs": {"high": 3}}, "env_kwargs is {} and {'high': 3}"),
        ({"split": "validation"}, "split is 'test' and 'validation'"),
    ],
)
def test_agents_that_played_different_things_are_not_compared(changed, what):
    first, second = (replace(played(name, [0, 1]), split="test") for name in ("a", "b"))
    with pytest.raises(UsageError, match=re.escape(f"a and b played different things: {what}; let them play the same")):
        Comparison.of([first, replace(second, **changed)])


def test_a_scenario_with_other_options_is_another_one():
    first, second = played("a", [0]), played("b", [0])
    second = replace(second, scenarios=(replace(second.scenarios[0], options="abc"),))
    with pytest.raises(UsageError, match="a and b played no scenario in common"):
        Comparison.of([first, second])


def test_no_interval_says_more_than_the_test():
    # 5 against 0: p is 2/32, above 0.05, so that the interval holds 0; 6 against 0, p is 2/64.
    for won, holds in ((5, True), (6, False)):
        (difference,) = Comparison.of([played("a", [0] * 20), played("b", [1] * won + [0] * (20 - won))]).differences
        assert (difference.success.low <= 0) is holds
    # Of fewer than six scenarios nothing can be told, and there is no interval.
    (difference,) = Comparison.of([played("a", [0] * 5), played("b", [1] * 5)]).differences
    assert (difference.success.low, difference.success.high, difference.success.p) == (None, None, 2 / 32)


def test_the_same_seed_gives_the_same_comparison():
    agents = [played("a", [0, 1, 2] * 20, k=4), played("b", [1, 0, 3] * 20, k=4)]
    assert Comparison.of(agents, seed=3) == Comparison.of(agents, seed=3)
    assert Comparison.of(agents, seed=3).differences[0].success.p != Comparison.of(agents, seed=4).differences[0].success.p


def test_without_a_finished_episode_there_is_no_difference_in_rewards():
    (difference,) = Comparison.of([played("old", [0, 1]), played("new", [0, 0], finished=0)]).differences
    assert difference.reward is None
    assert difference.success.difference == -0.5


def test_scenarios_are_paired_by_what_they_are_and_not_by_their_place():
    first, second = played("old", [1, 0, 1]), played("new", [1, 0, 1])
    reversed_ = Evaluation.from_dict({**second.to_dict(), "scenarios": second.to_dict()["scenarios"][::-1]})
    (difference,) = Comparison.of([first, reversed_]).differences
    assert (difference.success.difference, difference.success.p) == (0.0, 1.0)
    # Those that only one played count for nothing.
    (difference,) = Comparison.of([first, played("short", [1])]).differences
    assert difference.scenarios == 1


def test_a_scenario_that_was_played_twice_is_paired_twice():
    twice = played("old", [1, 0]).to_dict()
    for outcome in twice["scenarios"]:
        outcome["id"], outcome["seed"] = "same", 0
    first, second = Evaluation.from_dict(twice), Evaluation.from_dict({**twice, "agent": "new"})
    (difference,) = Comparison.of([first, second]).differences
    assert (difference.scenarios, difference.success.difference) == (2, 0.0)


def test_every_two_of_three_are_compared_with_holms_correction():
    agents = [played("a", [0] * 8), played("b", [1] * 6 + [0] * 2), played("c", [1] * 8)]
    differences = Comparison.of(agents).differences
    assert [(difference.first, difference.second) for difference in differences] == [("a", "b"), ("a", "c"), ("b", "c")]
    # 2/2⁶, 2/2⁸ and 2/2²; the smallest times 3, the next times 2, the last as it is.
    assert [difference.success.p for difference in differences] == [2 / 64, 2 / 256, 0.5]
    assert [difference.success.adjusted_p for difference in differences] == [2 * 2 / 64, 3 * 2 / 256, 0.5]


def test_one_agent_alone_has_nothing_to_be_compared_with():
    assert Comparison.of([played("a", [1])]).differences == ()


def test_it_goes_through_json_unchanged():
    result = Comparison.of([played("a", [0, 1]), played("b", [1, 1]), played("c", [0, 0], finished=0)])
    assert Comparison.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(ValueError, match="has format 9"):
        Comparison.from_dict({**result.to_dict(), "format": 9})


def test_two_of_one_name_or_with_nothing_in_common_are_refused():
    with pytest.raises(UsageError, match="two agents have the name 'a'"):
        Comparison.of([played("a", [0]), played("a", [1])])
    other = Evaluation.from_dict({**played("b", [0]).to_dict(), "scenarios": []})
    with pytest.raises(UsageError, match="a and b played no scenario in common"):
        Comparison.of([played("a", [0]), other])
