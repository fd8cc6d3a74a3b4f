"""GuessNumber: the hints, the rewards, the options."""

from __future__ import annotations

from typing import Any

import pytest

from art_gym import call, make, say
from art_gym_envs import GuessNumber


def started(seed: int = 0, **options: Any) -> GuessNumber:
    env = GuessNumber(**options)
    env.reset(seed=seed)
    return env


def test_the_opening() -> None:
    observation, _ = GuessNumber(low=2, high=9).reset(seed=0)
    assert [message["content"] for message in observation] == ["Find the secret number from 2 to 9 by calling guess.", "Make your first guess."]


def test_hints_and_outcome() -> None:
    env = started()
    env.secret = 7
    results = [env.step(call("guess", number=number)) for number in (3, 9, 7)]
    assert [result[0][0]["content"] for result in results] == ["Higher.", "Lower.", "Correct."]
    assert [result[1] for result in results] == [0.0, 0.0, 1.0]
    assert [result[2] for result in results] == [False, False, True]
    assert [result[4]["metrics"]["success"] for result in results] == [0.0, 0.0, 1.0]


def test_halving_finds_every_number_in_five() -> None:
    for seed in range(60):
        env = started(seed)
        low, high, done = 1, 16, False
        while not done:
            guess = (low + high) // 2
            observation, reward, done, truncated, _ = env.step(call("guess", number=guess))
            assert not truncated
            low, high = (guess + 1, high) if observation[0]["content"] == "Higher." else (low, guess - 1)
        assert reward == 1.0


def test_secrets_cover_the_range() -> None:
    assert {started(seed, low=-1, high=2).secret for seed in range(60)} == {-1, 0, 1, 2}


def test_zero_is_a_number() -> None:
    env = started(low=0, high=1)
    env.secret = 0
    assert env.step(call("guess", number=0))[2]


def test_out_of_range_is_told() -> None:
    observation, *_, info = started().step(call("guess", number=17))
    assert observation[0]["content"] == "invalid arguments: 'number' should be less than or equal to 16, got 17"
    assert info["invalid_calls"] == 1


def test_an_episode_without_the_number_is_truncated_without_success() -> None:
    env = started(max_turns=2)
    env.secret = 7
    env.step(say("Is it 3?"))
    _, reward, terminated, truncated, info = env.step(call("guess", number=1))
    assert (reward, terminated, truncated, info["metrics"]) == (0.0, False, True, {"success": 0.0})


def test_text_is_nudged() -> None:
    assert started().step(say("Is it 3?"))[0] == ({"role": "user", "content": "Call guess."},)


@pytest.mark.parametrize("options", [{"low": 2, "high": 1}, {"low": 1.5}, {"high": True}, {"max_turns": 0}, {"low": None}], ids=str)
def test_options_that_make_no_task_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        GuessNumber(**options)


def test_registered() -> None:
    assert isinstance(make("art_gym/GuessNumber-v0").unwrapped, GuessNumber)
