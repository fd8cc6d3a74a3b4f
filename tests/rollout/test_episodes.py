"""Episodes: what they hold, what the agent is shown, and where they end."""

import pytest

from art_gym.errors import ContextOverflow
from art_gym.messages import call, say
from art_gym.rollout import Reply, Runner


async def test_an_episode_holds_what_happened(an_agent, play, scenarios, any_steps):
    (group,) = await play(Runner(any_steps, an_agent()), scenarios(1))
    (episode,) = group.episodes
    assert episode.env_id == any_steps.__name__
    assert [tool["function"]["name"] for tool in episode.tools] == ["go"]
    assert [message["content"] for message in episode.messages] == ["start 0", None, "step 1", None, "step 2"]
    first, last = episode.turns
    assert (first.prompt_ids, first.completion_ids, first.logprobs, first.policy) == ([1], [2], [-0.1], "v1")
    assert (first.reward, first.rewards, first.invalid_calls) == (0.5, {"step": 0.5}, 1)
    assert [message["content"] for message in last.observation] == ["step 1"]
    assert (episode.reward, episode.metrics, episode.terminated, episode.truncated, episode.failure) == (1.0, {"turns": 2.0}, True, False, None)
    assert 0 < episode.seconds < 5


async def test_the_generator_of_an_episode_depends_on_scenario_and_member_only(instant_steps, an_agent, play, scenarios):
    draws = {}

    def draw(state):
        draws.setdefault((state.scenario.id, state.member), []).append(int(state.rng.integers(1000)))

    await play(Runner(instant_steps, an_agent(odd=draw), group_size=2, concurrency=8), scenarios(2))
    again, draws = draws, {}
    await play(Runner(instant_steps, an_agent(odd=draw), group_size=2, concurrency=1), scenarios(2))
    assert draws == again
    assert len(set(map(tuple, draws.values()))) == 4


async def test_the_generator_of_an_episode_is_not_the_environments(instant_steps, an_agent, play, scenarios):
    class Hiding(instant_steps):
        def reset(self, *, seed=None, options=None):
            result = super().reset(seed=seed, options=options)
            self.options = {"turns": 1}
            secrets.append(float(self.np_random.random()))
            return result

    secrets, draws = [], []
    await play(Runner(Hiding, an_agent(odd=lambda state: draws.append(float(state.rng.random()))), group_size=3), scenarios(20))
    assert len(draws) == len(secrets) == 60
    assert not set(draws) & set(secrets)


async def test_memory_lasts_for_the_episode_and_messages_grow(instant_steps, an_agent, play, scenarios):
    seen = {}

    def look(state):
        state.memory["turns"] = state.memory.get("turns", 0) + 1
        seen[state.scenario.id, state.turn] = (state.memory["turns"], [message["role"] for message in state.messages], len(state.observation))

    await play(Runner(instant_steps, an_agent(odd=look), concurrency=1), scenarios(2))
    assert seen["s1", 0] == (1, ["user"], 1)
    assert seen["s1", 1] == (2, ["user", "assistant", "tool"], 1)


@pytest.mark.parametrize(("at", "reward", "last"), [(0, 0.0, "start 0"), (1, 0.5, "step 1")])
async def test_context_overflow_truncates_with_the_reward_so_far(steps, an_agent, play, scenarios, at, reward, last):
    agent = an_agent(odd=lambda state: ContextOverflow("too long") if state.turn == at else None)
    ((group,),) = [await play(Runner(steps, agent), scenarios(1))]
    (episode,) = group.finished
    assert (episode.truncated, episode.truncation, episode.terminated, episode.reward) == (True, "context_length", False, reward)
    assert (len(episode.turns), episode.messages[-1]["content"]) == (at, last)


async def test_no_policy_call_after_the_end(steps, an_agent, play, scenarios):
    agent = an_agent()
    await play(Runner(steps, agent), scenarios(1, turns=1))
    assert agent.asked == [("s0", 0, 0)]


async def test_truncation_by_the_environment_and_by_its_turns(instant_steps, an_agent, play, scenarios):
    class Limited(instant_steps):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            return observation, reward, False, done, info | self.options["info"]

    groups = await play(Runner(Limited, an_agent()), [*scenarios(1, info={}), *scenarios(1, info={"truncation": "max_turns"})])
    assert [(group.episodes[0].truncated, group.episodes[0].truncation) for group in groups] == [(True, "environment"), (True, "max_turns")]


async def test_an_environment_that_says_terminated_and_truncated_terminated(instant_steps, an_agent, play, scenarios):
    class Both(instant_steps):
        def step(self, action):
            observation, reward, done, _, info = super().step(action)
            return observation, reward, done, done, info

    ((group,),) = [await play(Runner(Both, an_agent()), scenarios(1))]
    assert (group.episodes[0].terminated, group.episodes[0].truncated, group.episodes[0].truncation) == (True, False, None)


async def test_text_actions_reach_the_environment(steps, an_agent, play, scenarios):
    ((group,),) = [await play(Runner(steps, an_agent(odd=lambda state: Reply(say("hm"), finish_reason="length"))), scenarios(1))]
    assert [(turn.action, turn.finish_reason) for turn in group.episodes[0].turns] == [({"role": "assistant", "content": "hm"}, "length")] * 2


async def test_a_message_of_the_sdk_is_kept_as_the_message_it_is(steps, an_agent, play, scenarios, open_store):
    class Message:
        def model_dump(self):
            return call("go")

    journal = open_store().journal("a")
    shown = []

    def reply(state):
        shown.append(state.messages[1:2])
        return Reply(Message())

    ((group,),) = [await play(Runner(steps, an_agent(odd=reply)), scenarios(1), journal=journal)]
    assert [turn.action for turn in group.finished[0].turns] == [call("go"), call("go")]
    assert shown == [[], [call("go")]]
    assert [episode.failure for episode in journal.read()] == [None]
