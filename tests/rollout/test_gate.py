"""The gate: how many policy calls are in flight, and whose turn it is; whom it asks how many are right."""

import asyncio
import gc
import logging
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_gym.errors import UsageError
from art_gym.rollout import RequestGate, Runner, ServerLoad


async def through(gate, order, seconds=0.0, passed=None):
    await gate.enter(order)
    if passed is not None:
        passed.append(order)
    try:
        await asyncio.sleep(seconds)
    finally:
        gate.leave()


async def end(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def test_no_more_than_the_limit_pass_at_once():
    gate, most = RequestGate(3), 0

    async def one(number):
        nonlocal most
        await gate.enter((0, number))
        most = max(most, gate.in_flight)
        await asyncio.sleep(0.001)
        gate.leave()

    await asyncio.gather(*map(one, range(20)))
    assert (most, gate.in_flight, gate.waiting) == (3, 0, 0)


async def test_the_smallest_order_goes_first_and_equals_as_they_came():
    gate, passed = RequestGate(1), []
    await gate.enter((9,))
    waiting = [asyncio.create_task(through(gate, order, passed=passed)) for order in ((1, 5), (0, 9), (1, 2), (1, 5), (0, 3))]
    await asyncio.sleep(0)
    gate.leave()
    await asyncio.gather(*waiting)
    assert passed == [(0, 3), (0, 9), (1, 2), (1, 5), (1, 5)]


def test_tickets_grow():
    gate = RequestGate()
    assert [gate.ticket() for _ in range(3)] == [0, 1, 2]


async def test_one_cancelled_at_the_moment_it_is_let_through_gives_its_place_back():
    gate = RequestGate(1)
    await gate.enter((0,))
    waiting = asyncio.create_task(through(gate, (0,), 30.0))
    await asyncio.sleep(0)
    gate.leave()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert (gate.in_flight, gate.waiting) == (0, 0)


async def test_a_place_that_gets_free_in_the_moment_in_which_its_only_waiter_is_cancelled_stays_free():
    gate = RequestGate(1)
    await gate.enter((0,))
    first = asyncio.create_task(gate.enter((1,)))
    await asyncio.sleep(0)
    first.cancel()
    gate.leave()
    # `first` hasn't run since it was cancelled.
    async with asyncio.timeout(1):
        await gate.enter((2,))
    await end(first)
    assert (gate.in_flight, gate.waiting) == (1, 0)


async def test_waiters_that_gave_up_arent_kept():
    gate = RequestGate(1)
    await gate.enter((0,))
    for _ in range(20):
        tasks = [asyncio.create_task(gate.enter((1,))) for _ in range(50)]
        await asyncio.sleep(0)
        await end(*tasks)
    assert gate.waiting == 0
    assert len(gate._queue) <= 64


MOVES = st.one_of(
    st.tuples(st.sampled_from(["enter", "enter and wait"]), st.integers(0, 3)),
    st.tuples(st.sampled_from(["leave", "cancel"]), st.integers(0, 30)),
    st.just(("turn", 0)),
)


@settings(max_examples=300, deadline=None)
@given(limit=st.integers(1, 4), moves=st.lists(MOVES))
def test_any_sequence_of_entering_leaving_and_cancelling_keeps_the_limit_and_lets_everyone_in(limit, moves):
    asyncio.run(moved(limit, moves))


async def moved(limit, moves):
    gate, waiting, inside, entered = RequestGate(limit), {}, [], set()

    async def one(number, order):
        await gate.enter((order,))
        inside.append(number)
        entered.add(number)

    def leave(which):
        inside.pop(which % len(inside))
        gate.leave()

    for number, (move, what) in enumerate(moves):
        left = [other for other in waiting if other not in entered]
        if move in ("enter", "enter and wait"):
            waiting[number] = asyncio.create_task(one(number, what))
        elif move == "leave" and inside:
            leave(what)
        elif move == "cancel" and left:
            waiting.pop(left[what % len(left)]).cancel()
        if move in ("enter and wait", "turn"):
            await asyncio.sleep(0)
        assert 0 <= gate.in_flight <= limit
    # As those inside leave, all that weren't cancelled get in.
    for _ in range(3 * len(moves) + 3):
        await asyncio.sleep(0)
        assert 0 <= gate.in_flight <= limit
        if inside:
            leave(0)
    assert entered >= waiting.keys()
    assert (gate.in_flight, gate.waiting, inside) == (0, 0, [])


def test_a_gate_serves_one_event_loop_after_another():
    gate = RequestGate(1)

    async def twice():
        steering = asyncio.create_task(gate.steer(None))
        await asyncio.gather(through(gate, (0,), 0.001), through(gate, (1,), 0.001))
        await end(steering)
        return gate.in_flight

    assert [asyncio.run(twice()) for _ in range(3)] == [0, 0, 0]


def test_what_a_closed_loop_left_behind_holds_no_place_in_the_next():
    gate = RequestGate(1)
    loop = asyncio.new_event_loop()
    left = [through(gate, (number,), 60.0) for number in range(3)]
    tasks = [loop.create_task(one) for one in left]
    loop.run_until_complete(asyncio.sleep(0.001))
    assert (gate.in_flight, gate.waiting) == (1, 2)
    loop.close()

    async def later():
        await gate.enter((0,))
        second = asyncio.create_task(gate.enter((1,)))
        await asyncio.sleep(0)
        # As the collector does: the one that was let through leaves, the others give up.
        for one in left[1:]:
            one.close()
        assert (gate.in_flight, gate.waiting) == (1, 1)
        gate.leave()
        await asyncio.wait_for(second, 1)
        gate.leave()
        left[0].close()
        await asyncio.wait_for(gate.enter((2,)), 1)
        return gate.in_flight, gate.waiting

    assert asyncio.run(later()) == (1, 0)
    for task in tasks:
        task._log_destroy_pending = False
    del task
    tasks.clear()
    gc.collect()


@pytest.mark.parametrize("by", ["a request", "a waiting one", "a rollout"])
@pytest.mark.parametrize("made", [RequestGate, lambda: RequestGate(1)], ids=["adaptive", "fixed"])
def test_two_event_loops_at_once_are_refused(made, by):
    gate = made()
    begun, over = threading.Event(), threading.Event()

    async def first():
        tasks = []
        if by == "a rollout":
            tasks = [asyncio.create_task(gate.steer(None))]
        else:
            await gate.enter((0,))
        if by == "a waiting one":
            tasks = [asyncio.create_task(gate.enter((0,))) for _ in range(gate.limit)]
        await asyncio.sleep(0)
        begun.set()
        await asyncio.to_thread(over.wait)
        await end(*tasks)

    thread = threading.Thread(target=lambda: asyncio.run(first()))
    thread.start()
    try:
        assert begun.wait(5)
        with pytest.raises(UsageError, match=r"^RequestGate\(.*\) is in use in another event loop; .* a gate of their own: RequestGate\(\)$"):
            asyncio.run(gate.enter((0,)))
        with pytest.raises(UsageError, match="in use in another event loop"):
            asyncio.run(gate.steer(None))
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("gate", [None, 2])
def test_a_runner_is_collected_again_and_again(instant_steps, an_agent, scenarios, gate):
    runner = Runner(instant_steps, an_agent(delay=0.001), gate=gate)
    assert [len(runner.collect(scenarios(4))) for _ in range(3)] == [4, 4, 4]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("art_gym.rollout.gate._LOAD_SECONDS", 0.01)
    monkeypatch.setattr("art_gym.rollout.gate._WINDOW_SECONDS", 0.01)
    monkeypatch.setattr("art_gym.rollout.gate._TICK_SECONDS", 0.002)
    monkeypatch.setattr("art_gym.rollout._steering._LATE_SECONDS", 60.0)


@pytest.fixture
async def busy():
    """An adaptive gate with four times as many who want through it as it lets through at first, each again and again."""
    gate = RequestGate()

    async def again(number):
        while True:
            await through(gate, (number,), 0.005)

    tasks = [asyncio.create_task(again(number)) for number in range(4 * gate.limit)]
    await asyncio.sleep(0)
    yield gate
    await end(*tasks)


@pytest.mark.usefixtures("quick")
async def test_a_server_that_holds_requests_back_gets_fewer(busy):
    async def server_load():
        return ServerLoad(running=32, waiting=max(0, busy.in_flight - 32), cache_usage=0.6)

    steering = asyncio.create_task(busy.steer(server_load))
    # A sixteenth of 32 waits in the end; one more or less may be on its way.
    await until(lambda: 32 <= busy.limit <= 36)
    await end(steering)


@pytest.mark.usefixtures("quick")
async def test_more_are_tried_while_some_wait_and_nothing_is_late(busy):
    steering = asyncio.create_task(busy.steer(None))
    await until(lambda: busy.limit >= 4 * 128)
    await end(steering)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failing", ["fails", "hangs", "returns rubbish"])
async def test_no_more_are_tried_while_server_load_fails_and_it_is_asked_again(busy, monkeypatch, caplog, failing):
    monkeypatch.setattr("art_gym.rollout._steering.ANSWER_SECONDS", 0.01)
    asked, well = 0, False

    async def server_load():
        nonlocal asked
        asked += 1
        if well:
            return ServerLoad(running=128, waiting=0)
        if failing == "hangs":
            await asyncio.sleep(60)
        if failing == "fails":
            raise ConnectionError
        return {"running": 3}

    with caplog.at_level(logging.WARNING, "art_gym"):
        steering = asyncio.create_task(busy.steer(server_load))
        await until(lambda: asked >= 2)
        first = busy.limit
        await until(lambda: asked >= 6)
        assert busy.limit == first
        well = True
        await until(lambda: busy.limit > first)
    assert len(caplog.records) == 1
    await end(steering)


@pytest.mark.usefixtures("quick")
async def test_each_runners_servers_steer_and_one_that_ends_leaves_the_others_to_it(busy):
    asked = {"roomy": 0, "full": 0}

    async def roomy():
        asked["roomy"] += 1
        return ServerLoad(running=max(1, busy.in_flight), waiting=0)

    async def full():
        asked["full"] += 1
        return ServerLoad(running=16, waiting=max(0, busy.in_flight - 16))

    first = asyncio.create_task(busy.steer(roomy))
    await until(lambda: busy.limit > 128)
    second = asyncio.create_task(busy.steer(full))
    await until(lambda: busy.limit <= 40)
    # The first one watched the event loop; the second does from here on.
    await end(first)
    before = dict(asked)
    await until(lambda: busy.limit <= 20)
    assert asked["roomy"] == before["roomy"]
    third = asyncio.create_task(busy.steer(None))
    await end(second)
    await until(lambda: busy.limit >= 128)
    await end(third)


@pytest.mark.parametrize("computes", [True, False], ids=["by its own work", "for want of a processor"])
async def test_an_event_loop_that_is_late_by_its_own_work_gets_fewer(monkeypatch, computes):
    monkeypatch.setattr("art_gym.rollout.gate._WINDOW_SECONDS", 0.03)
    monkeypatch.setattr("art_gym.rollout.gate._TICK_SECONDS", 0.005)
    monkeypatch.setattr("art_gym.rollout.gate.thread_time", time.monotonic if computes else lambda: 0.0)
    gate = RequestGate()
    for number in range(gate.limit):
        await gate.enter((number,))
    steering = asyncio.create_task(gate.steer(None))
    await asyncio.sleep(0.001)
    time.sleep(0.05)
    await asyncio.sleep(0.02)
    await end(steering)
    # 0.8 of the 128 that were in flight.
    assert gate.limit == (102 if computes else 128)


@pytest.mark.usefixtures("quick")
async def test_a_fixed_limit_stays_and_nobody_is_asked():
    gate, asked = RequestGate(7), []

    async def server_load():
        asked.append(True)
        return ServerLoad(running=1, waiting=1000)

    steering = asyncio.create_task(gate.steer(server_load))
    await asyncio.sleep(0.05)
    assert (gate.limit, gate.adaptive, steering.done(), asked) == (7, False, False, [])
    await end(steering)


@pytest.mark.usefixtures("quick")
async def test_an_agent_whose_server_load_raises_does_no_harm(instant_steps, an_agent, play, scenarios):
    agent, asked = an_agent(delay=0.05), []

    async def server_load():
        asked.append(True)
        raise ConnectionError

    agent.server_load = server_load
    groups = await play(Runner(instant_steps, agent), scenarios(3))
    assert all(group.finished for group in groups)
    assert len(asked) > 1


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
