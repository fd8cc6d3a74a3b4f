"""kill -9 under load: what a client was told of is there after a restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}

_SERVE = """
import sys, uvicorn
from art_gym.gateway import GatewaySettings, create_app
upstream, folder, port = sys.argv[1:]
app = create_app(GatewaySettings.of(upstream=upstream, model="mock", folder=folder))
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")
"""


@contextmanager
def served(upstream: str, folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", _SERVE, upstream, str(folder), str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, "the gateway ended at once"
            assert time.monotonic() < deadline
            try:
                httpx.get(url + "/health")
                break
            except httpx.HTTPError:
                time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.wait()


class Player(threading.Thread):
    """Plays episodes until the gateway is gone; knows what it was told."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self.url, self.number = url, number
        self.finished: dict[str, tuple[float, list[str]]] = {}
        self.rewarded: dict[str, float] = {}
        self.created: set[str] = set()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as client:
            try:
                while True:
                    self._play(client)
            except (httpx.HTTPError, OSError):
                return

    def _play(self, client: httpx.Client) -> None:
        made = client.post("/episodes", json={"group": str(self.number)}).raise_for_status().json()
        self.created.add(made["id"])
        said = []
        for _ in range(3):
            answer = client.post(f"/episodes/{made['id']}/v1/chat/completions", json=CHAT).raise_for_status().json()
            said.append(answer["choices"][0]["message"]["content"])
        reward = float(len(self.finished))
        client.post(f"/episodes/{made['id']}/finish", json={"reward": reward}).raise_for_status()
        self.finished[made["id"]] = (reward, said)
        if len(self.finished) % 2:
            client.post(f"/episodes/{made['id']}/rewards", json={"reward": 0.5}).raise_for_status()
            self.rewarded[made["id"]] = reward + 0.5


@pytest.mark.slow
def test_finished_episodes_survive_kill_9_under_load(upstream: str, tmp_path: Path) -> None:
    players: list[Player] = []
    for round in range(3):
        with served(upstream, tmp_path) as (url, process):
            now = [Player(url, number) for number in range(8)]
            for player in now:
                player.start()
            deadline = time.monotonic() + 60
            while sum(len(player.finished) for player in now) < 20 + 10 * round and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
            for player in now:
                player.join(60)
            players += now

    finished = {id: end for player in players for id, end in player.finished.items()}
    rewarded = {id: reward for player in players for id, reward in player.rewarded.items()}
    created = set.union(*(player.created for player in players))
    assert len(finished) >= 60
    with served(upstream, tmp_path) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        for id, (reward, said) in finished.items():
            found = client.get(f"/episodes/{id}", params={"include": "calls"}).json()
            assert found["state"] == "finished"
            # A reward may have been written although its answer was never received.
            assert found["reward"] in ({rewarded[id]} if id in rewarded else {reward, reward + 0.5})
            assert [call["action"]["content"] for call in found["captured"]] == said
            assert found["calls"] == 3
        for id in created - finished.keys():
            found = client.get(f"/episodes/{id}").json()
            if found["state"] == "open":
                assert client.post(f"/episodes/{id}/v1/chat/completions", json=CHAT).status_code == 200
                assert client.post(f"/episodes/{id}/finish", json={"reward": 1}).status_code == 200
        # Only those are open whose players never learned of them.
        left = {one["id"] for one in client.get("/episodes", params={"state": "open", "limit": 1000}).json()["episodes"]}
        assert not left & created
        assert len(left) <= len(players)
