"""Advantages, with values worked out by hand and against TRL's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.scenarios import Scenario
from art_gym_trainers.advantages import AdvantageScheme, batch_advantages, group_advantages, returns_to_go, tells_something

SCHEMES = get_args(AdvantageScheme)


def played(member: int, *rewards: float, scenario: str = "s", failed: bool = False) -> Episode:
    turns = [Turn([], {"role": "assistant", "content": ""}, reward=reward) for reward in rewards]
    failure = Failure("policy", "gone") if failed else None
    return Episode(f"{scenario}{member}", "x", Scenario(scenario, 0), member, turns=turns, failure=failure)


def group(*episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(episodes[0].scenario, list(episodes))


# mean 0.25, squared deviations 0.5625 + 3 * 0.0625 = 0.75, sample variance 0.25, deviation 0.5
@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("group_std", [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
        # The others' mean is 0 for the first, 1/3 for the rest.
        ("leave_one_out", [1.0, *[-1 / 3] * 3]),
        # The batch: 1, 0, 0, 0, 2, 2. Mean 5/6; squared deviations 1/36 + 3 * 25/36 + 2 * 49/36 = 174/36; sample variance 174/180.
        ("batch_std", [value / (math.sqrt(174 / 180) + 1e-4) for value in (0.75, -0.25, -0.25, -0.25)]),
    ],
)
def test_returns_are_compared_as_the_scheme_says(scheme: AdvantageScheme, expected: list[float]) -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], scheme, batch=[1.0, 0.0, 0.0, 0.0, 2.0, 2.0]) == pytest.approx(expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("returns", [[], [1.0], [0.2] * 8, [0.1 + 0.2, 0.3], [1e9, 1e9 + 1e-6]])
def test_a_group_that_tells_nothing_has_zero_advantages(returns: list[float], scheme: AdvantageScheme) -> None:
    assert group_advantages(returns, scheme, batch=[*returns, 5.0, 7.0]) == [0.0] * len(returns)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([0.0, reward])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=10), st.sampled_from(SCHEMES))
def test_a_groups_advantages_add_up_to_nothing_and_keep_the_order(returns: list[float], scheme: AdvantageScheme) -> None:
    advantages = group_advantages(returns, scheme)
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6 * max(1.0, *map(abs, advantages)))
    assert [value for _, value in sorted(zip(returns, advantages, strict=True))] == sorted(advantages)


def test_failed_episodes_neither_get_an_advantage_nor_count_in_the_baseline() -> None:
    failing = group(played(0, 1.0), played(1, 0.0), played(2, 8.0, failed=True))
    assert batch_advantages([failing], "group_mean") == [{"s0": [0.5], "s1": [-0.5]}]
    assert batch_advantages([failing], "group_mean", credit="turn") == [{"s0": [0.5], "s1": [-0.5]}]
    # With the failed episode's 8 the deviation of the batch would be another.
    assert batch_advantages([failing], "batch_std")[0]["s0"] == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4)])


def test_the_deviation_of_the_batch_counts_groups_that_tell_nothing() -> None:
    telling, alike = group(played(0, 1.0), played(1, 0.0)), group(played(0, 1.0, scenario="t"), played(1, 1.0, scenario="t"))
    # 1, 0, 1, 1: mean 3/4, squared deviations 3/16 + 9/16, sample variance 1/4.
    first, second = batch_advantages([telling, alike], "batch_std")
    assert first == {"s0": pytest.approx([0.5 / 0.5001]), "s1": pytest.approx([-0.5 / 0.5001])}
    assert second == {"t0": [0.0], "t1": [0.0]}


def test_returns_to_go_are_discounted_by_the_turn() -> None:
    assert returns_to_go([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert returns_to_go([1.0, 0.0, 4.0]) == [5.0, 4.0, 4.0]
    assert returns_to_go([]) == []


def test_credit_by_turn_compares_what_is_still_earned_among_those_that_came_so_far() -> None:
    # Returns-to-go with discount 0.5: (0.5 + 0.5 * 1, 1), (0 + 0.5 * 0, 0), (2,).
    turns = group(played(0, 0.5, 1.0), played(1, 0.0, 0.0), played(2, 2.0))
    (by_turn,) = batch_advantages([turns], "group_mean", credit="turn", discount=0.5)
    # First turn: 1, 0, 2, mean 1. Second turn: 1, 0, mean 0.5.
    assert by_turn == {"s0": [0.0, 0.5], "s1": [-1.0, -0.5], "s2": [1.0]}
    (alone,) = batch_advantages([turns], "leave_one_out", credit="turn", discount=0.5)
    assert alone == {"s0": [0.0, 1.0], "s1": [-1.5, -1.0], "s2": [1.5]}


def test_a_turn_that_only_one_episode_came_to_has_no_advantage() -> None:
    (by_turn,) = batch_advantages([group(played(0, 0.0, 0.0, 3.0), played(1, 0.0))], "group_std", credit="turn")
    # 3 and 0 at the first turn: 1.5 off the mean, deviation sqrt(4.5).
    assert by_turn == {"s0": [pytest.approx(1.5 / (math.sqrt(4.5) + 1e-4)), 0.0, 0.0], "s1": [pytest.approx(-1.5 / (math.sqrt(4.5) + 1e-4))]}


def test_a_group_whose_returns_are_equal_may_tell_something_of_its_turns() -> None:
    equal = group(played(0, 1.0, 0.0), played(1, 0.0, 1.0))
    assert not tells_something(equal)
    assert tells_something(equal, credit="turn")
    assert batch_advantages([equal], "group_mean", credit="turn") == [{"s0": [0.0, -0.5], "s1": [0.0, 0.5]}]


def test_episodes_without_turns_are_no_trouble() -> None:
    empty = group(played(0), played(1))
    for credit in ("episode", "turn"):
        assert batch_advantages([empty], credit=credit) == [{"s0": [], "s1": []}]
        assert not tells_something(empty, credit=credit)
    assert batch_advantages([group(played(0, 1.0, failed=True))], credit="turn") == [{}]


RETURNS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5, 0.5, -2.0, 3.0, 0.1, 0.7]
"""Three groups of four."""


@pytest.mark.train
@pytest.mark.parametrize(("scheme", "scale_rewards"), [("group_std", "group"), ("group_mean", "none"), ("batch_std", "batch")])
def test_they_are_what_trl_computes_for_grpo(scheme: AdvantageScheme, scale_rewards: str, tiny_model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    assert ours(scheme) == pytest.approx(theirs(trl.GRPOTrainer, trl.GRPOConfig, tiny_model, tmp_path, scale_rewards=scale_rewards), abs=1e-5)


@pytest.mark.train
def test_they_are_what_trl_computes_for_rloo(tiny_model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    assert ours("leave_one_out") == pytest.approx(theirs(trl.RLOOTrainer, trl.RLOOConfig, tiny_model, tmp_path), abs=1e-5)


def ours(scheme: AdvantageScheme) -> list[float]:
    names = "abc"
    groups = [group(*(played(member, RETURNS[4 * index + member], scenario=name) for member in range(4))) for index, name in enumerate(names)]
    return [values[0] for by_episode in batch_advantages(groups, scheme) for values in by_episode.values()]


def theirs(trainer_class: Any, config_class: Any, model: Path, folder: Path, **options: Any) -> list[float]:
    """TRL's advantages for replies of its own, which are rewarded with our returns in order."""
    from datasets import Dataset

    config = config_class(
        output_dir=str(folder), num_generations=4, per_device_train_batch_size=12, max_completion_length=1, use_cpu=True, bf16=False,
        report_to="none", beta=0.0, **options,
    )  # fmt: skip
    trainer = trainer_class(
        str(model), reward_funcs=lambda **_: list(RETURNS), args=config, train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c"]})
    )
    inputs = [{"prompt": prompt} for prompt in "abc" for _ in range(4)]
    return trainer._generate_and_score_completions(inputs)["advantages"].tolist()


def branch(parent: Episode, number: int, turn: int, *rewards: float) -> Episode:
    child = played(parent.member, *[each.reward for each in parent.turns[:turn]], *rewards)
    child.id, child.parent, child.shared_turns = f"{parent.id}~{number}", parent.id, turn
    parent.branches.append(turn)
    return child


def test_credit_by_tree_compares_places_with_the_group_and_with_the_place_before() -> None:
    trunk, other = played(0, 0.0, 0.0, 1.0), played(1, 0.0, 0.0)
    first, second = branch(trunk, 0, 1, 0.0, 0.0), branch(trunk, 1, 1, 0.0)
    (found,) = batch_advantages([group(trunk, first, second, other)], "group_mean", credit="tree")
    # V(root) = 1/4. Through the place before turn 1 of the trunk went three episodes, with a mean return of 1/3.
    assert found["s0"] == pytest.approx([(2 / 3 - 1 / 4 - 1 / 4) / math.sqrt(3), 2 - 1 / 4 - 1 / 3, 2 - 1 / 4 - 1 / 3])
    assert found["s0~0"] == pytest.approx([0.0, -1 / 4 - 1 / 3, -1 / 4 - 1 / 3])
    assert found["s0~1"] == pytest.approx([0.0, -1 / 4 - 1 / 3])
    assert found["s1"] == pytest.approx([-1 / 2, -1 / 2])
    (scaled,) = batch_advantages([group(trunk, first, second, other)], "group_std", credit="tree")
    assert scaled["s1"] == pytest.approx([-0.5 / 0.5001] * 2)


def test_credit_by_tree_counts_branches_of_branches_and_leaves_failed_episodes_out() -> None:
    trunk = played(0, 0.0, 0.0, 0.0)
    child = branch(trunk, 0, 1, 0.0, 1.0)
    grandchild = branch(child, 0, 2, 1.0)
    failed = branch(trunk, 1, 1, 5.0)
    failed.failure = Failure("policy", "gone")
    (found,) = batch_advantages([group(trunk, child, grandchild, failed)], "group_mean", credit="tree")
    # Three finished, with a mean return of 2/3, all through the place before turn 1; two through the child's before turn 2, both with 1.
    assert found["s0"] == pytest.approx([0.0, -4 / 3, -4 / 3])
    assert found["s0~0"] == pytest.approx([0.0, (2 - 4 / 3) / math.sqrt(2), 2 - 2 / 3 - 1])
    assert found["s0~0~0"] == pytest.approx([0.0, 0.0, 2 - 2 / 3 - 1])
    assert "s0~1" not in found


def test_credit_by_tree_is_that_by_episode_doubled_where_nothing_branched() -> None:
    episodes = [played(0, 0.0, 1.0), played(1, 0.0), played(2, 0.5)]
    (tree,) = batch_advantages([group(*episodes)], "group_mean", credit="tree")
    (plain,) = batch_advantages([group(*episodes)], "group_mean")
    assert tree == {id: pytest.approx([2 * value for value in values]) for id, values in plain.items()}


def test_credit_by_tree_with_equal_returns_is_nothing_and_leave_one_out_is_refused() -> None:
    trunk = played(0, 0.0, 0.5)
    same = group(trunk, branch(trunk, 0, 1, 0.5))
    assert batch_advantages([same], "group_std", credit="tree") == [{"s0": [0.0, 0.0], "s0~0": [0.0, 0.0]}]
    assert not tells_something(same, credit="tree")
    with pytest.raises(ValueError, match="group_std, group_mean or batch_std"):
        batch_advantages([same], "leave_one_out", credit="tree")
