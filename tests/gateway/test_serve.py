"""`art-gym serve` without a model: what it refuses before anything starts, and how its process begins and ends, before a stand-in for vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from art_gym.cli import _serve, run_folder
from art_gym.cli._serve import Request, configure, listening, take_adapter
from art_gym.cli._serve_config import job_config
from art_gym.cli.config import RunConfig
from art_gym.errors import UsageError

PROGRAM = "import sys; from art_gym.cli import main; sys.exit(main())"


class Process:
    """A gateway in a process of its own."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-c", PROGRAM, "serve", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env={**os.environ, **(environment or {})})

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is served at " in line, self.process.communicate()[1]
        return line.split(" is served at ")[1].split(";")[0]

    def end(self, sent: int, *, within: float) -> int:
        self.process.send_signal(sent)
        return self.process.wait(within)


@pytest.fixture
def serve(upstream: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        fixed = ["mock", "--attach", upstream, "--no-train", "--port", "0", "--dir", str(tmp_path / "served")]
        made.append(Process(*fixed, *arguments, **options))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_a_signal_lets_calls_end_and_accepts_no_more(serve: Callable[..., Process], mock: Any) -> None:
    mock.token_seconds = 0.3
    mock.words = 4
    gateway = serve()
    address = gateway.address()
    answers: queue.Queue[Any] = queue.Queue()
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}]}
    threading.Thread(target=lambda: answers.put(httpx.post(f"{address}/chat/completions", json=body, timeout=20)), daemon=True).start()
    while not mock.running:
        time.sleep(0.01)
    gateway.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/models")
    assert answers.get(timeout=20).status_code == 200
    assert gateway.process.wait(20) == 0


def test_what_does_not_end_is_ended_at_the_bound(serve: Callable[..., Process], mock: Any) -> None:
    mock.hold_after = 1
    gateway = serve("--shutdown-seconds", "1")
    address = gateway.address()
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "stream": True}

    def hang() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{address}/chat/completions", json=body, timeout=20)

    threading.Thread(target=hang, daemon=True).start()
    while not mock.running:
        time.sleep(0.01)
    began = time.monotonic()
    assert gateway.end(signal.SIGTERM, within=20) == 0
    assert time.monotonic() - began < 10


def test_a_second_signal_ends_it_at_once(serve: Callable[..., Process], mock: Any) -> None:
    mock.hold_after = 1
    gateway = serve("--shutdown-seconds", "60")
    address = gateway.address()
    body = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    with httpx.stream("POST", f"{address}/chat/completions", json=body, timeout=20):
        gateway.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert gateway.process.poll() is None
        began = time.monotonic()
        assert gateway.end(signal.SIGINT, within=20) == 128 + signal.SIGINT
        assert time.monotonic() - began < 3


def test_a_folder_is_one_gateways_and_can_be_gone_on_with(serve: Callable[..., Process], tmp_path: Path) -> None:
    first = serve()
    address = first.address()
    episode = httpx.post(address.removesuffix("/v1") + "/episodes", json={}).json()
    second = serve()
    _, error = second.process.communicate(timeout=60)
    assert second.process.returncode == 2
    assert "another process is working in" in error
    assert "--dir" in error
    assert first.end(signal.SIGTERM, within=20) == 0
    third = serve()
    assert httpx.get(third.address().removesuffix("/v1") + f"/episodes/{episode['id']}").json()["id"] == episode["id"]


def test_keys_come_from_a_file_or_the_environment_and_are_in_no_log(serve: Callable[..., Process], tmp_path: Path) -> None:
    key = "k" * 20
    gateway = serve(environment={"ART_GYM_API_KEYS": key})
    address = gateway.address()
    assert httpx.get(f"{address}/models").status_code == 401
    assert httpx.get(f"{address}/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    gateway.process.send_signal(signal.SIGTERM)
    output, error = gateway.process.communicate(timeout=20)
    assert key not in output + error


def test_a_slow_head_is_cut_off_by_the_protocol_that_serve_uses() -> None:
    from art_gym.gateway._protocol import GuardedProtocol
    from art_gym.gateway.settings import GatewaySettings

    settings = GatewaySettings.of(upstream="http://127.0.0.1:1/v1", model="m", folder=Path())
    from art_gym.cli._serve_process import _server_config
    from art_gym.gateway.policy import PolicyState

    config = _server_config(settings, PolicyState("m", "m"), None, 30.0)
    assert isinstance(config.http, type)
    assert issubclass(config.http, GuardedProtocol)


# ---------------------------------------------------------------- what is refused


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 can't be used .*--port"), listening("127.0.0.1", port):
            pass


def test_a_public_address_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no API key is set"):
        _serve.run(Request(model="smollm2-135m", host="0.0.0.0", folder=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_something_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="say what to serve"):
        configure(Request())
    with pytest.raises(UsageError, match="no gateway to go on with"):
        configure(Request(folder=tmp_path))


def test_a_gateway_goes_on_with_its_settings_and_refuses_others(tmp_path: Path) -> None:
    given = Request(model="models/tiny", name="public", folder=tmp_path, assignments=["model.lora_rank=4", "grpo.learning_rate=0.01"])
    config, folder = configure(given)
    config.save(folder / run_folder.CONFIG)
    again, _ = configure(Request(folder=tmp_path))
    assert again == config
    assert again.env.kwargs == {"name": "public"}
    # What later jobs only begin with may change; what the checkpoints are made of may not.
    changed, _ = configure(Request(folder=tmp_path, assignments=["grpo.learning_rate=0.1"]))
    assert changed.grpo.learning_rate == 0.1
    with pytest.raises(UsageError, match=r"has other settings than you ask for: model.lora_rank"):
        configure(Request(folder=tmp_path, assignments=["model.lora_rank=8"]))
    with pytest.raises(UsageError, match=r"env.kwargs.name"):
        configure(Request(folder=tmp_path, name="other"))


def test_the_folder_of_a_training_run_is_not_served_from(tmp_path: Path, configured: Callable[..., Any]) -> None:
    configured(tmp_path, "art_gym/Lookup-v0")
    with pytest.raises(UsageError, match="is the folder of a training run; serve its policy with --adapter"):
        configure(Request(folder=tmp_path, model="tiny"))


def adapter(folder: Path, weights: bytes = b"weights", **config: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapter_sets_the_size_and_is_taken_once(tmp_path: Path) -> None:
    config, _ = configure(Request(model="tiny", adapter=adapter(tmp_path / "a"), folder=tmp_path / "served"))
    assert (config.model.lora_rank, config.model.lora_alpha) == (4, 8)
    served = tmp_path / "served"
    take_adapter(tmp_path / "a", served)
    take_adapter(tmp_path / "a", served)
    assert (served / "checkpoints" / "warm-start" / "adapter_model.safetensors").read_bytes() == b"weights"
    with pytest.raises(UsageError, match="began with another adapter"):
        take_adapter(adapter(tmp_path / "b", b"others"), served)
    (tmp_path / "late" / "checkpoints" / "step-0001").mkdir(parents=True)
    with pytest.raises(UsageError, match="began without an adapter"):
        take_adapter(tmp_path / "a", tmp_path / "late")


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "is no adapter"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "can't be used"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "can't be used"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors"),
    ],
)
def test_what_is_no_adapter_is_told(tmp_path: Path, break_it: Callable[[Path], Any], problem: str) -> None:
    folder = adapter(tmp_path / "a")
    break_it(folder)
    with pytest.raises(UsageError, match=problem):
        configure(Request(model="tiny", adapter=folder))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(UsageError, match="holds no API key"):
        _serve.run(Request(model="smollm2-135m", api_keys=path, folder=tmp_path / "new"))
    with pytest.raises(UsageError, match="can't be read"):
        _serve.run(Request(model="smollm2-135m", api_keys=tmp_path / "none", folder=tmp_path / "new"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"loss": "cispo"}, "clip_high is 0.28"),
        ({"loss": "vespo", "importance_correction": "sequence_mask"}, "weights whole episodes itself"),
        ({"discount": 0.5}, "set credit to turn"),
        ({"optimiser_steps": 2, "credit": "turn", "discount": 0.5}, None),
        ({"loss": "cispo", "clip_high": 5.0}, None),
    ],
)
def test_a_jobs_options_are_laid_over_the_gateways_and_checked(options: dict[str, Any], problem: str | None) -> None:
    base = RunConfig.from_values({"env": {"id": "gateway"}, "grpo": {"learning_rate": 0.5}})
    if problem is not None:
        with pytest.raises(UsageError, match=problem):
            job_config(base, options, temperature=0.7, groups=3)
        return
    config = job_config(base, options, temperature=0.7, groups=3)
    assert (config.rollout.temperature, config.grpo.learning_rate) == (0.7, 0.5)
    assert config.grpo.steps_per_batch == options.get("optimiser_steps", 8)
    assert config.grpo.loss_type == options.get("loss", "dapo")
