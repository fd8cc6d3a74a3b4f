"""`art-gym serve` with a real vLLM: captured, rewarded, trained through the API, answered by the new version, and gone on with after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.train, pytest.mark.timeout(900)]

SETTINGS = {
    "model.dtype": "float32",
    "model.lora_rank": 4,
    "model.lora_alpha": 8,
    "engine.max_model_len": 512,
    "engine.kv_cache_gib": 0.5,
    "grpo.learning_rate": 1e-2,
    "grpo.steps_per_batch": 2,
    "rollout.max_tokens": 16,
}


def ask(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def served(folder: Path, model: Path | None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", "import sys; from art_gym.cli import main; sys.exit(main())", "serve", "--port", "0", "--dir", str(folder)]
    if model is not None:
        command += [str(model), "--name", "tiny"]
    else:
        command += ["--name", "tiny"]
    for key, value in SETTINGS.items():
        command += ["--set", f"{key}={value}"]
    with (folder.parent / "serve.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://" in line, (folder.parent / "serve.log").read_text()[-4000:]
        yield line.split(" is served at ")[1].split("/v1;")[0], process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def play(address: str, group: str, reward: float) -> str:
    """One episode of two turns, by the openai package."""
    episode = ask("POST", f"{address}/episodes", {"group": group})
    key = episode.get("api_key") or "none"
    with openai.OpenAI(base_url=episode["base_url"], api_key=key) as client:
        messages: list[Any] = [{"role": "user", "content": f"Say something about {group}."}]
        for _ in range(2):
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}, {"role": "user", "content": "Go on."}]
    id = str(episode["id"])
    ask("POST", f"{address}/episodes/{id}/finish", {"reward": reward})
    return id


def test_an_agent_is_trained_through_the_api_and_its_version_survives_a_kill(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    with served(folder, tiny_model) as (address, process):
        groups = [[play(address, group, reward) for reward in (0.0, 1.0, 0.5)] for group in ("tea", "bread")]
        job = ask("POST", f"{address}/train", {"groups": groups})
        request = urllib.request.Request(f"{address}{job['events_url']}", headers={"Accept": "application/x-ndjson"})
        with urllib.request.urlopen(request, timeout=300) as stream:
            events = [event for event in map(json.loads, stream) if event["type"] != "heartbeat"]
        kinds = [event["type"] for event in events]
        assert kinds == ["queued", "started", "step", "step", "published", "finished"], events
        assert [event["number"] for event in events] == list(range(1, 7))
        started, first, published = events[1], events[2], events[4]
        assert started["version"] == "tiny@0"
        assert started["batch"]["policies"] == {"tiny@0": 12}
        # Engine and trainer agree on what was sampled.
        assert first["logprob_difference"] < 0.01
        assert published["version"] == "tiny@1"
        assert published["difference"] < 0.01
        id = play(address, "tea", 1.0)
        turns = ask("GET", f"{address}/episodes/{id}?include=calls")
        assert "tiny@1" in json.dumps(turns)
        assert "tiny@0" not in json.dumps(turns)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        deadline = time.monotonic() + 40
        while _left(folder) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not _left(folder)
    with served(folder, None) as (address, process):
        checkpoints = ask("GET", f"{address}/checkpoints")
        assert checkpoints["active"] == 1
        assert [one["step"] for one in checkpoints["checkpoints"]] == [0, 1]
        assert ask("GET", f"{address}{job['events_url'].removesuffix('/events')}")["state"] == "finished"
        assert ask("GET", f"{address}/episodes/{groups[0][0]}")["reward"] == 0.0
        again = play(address, "tea", 0.0)
        other = play(address, "tea", 1.0)
        second = ask("POST", f"{address}/train", {"groups": [[again, other]]})
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    assert not _left(folder)
    assert second["state"] == "queued"


def _left(folder: Path) -> list[int]:
    """Processes whose command line or environment names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (
                    str(folder).encode() in (entry / "cmdline").read_bytes()
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
