"""A rollout that is killed, again and again: nothing that had ended is lost, nothing is played twice."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from art_gym.store import EpisodeStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COUNT, GROUP_SIZE = 200, 2
KILLS = 30


class Child:
    """The process, and what it has said."""

    def __init__(self, url, folder):
        command = [sys.executable, Path(__file__).with_name("rollout_process.py"), url, folder, str(COUNT)]
        env = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        self.said = {"plays": [], "ended": []}
        self._news = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            if line.endswith("\n"):  # what a kill cut short was not said
                what, id = line.split()
                with self._news:
                    self.said[what].append(id)
                    self._news.notify()
        with self._news:
            self._over = True
            self._news.notify()

    def wait_for(self, what, count):
        """Wait until it has said that so often; or until it has nothing more to say."""
        with self._news:
            self._news.wait_for(lambda: len(self.said[what]) >= count or self._over, timeout=60)

    def kill(self):
        self.process.kill()
        self.end()

    def end(self):
        self._reader.join()
        errors = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdout.close()
        assert self.process.wait(timeout=60) in (0, -9), errors


@pytest.fixture
def mock_server(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from rollout.mock_server import MockServer

    with MockServer(latency=0.02) as server:
        yield server


def latest(folder):
    with EpisodeStore(folder) as store:
        return store.journal("train").latest()


def outcome(episode):
    turns = [(turn.prompt_ids, turn.completion_ids, turn.logprobs, turn.reward, turn.rewards, turn.policy) for turn in episode.turns]
    return episode.scenario, episode.member, episode.failure, episode.messages, turns, episode.reward, episode.metrics, episode.terminated


def test_thirty_kills_lose_no_episode_that_had_ended(mock_server, tmp_path):
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    Child(mock_server.url, undisturbed).end()
    everything = {f"train/{index}/{member}" for index in range(COUNT) for member in range(GROUP_SIZE)}
    expected = latest(undisturbed)
    assert expected.keys() == everything
    rng = random.Random(5)
    before = {}
    in_play = 0
    for number in range(KILLS):
        child = Child(mock_server.url, folder)
        if number % 5 == 0:
            time.sleep(rng.uniform(0.0, 1.0))  # while it starts, or reads what there is
        else:
            # Those known from before are told first.
            child.wait_for("ended", len(before) + rng.randrange(12))
            time.sleep(rng.uniform(0.0, 0.03))
        child.kill()
        after = latest(folder)
        assert set(child.said["ended"]) <= after.keys(), f"kill {number}: an episode was said to have ended, and isn't on disk"
        assert not set(child.said["plays"]) & before.keys(), f"kill {number}: an episode that was on disk was played again"
        assert {id: after[id] for id in before} == before
        before = after
        in_play += 0 < len(after) < len(everything)
    assert in_play > KILLS // 2
    last = Child(mock_server.url, folder)
    last.end()
    assert set(last.said["plays"]) == everything - before.keys()
    assert {id: outcome(episode) for id, episode in latest(folder).items()} == {id: outcome(episode) for id, episode in expected.items()}
