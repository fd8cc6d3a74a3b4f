"""A whole run on a tiny model, its engine left out: an alarm stops it in order, and it goes on as if it had never stopped."""

import io
import math
from contextlib import nullcontext
from types import SimpleNamespace

import gymnasium
import pytest
from rich.console import Console

from art_gym import Reply, ToolEnv, say, tool
from art_gym.cli.live import LiveTable
from art_gym.cli.report import read_evaluations, read_metrics
from art_gym.errors import RunStopped
from art_gym_trainers import checkpoints

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from art_gym.cli import _train  # noqa: E402
from art_gym_trainers.publish import Published  # noqa: E402

pytestmark = pytest.mark.train


class Letters(ToolEnv):
    """Rewards what chance decides, so that groups differ."""

    instructions = "Say something."
    max_turns = 2
    instant = True

    def start(self):
        return "Speak."

    @tool
    def hush(self) -> str:
        """Say nothing."""
        return "Hush."

    def on_text(self, text):
        self.reward("letters", (len(text) % 3) / 2)
        return "More."


class Chance:
    """Says what the episode's generator draws, as if each token had been as likely as any other."""

    name = "chance"
    model = version = ""

    async def act(self, state):
        before = state.memory.setdefault("tokens", [1, 2, 3])
        said = [int(token) for token in state.rng.integers(20, 1000, size=int(state.rng.integers(2, 6)))]
        prompt = [*before, 7]
        state.memory["tokens"] = prompt + said
        likely = [-math.log(1000)] * len(said)
        return Reply(say("x" * len(said)), policy=self.version, prompt_ids=prompt, completion_ids=said, logprobs=likely)

    async def close(self):
        pass


class NoEngine:
    """Stands for the engine: it plays with `Chance` and takes every policy."""

    started = 0

    def __init__(self, config, folder, model_folder, name, live):
        self.name = name
        self.engine = SimpleNamespace(start=self._start, stop=lambda: None, check=lambda: None)
        self.asleep = nullcontext

    def _start(self):
        NoEngine.started += 1

    def agent(self):
        return Chance()

    def publish(self, step, policy, probe_tokens):
        return Published(self.name, f"{self.name}@{step}", 0.0, 0.0)


@pytest.fixture
def train(tiny_model, configured, monkeypatch):
    """Train two batches, or what is left of them; gives what was shown. The sampler's log-probabilities are far off, which raises an alarm."""
    gymnasium.register("test/Letters-v0", entry_point=Letters)
    monkeypatch.setattr(_train, "Serving", NoEngine)

    def run(folder, **sections) -> str:
        config = configured(folder, "test/Letters-v0", **sections)
        screen = io.StringIO()
        with LiveTable("test", console=Console(file=screen, width=200)) as live:
            try:
                _train.run_training(config, folder, model_folder=tiny_model, live=live)
            finally:
                run.shown = screen.getvalue()
        return run.shown

    return run


STRICT = {"logprob_difference": {"warn": 0.1, "stop": 0.2}}


def test_an_alarm_stops_a_run_in_order_and_it_goes_on_as_if_it_had_not(train, tmp_path):
    shown = train(tmp_path / "whole")
    assert "warning: logprob_difference: sampler and trainer differ by" in shown
    assert [[alarm["name"] for alarm in row["alarms"] if alarm["stops"]] for row in read_metrics(tmp_path / "whole")] == [[], []]

    folder = tmp_path / "stopped"
    with pytest.raises(RunStopped, match=r"^stopped after batch 1: logprob_difference: .* \(limit 0\.2\)"):
        train(folder, alarms=STRICT)
    assert "alarm: logprob_difference: sampler and trainer differ by" in train.shown
    assert checkpoints.steps(folder / "checkpoints") == [1]
    (row,) = read_metrics(folder)
    assert [(alarm["name"], alarm["stops"]) for alarm in row["alarms"] if alarm["stops"]] == [("logprob_difference", True)]
    assert "it stopped the run after batch 1" in (folder / "report.md").read_text()

    # Without another limit it would only stop again, which is told before an engine is started.
    started = NoEngine.started
    with pytest.raises(RunStopped, match="stopped after batch 1"):
        train(folder, alarms=STRICT)
    assert NoEngine.started == started

    train(folder)
    assert list(read_evaluations(folder)) == ["untrained", "grpo"]
    resumed, whole = (load_file(tmp_path / name / "checkpoints" / "step-0002" / "adapter_model.safetensors") for name in ("stopped", "whole"))
    assert set(resumed) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    timeless = [
        [{key: row[key] for key in row if key != "alarms" and not key.startswith("seconds_")} for row in read_metrics(tmp_path / name)]
        for name in ("stopped", "whole")
    ]
    assert timeless[0] == timeless[1]


def test_a_broken_policy_stops_the_run_and_leaves_the_checkpoint_before(train, tmp_path, monkeypatch):
    step = _train.GRPOTrainer.training_step

    def broken(self, *arguments, **options):
        loss = step(self, *arguments, **options)
        if self.state.global_step >= 2:
            self._statistics.losses[-1] = math.nan
        return loss

    monkeypatch.setattr(_train.GRPOTrainer, "training_step", broken)
    with pytest.raises(RunStopped, match=r"^stopped after batch 2: not_finite: 2 of the batch's optimiser steps"):
        train(tmp_path / "run", checkpoints={"keep_last": 1, "keep_best": 0})
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [1, 2]
    assert read_metrics(tmp_path / "run")[-1]["not_finite"] == 2
