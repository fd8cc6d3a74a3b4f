"""Record: which episodes are kept, and what of them."""

from __future__ import annotations

import asyncio
import copy
import pickle
import re
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import TimeLimit

import art_gym
from art_gym import Episode, EpisodeStore, ToolTimeout, call, say
from art_gym.wrappers import Record, SelectTools, Transcript, TurnLimit, recording


def episodes(folder: Path, label: str = "episodes") -> list[Episode]:
    return list(EpisodeStore(folder).journal(label).read())


def test_a_finished_episode_is_kept_as_it_happened(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    opening, _ = env.reset(seed=3, options={"code": 42})
    first, *_ = env.step(call("peek"))
    assert episodes(tmp_path) == []
    last, *_ = env.step(call("dial", code=42))
    (episode,) = episodes(tmp_path)
    assert (episode.env_id, episode.scenario) == ("Vault", art_gym.Scenario("seed-3", 3, {"code": 42}))
    assert [turn.observation for turn in episode.turns] == [list(opening), list(first)]
    assert [turn.action for turn in episode.turns] == [call("peek"), call("dial", code=42)]
    assert [(turn.reward, turn.rewards) for turn in episode.turns] == [(0.5, {"peek": 0.5}), (1.0, {"outcome": 1.0})]
    assert episode.final_observation == list(last)
    assert (episode.terminated, episode.truncated, episode.truncation, episode.abandoned) == (True, False, None, False)
    assert (episode.metrics, episode.reward, episode.failure) == ({"success": 1.0}, 1.5, None)
    assert episode.tools == env.get_wrapper_attr("tools")
    assert episode.seconds >= sum(turn.policy_seconds + turn.environment_seconds for turn in episode.turns) > 0


def test_a_truncated_one_has_its_reason(vault: Any, tmp_path: Path) -> None:
    for env in (Record(TurnLimit(vault(), 1), tmp_path), Record(TimeLimit(vault(), 1), tmp_path)):
        env.reset(seed=3)
        env.step(say("Hm."))
    assert [(episode.truncated, episode.truncation) for episode in episodes(tmp_path)] == [(True, "max_turns"), (True, "environment")]
    assert not any(episode.abandoned for episode in episodes(tmp_path))


def test_flags_that_are_both_true_are_kept_as_an_end(vault: Any, tmp_path: Path) -> None:
    env = Record(TimeLimit(vault(), 1), tmp_path)
    env.reset(seed=3, options={"code": 1})
    env.step(call("dial", code=1))
    (episode,) = episodes(tmp_path)
    assert (episode.terminated, episode.truncated, episode.truncation) == (True, False, None)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_episode_left_before_its_end_is_kept(vault: Any, tmp_path: Path, how: str) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    env.step(call("peek"))
    getattr(env, how)()
    env.close()
    (episode,) = episodes(tmp_path)
    assert (episode.truncated, episode.truncation, episode.abandoned, len(episode.turns)) == (True, "environment", True, 1)
    assert episode.terminated is False


def test_a_reset_after_which_nothing_was_done_is_not_kept(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    env.reset(seed=3)
    env.close()
    assert list(tmp_path.iterdir()) == []


def test_a_reset_without_a_seed_draws_one_and_is_repeatable_from_it(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    shown = []
    for seed in (3, None, None):
        shown.append(env.reset(seed=seed)[0])
        env.step(call("peek"))
    env.close()
    seeds = [episode.scenario.seed for episode in episodes(tmp_path)]
    assert (seeds[0], len(set(seeds))) == (3, 3)
    assert [vault().reset(seed=seed)[0] for seed in seeds] == shown
    # The first reset's seed decides about those drawn after it.
    again = Record(vault(), tmp_path, "again")
    for seed in (3, None, None):
        again.reset(seed=seed)
        again.step(call("peek"))
    again.close()
    assert [episode.scenario.seed for episode in episodes(tmp_path, "again")] == seeds


def test_the_very_first_reset_needs_no_seed_either(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    shown, _ = env.reset()
    env.step(call("peek"))
    env.close()
    (episode,) = episodes(tmp_path)
    assert vault().reset(seed=episode.scenario.seed)[0] == shown


def test_global_generators_are_left_alone(vault: Any, tmp_path: Path) -> None:
    import random

    before = random.getstate(), repr(np.random.get_state())
    env = Record(vault(), tmp_path)
    env.reset()
    env.step(call("peek"))
    env.close()
    assert (random.getstate(), repr(np.random.get_state())) == before


def test_ids_are_all_different(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path, "played")
    env.reset(seed=3, options={"code": 5})
    before = env.snapshot()
    for _ in range(2):
        env.restore(before)
        env.step(call("dial", code=5))
    ids = [episode.id for episode in episodes(tmp_path, "played")]
    assert (len(set(ids)), {id_.split("/")[0] for id_ in ids}) == (2, {"played"})


def test_a_snapshot_holds_the_episode_so_far(vault: Any, tmp_path: Path) -> None:
    env, other = Record(vault(), tmp_path), Record(vault(), tmp_path)
    env.reset(seed=3, options={"code": 5})
    env.step(call("peek"))
    state = env.snapshot()
    env.step(say("left out"))
    for target in (env, other):
        target.restore(state)
        target.step(call("dial", code=5))
    first, second = episodes(tmp_path)
    assert [turn.action for turn in first.turns] == [turn.action for turn in second.turns] == [call("peek"), call("dial", code=5)]


def copied(env: Any) -> Any:
    return pickle.loads(pickle.dumps(env))


def restored(env: Any) -> Any:
    other = Record(type(env.unwrapped)(), env._folder)
    other.restore(env.snapshot())
    return other


@pytest.mark.parametrize("turns", [0, 1])
@pytest.mark.parametrize("moved", [copied, copy.deepcopy, restored], ids=["pickled", "copied", "restored"])
def test_elsewhere_time_goes_on_from_where_the_episode_stood(
    vault: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: Any, turns: int
) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3, options={"code": 5})
    for _ in range(turns):
        env.step(call("peek"))
    time.sleep(0.05)
    monkeypatch.setattr(recording, "perf_counter", lambda: time.perf_counter() + 10**6)  # as on a machine that started long ago
    other = moved(env)
    other.step(call("dial", code=5))
    (episode,) = episodes(tmp_path)
    seconds = [turn.policy_seconds + turn.environment_seconds for turn in episode.turns]
    assert 0 < seconds[-1] < 1
    assert sum(seconds) <= episode.seconds < 1


def test_an_exception_is_kept_as_a_failure_and_goes_on(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    env.step(call("peek"))
    with pytest.raises(ValueError, match="the vault fell over"):
        env.step(call("kick", force="hard"))
    (episode,) = episodes(tmp_path)
    assert episode.failure is not None
    assert (episode.failure.kind, episode.failure.message) == ("environment", "ValueError: the vault fell over")
    assert "in kick" in episode.failure.traceback
    assert episode.failure.action == call("kick", force="hard")
    assert (len(episode.turns), episode.terminated, episode.truncated) == (1, False, False)
    assert episode.final_observation[0]["role"] == "tool"
    env.close()
    assert len(episodes(tmp_path)) == 1


def test_a_tool_past_its_time_has_a_kind_of_its_own(vault: Any, tmp_path: Path) -> None:
    class Slow(vault):
        def on_text(self, text: str) -> str:
            raise ToolTimeout("too long")

    env = Record(Slow(), tmp_path)
    env.reset(seed=3)
    with pytest.raises(ToolTimeout):
        env.step(say("Hm."))
    assert [episode.failure and episode.failure.kind for episode in episodes(tmp_path)] == ["tool_timeout"]


def test_an_exception_in_reset_is_kept(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    with pytest.raises(ValueError, match="invalid literal"):
        env.reset(seed=3, options={"code": "x"})
    (episode,) = episodes(tmp_path)
    assert episode.failure is not None
    assert (episode.scenario.seed, episode.turns) == (3, [])


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_interrupted_one_is_kept_as_cancelled(plain: Any, tmp_path: Path, where: str) -> None:
    class Interrupted(plain):
        def reset(self, **kwargs: Any) -> Any:
            if where == "reset":
                raise KeyboardInterrupt
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            if self.turn == 1:
                raise KeyboardInterrupt
            return super().step(action)

    def interrupted(env: Any) -> None:
        env.reset(seed=3)
        env.step(call("go"))
        env.step(call("go"))

    env = Record(Interrupted(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        interrupted(env)
    env.close()
    (episode,) = episodes(tmp_path)
    assert episode.failure is not None
    assert (episode.failure.kind, episode.failure.message, len(episode.turns)) == ("cancelled", "KeyboardInterrupt", int(where == "step"))


async def test_a_step_that_is_cancelled_ends_the_episode(vault: Any, tmp_path: Path) -> None:
    class Slow(vault):
        instant = False

        async def on_text(self, text: str) -> str:
            await asyncio.sleep(5)
            return "At last."

    env = Record(Slow(), tmp_path)
    env.reset(seed=3)
    await env.astep(call("peek"))
    step = asyncio.create_task(env.astep(say("Hm.")))
    await asyncio.sleep(0.05)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    with pytest.raises(ResetNeeded):
        await env.astep(call("peek"))
    env.close()
    assert [(episode.failure and episode.failure.kind, len(episode.turns)) for episode in episodes(tmp_path)] == [("cancelled", 1)]


def test_a_step_after_the_end_is_no_failure(vault: Any, tmp_path: Path) -> None:
    env = Record(TurnLimit(vault(), 1), tmp_path)
    env.reset(seed=3)
    env.step(say("Hm."))
    with pytest.raises(ResetNeeded):
        env.step(say("Hm."))
    env.close()
    assert [episode.failure for episode in episodes(tmp_path)] == [None]


class Odd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Returns what can't be kept."""

    reward: Any = 0.0
    content: Any = "ok"

    def step(self, action: Any) -> Any:
        self.env.step(action)
        return ({"role": "user", "content": self.content},), self.reward, True, False, {}


def test_what_cannot_be_kept_is_returned_all_the_same_and_kept_as_a_failure(plain: Any, tmp_path: Path) -> None:
    env: Any = Odd(plain())
    for reward, content in ((float("nan"), "ok"), (0.0, {1})):
        env.reward, env.content = reward, content
        recorded = Record(env, tmp_path)
        recorded.reset(seed=1)
        assert repr(recorded.step(call("go"))[:2]) == repr((({"role": "user", "content": content},), reward))
    nan, unwritable = episodes(tmp_path)
    assert nan.failure is not None
    assert unwritable.failure is not None
    assert nan.failure.message == "ValueError: reward must be finite, not nan"
    assert "can't be written as JSON" in unwritable.failure.message


def test_the_outermost_view_is_kept(vault: Any, tmp_path: Path) -> None:
    env = Record(Transcript(SelectTools(vault(), ["dial"])), tmp_path)
    env.reset(seed=3, options={"code": 5})
    env.step(call("dial", code=5))
    (episode,) = episodes(tmp_path)
    assert [schema["function"]["name"] for schema in episode.tools] == ["dial"]
    assert [message["role"] for message in episode.final_observation] == ["system", "user", "assistant", "tool"]


class Sdk:
    """A message object as the OpenAI SDK gives it."""

    def model_dump(self) -> Any:
        return call("peek")


class Strange:
    pass


@pytest.mark.parametrize(
    ("action", "kept"),
    [
        (None, None),
        ("peek", "peek"),
        (3, 3),
        (Sdk(), call("peek")),
        (Strange(), 0),
        ({"tool_calls": ({"function": {"name": "peek"}},)}, {"tool_calls": [{"function": {"name": "peek"}}]}),
        ({"content": Strange()}, {"content": 0}),
        (
            {"tool_calls": [{"function": {"name": "dial", "arguments": {"code": 5, 1: None}}}]},
            {"tool_calls": [{"function": {"name": "dial", "arguments": {"code": 5, "1": None}}}]},
        ),
        (
            {"tool_calls": [{"function": {"name": "dial", "arguments": [float("nan")]}}]},
            {"tool_calls": [{"function": {"name": "dial", "arguments": 0}}]},
        ),
        (say("\ud800"), say("\ud800")),
        (
            {"tool_calls": [{"id": "a", "function": {"name": "dial", "arguments": {"code": float("nan")}}}]},
            {"tool_calls": [{"id": "a", "function": {"name": "dial", "arguments": '{"code": NaN}'}}]},
        ),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", ascii(value)),
)
def test_an_action_is_kept_as_json_that_is_answered_alike(vault: Any, tmp_path: Path, action: Any, kept: Any) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    answer = env.step(copy.deepcopy(action))[0]
    env.close()
    (episode,) = episodes(tmp_path)
    assert episode.turns[0].action == kept
    twin = vault()
    twin.reset(seed=3)
    assert twin.step(episode.turns[0].action)[0] == answer


def test_arguments_that_are_not_json_are_kept_as_what_is_refused_too(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    info = env.step({"tool_calls": [{"function": {"name": "dial", "arguments": {"code": np.int64(5)}}}]})[4]
    env.close()
    (turn,) = episodes(tmp_path)[0].turns
    assert turn.action == {"tool_calls": [{"function": {"name": "dial", "arguments": 0}}]}
    twin = vault()
    twin.reset(seed=3)
    assert twin.step(turn.action)[4] == info


def test_an_action_that_holds_itself_is_kept_as_it_was_read(vault: Any, tmp_path: Path) -> None:
    action: Any = {"role": "assistant", "content": "round"}
    action["more"] = action
    env = Record(vault(), tmp_path)
    env.reset(seed=3)
    env.step(action)
    env.close()
    assert episodes(tmp_path)[0].turns[0].action == say("round")


def test_an_action_is_kept_as_it_was_before_the_step(vault: Any, tmp_path: Path) -> None:
    class Careless(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            result = self.env.step(action)
            action.clear()
            return result

    env = Record(Careless(vault()), tmp_path)
    env.reset(seed=3)
    env.step(call("peek"))
    env.close()
    assert episodes(tmp_path)[0].turns[0].action == call("peek")


def test_what_the_caller_does_to_an_observation_is_not_kept(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    texts = []
    for observation in (env.reset(seed=3)[0], env.step(call("peek"))[0]):
        texts.append([message["content"] for message in observation])
        for message in observation:
            message["content"] = "changed"
    env.close()
    (episode,) = episodes(tmp_path)
    kept = (episode.turns[0].observation, episode.final_observation)
    assert [[message["content"] for message in messages] for messages in kept] == texts


def test_it_pickles_in_the_middle_of_an_episode(vault: Any, tmp_path: Path) -> None:
    env = Record(vault(), tmp_path)
    env.reset(seed=3, options={"code": 5})
    env.step(call("peek"))
    twin = pickle.loads(pickle.dumps(env))
    twin.step(call("dial", code=5))
    (episode,) = episodes(tmp_path)
    assert len(episode.turns) == 2
