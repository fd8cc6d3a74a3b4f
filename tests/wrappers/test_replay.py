"""Replay: nothing to report where nothing changed, and the first difference where something did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import TimeLimit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import art_gym
from art_gym import Divergence, Episode, EpisodeStore, Failure, Reply, Runner, Scenario, UsageError, call, calls, replay, say
from art_gym.errors import ContextOverflow, PolicyError
from art_gym.testing import actions, broken_actions
from art_gym.wrappers import AddReward, Record, Redact, SelectTools, TokenLimit, Transcript, TurnLimit

ODD = [call("peek"), calls(("kick", {}), ("dial", {"code": 200}), ("nothing", {})), say("Hm."), None, call("dial", code=5)]


def recorded(env: Any, folder: Path, script: list[Any] = ODD, code: int = 5) -> Episode:
    """An episode as it comes back from the disk."""
    env = Record(env, folder)
    env.reset(seed=3, options={"code": code})
    for action in script:
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
    env.close()
    *_, episode = EpisodeStore(folder).journal("episodes").read()
    return episode


class Agent:
    """Plays a list of actions; an exception among them is raised."""

    name = "script"

    def __init__(self, actions: list[Any]) -> None:
        self.actions = actions

    async def act(self, state: Any) -> Reply:
        action = self.actions[state.turn]
        if isinstance(action, BaseException):
            raise action
        return Reply(action)

    async def close(self) -> None:
        pass


def rolled_out(make: Any, actions: list[Any], code: int = 5) -> Episode:
    ((episode,),) = [group.episodes for group in Runner(make, Agent(actions)).collect([Scenario("s", 3, {"code": code})])]
    return episode


WRAPS: list[Callable[[Any], Any]] = [
    lambda env: env,
    Transcript,
    lambda env: TurnLimit(env, 2),
    lambda env: TokenLimit(env, 40),
    lambda env: TimeLimit(env, 2),
    lambda env: Redact(AddReward(SelectTools(env, ["dial"]), "bonus", lambda step: 0.1), "vault"),
]


@pytest.mark.parametrize("wrap", WRAPS)
def test_an_unchanged_environment_has_no_divergence(vault: Any, tmp_path: Path, wrap: Any) -> None:
    by_record, by_runner = recorded(wrap(vault()), tmp_path), rolled_out(lambda: wrap(vault()), [*ODD[:3], {"tool_calls": 7}, ODD[4]])
    assert len(by_record.turns) == len(by_runner.turns) >= 2
    for episode in (by_record, by_runner, Episode.from_dict(by_runner.to_dict())):
        assert replay(wrap(vault()), episode) is None


def test_an_abandoned_episode_is_replayed_as_far_as_it_goes(vault: Any, tmp_path: Path) -> None:
    episode = recorded(vault(), tmp_path, ODD[:2])
    assert episode.abandoned
    assert replay(vault, episode) is None
    ended = replay(lambda: TurnLimit(vault(), 2), episode)
    assert ended == Divergence(1, "truncated", False, True)


def test_one_that_the_context_cut_is_replayed_as_far_as_it_goes(vault: Any) -> None:
    for script in ([call("peek"), ContextOverflow()], [ContextOverflow()]):
        episode = rolled_out(vault, script)
        assert (episode.truncation, len(episode.turns)) == ("context_length", len(script) - 1)
        assert replay(vault, episode) is None


@pytest.mark.parametrize(
    ("actions", "code", "kind", "turns"),
    [
        ([call("peek"), call("kick", force="hard")], 5, "environment", 1),
        ([call("peek"), PolicyError("no answer")], 5, "policy", 1),
        ([PolicyError("no answer")], 5, "policy", 0),
        ([call("peek")], "x", "environment", 0),
    ],
)
def test_a_failed_one_is_replayed_as_far_as_it_goes(vault: Any, tmp_path: Path, actions: Any, code: Any, kind: str, turns: int) -> None:
    episode = rolled_out(vault, actions, code)
    assert episode.failure is not None
    assert (episode.failure.kind, len(episode.turns)) == (kind, turns)
    assert replay(vault, episode) is None
    if turns:
        episode.final_observation = []
        assert str(replay(vault, episode)).startswith("turn 0: final_observation was [] when it was recorded")


def test_an_environment_that_failed_fails_again(vault: Any) -> None:
    episode = rolled_out(vault, [call("peek"), call("kick", force="hard")])
    assert episode.failure is not None
    assert episode.failure.action == call("kick", force="hard")

    class Mended(vault):
        def on_invalid(self, problem: str) -> None: ...

        @art_gym.tool
        def kick(self, force: str = "") -> str:
            """Kick the vault."""
            return "Nothing happens."

    assert str(replay(Mended, episode)).startswith("turn 1: failure was 'ValueError: the vault fell over' when it was recorded, and is '' now")
    assert replay(vault, Episode.from_dict(episode.to_dict())) is None


def test_one_that_was_too_odd_to_write_has_nothing_to_replay(vault: Any) -> None:
    episode = Episode("e", "Vault", Scenario("s", 3), failure=Failure("environment", "can't be written as JSON"))
    assert replay(vault, episode) is None


def test_an_environment_is_made_by_its_id_by_a_function_or_given(tmp_path: Path) -> None:
    env = art_gym.make("art_gym/GuessNumber-v0")
    episode = recorded(env, tmp_path, [call("guess", number=1), say("Hm.")])
    assert replay("art_gym/GuessNumber-v0", episode) is None
    assert replay(lambda: art_gym.make("art_gym/GuessNumber-v0"), episode) is None
    assert replay(env, episode) is None
    with pytest.raises(UsageError, match="unknown environment 'art_gym/GuesNumber-v0'; did you mean"):
        replay("art_gym/GuesNumber-v0", episode)


def test_one_that_was_made_is_closed_and_one_that_was_given_is_not(vault: Any, tmp_path: Path) -> None:
    closed = []

    class Closing(vault):
        def close(self) -> None:
            closed.append(self)

    episode = recorded(vault(), tmp_path)
    env: Any = Closing()
    replay(env, episode)
    assert closed == []
    replay(Closing, episode)
    assert len(closed) == 1


class Changed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Changes what comes out of step `at` (-1: reset)."""

    def __init__(self, env: Any, at: int, change: Callable[[list[Any]], None]) -> None:
        super().__init__(env)
        self.at, self.change = at, change

    def reset(self, **kwargs: Any) -> Any:
        self.turn = -1
        return self.changed(self.env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        self.turn += 1
        return self.changed(self.env.step(action))

    def changed(self, result: Any) -> Any:
        result = list(result)
        if self.turn == self.at:
            self.change(result)
        return tuple(result)


def item(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda result: result.__setitem__(index, value)


def info(**changes: Any) -> Callable[[list[Any]], None]:
    return lambda result: result[-1].update(changes)


def said(content: str) -> Callable[[list[Any]], None]:
    return lambda result: result[0][-1].update(content=content)


@pytest.mark.parametrize(
    ("at", "change", "turn", "field", "expected", "actual"),
    [
        (-1, said("Hello."), 0, "observation", None, None),
        (0, said("The code is 6."), 1, "observation", None, None),
        (2, said("Right!"), 2, "final_observation", None, None),
        (1, item(1, 0.25), 1, "reward", -0.5, 0.25),
        (0, info(rewards={"peek": 0.25, "more": 0.25}), 0, "rewards", {"peek": 0.5}, {"peek": 0.25, "more": 0.25}),
        (1, info(invalid_calls=1), 1, "invalid_calls", 2, 1),
        (1, item(2, True), 1, "terminated", False, True),
        (1, item(3, True), 1, "truncated", False, True),
        (2, item(2, False), 2, "terminated", True, False),
        (2, info(metrics={"success": 0.0}), 2, "metrics", {"success": 1.0}, {"success": 0.0}),
    ],
)
def test_the_first_difference_is_reported(
    vault: Any, tmp_path: Path, at: int, change: Any, turn: int, field: str, expected: Any, actual: Any
) -> None:
    episode = recorded(vault(), tmp_path, [ODD[0], ODD[1], ODD[4]])
    assert episode.terminated
    divergence = replay(Changed(vault(), at, change), episode)
    assert divergence is not None
    assert (divergence.turn, divergence.field) == (turn, field)
    if expected is not None:
        assert (divergence.expected, divergence.actual) == (expected, actual)
    assert "\n" not in str(divergence)


def test_another_reason_of_a_truncation_is_a_difference(vault: Any, tmp_path: Path) -> None:
    episode = recorded(TurnLimit(vault(), 1), tmp_path)
    assert replay(TimeLimit(vault(), 1), episode) == Divergence(0, "truncation", "max_turns", "environment")


def test_a_truncation_by_a_foreign_wrapper_that_is_gone_is_a_difference(vault: Any, tmp_path: Path) -> None:
    episode = recorded(TimeLimit(vault(), 2), tmp_path)
    assert replay(vault(), episode) == Divergence(1, "truncated", True, False)


def test_an_exception_in_the_replay_is_a_difference(vault: Any, tmp_path: Path) -> None:
    def raise_(result: Any) -> None:
        raise KeyError("code")

    episode = recorded(vault(), tmp_path)
    divergence = replay(Changed(vault(), 1, raise_), episode)
    assert divergence == Divergence(1, "exception", None, "KeyError: 'code'")
    assert str(divergence) == "turn 1: the replay raised KeyError: 'code'"
    assert replay(Changed(vault(), -1, raise_), episode) == Divergence(0, "exception", None, "KeyError: 'code'")


def test_an_exception_where_the_recorded_episode_reset_is_a_difference(vault: Any) -> None:
    def raise_(result: Any) -> None:
        raise KeyError("code")

    episode = rolled_out(vault, [ContextOverflow()])
    assert replay(Changed(vault(), -1, raise_), episode) == Divergence(0, "exception", None, "KeyError: 'code'")


def test_the_recorded_actions_are_not_changed(vault: Any, tmp_path: Path) -> None:
    episode = recorded(vault(), tmp_path, [call("peek")])

    class Careless(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            result = self.env.step(action)
            action.clear()
            return result

    assert replay(Careless(vault()), episode) is None
    assert episode.turns[0].action == call("peek")


@pytest.mark.parametrize(
    ("divergence", "text"),
    [
        (
            Divergence(2, "reward", 1.0, 0.5),
            "turn 2: reward was 1.0 when it was recorded, and is 0.5 now",
        ),
        (
            Divergence(0, "observation", [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
            "turn 0: observation[0].content was 'a' when it was recorded, and is 'b' now",
        ),
        (
            Divergence(1, "final_observation", [], [{"role": "user", "content": "b"}]),
            "turn 1: final_observation was [] when it was recorded, and is [{'role': 'user', 'content': 'b'}] now",
        ),
        (
            Divergence(1, "metrics", {"success": 1.0, "found": 0.0}, {"success": 1.0, "found": 1.0}),
            "turn 1: metrics.found was 0.0 when it was recorded, and is 1.0 now",
        ),
        (
            # 20 characters before the first difference, 80 in all.
            Divergence(0, "observation", [{"content": "a" * 200 + "b" * 90}], [{"content": "a" * 200}]),
            f"turn 0: observation[0].content was '…{'a' * 20 + 'b' * 60}…' when it was recorded, and is '…{'a' * 20}' now",
        ),
        (
            Divergence(0, "observation", [{"content": "x\ny"}], [{"content": "x\nz"}]),
            "turn 0: observation[0].content was 'x\\ny' when it was recorded, and is 'x\\nz' now",
        ),
    ],
)
def test_a_divergence_reads_as_one_line(divergence: Divergence, text: str) -> None:
    assert str(divergence) == text


@pytest.mark.parametrize(
    "arguments",
    [b"{}", {"x": float("nan")}, [float("inf")], {3: 4}, 10**5000, object()],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", WRAPS)
def test_arguments_that_are_no_json_are_replayed(vault: Any, wrap: Any, tmp_path: Path, arguments: Any) -> None:
    action = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "peek", "arguments": arguments}}]}
    assert str(replay(wrap(vault()), recorded(wrap(vault()), tmp_path, [action, call("peek")]))) == "None"


@given(st.data())
@settings(max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_whatever_a_model_wrote_is_replayed(vault: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    wrap = data.draw(st.sampled_from(WRAPS), "wrap")
    env = wrap(vault())
    written = st.one_of(actions(env.action_space), broken_actions(env.action_space))
    episode = recorded(env, tmp_path_factory.mktemp("run"), data.draw(st.lists(written, min_size=1, max_size=7), "actions"))
    assert str(replay(wrap(vault()), episode)) == "None"


@pytest.mark.parametrize("env_id", ["art_gym/GuessNumber-v0", "art_gym/Lookup-v0"])
def test_random_episodes_of_every_bundled_environment(env_id: str, tmp_path: Path) -> None:
    env = Record(art_gym.make(env_id), tmp_path)
    env.action_space.seed(1)
    env.reset(seed=1)
    for _ in range(60):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    env.close()
    kept = list(EpisodeStore(tmp_path).journal("episodes").read())
    assert len(kept) >= 12
    assert [str(found) for episode in kept if (found := replay(env_id, episode))] == []
