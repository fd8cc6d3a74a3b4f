"""Registration: ids, options, and the errors that name the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from art_gym import MissingExtra, ToolEnv, UsageError, env_ids, make, register, tool

GUESS = "art_gym_envs.guess_number:GuessNumber"


class Plain(ToolEnv):
    """Registered with Gymnasium directly, under a class."""

    @tool
    def look(self) -> str:
        return "a room"


class Picky(ToolEnv):
    def __init__(self, size: int = 3) -> None:
        if size < 1:
            raise ValueError("size must be positive")
        super().__init__()


class Down(ToolEnv):
    def __init__(self) -> None:
        raise RuntimeError("db\ndown")


class Silent(ToolEnv):
    def __init__(self) -> None:
        raise KeyError


class NeedsExtra(ToolEnv):
    def __init__(self) -> None:
        raise MissingExtra("the map", extra="maps", package="maps")


def test_a_registered_environment_is_made_with_its_options() -> None:
    register("tests/Small-v0", GUESS, high=4)
    env: Any = make("tests/Small-v0")
    assert (env.low, env.high, env.unwrapped is env) == (1, 4, True)
    other: Any = gymnasium.make("tests/Small-v0", low=2)
    assert (other.unwrapped.low, other.unwrapped.high) == (2, 4)


@pytest.mark.filterwarnings("error")
def test_registering_the_same_again_does_nothing() -> None:
    for _ in range(2):
        register("tests/Small-v0", GUESS, high=4)


@pytest.mark.parametrize(("entry_point", "options"), [(GUESS, {"high": 5}), ("art_gym_envs.lookup:Lookup", {"high": 4})])
def test_registering_something_else_under_the_same_id_is_an_error(entry_point: str, options: Any) -> None:
    register("tests/Small-v0", GUESS, high=4)
    with pytest.raises(UsageError, match=r"tests/Small-v0 is registered already.*choose another name or version"):
        register("tests/Small-v0", entry_point, **options)
    assert gymnasium.spec("tests/Small-v0").kwargs == {"high": 4}


@pytest.mark.parametrize(
    ("id_", "entry_point", "options", "text"),
    [
        *(
            (id_, GUESS, {}, "form namespace/Name-v0")
            for id_ in (
                "two words",
                "A-v0",
                "tests/A",
                "tests/A-v",
                "tests/A-v00",
                "tests/A-v0\n",
                "tests:a/A-v0",
                "tests/A:b-v0",
                "module:tests/A-v0",
                "",
                None,
                3,
            )
        ),
        ("tests/A-v0", "no_colon", {}, "form 'package.module:Class'"),
        ("tests/A-v0", Plain, {}, "form 'package.module:Class'"),
        ("tests/A-v0", GUESS, {"x": object()}, "JSON-serialisable"),
        ("tests/A-v0", GUESS, {"x": (1, 2)}, "stay the same through JSON"),
    ],
)
def test_what_cannot_be_registered(id_: Any, entry_point: Any, options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        register(id_, entry_point, **options)


def test_specs_survive_json() -> None:
    register("tests/Small-v0", GUESS, high=4)
    spec = EnvSpec.from_json(gymnasium.spec("tests/Small-v0").to_json())
    assert spec == gymnasium.spec("tests/Small-v0")
    assert gymnasium.make(spec).unwrapped.high == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("env_id", "options", "text"),
    [
        ("art_gym/Lokup-v0", {}, r"unknown environment 'art_gym/Lokup-v0'; did you mean 'art_gym/Lookup-v0'\?"),
        ("art_gym/Lookup-v7", {}, "did you mean 'art_gym/Lookup-v0'"),
        ("Zap", {}, "unknown environment 'Zap'; `art-gym envs` lists"),
        ("a b", {}, "unknown environment 'a b'"),
        ("", {}, "unknown environment ''"),
        ("no_such_package:x/Y-v0", {}, "can't import 'no_such_package'.*is it installed"),
        ("art_gym/Lookup-v0", {"poeple": 3}, r"has no option 'poeple'; did you mean 'people'\? its options are: people, topics, max_turns"),
        ("art_gym/Lookup-v0", {"people": 99}, "people must be an integer from 1 to 32, got 99"),
        ("art_gym/GuessNumber-v0", {"low": 9, "high": 3}, "low must not be above high, got low=9 and high=3"),
        ("art_gym/GuessNumber-v0", {"low": "a"}, "low must be an integer, got 'a'"),
        ("art_gym/GuessNumber-v0", {"render_mode": "rgb"}, "render_mode must be one of ansi, human, not 'rgb'$"),
        ("art_gym/Lookup-v0", {"render_mode": 3}, "render_mode must be one of ansi, human, not 3$"),
        (".foo:art_gym/Lookup-v0", {}, "can't import '.foo' for '.foo:art_gym/Lookup-v0': .*write package:namespace/Name-v0"),
        ("..:art_gym/Lookup-v0", {}, "can't import '..' for"),
        (
            "tests/Down-v0",
            {},
            r"^tests/Down-v0 can't be made with {}: its constructor raised RuntimeError: db down at .*test_registration\.py:\d+; ",
        ),
        ("tests/Silent-v0", {}, "its constructor raised KeyError at "),
        ("tests/NoEnv-v0", {}, "can't be made with {}: The environment must inherit from the gymnasium.Env class"),
        ("tests/NoEntry-v0", {}, "its entry point 'collections:OrderedDict:x' can't be loaded"),
        ("tests/BrokenModule-v0", {}, "its entry point 'broken_module:Env' can't be loaded: RuntimeError: two lines"),
        ("broken_module:tests/X-v0", {}, "can't import 'broken_module' for 'broken_module:tests/X-v0': RuntimeError: two lines"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_made(
    env_id: str, options: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    gymnasium.register("tests/Down-v0", entry_point=Down)
    gymnasium.register("tests/Silent-v0", entry_point=Silent)
    gymnasium.register("tests/NoEnv-v0", entry_point=dict)
    gymnasium.register("tests/NoEntry-v0", entry_point="collections:OrderedDict:x")
    gymnasium.register("tests/BrokenModule-v0", entry_point="broken_module:Env")
    with pytest.raises(UsageError, match=text) as caught:
        make(env_id, **options)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_missing_extra_stays_what_it_is() -> None:
    gymnasium.register("tests/Extra-v0", entry_point=NeedsExtra)
    with pytest.raises(MissingExtra, match=r"^the map needs the package 'maps'"):
        make("tests/Extra-v0")


def test_an_entry_point_that_is_gone_is_named() -> None:
    register("tests/Gone-v0", "art_gym_envs:Gone")
    with pytest.raises(UsageError, match="its entry point 'art_gym_envs:Gone' can't be loaded"):
        make("tests/Gone-v0")


def test_errors_of_the_constructor_are_told_without_a_traceback() -> None:
    gymnasium.register("tests/Picky-v0", entry_point=Picky)
    with pytest.raises(UsageError, match=r"^tests/Picky-v0 can't be made with {'size': 0}: size must be positive$"):
        make("tests/Picky-v0", size=0)


def test_wrappers_of_the_registration_stay() -> None:
    gymnasium.register("tests/Limited-v0", entry_point=Plain, max_episode_steps=3)
    assert isinstance(make("tests/Limited-v0"), gymnasium.wrappers.TimeLimit)


def test_ids_are_those_of_tool_environments() -> None:
    gymnasium.register("tests/Plain-v0", entry_point=Plain)
    gymnasium.register("tests/Broken-v0", entry_point="no_such_module:Env")
    register("tests/Small-v0", GUESS, high=4)
    found = env_ids()
    assert {"art_gym/GuessNumber-v0", "art_gym/Lookup-v0", "tests/Plain-v0", "tests/Small-v0"} <= set(found)
    assert not {"CartPole-v1", "tests/Broken-v0"} & set(found)
    assert found == sorted(found)


@pytest.mark.parametrize("name", ["GuessNumber", "Lookup"])
@pytest.mark.slow
def test_a_bare_interpreter_makes_the_bundled_environments(name: str) -> None:
    code = f"import gymnasium; print(gymnasium.make('art_gym_envs:art_gym/{name}-v0').reset(seed=0)[0])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert "'role': 'user'" in done.stdout
