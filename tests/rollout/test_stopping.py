"""Stopping: leaving, cancelling and errors, with nothing left behind."""

import asyncio
import subprocess
import sys
import time
from contextlib import aclosing

import pytest

from art_gym.errors import UsageError
from art_gym.messages import call
from art_gym.rollout import Reply, Runner
from art_gym.scenarios import Scenario


async def test_leaving_early_cancels_what_is_in_play(steps, an_agent, scenarios, open_store):
    agent = an_agent(odd=lambda state: 30.0 if state.scenario.seed > 0 else None)
    journal = open_store().journal("a")
    before = asyncio.all_tasks()
    async with aclosing(Runner(steps, agent, concurrency=4).run(scenarios(), journal=journal)) as groups:
        async for _ in groups:
            break
    assert asyncio.all_tasks() == before
    assert agent.playing == 0
    kinds = [episode.failure and episode.failure.kind for _, episode in sorted(journal.latest().items())]
    assert kinds[0] is None
    assert set(kinds[1:]) == {"cancelled"}


async def test_a_break_without_aclosing_cleans_up_too(steps, an_agent, scenarios):
    before = asyncio.all_tasks()
    async for _ in Runner(steps, an_agent(odd=lambda state: 0.2), concurrency=4).run(scenarios()):
        break
    await asyncio.sleep(0.3)
    assert asyncio.all_tasks() == before


async def test_cancelling_the_caller_propagates(steps, an_agent, play, scenarios):
    agent = an_agent(delay=30.0)
    task = asyncio.create_task(play(Runner(steps, agent), scenarios()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert agent.playing == 0


@pytest.mark.slow
async def test_cancelling_does_not_wait_for_a_stuck_tool_for_ever(steps, an_agent, play, scenarios, monkeypatch):
    monkeypatch.setattr("art_gym.rollout._hosts.CLOSE_SECONDS", 0.2)
    task = asyncio.create_task(play(Runner(steps, an_agent()), scenarios(1, step=2.0)))
    await asyncio.sleep(0.2)
    begin = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - begin < 1.5


async def test_an_error_in_the_scenarios_reaches_the_caller(steps, an_agent, play):
    def broken():
        yield Scenario("s0", 0)
        raise LookupError("no more files")

    with pytest.raises(LookupError, match="no more files"):
        await play(Runner(steps, an_agent()), broken())


async def test_an_error_in_the_progress_display_reaches_the_caller(steps, an_agent, play, scenarios):
    class Broken:
        def on_episode(self, episode):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        await play(Runner(steps, an_agent()), scenarios(), progress=Broken())


async def test_a_mistake_in_the_agents_setup_stops_the_rollout(steps, an_agent, play, scenarios):
    with pytest.raises(UsageError, match="no such model"):
        await play(Runner(steps, an_agent(odd=lambda state: UsageError("no such model"))), scenarios())


async def test_cancelling_while_the_first_environment_is_made_leaves_none(steps, an_agent, play, scenarios):
    def make():
        time.sleep(0.3)
        return steps()

    task = asyncio.create_task(play(Runner(make, an_agent()), scenarios()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_episode_that_never_waits_can_be_cancelled(instant_steps, an_agent, play, scenarios):
    agent = an_agent()

    async def act(state):
        return Reply(call("go"))

    agent.act = act
    begin = time.perf_counter()
    task = asyncio.create_task(play(Runner(instant_steps, agent, episode_timeout=20), scenarios(1, turns=10**9)))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.perf_counter() - begin < 10


async def test_an_agent_that_cancels_the_rollouts_own_task_is_told_and_not_waited_for(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: asyncio.current_task().cancel() and 1.0)
    with pytest.raises(RuntimeError, match="the rollout was ended by CancelledError"):
        await asyncio.wait_for(play(Runner(steps, agent), scenarios()), 10)


LEFT = """
import asyncio, sys
sys.path[:0] = {path!r}
from art_gym import Runner, call
from art_gym.rollout import Reply
class Slow:
    name = "slow"
    async def act(self, state):
        await asyncio.sleep(0.05)
        return Reply(call("guess", number=1))
    async def close(self):
        pass
async def main():
    runner = Runner("art_gym/GuessNumber-v0", Slow(), concurrency=4)
    async for group in runner.run(runner.make().unwrapped.scenarios("train")):
        break
asyncio.run(main())
print("ended")
"""


@pytest.mark.slow
def test_a_program_that_ends_in_the_middle_of_a_rollout_ends():
    done = subprocess.run([sys.executable, "-c", LEFT.format(path=sys.path)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)
