"""TurnLimit and TokenLimit: which step is the last one, and why."""

from __future__ import annotations

from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from art_gym import call, calls, say
from art_gym.wrappers import Redact, TokenLimit, Transcript, TurnLimit


def flags(env: Any, *actions: Any, seed: int = 0, **options: Any) -> list[tuple[bool, bool, str]]:
    """(terminated, truncated, reason) of each step."""
    env.reset(seed=seed, options=options)
    return [(terminated, truncated, info["truncation"]) for _, _, terminated, truncated, info in map(env.step, actions)]


RUNNING = (False, False, "")


def test_the_turn_that_reaches_the_limit_is_the_last_one(vault: Any) -> None:
    env = TurnLimit(vault(), 2)
    assert flags(env, say("1"), say("2")) == [RUNNING, (False, True, "max_turns")]
    with pytest.raises(ResetNeeded, match="truncated by max_turns: call reset first"):
        env.step(say("3"))


@pytest.mark.parametrize("action", [None, {}, "Hm."], ids=repr)
def test_an_action_that_is_no_message_is_a_turn(vault: Any, action: Any) -> None:
    assert flags(TurnLimit(vault(), 2), action, action) == [RUNNING, (False, True, "max_turns")]


def test_a_reset_counts_anew(vault: Any) -> None:
    env = TurnLimit(vault(), 2)
    flags(env, say("1"))
    assert flags(env, say("1"), say("2")) == [RUNNING, (False, True, "max_turns")]


def test_an_end_on_the_last_turn_is_no_truncation(vault: Any) -> None:
    assert flags(TurnLimit(vault(), 1), call("dial", code=5), code=5) == [(True, False, "")]


def test_the_environments_own_limit_holds_too(vault: Any) -> None:
    class Short(vault):
        max_turns = 1

    env = TurnLimit(Short(), 2)
    assert flags(env, say("1")) == [(False, True, "max_turns")]
    with pytest.raises(ResetNeeded):
        env.step(say("2"))


def test_a_reason_is_given_around_an_environment_that_gives_none(plain: Any) -> None:
    env = TurnLimit(plain(), 2)
    assert env.reset(seed=0)[1] == {"truncation": ""}
    assert flags(env, call("go"), call("go")) == [RUNNING, (False, True, "max_turns")]


def test_the_limit_can_be_asked_for(vault: Any) -> None:
    assert TurnLimit(vault(), 2).get_wrapper_attr("max_turns") == 2
    assert TokenLimit(vault(), 9).max_tokens == 9


def characters(message: Any) -> int:
    return len(message["content"] or "")


def test_tokens_of_observations_and_actions_count(vault: Any) -> None:
    env = TokenLimit(vault(), 10_000, characters)
    observation, _ = env.reset(seed=0)
    opening = len("Open the vault.") + len(observation[1]["content"])
    assert env.tokens == opening
    env.step(calls(("kick", {}), ("kick", {}), text="Harder!"))
    assert env.tokens == opening + len("Harder!") + 2 * len("Ouch.")


def test_the_step_that_reaches_the_limit_is_taken_and_is_the_last_one(vault: Any) -> None:
    env = TokenLimit(vault(), 1, lambda message: 0 if message["role"] != "tool" else 1)
    env.reset(seed=0)
    observation, reward, *flags, info = env.step(call("peek"))
    assert (len(observation), reward, flags, info["truncation"]) == (1, 0.5, [False, True], "max_tokens")
    with pytest.raises(ResetNeeded, match="truncated by max_tokens"):
        env.step(say("Hm."))


def test_one_token_less_than_the_limit_goes_on(vault: Any) -> None:
    # One token a message: 2 at reset, then 2 a step.
    assert flags(TokenLimit(vault(), 6, lambda message: 1), say("1"), say("2")) == [RUNNING, (False, True, "max_tokens")]
    assert flags(TokenLimit(vault(), 7, lambda message: 1), say("1"), say("2")) == [RUNNING, RUNNING]


def test_an_opening_beyond_the_limit_leaves_one_step(vault: Any) -> None:
    assert flags(TokenLimit(vault(), 1), say("1")) == [(False, True, "max_tokens")]


def test_an_end_at_the_limit_is_no_truncation(vault: Any) -> None:
    assert flags(TokenLimit(vault(), 1), call("dial", code=5), code=5) == [(True, False, "")]


@pytest.mark.parametrize(
    ("action", "tokens"),
    [
        (say(""), 0),
        (say("abcd"), 1),
        (say("abcde"), 2),
        (say("åäö"), 2),  # 6 bytes
        (say("\U0001f511"), 1),  # 4 bytes
        (say("\ud800"), 1),  # shown as "?"
        ({"role": "assistant", "content": [{"type": "text", "text": "abcde"}, {"type": "text", "text": "fgh"}]}, 2),
        # "kick" and '{"force": "a"}': 4 and 14 bytes
        (call("kick", force="a"), 5),
        # twice "kick" and "{}", and "Hm": 14 bytes
        (calls(("kick", {}), ("kick", {}), text="Hm"), 4),
        (None, 0),
        ({"tool_calls": [{"function": {"name": "kick", "arguments": {"force": "a"}}}]}, 5),
    ],
    ids=ascii,
)
def test_the_estimate_is_four_bytes_a_token_rounded_up(vault: Any, action: Any, tokens: int) -> None:
    env = TokenLimit(vault(), 10_000)
    env.reset(seed=0)
    before = env.tokens
    observation = env.step(action)[0]
    answers = sum(-(-len(message["content"].encode()) // 4) for message in observation)
    assert env.tokens == before + tokens + answers


def test_a_counter_gets_every_action_as_a_message(vault: Any) -> None:
    seen: list[Any] = []
    env = TokenLimit(vault(), 10_000, lambda message: seen.append(message) or 0)
    env.reset(seed=0)
    env.step({"tool_calls": [{"function": {"name": "kick"}}]})
    function = {"name": "kick", "arguments": ""}
    assert seen[2] == {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


@pytest.mark.parametrize("count", [-1, 1.5, None, "3"])
def test_a_counter_that_gives_no_count_is_refused(vault: Any, count: Any) -> None:
    with pytest.raises(TypeError, match="count must return how many tokens a message has, an integer of at least 0, not"):
        TokenLimit(vault(), 5, lambda message: count).reset(seed=0)


@pytest.mark.parametrize("inside", [Transcript, lambda env: Redact(Transcript(env), "vault", "box")], ids=["transcript", "redacted"])
def test_each_message_of_a_transcript_counts_once(vault: Any, inside: Any) -> None:
    env = TokenLimit(inside(vault()), 10_000, lambda message: 1)
    env.reset(seed=0)
    used = []
    for action in (say("Hm."), calls(("kick", {}), ("peek", {})), call("dial", code=100), None):
        env.step(action)
        used.append(env.tokens)
    assert used == [4, 7, 9, 11]
    env.reset(seed=0)
    env.step(say("Hm."))
    assert env.tokens == 4


def test_a_transcript_without_an_opening_counts_once(vault: Any) -> None:
    class Mute(vault):
        instructions = ""

        def start(self) -> None:
            super().start()

    env = TokenLimit(Transcript(Mute()), 10_000, lambda message: 1)
    env.reset(seed=0)
    env.step(say("Hm."))
    env.step(say("Hm."))
    assert env.tokens == 4


def test_a_snapshot_tells_what_was_counted(vault: Any) -> None:
    env, other = (TokenLimit(Transcript(vault()), 10_000, lambda message: 1) for _ in range(2))
    env.reset(seed=0)
    other.reset(seed=1)
    env.step(say("Hm."))
    other.restore(env.snapshot())
    other.step(say("Hm."))
    assert other.tokens == 6


def test_a_caller_that_changes_the_observation_changes_no_count(vault: Any) -> None:
    env: Any = TokenLimit(Transcript(vault()), 10_000, lambda message: 1)
    observation, _ = env.reset(seed=0)
    observation[0]["content"] = "scribbled"
    env.step(say("Hm."))
    assert env.tokens == 4


def test_messages_that_are_said_again_count_again(plain: Any) -> None:
    class Parrot(plain):
        def step(self, action: Any) -> Any:
            opening = {"role": "user", "content": f"start {self.start}"}
            return (opening, {"role": "user", "content": "again"}), 0.0, False, False, {}

    env = TokenLimit(Parrot(), 10_000, lambda message: 1)
    env.reset(seed=0)
    env.step(say("Hm."))
    assert env.tokens == 4
