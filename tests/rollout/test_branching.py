"""Branching: episodes that begin in the middle of another one, and share what it said until there."""

import threading

import gymnasium
import numpy as np
import pytest

from art_gym import ToolEnv, replay, tool
from art_gym.errors import UsageError
from art_gym.messages import call
from art_gym.rollout import Reply, Runner, branch_at
from art_gym.scenarios import Scenario


class Ledger(ToolEnv):
    """Add numbers to a ledger; its reward is their sum."""

    instructions = "Call add four times."
    max_turns = 10

    def start(self):
        self.numbers = [int(self.np_random.integers(100))]
        return f"The ledger begins with {self.numbers[0]}."

    @tool
    def add(self, number: int) -> str:
        """Add a number."""
        self.numbers.append(number)
        if len(self.numbers) == 5:
            self.finish(reward=float(sum(self.numbers)))
        return f"The ledger has {self.numbers}."


class Instant(Ledger):
    instant = True


class Forgetful(gymnasium.Wrapper):
    """Has no snapshots, so that its actions must be taken again."""

    def has_wrapper_attr(self, name):
        return name not in ("snapshot", "restore") and super().has_wrapper_attr(name)


def adding(state):
    """Adds what its generator draws, and remembers it."""
    number = int(state.rng.integers(1000))
    state.memory.setdefault("said", []).append(number)
    return Reply(call("add", number=number), prompt_ids=[len(state.messages)], completion_ids=[number], logprobs=[-0.5])


ENVIRONMENTS = {"in the loop": Instant, "in threads": Ledger, "without snapshots": lambda: Forgetful(Instant())}


@pytest.fixture(params=ENVIRONMENTS)
def ledger(request):
    return ENVIRONMENTS[request.param]


async def test_branches_share_their_parents_turns_and_go_on_by_themselves(ledger, an_agent, play):
    agent = an_agent(odd=adding)
    (group,) = await play(Runner(ledger, agent, branch=branch_at({2: 2})), [Scenario("s", seed=3)])
    trunk, *branches = group.episodes
    assert [episode.id for episode in branches] == ["0/0~0", "0/0~1"]
    assert trunk.branches == [2, 2]
    for branch in branches:
        assert (branch.parent, branch.shared_turns, branch.member, branch.failure) == ("0/0", 2, 0, None)
        assert branch.turns[:2] == trunk.turns[:2]
        assert [turn.observation for turn in branch.turns[2:3]] == [trunk.turns[2].observation]
    numbers = [[turn.completion_ids[0] for turn in episode.turns] for episode in group.episodes]
    assert len({tuple(values) for values in numbers}) == 3
    begin = int(trunk.turns[0].observation[-1]["content"].removeprefix("The ledger begins with ").rstrip("."))
    assert [episode.reward for episode in group.episodes] == [float(begin + sum(values)) for values in numbers]
    # Four turns of the trunk, and two of each branch: what is shared was sampled once.
    assert len(agent.asked) == 4 + 2 + 2
    assert all(replay(ledger, episode) is None for episode in group.episodes)


async def test_branches_may_branch(ledger, an_agent, play):
    def rule(episode, state):
        return 1 if state.turn == len(episode.id.split("~")) else 0

    (group,) = await play(Runner(ledger, an_agent(odd=adding), branch=rule), [Scenario("s", seed=3)])
    # The trunk branches before turn 1, its branch before turn 2, and so on.
    assert [episode.id for episode in group.episodes] == ["0/0", "0/0~0", "0/0~0~0", "0/0~0~0~0"]
    assert [episode.shared_turns for episode in group.episodes] == [0, 1, 2, 3]


async def test_the_agents_memory_is_each_branchs_own(an_agent, play):
    memories = {}

    def odd(state):
        reply = adding(state)
        memories.setdefault(id(state.memory), state.memory)
        return reply

    await play(Runner(Instant, an_agent(odd=odd), branch=branch_at({3: 1})), [Scenario("s", seed=3)])
    said = sorted(memory["said"] for memory in memories.values())
    assert [len(numbers) for numbers in said] == [4, 4]
    assert said[0][:3] == said[1][:3]
    assert said[0] != said[1]


async def test_a_resumed_rollout_plays_trees_again_of_which_something_is_missing(ledger, an_agent, play, open_store):
    starts = [Scenario(f"s{seed}", seed=seed) for seed in range(3)]
    whole = open_store().journal("whole")
    expected = await play(Runner(ledger, an_agent(odd=adding), group_size=2, branch=branch_at({2: 2})), starts, journal=whole)
    part = open_store().journal("part")
    kept = [episode for group in expected for episode in group.episodes if episode.id not in ("whole/1/0~1", "whole/2/1")]
    for episode in kept:
        episode.id = episode.id.replace("whole", "part")
        episode.parent = episode.parent and episode.parent.replace("whole", "part")
    part.append(*kept)
    agent = an_agent(odd=adding)
    groups = await play(Runner(ledger, agent, group_size=2, branch=branch_at({2: 2})), starts, journal=part, resume=True)
    assert [[e.id.partition("/")[2] for e in group.episodes] for group in groups] == [
        [e.id.partition("/")[2] for e in group.episodes] for group in expected
    ]
    # Two of six trunks, with all that branches off them: what the agent remembered where a branch is missing, nobody knows any more.
    assert len(agent.asked) == 2 * (4 + 2 + 2)
    again = {episode.id: [turn.action for turn in episode.turns] for group in groups for episode in group.episodes}
    for group in expected:
        for episode in group.episodes:
            assert again[episode.id.replace("whole", "part")] == [turn.action for turn in episode.turns]


async def test_a_rule_that_always_says_yes_is_stopped(an_agent, play):
    with pytest.raises(UsageError, match="more than 256 episodes would branch off"):
        await play(Runner(Instant, an_agent(odd=adding), branch=lambda episode, state: 8), [Scenario("s", seed=3)])


@pytest.mark.parametrize("count", [-1, 1.5, None, "two"])
async def test_a_rule_returns_a_number_of_episodes(an_agent, play, count):
    with pytest.raises(UsageError, match="it must return how many episodes branch off"):
        await play(Runner(Instant, an_agent(odd=adding), branch=lambda episode, state: count), [Scenario("s", seed=3)])


async def test_a_rule_may_return_numpys_numbers(an_agent, play):
    rule = lambda episode, state: np.int64(state.turn == 1 and episode.parent is None)  # noqa: E731
    (group,) = await play(Runner(Instant, an_agent(odd=adding), branch=rule), [Scenario("s", seed=3)])
    assert len(group.episodes) == 2


async def test_a_rule_that_raises_is_named(an_agent, play):
    def rule(episode, state):
        raise KeyError("entropy")

    with pytest.raises(UsageError, match=r"branch raised KeyError\('entropy'\)"):
        await play(Runner(Instant, an_agent(odd=adding), branch=rule), [Scenario("s", seed=3)])


async def test_memory_that_can_not_be_copied_is_named(an_agent, play):
    def odd(state):
        state.memory["lock"] = threading.Lock()
        return adding(state)

    with pytest.raises(UsageError, match="memory can't be copied for a branch"):
        await play(Runner(Instant, an_agent(odd=odd), branch=branch_at({1: 1})), [Scenario("s", seed=3)])


class Shaky(Instant):
    """Its snapshot fails, and it doesn't repeat what it did."""

    played = 0

    def snapshot(self):
        raise OSError("the disk is full")

    def start(self):
        Shaky.played += 1
        super().start()
        return "The ledger begins."

    @tool
    def add(self, number: int) -> str:
        """Add a number."""
        said = super().add(number)
        return said if Shaky.played == 1 else said.upper()


async def test_a_branch_whose_environment_does_not_repeat_its_parents_steps_fails_and_its_parent_does_not(an_agent, play):
    Shaky.played = 0
    (group,) = await play(Runner(Shaky, an_agent(odd=adding), branch=branch_at({2: 1})), [Scenario("s", seed=3)])
    trunk, branch = group.episodes
    assert trunk.failure is None
    assert branch.failure.kind == "environment"
    assert "with the same actions it didn't do again in turn 0 what it did" in branch.failure.message


async def test_branches_of_an_episode_that_is_played_again_are_superseded(an_agent, play, open_store):
    journal = open_store().journal("a")
    starts = [Scenario("s", seed=3)]
    fails = an_agent(odd=lambda state: RuntimeError("gone") if state.turn == 3 and not state.memory.get("branch") else adding(state))
    await play(Runner(Instant, fails, branch=branch_at({2: 3})), starts, journal=journal)
    done = journal.latest()["a/0/0~1"]
    done.failure, done.turns = None, done.turns[:2]
    journal.append(done)
    (group,) = await play(Runner(Instant, an_agent(odd=adding), branch=branch_at({1: 1})), starts, journal=journal, resume=True)
    assert [episode.id for episode in group.episodes] == ["a/0/0", "a/0/0~0"]
    latest = journal.latest()
    assert latest["a/0/0~0"].shared_turns == 1
    assert {latest[f"a/0/0~{number}"].failure.kind for number in (1, 2)} <= {"cancelled", "policy"}
    assert "superseded" in latest["a/0/0~1"].failure.message


@pytest.mark.parametrize("turns", [{0: 1}, {1: 0}, {-1: 2}, {1.5: 2}, {1: True}])
def test_turns_to_branch_at_are_checked(turns):
    with pytest.raises(UsageError, match="whole number of at least 1"):
        branch_at(turns)
