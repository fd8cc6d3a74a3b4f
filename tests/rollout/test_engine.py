"""The engine: one that died stops the rollout, with what was in play on disk."""

import asyncio
import threading
import time

import pytest

from art_gym.errors import EngineError, PolicyError
from art_gym.rollout import Runner


async def test_a_dead_engine_stops_the_rollout_and_what_was_in_play_is_recorded(steps, an_agent, scenarios, open_store):
    class Dying(an_agent):
        async def act(self, state):
            if state.scenario.id == "s5":
                while ("s6", 0, 0) not in self.asked:
                    await asyncio.sleep(0.01)
                raise EngineError("gone")
            return await super().act(state)

    agent = Dying(odd=lambda state: 10.0 if state.scenario.id == "s6" else None)
    journal = open_store().journal("a")
    yielded = []

    async def consume():
        async for group in Runner(steps, agent, concurrency=2).run(scenarios(), journal=journal):
            yielded.append(group.scenario.id)

    with pytest.raises(EngineError, match="gone"):
        await consume()
    assert yielded == ["s0", "s1", "s2", "s3", "s4"]
    recorded = {episode.scenario.id: episode.failure and episode.failure.kind for episode in journal.read()}
    assert recorded == dict.fromkeys(["s0", "s1", "s2", "s3", "s4"]) | {"s5": "engine", "s6": "engine"}
    assert len(agent.asked) < 20


async def test_a_policy_error_of_a_dead_engine_is_the_engines_with_its_log(steps, an_agent, play, scenarios):
    def check():
        raise EngineError("vLLM died; its log ends with: out of memory")

    agent = an_agent(odd=lambda state: PolicyError("connection reset"))
    with pytest.raises(EngineError, match="out of memory"):
        await play(Runner(steps, agent, engine_check=check), scenarios())


async def test_a_dead_engine_is_noticed_while_every_episode_waits(steps, an_agent, play, scenarios, monkeypatch):
    monkeypatch.setattr("art_gym.rollout._rollout.ENGINE_CHECK_SECONDS", 0.05)
    checks = []

    def check():
        checks.append(threading.current_thread())
        if len(checks) > 2:
            raise EngineError("vLLM died")

    begin = time.perf_counter()
    with pytest.raises(EngineError, match="vLLM died"):
        await play(Runner(steps, an_agent(odd=lambda state: 30.0), engine_check=check), scenarios())
    assert time.perf_counter() - begin < 5
    assert threading.main_thread() not in checks
