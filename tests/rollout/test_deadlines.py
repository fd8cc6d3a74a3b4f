"""Deadlines: no tool, policy or episode is waited for longer than was asked for."""

import subprocess
import sys
import time

import pytest

from art_gym.messages import call
from art_gym.rollout import Reply, Runner


async def test_blocking_tools_of_20_episodes_run_side_by_side(steps, an_agent, play, scenarios):
    begin = time.perf_counter()
    groups = await play(Runner(steps, an_agent(), concurrency=20), scenarios(20, step=0.2, turns=1))
    assert time.perf_counter() - begin < 2
    assert len(groups) == 20


@pytest.mark.slow
async def test_a_stuck_tool_is_left_at_its_deadline_and_its_instance_replaced(steps, an_agent, play, mixed):
    begin = time.perf_counter()
    groups = await play(Runner(steps, an_agent(), concurrency=1, tool_timeout=0.3), mixed(3, {0}, step=1.5))
    assert time.perf_counter() - begin < 1.4
    assert groups[0].episodes[0].failure.kind == "tool_timeout"
    assert groups[0].episodes[0].failure.message == "TimeoutError: the environment's step did not return within 0.3 s"
    assert [group.finished[0].reward for group in groups[1:]] == [1.0, 1.0]


async def test_a_policy_that_does_not_answer_fails_at_its_deadline(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: 30.0 if state.scenario.id == "s1" else None)
    begin = time.perf_counter()
    groups = await play(Runner(steps, agent, turn_timeout=0.2), scenarios(3))
    assert time.perf_counter() - begin < 5
    failure = groups[1].episodes[0].failure
    assert (failure.kind, failure.message) == ("policy", "the agent 'test agent' gave no reply within 0.2 s")


async def test_the_agent_is_told_how_long_it_may_take(instant_steps, an_agent, play, scenarios):
    told = []
    await play(Runner(instant_steps, an_agent(odd=lambda state: told.append(state.timeout)), turn_timeout=5, episode_timeout=2), scenarios(1))
    assert all(1.5 < timeout <= 2 for timeout in told)


async def test_an_endless_episode_is_bounded_by_time(instant_steps, an_agent, play, scenarios):
    agent = an_agent(delay=0.01)
    begin = time.perf_counter()
    groups = await play(Runner(instant_steps, agent, episode_timeout=0.3), scenarios(1, turns=10**9))
    assert time.perf_counter() - begin < 5
    assert groups[0].episodes[0].failure.kind == "policy"
    assert len(groups[0].episodes[0].turns) > 3


async def test_an_endless_episode_that_never_waits_is_bounded_by_time(instant_steps, an_agent, play, scenarios):
    agent = an_agent()

    async def act(state):
        return Reply(call("go"))

    agent.act = act
    groups = await play(Runner(instant_steps, agent, episode_timeout=0.3), scenarios(1, turns=10**9))
    failure = groups[0].episodes[0].failure
    assert (failure.kind, failure.message) == ("policy", "the episode did not end within 0.3 s")


@pytest.mark.slow
async def test_an_episode_out_of_time_in_a_step_fails_with_that_kind(steps, an_agent, play, scenarios):
    groups = await play(Runner(steps, an_agent(), episode_timeout=0.2), scenarios(1, step=1.0))
    assert groups[0].episodes[0].failure.kind == "tool_timeout"


STUCK = """
import sys, time
sys.path[:0] = {path!r}
from art_gym import Runner, Scenario, ToolEnv, call, tool
from art_gym.rollout import Reply
class Stuck(ToolEnv):
    @tool
    def wait(self) -> str:
        "Wait for ever."
        time.sleep(3600)
class Waits:
    name = "waits"
    async def act(self, state):
        return Reply(call("wait"))
    async def close(self):
        pass
(group,) = Runner(Stuck, Waits(), tool_timeout=0.2).collect([Scenario("s", 0)])
print(group.episodes[0].failure.kind)
"""


@pytest.mark.slow
def test_a_tool_that_never_returns_does_not_keep_the_process_alive():
    done = subprocess.run([sys.executable, "-c", STUCK.format(path=sys.path)], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode) == ("tool_timeout\n", 0), done.stderr
