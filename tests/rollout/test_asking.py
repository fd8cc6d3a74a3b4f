"""Asking an agent: bounded whatever it does, and what it returns is looked at before it counts."""

import asyncio
import time

import numpy as np
import pytest

from art_gym.errors import EngineError, UsageError
from art_gym.messages import call
from art_gym.rollout import Reply, Runner
from art_gym.rollout._asking import _left

GO = call("go")


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(None), "must reply with an assistant message"),
        (Reply("go"), "must reply with an assistant message"),
        (Reply({}), "must reply with an assistant message"),
        (Reply({"role": "user", "content": "go"}), "must reply with an assistant message"),
        (Reply(GO, prompt_ids=np.array([1])), "must give prompt_ids as a list of whole numbers"),
        (Reply(GO, completion_ids=[1.5]), "must give completion_ids as a list of whole numbers"),
        (Reply(GO, completion_ids=["1"]), "must give completion_ids as a list of whole numbers"),
        (Reply(GO, completion_ids=[1], logprobs=[float("nan")]), "must give logprobs as a list of finite numbers"),
        (Reply(GO, completion_ids=[1], logprobs=[None]), "must give logprobs as a list of finite numbers"),
        (Reply(GO, completion_ids=[1, 2], logprobs=[-0.5]), "gave 2 completion_ids and 1 logprobs"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False], ids=["with a journal", "without"])
async def test_what_is_no_reply_is_the_policys_failure(any_steps, an_agent, play, scenarios, open_store, reply, problem, recorded):
    journal = open_store().journal("a") if recorded else None
    (group,) = await play(Runner(any_steps, an_agent(odd=lambda state: reply)), scenarios(1), journal=journal)
    (episode,) = group.failed
    assert episode.failure.kind == "policy"
    assert problem in episode.failure.message
    assert episode.turns == []


@pytest.mark.parametrize(
    "reply", [Reply({"content": "go"}), Reply({"tool_calls": GO["tool_calls"]}), Reply(GO, completion_ids=[], logprobs=[])]
)
async def test_short_forms_are_replies(any_steps, an_agent, play, scenarios, reply):
    (group,) = await play(Runner(any_steps, an_agent(odd=lambda state: reply)), scenarios(1))
    assert group.failed == []


class Stubborn:
    """Doesn't end when it is cancelled."""

    name = "stubborn"

    def __init__(self, seconds):
        self.seconds = seconds

    async def act(self, state):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return Reply(GO)

    async def close(self):
        pass


async def test_an_agent_that_does_not_end_is_left_behind(monkeypatch, caplog, steps, play, scenarios):
    monkeypatch.setattr("art_gym.rollout._asking.GRACE_SECONDS", 0.1)
    begin = time.monotonic()
    (group,) = await play(Runner(steps, Stubborn(2.0), turn_timeout=0.1), scenarios(1))
    assert time.monotonic() - begin < 1.5
    assert group.failed[0].failure.kind == "policy"
    assert "gave no reply within 0.1 s" in group.failed[0].failure.message
    assert "'stubborn' doesn't end when it is cancelled, and is left behind" in caplog.text
    await asyncio.gather(*_left)
    assert not _left


async def test_waiting_for_others_is_not_an_episodes_own_time(instant_steps, an_agent, play, scenarios):
    runner = Runner(instant_steps, an_agent(odd=lambda state: 0.1), concurrency=12, gate=1, episode_timeout=0.8)
    # One after the other, 12 episodes of two turns take 2.4 s; each has 0.2 s of its own.
    groups = await play(runner, scenarios(12))
    assert all(group.finished for group in groups)


async def test_an_engine_check_that_does_not_answer_ends_the_rollout(monkeypatch, steps, an_agent, play, scenarios):
    monkeypatch.setattr("art_gym.rollout._rollout.ENGINE_ANSWER_SECONDS", 0.2)
    runner = Runner(steps, an_agent(odd=lambda state: ValueError("no")), engine_check=lambda: time.sleep(1.0))
    with pytest.raises(EngineError, match=r"the engine check gave no answer within 0\.2 s"):
        await play(runner, scenarios(1))


async def test_cancelled_twice_it_still_records_and_leaves_nothing(steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    agent = an_agent(delay=30.0)
    task = asyncio.create_task(play(Runner(steps, agent, concurrency=4), scenarios(4), journal=journal))
    while agent.playing < 4:
        await asyncio.sleep(0.01)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {episode.failure.kind for episode in journal.latest().values()} == {"cancelled"}
    assert len(journal.latest()) == 4
    assert agent.playing == 0


async def test_a_journal_takes_one_rollout_at_a_time(steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    runner = Runner(steps, an_agent(delay=0.1))
    first = asyncio.create_task(play(runner, scenarios(2), journal=journal))
    await asyncio.sleep(0.05)
    with pytest.raises(UsageError, match="another rollout writes to"):
        await play(runner, scenarios(2), journal=journal, resume=True)
    assert len(await first) == 2


async def test_an_instance_that_is_shared_ends_the_rollout(steps, an_agent, play, scenarios):
    env = steps()
    with pytest.raises(UsageError, match="make a new one each time"):
        await play(Runner(lambda: env, an_agent(delay=0.05), concurrency=4), scenarios(8))
    env.close()


async def test_a_healthy_tool_is_not_blamed_for_the_episodes_time(steps, an_agent, play, scenarios):
    agent = an_agent(odd=lambda state: 0.3)
    (group,) = await play(Runner(steps, agent, tool_timeout=5.0, episode_timeout=0.4), scenarios(1, step=0.3))
    assert "the episode did not end within 0.4 s, and the environment's step did not return" in group.failed[0].failure.message
