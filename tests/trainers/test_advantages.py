"""Group advantages, with values worked out by hand."""

from __future__ import annotations

import math

import pytest

from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.scenarios import Scenario
from art_gym_trainers.advantages import episode_advantages, group_advantages


def test_the_group_mean_is_taken_off_and_the_sample_deviation_divided_by() -> None:
    # mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, sample variance 0.25, deviation 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])


def test_without_scale_only_the_mean_is_taken_off() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scale="none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[], [1.0], [0.2] * 8, [0.1 + 0.2, 0.3]])
def test_a_group_that_tells_nothing_has_zero_advantages(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([0.0, reward])


def test_failed_episodes_neither_get_an_advantage_nor_count_in_the_baseline() -> None:
    def played(member: int, reward: float, failed: bool = False) -> Episode:
        turn = Turn([], {"role": "assistant", "content": ""}, reward=reward)
        return Episode(f"e{member}", "x", Scenario("s", 0), member, turns=[turn], failure=Failure("policy", "gone") if failed else None)

    group = EpisodeGroup(Scenario("s", 0), [played(0, 1.0), played(1, 0.0), played(2, 0.0, failed=True)])
    assert episode_advantages(group, "none") == {"e0": 0.5, "e1": -0.5}
