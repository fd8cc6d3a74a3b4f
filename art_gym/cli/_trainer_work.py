"""What the trainer process does: training as in `art_gym.cli._train`, one batch a job, and publishing as in `art_gym.cli._serving`.

Each job goes on from a checkpoint, with weights, optimiser and random states together, so that jobs one after another compute what one run over
the same batches does. Loads torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import TrainerCallback

from art_gym.cli import _standing
from art_gym.cli._figures import batch_row
from art_gym.cli._grpo_arguments import grpo_arguments
from art_gym.cli._serve_config import job_config
from art_gym.cli._trainer_process import Failed, Message, Wire
from art_gym.cli.config import RunConfig
from art_gym.engine import AttachedEngine
from art_gym.episodes import EpisodeGroup
from art_gym.gateway._jobs_batch import read_batch
from art_gym.scenarios import Scenario
from art_gym_trainers import checkpoints
from art_gym_trainers.alarms import not_finite
from art_gym_trainers.forks import token_decoder
from art_gym_trainers.grpo import GRPOTrainer
from art_gym_trainers.passes import Passes, prepare_passes
from art_gym_trainers.policy import load_policy, load_saved, load_tokenizer
from art_gym_trainers.publish import LoraPublisher, MergedPublisher, Probe, Published, Publisher, prepare_weights
from art_gym_trainers.rows import Row, RowCounts, batch_rows, split_steps
from art_gym_trainers.sampling import SampledBatch
from art_gym_trainers.statistics import BatchStatistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARM_START = "warm-start"
"""The folder, beside the checkpoints, of the adapter that version 0 has."""

_PROBE_TOKENS = 256
_PROBE_TEXT = "The quick brown fox jumps over the lazy dog, and the capital of France is Paris. One, two, three, four, five, six, seven."


class Worker:
    """Keeps the policy, and does tasks.

    Args:
        settings: `config` (a `RunConfig` as data), `folder` (the gateway's), `model_folder`, `name` (of the policy), `adapters` (whether
            versions are published as adapters), `dtype` (of the engine's weights) and `engine` (`url`, `model`, `key`; None before it runs).
        wire: To the gateway.

    Attributes:
        engine_settings: The last of these.
    """

    def __init__(self, settings: Message, wire: Wire) -> None:
        self.config = RunConfig.from_values(settings["config"])
        self.folder, self.model_folder = Path(settings["folder"]), Path(settings["model_folder"])
        self.name, self.adapters, self.dtype = str(settings["name"]), bool(settings["adapters"]), str(settings["dtype"])
        self.engine_settings: Message | None = settings.get("engine")
        self.checkpoints = self.folder / _standing.CHECKPOINTS
        self._wire = wire
        self._policy: PeftModel | PreTrainedModel | None = None
        self._at: int | None = None
        self._probe: Probe | None = None
        _standing.found(self.config, self.folder)
        self.tokenizer = load_tokenizer(self.model_folder)

    # ---------------------------------------------------------------- tasks

    def prepare(self, task: Message) -> None:
        """Write the folder that the engine reads merged weights from; or clear away the adapters that an earlier one was handed."""
        if self.adapters:
            shutil.rmtree(self.folder / "adapters", ignore_errors=True)
        else:
            prepare_weights(self.model_folder, self.folder / "weights", self.dtype)

    def publish(self, task: Message) -> None:
        """Put a version that is kept into the engine."""
        step = int(task["from"])
        policy = self._stand_at(step)
        self._put(step, policy, self._probe_tokens(step))

    def train(self, task: Message) -> None:
        """Train on a batch, keep the version and publish it."""
        start, step = int(task["from"]), int(task["step"])
        groups = [EpisodeGroup(Scenario(id=name, seed=0, options={}), episodes) for name, episodes in read_batch(Path(task["file"]))]
        config = job_config(self.config, task["config"], temperature=float(task["temperature"]), groups=len(groups))
        settings = config.grpo
        kept, counts = batch_rows(
            groups,
            settings.advantage,
            credit=settings.credit,
            discount=settings.discount,
            decode=token_decoder(self.tokenizer),
            realign=settings.realign,
        )
        if not kept:
            self._tell_nothing(groups, counts)
            return
        self._wire.check()
        policy = self._stand_at(start)
        tokens = next(row.sequence.token_ids for rows in kept for row in rows)[:_PROBE_TOKENS]
        served = self._prove_served(start, policy, tokens, task.get("serving"))
        job = _Training(self, config, kept, start)
        statistics = job.run(policy)
        if bad := not_finite(statistics.losses, statistics.gradient_norms):
            raise Failed(
                f"{bad} of {statistics.steps} optimiser steps had a loss or a gradient that is no finite number", "lower learning_rate"
            )
        played = SampledBatch(groups=groups, rounds=1)
        row = batch_row(step, served, played, counts, statistics) | {"seconds_train": job.seconds, "seconds_publish": served.seconds}
        self._wire.tell("trained")
        self._wire.wait_for("commit")
        details = {
            "policy": f"{self.name}@{step}",
            "token_budget": job.passes.token_budget,
            "job": task["job"],
            "from": start,
            "probe": tokens,
        }
        alarmed = _standing.keep(self.config, self.folder, row, save=job.trainer.save, details=details)
        if stopping := [alarm for alarm in alarmed if alarm.stops]:
            raise Failed("; ".join(alarm.message for alarm in stopping), "correct that, or start the gateway with another limit in `alarms`")
        self._at = step
        warnings = [alarm.message for alarm in alarmed]
        self._wire.tell("kept", optimiser_steps=statistics.steps, warnings=warnings, figures=_plain(row))
        self._put(step, policy, tokens)

    # --------------------------------------------------------------- policy

    def _stand_at(self, step: int) -> PeftModel | PreTrainedModel:
        """Load the policy as it was at a step; what was trained since and not kept is gone."""
        saved = checkpoints.read(self.checkpoints, step).folder if step else None
        if self._policy is None or (saved is None and self._at != 0):
            model = self.config.model
            warm = self.checkpoints / WARM_START
            self._policy = load_policy(
                self.model_folder,
                method=model.method,
                dtype=model.dtype,
                lora_rank=model.lora_rank,
                lora_alpha=model.lora_alpha,
                saved=warm if warm.exists() else None,
                seed=self.config.seed,
            )
            arguments = grpo_arguments(self.config, self.checkpoints)
            wanted = None if self.config.grpo.token_budget == "auto" else self.config.grpo.token_budget
            self.passes = prepare_passes(self._policy, arguments, wanted, reference=model.method == "full" and self.config.grpo.kl_coef > 0)
        if saved is not None and self._at != step:
            load_saved(self._policy, saved)
        self._at = step
        return self._policy

    def unsettle(self) -> None:
        """Note that the policy in memory is none that is kept."""
        self._at = None

    def _tell_nothing(self, groups: Sequence[EpisodeGroup], counts: RowCounts) -> None:
        few = sum(len(group.finished) < 2 for group in groups)
        alike = counts.dropped_groups - few
        why = [f"in {alike} of {counts.groups} groups all episodes earned the same"] if alike else []
        why += [f"{few} of {counts.groups} have fewer than two episodes that didn't fail"] if few else []
        self._wire.tell(
            "nothing",
            reason="there is nothing to learn: " + ("; ".join(why) or "no episode has a sampled token"),
            advice="play scenarios that are neither too easy nor too hard, more episodes in a group, or give finer rewards",
            figures=dataclasses.asdict(counts),
        )

    # -------------------------------------------------------------- publish

    def _put(self, step: int, policy: PeftModel | PreTrainedModel, tokens: Sequence[int]) -> None:
        """Publish the policy when the gateway lets it, and drop what the gateway no longer serves."""
        engine, probe = self._engine(), self._probe_on(tokens)
        self._wire.tell("ready_to_publish", step=step)
        go = self._wire.wait_for("go")
        for version in go["drop"]:
            if version in engine.models():
                engine.unload_adapter(version)
            shutil.rmtree(self._adapter_folder(int(version.rpartition("@")[2])), ignore_errors=True)
        published = self._publisher(engine, step, policy, probe).publish(step)
        self._wire.tell("published", step=step, **dataclasses.asdict(published))

    def _publisher(self, engine: AttachedEngine, step: int, policy: PeftModel | PreTrainedModel, probe: Probe) -> Publisher:
        if self.adapters:
            # A folder for each, since the publisher drops what else lies there, and the version before has to end its calls.
            return LoraPublisher(policy, engine, self._adapter_folder(step), self.name, probe)
        return MergedPublisher(policy, engine, self.folder / "weights", engine.model, probe, self.dtype)

    def _adapter_folder(self, step: int) -> Path:
        return self.folder / "adapters" / f"step-{step:04d}"

    def _prove_served(self, step: int, policy: PeftModel | PreTrainedModel, tokens: Sequence[int], serving: str | None) -> Published:
        """Prove that the engine answers with the version that is trained from, so that the next one can be told from it."""
        began = time.perf_counter()
        version = f"{self.name}@{step}"
        difference = self._probe_on(tokens).check(policy, self._engine(), serving if self.adapters else None, version)
        return Published(serving or self.name, version, difference, time.perf_counter() - began)

    def _probe_on(self, tokens: Sequence[int]) -> Probe:
        if self._probe is None or self._probe.token_ids != list(tokens):
            exact = self.config.model.dtype == self.dtype == "float32"
            rough = 0.5 if self.config.model.method == "qlora" else 0.15
            self._probe = Probe(tokens, tolerance=0.01 if exact else rough)
        return self._probe

    def _probe_tokens(self, step: int) -> list[int]:
        """What the version was proven on when it was made; a text for version 0."""
        noted = checkpoints.read(self.checkpoints, step).details.get("probe") if step else None
        return list(noted) if noted else list(self.tokenizer(_PROBE_TEXT)["input_ids"])

    def _engine(self) -> AttachedEngine:
        if self.engine_settings is None:
            raise Failed("the trainer process wasn't told where the engine is", "this is a fault of the gateway")
        engine = self.engine_settings
        return AttachedEngine(engine["url"], engine["model"], api_key=engine.get("key"))


class _Training:
    """One job's training.

    Attributes:
        trainer: Ours; after `run`.
        passes: How it cuts its steps.
        seconds: What it took.
    """

    def __init__(self, worker: Worker, config: RunConfig, kept: list[list[Row]], start: int) -> None:
        self._worker, self._start = worker, start
        self._steps = split_steps(kept, config.grpo.steps_per_batch)
        self._arguments = grpo_arguments(config, worker.checkpoints)
        budget = config.grpo.token_budget
        self.passes: Passes = worker.passes if budget == "auto" else dataclasses.replace(worker.passes, token_budget=budget)
        self.trainer: GRPOTrainer
        self.seconds = 0.0

    def run(self, policy: PeftModel | PreTrainedModel) -> BatchStatistics:
        """Take the steps.

        Raises:
            Stop: The job was cancelled.
        """
        saved = checkpoints.read(self._worker.checkpoints, self._start).folder if self._start else None
        began = time.perf_counter()
        progress = _Progress(self._worker._wire, len(self._steps), self._arguments.learning_rate)
        # Counted from the first job on.
        self._arguments.max_steps = _steps_taken(saved) + len(self._steps) + 1
        self.trainer = GRPOTrainer(
            policy,
            self._arguments,
            batches=self._batches(),
            processing_class=self._worker.tokenizer,
            passes=self.passes,
            callbacks=[progress],
        )
        progress.trainer = self.trainer
        if isinstance(policy, PeftModel) and "ref" in policy.peft_config:
            # TRL's copy of the adapter as a reference, which the next job's trainer couldn't make again; ours is the model without one.
            policy.delete_adapter("ref")
        self._worker.unsettle()
        self.trainer.train(resume_from_checkpoint=str(saved) if saved else None)
        self.seconds = time.perf_counter() - began
        return progress.statistics

    def _batches(self) -> Iterator[list[list[Row]]]:
        yield self._steps


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers has no types for it
    """Tells the gateway of each optimiser step, and ends training when it is cancelled.

    Attributes:
        trainer: Whose steps they are.
        statistics: Of all steps so far.
    """

    def __init__(self, wire: Wire, steps: int, learning_rate: float) -> None:
        self._wire, self._steps, self._learning_rate = wire, steps, learning_rate
        self.trainer: GRPOTrainer
        self.statistics = BatchStatistics()
        self._began = time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # A checkpoint's optimiser and scheduler come with the settings of the job that wrote it.
        rate, betas = args.learning_rate, (args.adam_beta1, args.adam_beta2)
        for group in self.trainer.optimizer.param_groups:
            group.update(lr=rate, initial_lr=rate, betas=betas)
        scheduler = self.trainer.lr_scheduler
        scheduler.base_lrs = [rate] * len(scheduler.base_lrs)
        scheduler._last_lr = [rate] * len(scheduler.base_lrs)
        self._began = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wire.check()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "grad_norm" not in logs:
            return
        taken = self.trainer.take_statistics()
        self.statistics = _merged(self.statistics, taken)
        figures = {key: value for key, value in taken.to_dict().items() if key != "optimiser_steps"}
        now = time.perf_counter()
        self._wire.tell(
            "step",
            optimiser_step=self.statistics.steps,
            optimiser_steps=self._steps,
            **_plain(figures),
            learning_rate=logs.get("learning_rate", self._learning_rate),
            tokens=int(taken.tokens),
            seconds=now - self._began,
        )
        self._began = now


def _merged(before: BatchStatistics, step: BatchStatistics) -> BatchStatistics:
    """Statistics of some steps and of one more, as if they had been counted together."""
    if not before.steps:
        return step
    sums: dict[str, Any] = {}
    for field in dataclasses.fields(BatchStatistics):
        # The difference between trainer and sampler is one of the first step only, and sums of an unfinished step are none.
        first = field.name.startswith(("first_step", "_"))
        sums[field.name] = getattr(before, field.name) if first else getattr(before, field.name) + getattr(step, field.name)
    private = sums.pop("_step")
    return BatchStatistics(**sums, _step=private)


def _steps_taken(saved: Path | None) -> int:
    return 0 if saved is None else int(json.loads((saved / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])


def _plain(value: Any) -> Any:
    """The value as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
