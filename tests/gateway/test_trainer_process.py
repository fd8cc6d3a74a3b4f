"""The trainer process, for real: a tiny model, and an engine's stand-in that computes with the weights it was given."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from art_gym.cli.config import RunConfig  # noqa: E402
from art_gym.episodes import Episode, EpisodeGroup, Turn  # noqa: E402
from art_gym.gateway._trainer import Cancelled, TrainerFailed, TrainerProcess  # noqa: E402
from art_gym.scenarios import Scenario  # noqa: E402
from art_gym_trainers import checkpoints  # noqa: E402
from art_gym_trainers.grpo import GRPOTrainer  # noqa: E402
from art_gym_trainers.grpo_config import grpo_config  # noqa: E402
from art_gym_trainers.policy import load_policy, load_tokenizer, token_logprobs  # noqa: E402
from art_gym_trainers.rows import batch_rows, split_steps  # noqa: E402

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class FakeEngine:
    """Answers what publishers ask of vLLM, with the weights that lie in its folder or the adapters that it was told to load.

    Attributes:
        deaf: It says that it reloads, and doesn't.
        asked: The paths that were asked for, in order.
    """

    def __init__(self, model_folder: Path, weights: Path | None) -> None:
        self._model_folder, self._weights = model_folder, weights
        self._adapters: dict[str, str] = {}
        self.deaf = False
        self.asked: list[str] = []
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({"data": [{"id": name} for name in ("tiny", *engine._adapters)]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
                engine.asked.append(self.path)
                self._answer(engine.do(self.path, body))

            def _answer(self, answer: Any) -> None:
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def do(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/collective_rpc" and not self.deaf:
            assert self._weights is not None
            self.model.load_state_dict(load_file(self._weights / "model.safetensors"), strict=False)
            self.model.tie_weights()
        if path == "/v1/load_lora_adapter":
            self._adapters[body["lora_name"]] = body["lora_path"]
        if path == "/v1/unload_lora_adapter":
            del self._adapters[body["lora_name"]]
        if path == "/v1/completions":
            ids = body["prompt"]
            values = token_logprobs(self._for(body["model"]), ids)
            scored = [{str(token): {"logprob": value}} for token, value in zip(ids[1:], values, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *scored]}]}
        return {}

    def _for(self, name: str) -> Any:
        if name not in self._adapters:
            return self.model
        base = AutoModelForCausalLM.from_pretrained(self._model_folder, dtype=torch.float32)
        return PeftModel.from_pretrained(base, self._adapters[name])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Group = tuple[str, list[Episode]]


@pytest.fixture(scope="module")
def batches(tiny_model: Path) -> list[list[Group]]:
    """Two batches of two groups of four episodes of two turns, as the untrained model might have sampled them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    chance = random.Random(0)

    def turn(prompt: list[int], reward: float) -> Turn:
        completion = [chance.randrange(1000) for _ in range(8)]
        logprobs = token_logprobs(model, prompt + completion)[len(prompt) - 1 :]
        action: Any = {"role": "assistant", "content": "…"}
        return Turn([], action, reward=reward, policy="tiny@0", prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)

    def episode(name: str, prompt: list[int]) -> Episode:
        first = turn(prompt, 0.0)
        assert first.completion_ids is not None
        second = turn(prompt + first.completion_ids + [7, 8], chance.random())
        return Episode(name, "gateway", Scenario(name, 0, {}), turns=[first, second], terminated=True)

    def batch(number: int) -> list[Group]:
        groups = []
        for group in range(2):
            prompt = [chance.randrange(1000) for _ in range(12)]
            groups.append((f"g{group}", [episode(f"e{number}-{group}-{member}", prompt) for member in range(4)]))
        return groups

    return [batch(0), batch(1)]


def written(groups: list[Group], path: Path) -> str:
    path.write_text("".join(json.dumps({"group": name, "episodes": [one.to_dict() for one in own]}) + "\n" for name, own in groups))
    return str(path)


class Stage:
    """A gateway's folder with an engine and a trainer process; `run` plays the gateway."""

    def __init__(self, folder: Path, model: Path, *, adapters: bool = False) -> None:
        self.folder = folder
        config = RunConfig.from_values(
            {
                "env": {"id": "gateway"},
                "model": {"name": str(model), "dtype": "float32", "lora_rank": 4, "lora_alpha": 8},
                "grpo": {"learning_rate": 1e-2, "steps_per_batch": 2, "groups_per_batch": 2},
            }
        )
        self.engine = FakeEngine(model, None if adapters else folder / "weights")
        settings = {"config": config.model_dump(mode="json"), "folder": str(folder), "model_folder": str(model), "name": "tiny"}
        settings |= {"adapters": adapters, "dtype": "float32", "engine": {"url": self.engine.url, "model": "tiny"}}
        self.trainer = TrainerProcess(settings, folder / "trainer.log", environment=ENVIRONMENT)

    async def run(self, task: dict[str, Any], act: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda message: None) -> list[Any]:
        told = []
        answers = {"trained": {"do": "commit"}, "ready_to_publish": {"do": "go", "drop": []}}
        async for message in self.trainer.work(task):
            told.append(message)
            if answer := act(message) or answers.get(message["event"]):
                await self.trainer.tell(answer)
        return told

    def job(self, groups: list[Group], start: int, step: int, **config: Any) -> dict[str, Any]:
        file = written(groups, self.folder / f"job-{step}.jsonl")
        task = {"do": "train", "job": f"job-{step}", "file": file, "from": start, "step": step, "config": config, "temperature": 1.0}
        return task | {"serving": f"tiny@{start}" if start else "tiny"}

    def adapter(self, step: int) -> dict[str, Any]:
        return load_file(self.folder / "checkpoints" / f"step-{step:04d}" / "adapter_model.safetensors")


@pytest.fixture
def stage(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(**options: Any) -> Stage:
        made.append(Stage(tmp_path, tiny_model, **options))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def named(told: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [message for message in told if message["event"] == event]


async def test_jobs_one_after_another_learn_what_one_run_over_the_same_batches_learns(
    stage: Callable[..., Stage], batches: list[list[Group]], tiny_model: Path, tmp_path: Path
) -> None:
    """Also with another process in between, which has to go on with optimiser and random states, and with a rate of its own."""
    ours = stage()
    await ours.run({"do": "prepare"})
    first = await ours.run(ours.job(batches[0], 0, 1))
    await ours.trainer.stop()
    second = await ours.run(ours.job(batches[1], 1, 2, learning_rate=3e-3))
    await ours.trainer.stop()

    # The same two batches in one run of the trainer, as the main loop does it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    policy = load_policy(tiny_model, dtype="float32", lora_rank=4, lora_alpha=8, seed=0)
    arguments = grpo_config(tmp_path / "reference", learning_rate=1e-2, seed=0)
    found: list[dict[str, Any]] = []

    def play() -> Iterator[Any]:
        for number, groups in enumerate(batches):
            kept, _ = batch_rows([EpisodeGroup(Scenario(name, 0, {}), episodes) for name, episodes in groups])
            if number == 1:
                for group in trainer.optimizer.param_groups:
                    group["lr"] = group["initial_lr"] = 3e-3
                trainer.lr_scheduler.base_lrs = [3e-3] * len(trainer.lr_scheduler.base_lrs)
            yield split_steps(kept, 2)
            found.append({name: value.detach().clone() for name, value in policy.named_parameters() if "lora_" in name})

    trainer = GRPOTrainer(policy, arguments, batches=play(), processing_class=load_tokenizer(tiny_model))
    trainer.train()
    torch.set_num_threads(threads)
    for step in (1, 2):
        adapter = ours.adapter(step)
        assert adapter
        for name, value in adapter.items():
            expected = found[step - 1][name.replace(".weight", ".default.weight")]
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    moved = max(float((ours.adapter(2)[name] - value).abs().max()) for name, value in ours.adapter(1).items())
    # Adam moves each weight by about the rate, twice.
    assert 1e-3 < moved < 1e-2
    for told, rate in ((first, 1e-2), (second, 3e-3)):
        assert [message["learning_rate"] for message in named(told, "step")] == pytest.approx([rate, rate])
        assert [message["optimiser_step"] for message in named(told, "step")] == [1, 2]
        assert named(told, "step")[0]["tokens"] == 4 * 2 * 8
        assert named(told, "published")[0]["difference"] < 1e-3
    assert named(second, "published")[0]["version"] == "tiny@2"
    kept = checkpoints.read(tmp_path / "checkpoints", 2)
    assert kept.details["job"] == "job-2"
    assert kept.details["from"] == 1
    # What the engine answers with is what was trained.
    policy.eval()
    ids = list(range(20, 60))
    assert token_logprobs(ours.engine.model, ids) == pytest.approx(token_logprobs(policy, ids), abs=1e-4)


async def test_groups_whose_episodes_earned_the_same_teach_nothing_and_change_nothing(
    stage: Callable[..., Stage], batches: list[list[Group]], tmp_path: Path
) -> None:
    ours = stage()
    alike = [Episode.from_dict(one.to_dict()) for one in batches[0][0][1]]
    for one in alike:
        one.turns[-1].reward = 0.5
    told = await ours.run(ours.job([("g", alike)], 0, 1))
    await ours.trainer.stop()
    assert [message["event"] for message in told] == ["nothing"]
    assert "in 1 of 1 groups all episodes earned the same" in told[0]["reason"]
    assert checkpoints.steps(tmp_path / "checkpoints") == []


async def test_a_job_that_is_cancelled_in_training_keeps_nothing(
    stage: Callable[..., Stage], batches: list[list[Group]], tmp_path: Path
) -> None:
    ours = stage()
    await ours.run({"do": "prepare"})
    with pytest.raises(Cancelled):
        await ours.run(ours.job(batches[0], 0, 1), lambda message: {"do": "cancel"} if message["event"] == "step" else None)
    assert checkpoints.steps(tmp_path / "checkpoints") == []
    # The next one begins where the cancelled one did.
    told = await ours.run(ours.job(batches[0], 0, 1))
    await ours.trainer.stop()
    assert named(told, "published")[0]["version"] == "tiny@1"


async def test_a_publish_that_the_engine_did_not_take_fails_the_job(stage: Callable[..., Stage], batches: list[list[Group]]) -> None:
    ours = stage()
    await ours.run({"do": "prepare"})
    ours.engine.deaf = True
    with pytest.raises(TrainerFailed, match=r"not proven|still answers with the version before"):
        await ours.run(ours.job(batches[0], 0, 1))


async def test_adapters_are_published_beside_each_other_and_dropped_when_told(
    stage: Callable[..., Stage], batches: list[list[Group]], tmp_path: Path
) -> None:
    ours = stage(adapters=True)
    told = [await ours.run(ours.job(batches[number], number, number + 1, kl_coef=0.1)) for number in range(2)]
    assert list(ours.engine._adapters) == ["tiny@1", "tiny@2"]
    # The reference is the model without an adapter, in each job of a process.
    first, second = (named(one, "step")[0]["kl_reference"] for one in told)
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second > 1e-6
    drop = {"do": "go", "drop": ["tiny@1"]}
    # Back to the version before any training, which has an adapter of nothing.
    back = await ours.run({"do": "publish", "from": 0}, lambda message: drop if message["event"] == "ready_to_publish" else None)
    await ours.trainer.stop()
    assert named(back, "published")[0]["model"] == "tiny@0"
    assert list(ours.engine._adapters) == ["tiny@2", "tiny@0"]
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == ["step-0000", "step-0002"]


async def test_settings_that_contradict_each_other_fail_the_job_with_their_reason(
    stage: Callable[..., Stage], batches: list[list[Group]]
) -> None:
    ours = stage()
    with pytest.raises(TrainerFailed, match="vespo weights whole episodes itself") as caught:
        await ours.run(ours.job(batches[0], 0, 1, loss="vespo", importance_correction="sequence_mask"))
    assert "send the request again" in caught.value.advice


async def test_the_process_ends_when_its_gateway_does(stage: Callable[..., Stage], batches: list[list[Group]]) -> None:
    ours = stage()
    await ours.trainer.start()
    pid = ours.trainer.pid
    assert pid is not None
    process = ours.trainer._process
    assert process is not None
    assert process.stdin is not None
    # As the kernel does when the gateway is killed.
    process.stdin.close()
    began = time.monotonic()
    assert await asyncio.wait_for(process.wait(), 10) == 0
    assert time.monotonic() - began < 5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_process_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    trainer = TrainerProcess({}, tmp_path / "log", command=["sh", "-c", "echo it hurts >&2; exit 3"])
    with pytest.raises(TrainerFailed, match=r"exited with code 3; the end of its log:\nit hurts"):
        await trainer.run({"do": "train"})
    with pytest.raises(TrainerFailed, match="can't be started"):
        await TrainerProcess({}, tmp_path / "log", command=["/no/such/program"]).start()
