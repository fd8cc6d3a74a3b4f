"""Dynamic sampling: when further scenarios are played, how many, and what becomes of what is too much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.scenarios import Scenario
from art_gym_trainers.advantages import tells_something
from art_gym_trainers.sampling import SampledBatch, sample_batch


class Scenarios:
    """An endless line of scenarios, played in order; `useful` says of which groups tell something."""

    def __init__(self, useful: list[bool], first: int = 0) -> None:
        self.useful, self.first = useful, first
        self.calls: list[tuple[int, int]] = []

    def play(self, played: int, count: int) -> list[EpisodeGroup]:
        self.calls.append((played, count))
        return [group(number, self.tells(number)) for number in range(self.first + played, self.first + played + count)]

    def tells(self, number: int) -> bool:
        return self.useful[number % len(self.useful)]


def group(number: int, useful: bool) -> EpisodeGroup:
    scenario = Scenario(str(number), number)
    return EpisodeGroup(scenario, [episode(scenario, member, float(useful and member)) for member in range(2)])


def episode(scenario: Scenario, member: int, reward: float, *, failed: bool = False) -> Episode:
    turn = Turn([], {"role": "assistant", "content": ""}, reward=reward)
    return Episode(f"{scenario.id}/{member}", "x", scenario, member, turns=[turn], failure=Failure("policy", "gone") if failed else None)


def numbers(groups: list[EpisodeGroup]) -> list[int]:
    return [int(group.scenario.id) for group in groups]


def test_one_round_is_the_batch_whatever_it_tells() -> None:
    scenarios = Scenarios([False])
    batch = sample_batch(scenarios.play, 4, tells_something)
    assert (numbers(batch.groups), batch.surplus, batch.rounds) == ([0, 1, 2, 3], [], 1)


def test_a_batch_that_is_full_at_once_plays_no_more() -> None:
    scenarios = Scenarios([True])
    assert sample_batch(scenarios.play, 4, tells_something, max_rounds=9).rounds == 1
    assert scenarios.calls == [(0, 4)]


def test_further_rounds_play_what_is_missing_by_the_share_that_was_useful() -> None:
    # Half of them are useful: 2 of the first 4; the 2 that are missing take 4 more.
    scenarios = Scenarios([True, False])
    batch = sample_batch(scenarios.play, 4, tells_something, max_rounds=9)
    assert scenarios.calls == [(0, 4), (4, 4)]
    assert numbers(batch.groups) == [0, 1, 2, 3, 4, 5, 6]
    assert numbers(batch.surplus) == [7]


def test_after_the_last_round_the_batch_is_what_it_is() -> None:
    scenarios = Scenarios([True] + [False] * 99)
    batch = sample_batch(scenarios.play, 4, tells_something, max_rounds=3)
    assert scenarios.calls == [(0, 4), (4, 4), (8, 4)]
    assert sum(map(tells_something, batch.groups)) == 1


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 8), st.integers(1, 5))
def test_no_scenario_is_skipped_or_used_twice(useful: list[bool], size: int, max_rounds: int) -> None:
    first, trained = 0, []
    for _ in range(3):
        batch = sample_batch(Scenarios(useful, first).play, size, tells_something, max_rounds=max_rounds)
        assert numbers(batch.played) == list(range(first, first + len(batch.played)))
        kept = [group for group in batch.groups if tells_something(group)]
        assert len(kept) <= size
        assert len(kept) == size or batch.rounds == max_rounds
        assert not batch.surplus or len(kept) == size
        trained += numbers(kept)
        first += len(batch.played)
    assert len(set(trained)) == len(trained)


def test_a_batch_that_is_played_again_after_a_kill_is_the_same() -> None:
    def batch() -> SampledBatch:
        return sample_batch(Scenarios([True, False, False], first=5).play, 4, tells_something, max_rounds=9)

    assert (numbers(batch().groups), numbers(batch().surplus)) == (numbers(batch().groups), numbers(batch().surplus))


@pytest.mark.parametrize(("rewards", "failed", "tells"), [((0.0, 1.0), False, True), ((0.0, 1.0), True, False), ((0.5, 0.5), False, False)])
def test_groups_that_failed_or_are_all_alike_tell_nothing(rewards: tuple[float, float], failed: bool, tells: bool) -> None:
    scenario = Scenario("s", 0)
    played = EpisodeGroup(scenario, [episode(scenario, 0, rewards[0]), episode(scenario, 1, rewards[1], failed=failed)])
    assert tells_something(played) is tells
