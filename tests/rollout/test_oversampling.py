"""Stragglers: more episodes than a group needs are played, and the slowest are cut."""

import asyncio

import pytest

from art_gym.errors import UsageError
from art_gym.rollout import Runner, branch_at


def slow_members(*members, seconds=30.0):
    return lambda state: seconds if state.member in members else None


@pytest.mark.parametrize("instant", [True, False], ids=["in the loop", "in threads"])
async def test_a_group_is_whole_when_enough_have_finished(instant, steps, instant_steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    agent = an_agent(odd=slow_members(1, 4))
    before = asyncio.all_tasks()
    groups = await play(Runner(instant_steps if instant else steps, agent, group_size=3, oversample=2), scenarios(2), journal=journal)
    for group in groups:
        assert [episode.member for episode in group.finished] == [0, 2, 3]
        assert [(episode.member, episode.failure.kind) for episode in group.failed] == [(1, "cancelled"), (4, "cancelled")]
        assert "3 episodes of its group had finished" in group.failed[0].failure.message
    assert len(journal.latest()) == 10
    assert asyncio.all_tasks() == before
    assert agent.playing == 0


async def test_a_failed_episode_is_made_up_for(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: ValueError("no") if state.member == 0 else None)
    (group,) = await play(Runner(steps, agent, group_size=2, oversample=1), scenarios(1))
    assert [episode.member for episode in group.finished] == [1, 2]


async def test_too_many_failures_leave_a_group_short_rather_than_hanging(steps, an_agent, play, scenarios):
    (group,) = await play(Runner(steps, an_agent(odd=lambda state: ValueError("no")), group_size=2, oversample=1), scenarios(1))
    assert len(group.failed) == 3


async def test_episodes_that_have_no_place_yet_are_not_begun(instant_steps, an_agent, play, scenarios):
    agent = an_agent()
    (group,) = await play(Runner(instant_steps, agent, group_size=1, oversample=5, concurrency=1), scenarios(1))
    assert [episode.member for episode in group.episodes] == [0]
    assert {member for _, member, _ in agent.asked} == {0}


async def test_a_tool_that_is_stuck_does_not_hold_up_its_group(steps, an_agent, play, scenarios):
    # The step of one member sleeps; its thread is left behind, and the next episode gets another environment.
    agent = an_agent(odd=slow_members(1, seconds=0.05))
    groups = await play(Runner(steps, agent, group_size=1, oversample=1, concurrency=2), scenarios(3, step=0.1))
    assert all(len(group.finished) == 1 for group in groups)


async def test_a_resumed_rollout_leaves_what_was_cut_alone(steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    runner = Runner(steps, an_agent(odd=slow_members(0)), group_size=2, oversample=1)
    first = await play(runner, scenarios(2), journal=journal)
    again = an_agent()
    second = await play(Runner(steps, again, group_size=2, oversample=1), scenarios(2), journal=journal, resume=True)
    assert again.asked == []
    assert [[episode.id for episode in group.finished] for group in second] == [[episode.id for episode in group.finished] for group in first]


def test_bad_numbers_are_refused(steps, an_agent):
    for oversample in (-1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="oversample"):
            Runner(steps, an_agent(), oversample=oversample)
    with pytest.raises(UsageError, match="either oversample or branch"):
        Runner(steps, an_agent(), oversample=1, branch=branch_at({1: 1}))


async def test_no_more_than_a_group_needs_finish_however_slow_the_disk_is(instant_steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    groups = await play(Runner(instant_steps, an_agent(), group_size=2, oversample=6), scenarios(5), journal=journal)
    assert [len(group.finished) for group in groups] == [2] * 5
