"""Groups: in the order of the scenarios, as many at once as was asked for, and `collect`."""

import asyncio
from contextlib import aclosing

import pytest

from art_gym.rollout import Runner


async def test_groups_come_in_the_order_of_the_scenarios_however_long_they_take(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: 0.02 * (state.scenario.seed % 3))
    groups = await play(Runner(steps, agent, group_size=2, concurrency=4), scenarios(9))
    assert [group.scenario.id for group in groups] == [f"s{number}" for number in range(9)]
    assert [[episode.member for episode in group.episodes] for group in groups] == [[0, 1]] * 9
    assert {episode.scenario.id for group in groups[:1] for episode in group.episodes} == {"s0"}


async def test_no_more_than_concurrency_episodes_are_in_play(instant_steps, an_agent, play, scenarios):
    agent = an_agent(delay=0.005)
    await play(Runner(instant_steps, agent, concurrency=3, group_size=2), scenarios(5))
    assert agent.most_playing == 3


async def test_endless_scenarios_are_taken_as_needed(instant_steps, an_agent, scenarios):
    taken = 0

    def endless():
        nonlocal taken
        for scenario in scenarios():
            taken += 1
            yield scenario

    runner = Runner(instant_steps, an_agent(), concurrency=4)
    async with aclosing(runner.run(endless())) as groups:
        ids = [(await anext(groups)).scenario.id for _ in range(5)]
        await asyncio.sleep(0.2)  # plenty for instant episodes to run ahead as far as they may
    assert ids == ["s0", "s1", "s2", "s3", "s4"]
    assert 5 <= taken <= 5 + 8 * 4 + 2


def test_collect_works_without_a_loop_and_closes_the_agent(steps, an_agent, scenarios):
    closed = []
    agent = an_agent()

    async def close():
        closed.append(True)

    agent.close = close
    groups = Runner(steps, agent, group_size=2).collect(scenarios(3))
    assert [len(group.episodes) for group in groups] == [2, 2, 2]
    assert closed == [True]


async def test_collect_works_where_a_loop_is_running(steps, an_agent, scenarios):
    assert len(Runner(steps, an_agent()).collect(scenarios(3))) == 3
    with pytest.raises(LookupError):
        Runner(steps, an_agent(odd=lambda state: None)).collect(iter_raising())


def iter_raising():
    raise LookupError
    yield


def test_progress_hears_of_every_episode(steps, an_agent, scenarios):
    heard = []

    class Listener:
        def on_episode(self, episode):
            heard.append(episode.id)

    Runner(steps, an_agent(), group_size=2).collect(scenarios(2), progress=Listener())
    assert sorted(heard) == ["0/0", "0/1", "1/0", "1/1"]
