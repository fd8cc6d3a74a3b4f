"""Every registered environment keeps Gymnasium's contract."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import art_gym

pytestmark = pytest.mark.filterwarnings("error")

ENV_IDS = ["art_gym/GuessNumber-v0", "art_gym/Lookup-v0"]


@pytest.fixture(params=ENV_IDS)
def env_id(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


def test_none_is_left_out() -> None:
    assert [id_ for id_ in art_gym.env_ids() if id_.startswith("art_gym/")] == ENV_IDS


def test_check_env_has_nothing_to_say(env_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    check_env(gymnasium.make(f"art_gym_envs:{env_id}").unwrapped)
    assert "WARN" not in capsys.readouterr().err


def test_the_spec_survives_json(env_id: str) -> None:
    spec = art_gym.make(env_id, max_turns=3).spec
    assert spec is not None
    again: Any = gymnasium.make(EnvSpec.from_json(spec.to_json())).unwrapped
    assert (again.max_turns, again.spec) == (3, spec)


def test_pickling_in_the_middle_of_an_episode(env_id: str) -> None:
    env = art_gym.make(env_id)
    env.reset(seed=3)
    env.step(art_gym.call("nothing_of_that_name"))
    twin = pickle.loads(pickle.dumps(env))
    env.action_space.seed(1)
    action = env.action_space.sample()
    assert env.step(action) == twin.step(action)


def test_the_action_space_follows_the_options() -> None:
    env: Any = art_gym.make("art_gym/GuessNumber-v0", low=5, high=6)
    assert env.action_space.tools["guess"]["properties"]["number"] == {"type": "integer", "minimum": 5, "maximum": 6}


@pytest.mark.parametrize("copied", [True, False], ids=["copy", "no copy"])
@pytest.mark.parametrize("observation_mode", ["same", "different"])
@pytest.mark.parametrize("autoreset", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments(env_id: str, mode: str, autoreset: AutoresetMode, observation_mode: str, copied: bool) -> None:
    options = {"autoreset_mode": autoreset, "observation_mode": observation_mode, "copy": copied}
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, vector_kwargs=options)
    single = art_gym.make(env_id)
    try:
        observations, infos = envs.reset(seed=5)
        assert tuple(observations) == tuple(single.reset(seed=5 + index)[0] for index in range(2))
        envs.action_space.seed(0)
        ended = 0
        for _ in range(12):
            observations, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
            assert tuple(observations) in envs.observation_space
            assert (rewards.dtype, infos["turn"].dtype, infos["truncation"].dtype) == (np.float64, np.int64, np.dtype(object))
            over = np.logical_or(terminated, truncated)
            ended += int(over.sum())
            if autoreset is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
        assert ended >= 2
    finally:
        envs.close()


def test_async_is_what_make_vec_gives_by_name_alone(env_id: str) -> None:
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode="async")
    try:
        observations, _ = envs.reset(seed=0)
        assert observations in envs.observation_space
        envs.step(envs.action_space.sample())
    finally:
        envs.close()
