"""Arguments that can't be right are told at once, in one line with the way out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import art_gym
from art_gym import Episode, EpisodeStore, Scenario, UsageError, replay
from art_gym.wrappers import AddReward, Record, Redact, TokenLimit, Transcript, TurnLimit

NAN, INF = float("nan"), float("inf")


def refused(kind: type[Exception], words: str, make: Any) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


MAKERS: dict[str, Any] = {
    "Transcript": Transcript,
    "AddReward": lambda env: AddReward(env, "bonus", lambda step: 0.0),
    "TurnLimit": lambda env: TurnLimit(env, 3),
    "TokenLimit": lambda env: TokenLimit(env, 3),
    "Redact": lambda env: Redact(env, "a"),
    "Record": lambda env: Record(env, "run"),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("env", "shown", "way_out"),
    [
        (None, "None", "art_gym.make"),
        ("art_gym/GuessNumber-v0", "an id", "art_gym.make('art_gym/GuessNumber-v0')"),
        (3, "3", "art_gym.make"),
        (gymnasium.Env, "class Env", "Env()"),
        (lambda: None, "function", "call it"),
    ],
    ids=["None", "id", "number", "class", "function"],
)
def test_an_environment_is_an_instance(name: str, env: Any, shown: str, way_out: str) -> None:
    refused(TypeError, f"{name} needs an environment, not ", lambda: MAKERS[name](env))
    refused(TypeError, shown, lambda: MAKERS[name](env))
    refused(TypeError, way_out, lambda: MAKERS[name](env))


@pytest.mark.parametrize("name", ["Transcript", "TokenLimit", "Redact", "Record"])
def test_an_environment_of_something_else_than_messages_is_told_at_its_reset(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    env = MAKERS[name](gymnasium.make("CartPole-v1"))
    refused(TypeError, "an observation must be a tuple of chat messages, not array(", lambda: env.reset(seed=0))


@pytest.mark.parametrize("name", ["Transcript", "TokenLimit", "Redact"])
@pytest.mark.parametrize("observation", [None, "text", {"role": "user"}, ("text",)], ids=repr)
def test_a_step_that_returns_something_else_is_told(plain: Any, name: str, observation: Any) -> None:
    class Odd(plain):
        def step(self, action: Any) -> Any:
            return observation, 0.0, False, False, {}

    env = MAKERS[name](Odd())
    env.reset(seed=0)
    refused(TypeError, f"an observation must be a tuple of chat messages, not {observation!r}", lambda: env.step(art_gym.say("Hm.")))


@pytest.mark.parametrize("limit", [0, -1, True, False, 2.0, NAN, INF, -INF, "3", None, [3], np.bool_(True), np.float64(2)], ids=repr)
@pytest.mark.parametrize("wrapper", [TurnLimit, TokenLimit])
def test_a_limit_is_a_positive_integer(vault: Any, wrapper: Any, limit: Any) -> None:
    name = "max_turns" if wrapper is TurnLimit else "max_tokens"
    refused(ValueError, f"{name} must be an integer of at least 1, not {limit!r}", lambda: wrapper(vault(), limit))


def test_a_limit_may_be_an_integer_of_numpys(vault: Any) -> None:
    assert repr(TurnLimit(vault(), np.int64(2)).max_turns) == "2"


@pytest.mark.parametrize("function", [None, 0.5, "bonus", [len]], ids=repr)
def test_a_reward_is_a_function(vault: Any, function: Any) -> None:
    refused(TypeError, "function must take a step and return a number, and ", lambda: AddReward(vault(), "a", function))


@pytest.mark.parametrize("name", [None, "", 0.5, True, ["bonus"]], ids=repr)
def test_a_reward_has_a_name(vault: Any, name: Any) -> None:
    refused(ValueError, f"name must be the name of a reward component, not {name!r}", lambda: AddReward(vault(), name, abs))


def test_a_function_is_no_async_one_and_a_reward_no_text(vault: Any) -> None:
    async def later(step: Any) -> Any:
        return 0.5

    for make in (lambda: AddReward(vault(), "a", later), lambda: TokenLimit(vault(), 5, later), lambda: Redact(vault(), later)):
        refused(TypeError, " is async: make it a plain function", make)
    env = AddReward(vault(), "a", lambda step: "0.5")
    env.reset(seed=0)
    refused(TypeError, "the function of the reward 'a' must return a number, not '0.5'", lambda: env.step(art_gym.say("Hm.")))


@pytest.mark.parametrize("count", [3, "gpt2", True, [len]], ids=repr)
def test_a_counter_is_a_function(vault: Any, count: Any) -> None:
    refused(TypeError, "count must take a message and return its tokens, and ", lambda: TokenLimit(vault(), 5, count))


@pytest.mark.parametrize(
    ("patterns", "shown"),
    [
        (None, "None"),
        (3, "3"),
        (True, "True"),
        (NAN, "nan"),
        (b"a", "b'a'"),
        ({"a": "b"}, "{'a': 'b'}"),
        ([3], "3"),
        (["a", None], "None"),
        ([["a"]], "['a']"),
        (re.compile("a"), "re.compile('a')"),
    ],
    ids=repr,
)
def test_patterns_are_texts(vault: Any, patterns: Any, shown: str) -> None:
    refused(TypeError, f"patterns must be regular expressions as text, or a function, not {shown}", lambda: Redact(vault(), patterns))


def test_the_text_of_a_compiled_pattern_is_named(vault: Any) -> None:
    compiled = [re.compile("a|b")]
    refused(TypeError, "write its text, 'a|b', with flags such as (?i) in front", lambda: Redact(vault(), compiled))  # type: ignore[arg-type]


@pytest.mark.parametrize("replacement", [None, 3, b"a", ["a"]], ids=repr)
def test_a_replacement_is_text(vault: Any, replacement: Any) -> None:
    refused(TypeError, f"replacement must be text, not {replacement!r}", lambda: Redact(vault(), "a", replacement))


@pytest.mark.parametrize("folder", [None, 3, b"run", ["run"], True], ids=repr)
def test_a_folder_is_a_path(vault: Any, folder: Any) -> None:
    refused(TypeError, f"folder must be the path of a folder, not {folder!r}", lambda: Record(vault(), folder))
    refused(TypeError, f"folder must be the path of a folder, not {folder!r}", lambda: EpisodeStore(folder))


@pytest.mark.parametrize("label", [None, 3, b"a", ["a"], True, "", "a/b"], ids=repr)
def test_a_label_is_a_file_name(vault: Any, tmp_path: Path, label: Any) -> None:
    refused(UsageError, f"{label!r} can't label episodes: use up to 100 letters", lambda: Record(vault(), tmp_path, label))
    assert os.listdir(tmp_path) == []


def test_options_must_be_json(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    with pytest.raises(UsageError, match=r"the options of reset can't be recorded as JSON .*: \{'code': \{5\}\}; pass JSON values only"):
        env.reset(seed=3, options={"code": {5}})


@pytest.mark.parametrize("options", [3, [1], "x", [("a", 1)]], ids=repr)
def test_options_are_a_dictionary(vault: Any, tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError, match=rf"the options of reset must be a dictionary, or None, not {re.escape(repr(options))}"):
        Record(vault(), tmp_path).reset(seed=3, options=options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", ["x", 1.5, [3]], ids=repr)
def test_a_seed_is_an_integer(vault: Any, tmp_path: Path, seed: Any) -> None:
    with pytest.raises(UsageError, match=rf"the seed of reset must be an integer of at least 0, or None, not {re.escape(repr(seed))}"):
        Record(vault(), tmp_path).reset(seed=seed)


def test_a_seed_may_be_an_integer_of_numpys(vault: Any, tmp_path: Path) -> None:
    env: Any = Record(vault(), tmp_path)
    assert env.reset(seed=np.int64(3)) == vault().reset(seed=3)


EPISODE = Episode("e", "Vault", Scenario("s", 3))


@pytest.mark.parametrize("episode", [None, {}, "e", EPISODE.to_dict(), [EPISODE], Episode], ids=lambda value: type(value).__name__)
def test_what_is_replayed_is_an_episode(vault: Any, episode: Any) -> None:
    for env in (vault, vault(), "art_gym/GuessNumber-v0"):
        refused(TypeError, "episode must be an art_gym.Episode, not ", lambda env=env: replay(env, episode))


def test_a_way_to_an_episode_is_named(vault: Any) -> None:
    refused(TypeError, "Episode.from_dict makes one of its JSON data", lambda: replay(vault, EPISODE.to_dict()))  # type: ignore[arg-type]
    refused(TypeError, "replay them one at a time", lambda: replay(vault, [EPISODE]))  # type: ignore[arg-type]


@pytest.mark.parametrize("env", [None, 3, [], b"art_gym/GuessNumber-v0"], ids=repr)
def test_what_an_episode_is_replayed_in_is_an_environment(env: Any) -> None:
    refused(TypeError, f"env must be an environment, its id, or a function that makes one, not {env!r}", lambda: replay(env, EPISODE))


@pytest.mark.parametrize("made", [None, 3, gymnasium.Env], ids=repr)
def test_the_function_that_makes_one_returns_one(made: Any) -> None:
    refused(TypeError, f"env must be a function that makes an environment, and it returned {made!r}", lambda: replay(lambda: made, EPISODE))


def test_a_vector_of_environments_is_none() -> None:
    envs: Any = gymnasium.make_vec("CartPole-v1", num_envs=1)
    refused(TypeError, "env must be an environment, its id, or a function that makes one, not", lambda: replay(envs, EPISODE))
    refused(TypeError, "Transcript needs an environment, not", lambda: Transcript(envs))
    envs.close()
