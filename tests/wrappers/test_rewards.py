"""AddReward: components that go on adding up."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import pytest

from art_gym import call, say
from art_gym.wrappers import AddReward, Step


def step(env: Any, action: Any = None) -> Any:
    env.reset(seed=0)
    return env.step(action or call("peek"))


def test_the_value_is_added_to_the_reward_and_named(vault: Any) -> None:
    _, reward, _, _, info = step(AddReward(vault(), "style", lambda step: -0.25))
    assert (reward, info["rewards"]) == (0.25, {"peek": 0.5, "style": -0.25})


def test_a_component_of_the_environments_own_is_added_to(vault: Any) -> None:
    _, reward, _, _, info = step(AddReward(vault(), "peek", lambda step: 1))
    assert (reward, info["rewards"]) == (1.5, {"peek": 1.5})


def test_two_of_them_add_up(vault: Any) -> None:
    env = AddReward(AddReward(vault(), "a", lambda step: 0.1), "b", lambda step: 0.2)
    _, reward, _, _, info = step(env, say("Hm."))
    assert info["rewards"] == {"a": 0.1, "b": 0.2}
    assert reward == math.fsum([0.1, 0.2])


def test_many_add_up_to_the_last_bit(vault: Any) -> None:
    env: Any = vault()
    for name, value in (("a", 0.1), ("b", 0.2), ("c", 0.3)):
        env = AddReward(env, name, lambda step, value=value: value)
    # One after the other they would make 0.6000000000000001.
    assert step(env, say("Hm."))[1] == 0.6


def test_an_environment_without_components_gets_one_for_its_own_reward(plain: Any) -> None:
    _, reward, _, _, info = step(AddReward(plain(), "bonus", lambda step: 0.25), call("go"))
    assert (reward, info["rewards"]) == (0.75, {"environment": 0.5, "bonus": 0.25})


def test_components_that_do_not_add_up_to_the_reward_are_left_alone(plain: Any) -> None:
    class Partly(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            *rest, info = self.env.step(action)
            return *rest, {**info, "rewards": {"part": 0.25}}

    _, reward, _, _, info = step(AddReward(Partly(plain()), "bonus", lambda step: 1.0), call("go"))
    assert (reward, info["rewards"]) == (1.5, {"part": 0.25, "bonus": 1.0})


def test_the_function_sees_the_step(vault: Any) -> None:
    seen: list[Step] = []

    def look(step: Step) -> float:
        seen.append(step)
        return 0.0

    env = AddReward(vault(), "look", look)
    env.reset(seed=0, options={"code": 42})
    env.step(call("dial", code=42))
    (only,) = seen
    assert only.action == call("dial", code=42)
    assert [message["content"] for message in only.observation] == ["It opens."]
    assert (only.reward, only.terminated, only.truncated, only.info["metrics"]) == (1.0, True, False, {"success": 1.0})


def test_the_environments_reward_range_no_longer_holds(vault: Any) -> None:
    class Narrow(vault):
        reward_range = (0.0, 1.0)

    assert AddReward(Narrow(), "bonus", lambda step: 9.0).get_wrapper_attr("reward_range") == (-math.inf, math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(vault: Any, value: float) -> None:
    with pytest.raises(ValueError, match="the reward 'odd' must return a finite number, not"):
        step(AddReward(vault(), "odd", lambda step: value))


@pytest.mark.parametrize("value", [None, "much", [1.0], 10**400], ids=["None", "text", "list", "huge"])
def test_a_value_that_is_no_number_is_refused(vault: Any, value: Any) -> None:
    with pytest.raises(TypeError, match="the reward 'odd' must return a number, not"):
        step(AddReward(vault(), "odd", lambda step: value))


def test_values_that_add_up_to_infinity_are_refused(vault: Any) -> None:
    env = AddReward(AddReward(vault(), "a", lambda step: 1.7e308), "b", lambda step: 1.7e308)
    with pytest.raises(ValueError, match="add up to a finite number"):
        step(env)


def test_a_truth_value_counts_as_one_or_nothing(vault: Any) -> None:
    assert step(AddReward(vault(), "said", lambda step: True), say("Hm."))[1] == 1.0
