"""Wrapped environments in a rollout: what counts is the outermost wrapper."""

from __future__ import annotations

from typing import Any

import pytest

from art_gym import Reply, Runner, Scenario, call, say
from art_gym.wrappers import AddReward, Redact, SelectTools, TokenLimit, Transcript, TurnLimit


class Agent:
    name = "test agent"

    def __init__(self, action: Any) -> None:
        self.action = action
        self.states: list[Any] = []

    async def act(self, state: Any) -> Reply:
        self.states.append((state.tools, state.action_space, state.observation))
        return Reply(self.action)

    async def close(self) -> None:
        pass


def play(make: Any, action: Any) -> tuple[Any, list[Any]]:
    agent = Agent(action)
    (group,) = Runner(make, agent).collect([Scenario("s", 3)])
    return group.episodes[0], agent.states


def names(tools: Any) -> list[str]:
    return [schema["function"]["name"] for schema in tools]


@pytest.mark.parametrize("outside", [lambda env: env, Transcript, lambda env: TurnLimit(env, 9)], ids=["outermost", "transcript", "limit"])
def test_tools_and_action_space_are_the_outermost_wrappers(vault: Any, outside: Any) -> None:
    episode, states = play(lambda: outside(SelectTools(vault(), ["dial"])), call("peek"))
    assert names(episode.tools) == ["dial"]
    assert {(*names(tools), *space.tools) for tools, space, _ in states} == {("dial", "dial")}
    assert [turn.invalid_calls for turn in episode.turns] == [1] * 6


def test_the_agent_sees_what_the_wrappers_show(vault: Any) -> None:
    _, states = play(lambda: Redact(vault(), "vault", "box"), say("Hm."))
    assert states[0][2][0]["content"] == "Open the box."


def test_added_reward_counts(vault: Any) -> None:
    episode, _ = play(lambda: AddReward(TurnLimit(vault(), 2), "bonus", lambda step: 0.25), say("Hm."))
    assert (episode.reward, [turn.rewards for turn in episode.turns]) == (0.5, [{"bonus": 0.25}] * 2)


@pytest.mark.parametrize(
    ("wrap", "reason", "turns"),
    [
        (lambda env: TurnLimit(env, 2), "max_turns", 2),
        (lambda env: TokenLimit(env, 5, lambda message: 1), "max_tokens", 2),  # 2 messages at reset, 2 a step
    ],
)
def test_an_episode_has_the_reason_of_its_truncation(vault: Any, wrap: Any, reason: str, turns: int) -> None:
    episode, _ = play(lambda: wrap(vault()), say("Hm."))
    assert (episode.truncated, episode.truncation, len(episode.turns)) == (True, reason, turns)


@pytest.mark.parametrize("outside", [Transcript, lambda env: TokenLimit(Transcript(env), 10_000)], ids=["outermost", "limit"])
def test_the_agent_is_sent_each_message_of_a_transcript_once(vault: Any, outside: Any) -> None:
    prompts: dict[bool, list[Any]] = {}

    class Reader(Agent):
        async def act(self, state: Any) -> Reply:
            prompts[wrapped].append((list(state.messages), len(state.observation)))
            return Reply(call("peek") if state.turn % 2 else say("Hm."))

    for wrapped in (False, True):
        prompts[wrapped] = []
        (group,) = Runner((lambda: outside(vault())) if wrapped else vault, Reader(None)).collect([Scenario("s", 3)])
        shown = [len(turn.observation) for turn in group.episodes[0].turns]
        assert shown == [length for _, length in prompts[wrapped]] == ([2, 4, 6, 8, 10, 12] if wrapped else [2, 1, 1, 1, 1, 1])
    assert [messages for messages, _ in prompts[True]] == [messages for messages, _ in prompts[False]]
