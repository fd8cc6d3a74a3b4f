"""The turnstile: few at once, in order, and nobody waits for ever."""

import asyncio

from art_gym.rollout._turnstile import AT_ONCE, Turnstile


async def test_a_bounded_number_pass_in_one_turn_of_the_loop_and_in_order():
    turnstile, passed = Turnstile(), []

    async def one(number):
        await turnstile.pass_through()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(10 * AT_ONCE)]
    counts = []
    while len(passed) < len(tasks):
        before = len(passed)
        await asyncio.sleep(0)
        counts.append(len(passed) - before)
    assert passed == list(range(10 * AT_ONCE))
    # The first turn starts the tasks, and lets the first ones through at once.
    assert max(counts) <= 2 * AT_ONCE
    assert len(counts) >= 9


async def test_one_alone_does_not_wait():
    turnstile = Turnstile()
    for _ in range(3):
        task = asyncio.create_task(turnstile.pass_through())
        await asyncio.sleep(0)
        assert task.done()
        await asyncio.sleep(0)


async def test_those_that_are_cancelled_take_nobodys_place():
    turnstile = Turnstile()
    tasks = [asyncio.create_task(turnstile.pass_through()) for _ in range(4 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : 3 * AT_ONCE]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5.0)
    assert sum(isinstance(result, asyncio.CancelledError) for result in done) == 2 * AT_ONCE
