"""The gate: how many policy calls are in flight, whose turn it is, and how many are found to be right."""

import asyncio
import time
from contextlib import suppress

import pytest

from art_gym.errors import UsageError
from art_gym.rollout import RequestGate, Runner, ServerLoad


async def through(gate, order, seconds=0.0, timeout=10.0, passed=None):
    await gate.enter(order, timeout)
    if passed is not None:
        passed.append(order)
    try:
        await asyncio.sleep(seconds)
    finally:
        gate.leave()


async def test_no_more_than_the_limit_pass_at_once():
    gate, most = RequestGate(3), 0

    async def one(number):
        nonlocal most
        await gate.enter((0, number), 10.0)
        most = max(most, gate.in_flight)
        await asyncio.sleep(0.001)
        gate.leave()

    await asyncio.gather(*map(one, range(20)))
    assert (most, gate.in_flight) == (3, 0)


async def test_the_smallest_order_goes_first_and_equals_as_they_came():
    gate, passed = RequestGate(1), []
    await gate.enter((9,), 1.0)
    waiting = [asyncio.create_task(through(gate, order, passed=passed)) for order in ((1, 5), (0, 9), (1, 2), (1, 5), (0, 3))]
    await asyncio.sleep(0)
    gate.leave()
    await asyncio.gather(*waiting)
    assert passed == [(0, 3), (0, 9), (1, 2), (1, 5), (1, 5)]


async def test_one_that_waits_too_long_is_told_so_and_holds_no_place():
    gate = RequestGate(1)
    await gate.enter((0,), 1.0)
    with pytest.raises(TimeoutError):
        await gate.enter((0,), 0.01)
    gate.leave()
    await gate.enter((0,), 0.01)
    assert gate.in_flight == 1


async def test_one_cancelled_at_the_moment_it_is_let_through_gives_its_place_back():
    gate = RequestGate(1)
    await gate.enter((0,), 1.0)
    waiting = asyncio.create_task(through(gate, (0,), 30.0))
    await asyncio.sleep(0)
    gate.leave()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert gate.in_flight == 0


async def steered(gate, load, seconds):
    task = asyncio.create_task(gate.steer(load))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("art_gym.rollout.gate._LOAD_SECONDS", 0.02)
    monkeypatch.setattr("art_gym.rollout.gate._WINDOW_SECONDS", 0.03)
    monkeypatch.setattr("art_gym.rollout.gate._TICK_SECONDS", 0.005)


@pytest.mark.usefixtures("quick")
async def test_a_server_that_holds_requests_back_gets_fewer():
    gate = RequestGate()
    for number in range(100):
        await gate.enter((number,), 1.0)

    async def load():
        return ServerLoad(running=32, waiting=68)

    await steered(gate, load, 0.05)
    # 32 run; a quarter of them may wait.
    assert gate.limit == 100 - (68 - 8)


@pytest.mark.usefixtures("quick")
async def test_more_are_tried_while_some_wait_and_nothing_is_late():
    gate = RequestGate()
    first = gate.limit
    waiting = [asyncio.create_task(through(gate, (number,), 30.0)) for number in range(2 * first)]
    await steered(gate, None, 0.3)
    assert gate.in_flight == 2 * first
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("computes", [True, False], ids=["by its own work", "for want of a processor"])
async def test_an_event_loop_that_is_late_by_its_own_work_gets_fewer(monkeypatch, computes):
    monkeypatch.setattr("art_gym.rollout.gate.thread_time", time.monotonic if computes else lambda: 0.0)
    gate = RequestGate()
    first = gate.limit
    for number in range(first):
        await gate.enter((number,), 1.0)
    task = asyncio.create_task(gate.steer(None))
    await asyncio.sleep(0.001)
    time.sleep(0.05)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gate.limit == (int(0.8 * first) if computes else first)


@pytest.mark.usefixtures("quick")
async def test_a_fixed_limit_stays():
    gate = RequestGate(7)

    async def load():
        return ServerLoad(running=1, waiting=1000)

    await steered(gate, load, 0.1)
    assert gate.limit == 7


async def test_an_agent_whose_load_raises_does_no_harm(monkeypatch, instant_steps, an_agent, play, scenarios):
    monkeypatch.setattr("art_gym.rollout.gate._LOAD_SECONDS", 0.001)
    agent = an_agent(delay=0.05)

    async def load():
        raise ConnectionError

    agent.load = load
    groups = await play(Runner(instant_steps, agent), scenarios(3))
    assert all(group.finished for group in groups)


async def test_the_runner_keeps_to_a_gates_limit(instant_steps, an_agent, play, scenarios):
    agent = an_agent(delay=0.002)
    await play(Runner(instant_steps, agent, concurrency=20, gate=2), scenarios(20))
    assert agent.most_playing == 2


async def test_an_evaluation_goes_before_a_training_through_a_shared_gate(instant_steps, an_agent, play, scenarios):
    asked = []
    gate = RequestGate(1)

    def agent_of(name):
        return an_agent(delay=0.001, odd=lambda state: asked.append(name))

    training = Runner(instant_steps, agent_of("training"), gate=gate, priority=1)
    evaluation = Runner(instant_steps, agent_of("evaluation"), gate=gate, priority=0)
    await asyncio.gather(play(training, scenarios(20)), play(evaluation, scenarios(20)))
    # One of the training's calls may be in flight whenever the evaluation's next ones are on their way.
    last = len(asked) - asked[::-1].index("evaluation")
    assert asked[:last].count("training") < 10 < asked[last:].count("training")


async def test_groups_get_whole_one_after_the_other(instant_steps, an_agent, play, scenarios):
    agent = an_agent(delay=0.001)
    await play(Runner(instant_steps, agent, concurrency=64, group_size=4, gate=4), scenarios(8, turns=3))
    last = {}
    for place, (scenario, _, _) in enumerate(agent.asked):
        last[scenario] = place
    # 12 calls a group: an earlier group's last comes before the call after the next group's last.
    assert list(last) == [f"s{number}" for number in range(8)]
    assert all(last[f"s{number}"] <= 12 * (number + 1) + 12 for number in range(8))


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "many"])
def test_a_limit_is_a_number_of_requests(limit):
    with pytest.raises(UsageError, match="whole number of at least 1"):
        RequestGate(limit)
