"""Wrapped environments in a rollout: what counts is the outermost wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from art_gym import EpisodeStore, Reply, Runner, Scenario, call, say
from art_gym.errors import ContextOverflow, PolicyError
from art_gym.wrappers import AddReward, Record, Redact, SelectTools, TokenLimit, Transcript, TurnLimit


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


class Scripted:
    """Plays a list of actions; an exception among them is raised."""

    name = "script"

    def __init__(self, actions: list[Any]) -> None:
        self.actions = actions

    async def act(self, state: Any) -> Reply:
        action = self.actions[state.turn]
        if isinstance(action, Exception):
            raise action
        return Reply(action)

    async def close(self) -> None:
        pass


SAID = [say("Hm."), say(""), call("go"), call("go", text="Hm."), {"role": "assistant", "tool_calls": [{"function": {"name": "go"}}]}]
ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=3)


@given(
    opening=ROLES,
    turns=st.lists(st.tuples(st.sampled_from(SAID), ROLES), min_size=1, max_size=5),
    error=st.sampled_from([None, ContextOverflow(), PolicyError("no answer")]),
)
@settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_an_episode_holds_each_message_once_whatever_the_wrappers_show(plain: Any, opening: Any, turns: Any, error: Any) -> None:
    actions = [action for action, _ in turns]
    shown = [
        [{"role": role, "content": f"{place}.{index}"} for index, role in enumerate(roles)]
        for place, roles in enumerate([opening, *(roles for _, roles in turns)])
    ]

    class Script(plain):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return tuple(map(dict, shown[0])), {}

        def step(self, action: Any) -> Any:
            self.turn += 1
            return tuple(map(dict, shown[self.turn])), 0.0, error is None and self.turn == len(turns), False, {}

    told = [*shown[0]]
    for action, answer in zip(actions, shown[1:], strict=True):
        told += [action, *answer]
    for wrap in (lambda env: env, Transcript, lambda env: TokenLimit(Redact(Transcript(env), "never said"), 10_000)):
        agent = Scripted(actions if error is None else [*actions, error])
        (group,) = Runner(lambda wrap=wrap: wrap(Script()), agent).collect([Scenario("s", 3)])
        assert group.episodes[0].messages == told


@pytest.mark.parametrize("wrap", [lambda env: env, Transcript], ids=["plain", "transcript"])
def test_an_opening_that_the_assistant_begins_is_taken_whole(plain: Any, wrap: Any, tmp_path: Path) -> None:
    class Examples(plain):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return (say("I am ready."), {"role": "user", "content": "Go on."}), {}

    env: Any = Record(wrap(Examples()), tmp_path)
    env.reset(seed=3)
    while not env.step(call("go"))[2]:
        pass
    (episode,) = EpisodeStore(tmp_path).journal("episodes").read()
    texts = ["I am ready.", "Go on.", None, "step 1", None, "step 2", None, "step 3"]
    assert [message["content"] for message in episode.messages] == texts


def test_a_transcript_of_which_some_is_redacted_holds_each_message_once(vault: Any) -> None:
    episode, _ = play(lambda: Redact(Transcript(vault()), "vault|Hm", "box"), say("Hm, a vault."))
    assert [message["role"] for message in episode.messages] == ["system", "user", *["assistant", "user"] * 6]
