"""2,000 episodes in which everything goes wrong that may: the others end as if nothing had happened, and nothing is left behind."""

import asyncio
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from art_gym.rollout import Runner
from art_gym.rollout.isolation import Processes
from art_gym.store import EpisodeStore
from art_gym_agents import ChatAgent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COUNT = 2000
RAISING, BLOCKING, EATING = COUNT // 100, 3, 1
SERVER_FAULTS = {"429": 0.01, "500": 0.01, "reset": 0.005}
TOOL_TIMEOUT, MEMORY = 3.0, 512 << 20


class Outage:
    """Kills the server once so many episodes have ended, and starts it again a second later. It counts the faults that the server made."""

    def __init__(self, server, after):
        self.server, self.after = server, after
        self.ended = 0
        self.faults = dict.fromkeys(SERVER_FAULTS, 0)
        self.thread = threading.Thread(target=self._strike)

    def on_episode(self, episode):
        self.ended += 1
        if self.ended == self.after:
            self.thread.start()

    def _strike(self):
        self.count()
        self.server.kill()
        time.sleep(1.0)
        self.server.start()

    def count(self):
        stats = self.server.stats()
        self.faults = {name: number + stats.get(name, 0) for name, number in self.faults.items()}


def what_is_there():
    """Tasks, threads, child processes and open files of this process."""
    children = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError):  # a thread that has just ended
            children |= {*listing.read_text().split()}
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed them
            files.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return {"tasks": asyncio.all_tasks(), "threads": {*threading.enumerate()}, "children": children, "files": files}


async def what_is_left(before):
    """What has come since, after a moment for what is on its way out."""
    for _ in range(50):
        left = {kind: there - before[kind] for kind, there in what_is_there().items()}
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left


def outcome(episode):
    turns = [(turn.prompt_ids, turn.completion_ids, turn.logprobs, turn.reward, turn.rewards, turn.policy) for turn in episode.turns]
    return episode.messages, turns, episode.reward, episode.metrics, episode.terminated, episode.truncated


async def rollout(env, scenarios, folder, *, faults, isolation, progress=None):
    """Play, with the journal on disk; returns the episodes by seed, what is left behind, the seconds, and what watched."""
    from rollout.mock_server import MockServer

    before = what_is_there()
    with MockServer(latency=0.02, faults=faults) as server, EpisodeStore(folder) as store:
        watching = progress and progress(server)
        agent = ChatAgent(server.url, "mock")
        runner = Runner(env, agent, concurrency=32, tool_timeout=TOOL_TIMEOUT, episode_timeout=60.0, isolation=isolation)
        begin = time.monotonic()
        groups = [group async for group in runner.run(scenarios, journal=store.journal("train"), progress=watching)]
        seconds = time.monotonic() - begin
        await agent.close()
        if watching:
            watching.thread.join()
            watching.count()
        journal = store.journal("train").latest()
    left = await what_is_left(before)
    episodes = {group.scenario.seed: group.episodes[0] for group in groups}
    assert [group.scenario.id for group in groups] == [scenario.id for scenario in scenarios]
    assert {episode.id: episode for episode in episodes.values()} == journal
    return episodes, left, seconds, watching


async def test_2000_episodes_with_faults_everywhere(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from rollout.faulty_env import FaultyLedgerEnv, faulty_scenarios

    chosen = random.Random(5).sample(range(COUNT), RAISING + BLOCKING + EATING)
    faults = dict(zip(chosen, ["raise"] * RAISING + ["block"] * BLOCKING + ["eat"] * EATING, strict=True))
    kinds = {number: "tool_timeout" if fault == "block" else "environment" for number, fault in faults.items()}
    isolation = Processes(memory=MEMORY)

    expected, left, _, _ = await rollout(FaultyLedgerEnv, faulty_scenarios(COUNT, {}), tmp_path / "calm", faults={}, isolation=isolation)
    assert all(episode.success for episode in expected.values())
    assert not any(left.values()), left

    episodes, left, seconds, outage = await rollout(
        FaultyLedgerEnv,
        faulty_scenarios(COUNT, faults),
        tmp_path / "faulty",
        faults=SERVER_FAULTS,
        isolation=isolation,
        progress=lambda server: Outage(server, COUNT // 2),
    )
    assert {number: episode.failure.kind for number, episode in episodes.items() if episode.failure} == kinds
    for number, fault in faults.items():
        words = {"raise": f"ledger {number} has a torn page", "block": "did not return within 3 s", "eat": "memory"}[fault]
        assert words in episodes[number].failure.message.lower()
    assert all(outcome(episodes[number]) == outcome(episode) for number, episode in expected.items() if number not in faults)
    # That the test tests something: about 1% of 10,000 turns each, and the outage.
    assert min(outage.faults.values()) > 20, outage.faults
    assert outage.ended == COUNT
    # Nothing hung: an episode takes a second at most, an outage or a blocked tool a few more.
    assert max(episode.seconds for episode in episodes.values()) < 30
    assert seconds < 300
    assert not any(left.values()), left
