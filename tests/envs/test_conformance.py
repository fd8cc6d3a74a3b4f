"""Every bundled environment keeps every contract."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

import art_gym
from art_gym.testing import conformance_tests

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.slow]

ENV_IDS = ["art_gym/GuessNumber-v0", "art_gym/Lookup-v0"]

test_conformance = conformance_tests("art_gym_envs", examples=300)


def test_none_is_left_out() -> None:
    assert [id_ for id_ in art_gym.env_ids() if id_.startswith("art_gym/")] == ENV_IDS


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_the_spec_carries_the_options(env_id: str) -> None:
    spec = art_gym.make(env_id, max_turns=3).spec
    assert spec is not None
    again: Any = gymnasium.make(EnvSpec.from_json(spec.to_json())).unwrapped
    assert (again.max_turns, again.spec) == (3, spec)


def test_the_action_space_follows_the_options() -> None:
    env: Any = art_gym.make("art_gym/GuessNumber-v0", low=5, high=6)
    assert env.action_space.tools["guess"]["properties"]["number"] == {"type": "integer", "minimum": 5, "maximum": 6}


@pytest.mark.parametrize("env_id", ENV_IDS)
def test_async_is_what_make_vec_gives_by_name_alone(env_id: str) -> None:
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode="async")
    try:
        observations, _ = envs.reset(seed=0)
        assert observations in envs.observation_space
        envs.step(envs.action_space.sample())
    finally:
        envs.close()
