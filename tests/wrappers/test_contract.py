"""What every wrapper keeps: Gymnasium's contract, the environment's own, and snapshots."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, TimeLimit
from pydantic import Field

import art_gym
from art_gym import call, calls, say
from art_gym.testing import check_transitions
from art_gym.wrappers import AddReward, Record, Redact, SelectTools, TokenLimit, Transcript, TurnLimit

Wrap = Callable[[Any], Any]


def bonus(step: Any) -> float:
    return 0.125


def shout(text: str) -> str:
    return text.upper()


def words(message: Any) -> int:
    return len(str(message.get("content") or "").split())


WRAPS: dict[str, Wrap] = {
    "Transcript": Transcript,
    "AddReward": lambda env: AddReward(env, "bonus", bonus),
    "TurnLimit": lambda env: TurnLimit(env, 3),
    "TokenLimit": lambda env: TokenLimit(env, 100),
    "TokenLimit with a counter": lambda env: TokenLimit(env, 60, words),
    "SelectTools": lambda env: SelectTools(env, ["peek", "dial"]),
    "Redact": lambda env: Redact(env, [r"code", "vault"]),
    "Redact with a function": lambda env: Redact(env, shout),
    "Record": lambda env: Record(env, "run"),
    "all of them": lambda env: Record(
        Redact(Transcript(TokenLimit(TurnLimit(AddReward(SelectTools(env, ["dial", "peek"]), "bonus", bonus), 3), 200)), "code"), "run"
    ),
    "with Gymnasium's between": lambda env: TurnLimit(TimeLimit(Transcript(OrderEnforcing(env)), 5), 4),
}
FUNCTIONS = ("AddReward", "TokenLimit with a counter", "Redact with a function", "all of them")

ACTIONS = [call("peek"), call("kick"), calls(("dial", {"code": -1}), ("nothing", {})), say("Hm."), call("dial", code=7), call("peek")]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=list(WRAPS))
def wrap(request: pytest.FixtureRequest) -> Wrap:
    return WRAPS[request.param]


def play(env: Any, actions: list[Any]) -> Iterator[Any]:
    """Yield what each step returns, to the end of the episode."""
    for action in actions:
        result = env.step(action)
        yield copy.deepcopy(result)
        if result[2] or result[3]:
            return


def episode(env: Any, seed: int = 3) -> list[Any]:
    return [copy.deepcopy(env.reset(seed=seed)), *play(env, ACTIONS)]


def written(state: Any) -> str:
    """A snapshot as text, generators by their state."""
    return json.dumps(state, default=lambda value: getattr(value, "bit_generator", value).state if hasattr(value, "random") else repr(value))


def test_steps_keep_the_contract(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    reset, *steps = episode(env)
    kinds = {key: type(value) for key, value in reset[1].items()}
    assert reset[0] in env.observation_space
    assert len(steps) >= 2
    for observation, reward, terminated, truncated, info in steps:
        assert observation in env.observation_space
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
        assert not (terminated and truncated)
        assert reward == sum(info["rewards"].values())
        assert {key: type(value) for key, value in info.items()} == kinds
        assert json.loads(json.dumps(info)) == info


def test_every_call_is_answered_once_in_order(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    before = len(env.reset(seed=3)[0])
    observation = env.step(calls(("kick", {}), ("dial", {"code": "x"}), ("nothing", {}), ("peek", {})))[0]
    answers = [message for message in observation if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in answers] == ["call_0", "call_1", "call_2", "call_3"]
    assert len(observation) in (4, before + 1 + 4)


def test_step_needs_a_reset_first_and_after_the_end(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    with pytest.raises(ResetNeeded):
        env.step(say("Hm."))
    first = episode(env)
    state = written(env.snapshot())
    for _ in range(2):
        with pytest.raises(ResetNeeded):
            env.step(call("peek"))
    assert written(env.snapshot()) == state
    assert episode(env) == first


def test_equal_seeds_give_equal_episodes(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    first = episode(env)
    episode(env, seed=4)
    assert episode(env) == first == episode(wrap(vault()))


def test_a_snapshot_brings_back_the_wrappers_state_too(wrap: Wrap, vault: Any) -> None:
    env, other = wrap(vault()), wrap(vault())
    env.reset(seed=3)
    env.step(ACTIONS[0])
    state = env.snapshot()
    rest = list(play(env, ACTIONS[1:]))
    episode(env, seed=8)
    for target in (env, other, env):
        target.restore(state)
        assert list(play(target, ACTIONS[1:])) == rest


def test_a_snapshot_goes_through_gymnasiums_wrappers(vault: Any) -> None:
    env: Any = Transcript(TimeLimit(vault(), 3))
    env.reset(seed=3)
    env.step(say("1"))
    state = env.snapshot()
    env.step(say("2"))
    env.restore(state)
    assert [env.step(say(text))[3] for text in ("2", "3")] == [False, True]


def test_there_are_no_snapshots_where_the_environment_has_none(plain: Any) -> None:
    env: Any = Transcript(TurnLimit(plain(), 2))
    assert not env.has_wrapper_attr("snapshot")
    assert env.has_wrapper_attr("turn")
    with pytest.raises(AttributeError, match="Plain instance> has no snapshots: it needs the methods snapshot"):
        env.snapshot()


def test_pickling_in_the_middle_of_an_episode(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    env.reset(seed=3)
    env.step(ACTIONS[0])
    env.action_space.seed(5)
    twin = pickle.loads(pickle.dumps(env))
    assert twin.action_space.sample() == env.action_space.sample()
    assert list(play(twin, ACTIONS[1:])) == list(play(env, ACTIONS[1:]))


async def test_astep_is_step(wrap: Wrap, vault: Any) -> None:
    env, twin = wrap(vault()), wrap(vault())
    assert env.reset(seed=3) == twin.reset(seed=3)
    for action in ACTIONS:
        result = await env.astep(action)
        assert result == twin.step(action)
        if result[2] or result[3]:
            break
    with pytest.raises(ResetNeeded):
        await env.astep(say("Hm."))


@pytest.mark.parametrize("name", [name for name in WRAPS if name not in (*FUNCTIONS, "SelectTools", "with Gymnasium's between")])
def test_the_spec_survives_json(name: str) -> None:
    env = WRAPS[name](art_gym.make("art_gym/Lookup-v0", max_turns=5))
    spec = EnvSpec.from_json(env.spec.to_json())
    again: Any = gymnasium.make(spec)
    assert (str(again), again.spec, again.unwrapped.max_turns) == (str(env), env.spec, 5)
    actions = [call("search", word="gate"), say("Hm.")]
    assert again.reset(seed=2) == env.reset(seed=2)
    assert list(play(again, actions)) == list(play(env, actions))


def test_the_spec_of_selected_tools_survives_json() -> None:
    env = SelectTools(art_gym.make("art_gym/Lookup-v0"), ("search",))
    assert env.spec is not None
    again = gymnasium.make(EnvSpec.from_json(env.spec.to_json()))
    assert again.action_space == env.action_space


def test_attributes_are_looked_up_when_they_are_asked_for(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    codes = []
    for seed in (1, 2):
        env.reset(seed=seed)
        codes.append(env.get_wrapper_attr("code"))
        assert codes[-1] == env.unwrapped.code
    assert codes[0] != codes[1]


def test_spaces_and_tools_follow_the_environment(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    assert env.action_space is env.action_space
    env.unwrapped.constrain("dial", code=Annotated[int, Field(ge=0, le=3)])
    assert env.action_space.tools["dial"]["properties"]["code"]["maximum"] == 3
    (dial,) = [schema for schema in env.get_wrapper_attr("tools") if schema["function"]["name"] == "dial"]
    assert dial["function"]["parameters"]["properties"]["code"]["maximum"] == 3


def test_what_was_returned_is_never_changed_later(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    returned = [env.reset(seed=3)]
    copies = copy.deepcopy(returned)
    for action in ACTIONS:
        result = env.step(action)
        returned.append(result)
        copies.append(copy.deepcopy(result))
        if result[2] or result[3]:
            break
    env.reset(seed=4)
    assert returned == copies


def test_changing_what_was_returned_changes_nothing(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    expected = episode(env)
    observation, info = env.reset(seed=3)
    for action, after in zip(ACTIONS, expected[1:], strict=False):
        for message in observation:
            message["content"] = "changed"
        info.clear()
        result = env.step(action)
        # The transcript aside, which starts with what reset returned, the rest can only come from copies too.
        assert result == after
        observation, info = result[0], result[4]


def test_an_action_is_not_changed(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    env.reset(seed=3)
    for action in (call("peek"), {"tool_calls": [{"function": {"name": "peek", "arguments": {}}}]}):
        before = copy.deepcopy(action)
        env.step(action)
        assert action == before


@pytest.mark.parametrize(
    "action",
    [None, 3, "peek", {}, {"role": "user"}, {"tool_calls": 3}, {"tool_calls": [3, {"function": 3}]}, {"content": {1}}, say("\ud800"), object()],
    ids=lambda action: type(action).__name__ if type(action) is object else ascii(action),
)
def test_broken_actions_are_answered(wrap: Wrap, vault: Any, action: Any) -> None:
    env = wrap(vault())
    env.reset(seed=3)
    observation, reward, terminated, truncated, _ = env.step(action)
    assert observation in env.observation_space
    assert (type(reward), terminated, truncated) == (float, False, False)


@pytest.mark.parametrize("name", [name for name in WRAPS if name not in ("SelectTools", "all of them")])
def test_a_plain_gymnasium_environment_can_be_wrapped(name: str, plain: Any) -> None:
    env = WRAPS[name](plain())
    env.reset(seed=1)
    *_, last = play(env, [call("go")] * 3)
    assert (last[2], last[3]) in ((True, False), (False, True))
    env.close()


def test_closing_twice(wrap: Wrap, vault: Any) -> None:
    env = wrap(vault())
    env.reset(seed=1)
    env.step(say("Hm."))
    env.close()
    env.close()


@pytest.mark.slow
def test_transitions(wrap: Wrap, vault: Any) -> None:
    report = check_transitions(lambda: wrap(vault()), examples=30, seed=0)
    assert not any(text.startswith("snapshot") for text in report.skipped)
