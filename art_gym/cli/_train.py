"""A training run from the untrained model to the report: measure, warm up, measure, train, measure.

Every stage leaves a whole file behind when it is done, and the run's state is what these files say: a run that was killed goes on with the
first stage that left none. Imported only by the `train` command, since it loads torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_gym._files import sync, sync_all, write_text
from art_gym.cli import _standing
from art_gym.cli._figures import batch_row
from art_gym.cli._grpo_arguments import computes_in_bfloat16, grpo_arguments
from art_gym.cli._practice import Practice, first_scenarios
from art_gym.cli._serving import Serving
from art_gym.cli.config import RunConfig
from art_gym.cli.live import LiveTable
from art_gym.cli.report import read_evaluations, write_report
from art_gym.episodes import Episode, EpisodeGroup
from art_gym.errors import RunStopped, UsageError
from art_gym.evaluation import Evaluation, evaluate
from art_gym.rollout import Runner, branch_at
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore
from art_gym_agents import ChatAgent, ScriptedAgent
from art_gym_agents.warmstart import script_for
from art_gym_trainers.advantages import tells_something
from art_gym_trainers.forks import token_decoder
from art_gym_trainers.grpo import GRPOTrainer
from art_gym_trainers.memory import GIB
from art_gym_trainers.passes import prepare_passes
from art_gym_trainers.policy import load_policy, load_saved, load_tokenizer
from art_gym_trainers.publish import Published
from art_gym_trainers.rows import Row, batch_rows, split_steps
from art_gym_trainers.sampling import SampledBatch, sample_batch
from art_gym_trainers.sequences import episode_sequences, require_tokens
from art_gym_trainers.sft import episode_examples, warm_start

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from art_gym_trainers.checkpoints import Checkpoint


def run_training(config: RunConfig, folder: Path, *, model_folder: Path, live: LiveTable) -> dict[str, Evaluation]:
    """Carry out a run, or what is left of it, in its folder.

    Args:
        config: What to do; already checked.
        folder: The run's folder, claimed by the caller.
        model_folder: The base model, resolved.
        live: Shows what goes on.

    Returns:
        The evaluations, by stage.

    Raises:
        EngineError: The engine died.
        RunStopped: An alarm ended the run; its report is written.
        UsageError: What is in the folder can't be gone on from.
    """
    # First of all, since it may refuse to go on.
    saved = _standing.found(config, folder)
    with ExitStack() as stack:
        run = _Run(config, folder, model_folder, live, stack)
        run.plan_memory(saved)
        run.measure_untrained()
        if config.warm_start.enabled:
            run.warm_up()
        try:
            run.train(saved)
        except RunStopped:
            write_report(folder)
            raise
        live.phase("report")
        write_report(folder)
        return read_evaluations(folder)


class _Run:
    """The parts of a run and its stages, in the order in which they are called."""

    def __init__(self, config: RunConfig, folder: Path, model_folder: Path, live: LiveTable, stack: ExitStack) -> None:
        self.config, self.folder, self.live = config, folder, live
        self.name = config.model.name.rstrip("/").rpartition("/")[2]
        self.checkpoints = folder / _standing.CHECKPOINTS
        # Before anything is started, since it may refuse a setting.
        self._arguments = grpo_arguments(config, self.checkpoints)
        self.store = stack.enter_context(EpisodeStore(folder))
        self.env_kwargs = config.env.kwargs
        live.phase("engine", "vLLM is starting")
        with ThreadPoolExecutor(1) as starter:
            self.serving = Serving(config, folder, model_folder, self.name, live)
            self.engine = self.serving.engine
            stack.callback(self.engine.stop)
            started = starter.submit(self.engine.start)
            try:
                # Loading the trainer's side takes a while too, and meanwhile the engine mostly waits for the disk.
                self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(model_folder)
                self.policy: PeftModel | PreTrainedModel = load_policy(
                    model_folder,
                    method=config.model.method,
                    dtype=config.model.dtype,
                    lora_rank=config.model.lora_rank,
                    lora_alpha=config.model.lora_alpha,
                    saved=self._warm_adapter if self._warm_adapter.exists() else None,
                    seed=config.seed,
                )
                started.result()
            except BaseException:
                # Ctrl-C, say: what is starting is stopped rather than waited for.
                while not started.done():
                    self.engine.stop()
                    time.sleep(0.1)
                raise
        self.agent = self.serving.agent()
        self._practice = Practice(config)

    # ------------------------------------------------------------------ stages

    def plan_memory(self, saved: Checkpoint | None) -> None:
        """Choose how long training's passes are, before anything is spent on a run that couldn't train.

        A run that goes on cuts its steps as it did, so that they are the same to the last bit.
        """
        wanted = None if self.config.grpo.token_budget == "auto" else self.config.grpo.token_budget
        if saved is not None and wanted is None:
            wanted = int(saved.details["token_budget"])
        with self.serving.asleep():
            reference = self.config.model.method == "full" and self.config.grpo.kl_coef > 0
            self._passes = passes = prepare_passes(self.policy, self._arguments, wanted, reference=reference)
        memory, free, self.token_budget = passes.memory, passes.free, passes.token_budget
        self.live.note(
            f"training in passes of at most {self.token_budget} tokens, which take up to {memory.peak(self.token_budget) / GIB:.1f} GiB"
        )
        longest = self.config.engine.max_model_len
        if passes.longest_row is not None and longest > passes.longest_row:
            raise UsageError(
                f"engine.max_model_len={longest}: beyond {passes.longest_row} tokens this model's rotary embedding depends on a pass's longest "
                f"row, so that training would depend on how steps are cut; set it to at most {passes.longest_row}"
            )
        if free is not None and longest > self.token_budget and memory.peak(longest) > free:
            self.live.note(
                f"warning: an episode of engine.max_model_len={longest} tokens would take {memory.peak(longest) / GIB:.1f} GiB to train on"
            )

    def measure_untrained(self) -> None:
        self._evaluate("untrained")
        # A server that gives no tokens is found out here, before anything is spent on training.
        require_tokens(episode for episode in self.store.journal("eval-untrained").read() if episode.failure is None)

    def warm_up(self) -> None:
        """Supervised steps on scripted episodes; the adapter lies in `checkpoints/warm-start`."""
        settings = self.config.warm_start
        if not self._warm_adapter.exists():
            count = settings.steps * settings.batch_size
            script = ScriptedAgent(script_for(self.config.env.id), name="warm-start")
            groups = self._play(script, self._practice.take(0, count), "warm-start", group_size=1)
            with self.serving.asleep():
                warm_start(
                    self.policy,
                    self.tokenizer,
                    [episode for group in groups for episode in group.episodes],
                    output_dir=self.checkpoints,
                    learning_rate=settings.learning_rate,
                    batch_size=settings.batch_size,
                    seed=self.config.seed,
                    bf16=computes_in_bfloat16(self.config),
                    token_budget=self.token_budget,
                    on_step=lambda step, steps, loss: self.live.phase("warm start", f"step {step} of {steps}, loss {loss:.3f}"),
                )
            scratch = self._warm_adapter.with_name(".warm-start.part")
            self.policy.save_pretrained(scratch)
            # A run that goes on takes it for whole where it's there.
            sync_all(scratch)
            scratch.rename(self._warm_adapter)
            sync(self.checkpoints)
        if "warm_start" not in read_evaluations(self.folder):
            self._publish(0)
            self._evaluate("warm_start")

    def train(self, saved: Checkpoint | None) -> None:
        """GRPO from the checkpoint on, and the last evaluation."""
        settings = self.config.grpo
        done = saved.step if saved else 0
        if saved and (differing := _standing.differing_versions(saved)):
            self.live.note(f"warning: {saved.folder.name} was written with other versions, so that figures may differ: {', '.join(differing)}")
        if done < settings.batches:
            # Made anew, since each trainer sets up the process's precision as its own configuration says.
            arguments = grpo_arguments(self.config, self.checkpoints)
            with self.serving.asleep():
                trainer = GRPOTrainer(
                    self.policy,
                    arguments,
                    batches=self._batches(done, self._next_scenario(saved)),
                    processing_class=self.tokenizer,
                    # A plan that stood when the run began isn't refused in the middle of it.
                    passes=self._passes,
                )
            self._trainer = trainer
            trainer.train(resume_from_checkpoint=str(saved.folder) if saved else None)
        elif saved and "grpo" not in read_evaluations(self.folder):
            load_saved(self.policy, saved.folder)
            self._publish(done)
        self._evaluate("grpo")

    # ------------------------------------------------------------- one batch

    def _batches(self, done: int, scenario: int) -> Iterator[list[list[Row]]]:
        """Play a batch, hand the rows of its steps to the trainer, and keep what it learned; then the next."""
        settings, every = self.config.grpo, self.config.evaluation.every
        published = self._publish(done)
        for batch in range(done + 1, settings.batches + 1):
            if every and batch > 1 and (batch - 1) % every == 0:
                self._evaluate(f"grpo@{batch - 1}")
            started = time.perf_counter()
            sampled = self._sample(batch, scenario)
            scenario += len(sampled.played)
            seconds_rollout = time.perf_counter() - started
            kept, counts = batch_rows(
                sampled.groups,
                settings.advantage,
                credit=settings.credit,
                discount=settings.discount,
                decode=token_decoder(self.tokenizer),
                realign=settings.realign,
            )
            self._compact(but=f"train-{batch:04d}")
            self.live.phase("training", f"batch {batch} of {settings.batches}")
            started = time.perf_counter()
            with self.serving.asleep():
                yield split_steps(kept, settings.steps_per_batch)
            seconds_train = time.perf_counter() - started
            statistics = self._trainer.take_statistics()
            row = {
                **batch_row(batch, published, sampled, counts, statistics),
                "seconds_rollout": seconds_rollout,
                "seconds_train": seconds_train,
                "seconds_publish": published.seconds,
            }
            details = {"policy": f"{self.name}@{batch}", "next_scenario": scenario, "token_budget": self.token_budget}
            alarmed = _standing.keep(self.config, self.folder, row, save=self._trainer.save, details=details)
            self.live.row(row)
            for alarm in alarmed:
                self.live.note(f"{'alarm' if alarm.stops else 'warning'}: {alarm.message}")
            _standing.raise_for_alarms(batch, alarmed)
            published = self._publish(batch)

    def _compact(self, *, but: str) -> None:
        """Make tables of the episodes of all stages before this one, which are over."""
        self.store.compact(*(label for label in self.store.labels() if not label.startswith(but)))

    def _sample(self, batch: int, first: int) -> SampledBatch:
        """Play a batch's scenarios, from number `first` on; with dynamic sampling in rounds.

        A round's journal is named by where it begins: a run that goes on may need other rounds, if episodes that failed now don't.
        """
        settings = self.config.grpo

        def play(played: int, count: int) -> list[EpisodeGroup]:
            return self._play(
                self.agent,
                self._practice.take(first + played, count),
                f"train-{batch:04d}" + (f"-from-{played:04d}" if played else ""),
                group_size=settings.group_size,
                oversample=self.config.rollout.oversample,
                branch=branch_at(self.config.rollout.branch) if self.config.rollout.branch else None,
                detail=f"batch {batch} of {settings.batches}" + (f", {played} scenarios played" if played else ""),
            )

        return sample_batch(
            play,
            settings.groups_per_batch,
            lambda group: tells_something(group, credit=settings.credit, discount=settings.discount),
            max_rounds=settings.max_sampling_rounds if settings.dynamic_sampling else 1,
        )

    def _play(
        self, agent: ChatAgent | ScriptedAgent, scenarios: list[Scenario], label: str, *, group_size: int, detail: str = "", **options: Any
    ) -> list[EpisodeGroup]:
        rollout = self.config.rollout
        runner = Runner(
            self.config.env.id,
            agent,
            env_kwargs=self.env_kwargs,
            concurrency=rollout.concurrency,
            group_size=group_size,
            turn_timeout=rollout.turn_timeout,
            tool_timeout=rollout.tool_timeout,
            episode_timeout=rollout.episode_timeout,
            max_failure_rate=rollout.max_failure_rate,
            isolation=rollout.isolation,
            engine_check=self.engine.check,
            **options,
        )
        progress = _Counter(self.live, "rollout", len(scenarios) * (group_size + runner.oversample), detail)
        return runner.collect(scenarios, journal=self.store.journal(label), resume=True, progress=progress)

    def _evaluate(self, stage: str) -> None:
        """Play the held-out scenarios, unless that is done, and note the outcome in `evaluations.json`."""
        done = read_evaluations(self.folder)
        if stage in done:
            return
        settings, rollout = self.config.evaluation, self.config.rollout
        self.live.phase("evaluation", stage)
        measured = evaluate(
            self.config.env.id,
            self.agent,
            first_scenarios(self.config, settings.split, settings.n),
            env_kwargs=self.env_kwargs,
            concurrency=rollout.concurrency,
            turn_timeout=rollout.turn_timeout,
            tool_timeout=rollout.tool_timeout,
            episode_timeout=rollout.episode_timeout,
            isolation=rollout.isolation,
            journal=self.store.journal(f"eval-{stage.replace('@', '-')}"),
            resume=True,
            progress=_Counter(self.live, "evaluation", settings.n, stage),
            engine_check=self.engine.check,
        )
        evaluations = {key: value.to_dict() for key, value in {**done, stage: measured}.items()}
        write_text(self.folder / "evaluations.json", json.dumps(evaluations, indent=2, allow_nan=False) + "\n")
        self.live.note(f"{stage.replace('_', ' ')}: {measured}")

    def _publish(self, step: int) -> Published:
        return self.serving.publish(step, self.policy, self._probe_tokens)

    @cached_property
    def _probe_tokens(self) -> list[int]:
        """Tokens on the policy's own ground: a scripted episode, or one of the untrained model's where there was no warm start."""
        if self.config.warm_start.enabled:
            scripted = next(episode for episode in self.store.journal("warm-start").read() if episode.failure is None and episode.turns)
            return episode_examples([scripted], self.tokenizer)[0]["input_ids"]
        for episode in self.store.journal("eval-untrained").read():
            if episode.failure is None and (sequences := episode_sequences(episode)) and len(sequences[0]) > 1:
                return sequences[0].token_ids
        raise UsageError("no episode of the untrained model finished, so that nothing can be published; its failures are in episodes/")

    # --------------------------------------------------------------- scenarios

    @property
    def _warm_adapter(self) -> Path:
        return self.checkpoints / "warm-start"

    def _next_scenario(self, saved: Checkpoint | None) -> int:
        """The number of the first scenario that no batch was trained on: the warm start's come first, then those of each batch."""
        if saved is not None:
            return int(saved.details["next_scenario"])
        return self.config.warm_start.steps * self.config.warm_start.batch_size


@dataclass(slots=True)
class _Counter:
    """Shows how many episodes have ended."""

    live: LiveTable
    phase: str
    total: int
    detail: str
    ended: int = 0

    def on_episode(self, episode: Episode) -> None:
        self.ended += 1
        self.live.phase(self.phase, f"{self.detail + ', ' if self.detail else ''}{self.ended} of {self.total} episodes")
