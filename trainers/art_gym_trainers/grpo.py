"""GRPO: TRL's trainer, fed with recorded episodes instead of prompts.

TRL keeps the loss, the optimiser, callbacks, trackers and accelerate. Ours: where rows come from (recorded tokens, never rendered again),
micro-batches by token budget, log-probabilities of sampled tokens only, with shared tokens computed once, and figures weighted by token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback

from art_gym.errors import UsageError
from art_gym_trainers.losses import StepSize, clipped, importance_ratio, share
from art_gym_trainers.memory import free_bytes
from art_gym_trainers.micro_batches import collate, episodes_of, micro_batches, sampled_tokens
from art_gym_trainers.passes import Passes, prepare_passes
from art_gym_trainers.policy import base_model, keep_trained_in_float32
from art_gym_trainers.rows import Row
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, add_scoring
from art_gym_trainers.statistics import BatchStatistics


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPO on recorded rows.

    Several processes (`accelerate launch`) share the micro-batches of each step, and only the main one is asked for batches; the gradients are
    those of one process.

    Args:
        model: A policy with a trainable adapter (`art_gym_trainers.policy.load_policy`), or a whole model to fine-tune.
        args: `grpo_config(...)`.
        batches: Yields a batch at a time, as the rows of each of its optimiser steps. It is asked for the next only when the last step has been
            taken, so that it may publish the policy and play new episodes in between; training ends when it ends. A folder among them is
            where a checkpoint is written then.
        processing_class: The model's tokenizer.
        token_budget: Most tokens of one forward and backward pass; None for as many as the free memory allows.
        passes: What `art_gym_trainers.passes.prepare_passes` gave for this policy, where a run planned before it began: memory isn't looked at
            again, and `token_budget` has no say. For one process: several agree on a plan only where they make it here.

    Attributes:
        pass_memory: What passes take of memory.
        token_budget: As chosen.

    Raises:
        UsageError: Passes of so many tokens don't fit into memory.
    """

    def __init__(
        self,
        model: PeftModel | PreTrainedModel,
        args: trl.GRPOConfig,
        batches: Iterable[Sequence[Sequence[Row]] | Path],
        processing_class: PreTrainedTokenizerBase,
        token_budget: int | None = None,
        passes: Passes | None = None,
        **kwargs: Any,
    ) -> None:
        # TRL asks for prompts and a reward function, neither of which is used: rows arrive with tokens and advantages.
        prompts = Dataset.from_dict({"prompt": [""]})
        super().__init__(model, _no_reward, args, train_dataset=prompts, processing_class=processing_class, **kwargs)
        if isinstance(self.model, PeftModel):
            keep_trained_in_float32(self.model)
        self.remove_callback(PrinterCallback)
        self.batches = batches
        if passes is None:
            passes = prepare_passes(self.model, args, token_budget, kind=self._agreed_batch(), free=self._agreed_free_bytes)
        self._batch, self.pass_memory, self.token_budget = passes.kind, passes.memory, passes.token_budget
        self._longest_row = passes.longest_row
        # TRL multiplies the loss by the correction's ratio where it believes that vLLM sampled, as it did; TRL itself calls none.
        self.use_vllm = args.vllm_importance_sampling_correction
        # Ours to add: TRL's is a mean over a micro-batch's tokens, which depends on how the step is cut.
        self._entropy_bonus_enabled = False
        self._statistics = BatchStatistics()
        self._scored: TreeBatch | PaddedBatch
        self._inputs: dict[str, torch.Tensor] = {}
        self._entropies: torch.Tensor
        self._entropy_floor = -torch.inf
        self._weight = 1
        self._save_into: Path | None = None

    def take_statistics(self) -> BatchStatistics:
        """The figures since the last call; starts new ones."""
        statistics, self._statistics = self._statistics, BatchStatistics()
        return statistics

    def _agreed_batch(self) -> type[TreeBatch] | type[PaddedBatch]:
        """Trees, if every process's models take them: all have to cut a step alike."""
        kinds = [add_scoring(base_model(self.model))] + ([] if self.ref_model is None else [add_scoring(self.ref_model)])
        trees = gather_object([all(kind is TreeBatch for kind in kinds)])
        return TreeBatch if all(trees) else PaddedBatch

    def _agreed_free_bytes(self) -> int | None:
        """What the process with least memory has; processes without a GPU share their machine's."""
        free = free_bytes(self.args.device)
        if free is not None and self.args.device.type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", self.accelerator.num_processes))
        return min((found for found in gather_object([free]) if found is not None), default=None)

    # ------------------------------------------------------- what Trainer asks

    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not prepared by accelerate, whose loader fetches one batch ahead: the next rows must be played by the updated policy.
        # With a generator of its own, since it draws a seed when it begins: a resumed run would be one draw ahead.
        return DataLoader(_Steps(self), batch_size=None, generator=torch.Generator())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            self.control.should_training_stop = True
        return samples, items

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        # 6 operations a parameter and token, forward and backward: arXiv 2001.08361, section 2.1.
        return 6.0 * sum(len(row.sequence) for row in inputs["rows"]) * self.model.num_parameters()

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One optimiser step's gradients, however many micro-batches and processes it takes: the sum doesn't depend on how the rows are cut."""
        model.train()
        rows: list[Row] = inputs["rows"]
        step = StepSize(len(episodes_of(rows)), sampled_tokens(rows))
        own = self._own(micro_batches(rows, self.token_budget, shared=self._batch is TreeBatch))
        high_entropy_tokens = self._find_entropy_floor(own) if self.top_entropy_quantile < 1.0 else step.tokens
        total = torch.zeros((), device=self.args.device)
        for index, (batch, weight) in enumerate(own):
            tensors = self._tensors(batch, step.tokens)
            self._weight = weight
            last = index == len(own) - 1
            with self.accelerator.no_sync(model) if not last else contextlib.nullcontext(), self.compute_loss_context_manager():
                size = StepSize(len(episodes_of(batch)), sampled_tokens(batch))
                loss = self.compute_loss(model, tensors) * share(self.loss_type, size, step, self.accelerator.num_processes)
                if self.entropy_coef:
                    kept = self._entropies[self._entropies >= self._entropy_floor]
                    # Gradients are averaged over the processes, and the bonus is a mean over the tokens of all of them.
                    loss = loss - self.entropy_coef * kept.sum() / high_entropy_tokens * self.accelerator.num_processes
                # DeepSpeed takes an optimiser step with any backward pass that it isn't told to wait after.
                self.accelerator.gradient_state._set_sync_gradients(last)
                self.accelerator.backward(loss * weight)
            total += loss.detach() * weight
        self._step += 1
        sums = torch.tensor([*self._statistics.step_sums(), float(total)], dtype=torch.float64)
        *sums, loss_sum = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").tolist()
        self._statistics.end_step(sums, loss_sum / self.accelerator.num_processes)
        return total

    # ---------------------------------------------------------- what TRL asks

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        # TRL passes only ids to the log-probability computation, which also needs what they were compared with.
        self._inputs = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probabilities and entropies (B, T) of the sampled tokens, zero on padding."""
        mask = attention_mask.bool()
        logprobs, entropies = self._score(model, self._scored, entropy_gradients=bool(self.entropy_coef))
        self._entropies = entropies
        # Both list the sampled tokens row by row.
        empty = torch.zeros(mask.shape, dtype=logprobs.dtype, device=logprobs.device)
        per_token = empty.masked_scatter(mask, logprobs)
        if self._weight:
            reference = self._inputs.get("ref_per_token_logps")
            self._statistics.count(
                logprobs=logprobs.detach(),
                sampled=self._inputs["sampling_per_token_logps"][mask],
                entropies=entropies.detach(),
                clipped=clipped(
                    self.loss_type,
                    per_token.detach() - self._inputs["old_per_token_logps"],
                    mask,
                    self._inputs["advantages"],
                    level=self.importance_sampling_level,
                    low=self.epsilon_low,
                    high=self.epsilon_high,
                ),
                reference=None if reference is None else reference[mask],
            )
        return per_token, empty.detach().masked_scatter(mask, entropies.detach()), None

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        # The quantile is one of the whole step's tokens, not of the micro-batch's.
        return (entropies >= self._entropy_floor) & mask.bool()

    # ------------------------------------------------------------------- passes

    def _score(self, model: torch.nn.Module, batch: TreeBatch | PaddedBatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with self.accelerator.autocast():
            scores: tuple[torch.Tensor, torch.Tensor] = model(batch=batch, temperature=self.temperature, **options)
        return scores

    def _tensors(self, batch: list[Row], step_tokens: int) -> dict[str, torch.Tensor]:
        """Lay a micro-batch out, for the model and for the loss."""
        self._scored = self._build(batch)
        tensors = collate(batch, step_tokens, self.args.device)
        mask = tensors["completion_mask"].bool()
        if self.use_vllm:
            tensors["importance_sampling_ratio"] = importance_ratio(
                tensors["old_per_token_logps"] - tensors["sampling_per_token_logps"],
                mask,
                self.args.vllm_importance_sampling_mode,
                self.args.vllm_importance_sampling_clip_max,
                self.args.vllm_importance_sampling_clip_min,
            )
        if self.beta:
            with torch.no_grad(), self._as_reference() as reference:
                logprobs, _ = self._score(reference, self._scored)
            tensors["ref_per_token_logps"] = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, logprobs)
        return tensors

    def _build(self, batch: list[Row]) -> TreeBatch | PaddedBatch:
        longest = max(len(row.sequence) for row in batch)
        if self._longest_row is not None and longest > self._longest_row:
            raise UsageError(
                f"a row has {longest} tokens, and beyond {self._longest_row} this model's rotary embedding depends on what else is in the "
                "pass; end episodes before that"
            )
        return self._batch.build([row.sequence.token_ids for row in batch], [row.sequence.sampled for row in batch], self.args.device)

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[torch.nn.Module]:
        """Give the reference: the model without its adapter, or where all of it is trained, what it was at first."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        with self.accelerator.unwrap_model(self.model).disable_adapter():
            yield self.model

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """Work out the trainer's own log-probabilities of rows under the policy as it is, and give rows that hold them."""
        cut = micro_batches(rows, self.token_budget, shared=self._batch is TreeBatch)
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for batch, weight in self._own(cut):
                logprobs, _ = self._score(self.model, self._build(batch))
                if weight:
                    values = iter(logprobs.tolist())
                    found |= {id(row): [next(values) if flag else 0.0 for flag in row.sequence.sampled] for row in batch}
        numbers = {id(row): index for index, row in enumerate(rows)}
        gathered = gather_object([(numbers[key], values) for key, values in found.items()])
        old = dict(gathered)
        return [dataclasses.replace(row, old_logprobs=old[index]) for index, row in enumerate(rows)]

    def _find_entropy_floor(self, own: list[tuple[list[Row], int]]) -> int:
        """Find the entropy that the most uncertain tokens of the step have at least, and how many these are."""
        entropies: list[float] = []
        with torch.no_grad():
            for batch, weight in own:
                # In the same way as in the step itself, since rounding may decide at the floor.
                values = self._score(self.model, self._build(batch), entropy_gradients=bool(self.entropy_coef))[1]
                if weight:
                    entropies += values.tolist()
        everywhere = torch.tensor(gather_object(entropies))
        self._entropy_floor = float(torch.quantile(everywhere, 1 - self.top_entropy_quantile))
        return int((everywhere >= self._entropy_floor).sum())

    def _own(self, batches: list[list[Row]]) -> list[tuple[list[Row], int]]:
        """Deal micro-batches out to processes, the longest first to whoever has least; gives this process's, each with weight 1.

        TRL gathers figures after each, so that all processes need equally many: who has fewer computes one again, with weight 0.
        """
        count = self.accelerator.num_processes
        hands: list[list[list[Row]]] = [[] for _ in range(count)]
        loads = [0] * count
        for batch in sorted(batches, key=lambda batch: -sum(len(row.sequence) for row in batch)):
            poorest = loads.index(min(loads))
            hands[poorest].append(batch)
            loads[poorest] += sum(len(row.sequence) for row in batch)
        own = hands[self.accelerator.process_index]
        missing = max(map(len, hands)) - len(own)
        return [(batch, 1) for batch in own] + [(min(batches, key=len), 0)] * missing

    # -------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write all that training needs to go on into an existing folder: weights, optimiser, scheduler, random states, trainer state.

        `train(resume_from_checkpoint=str(folder))` goes on from there. Several processes save together: let `batches` yield the folder.

        Raises:
            UsageError: There are several processes.
        """
        if self.accelerator.num_processes > 1:
            raise UsageError("several processes save together, and save() is one's own; let batches yield the folder as a Path instead")
        self._save_together(folder)

    def _save_together(self, folder: Path) -> None:
        self._save_into = folder
        # Straight to transformers: TRL's override only adds a model card, which the run's report stands for.
        super(trl.GRPOTrainer, self)._save_checkpoint(self.model, trial=None)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            written = folder / f"checkpoint-{self.state.global_step}"
            for path in written.iterdir():
                path.replace(folder / path.name)
            written.rmdir()
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._save_into or super()._get_output_dir(trial))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "grad_norm" in logs:
            self._statistics.gradient_norms.append(float(logs["grad_norm"]))
        super().log(logs, start_time)


class _Steps(IterableDataset[Any]):
    """The optimiser steps of the trainer's batches; the main process asks for them, and tells the others."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[dict[str, list[Row]]]:
        trainer = self.trainer
        source = iter(trainer.batches) if trainer.accelerator.is_main_process else iter(())
        while True:
            message: list[Any] = [next(source, None)]
            if trainer.accelerator.num_processes > 1:
                broadcast_object_list(message)
            if message[0] is None:
                return
            if isinstance(message[0], Path):
                trainer._save_together(message[0])
                continue
            steps = [list(step) for step in message[0] if step]
            if trainer.use_vllm and steps:
                # Before the first step: the ratio is taken to the policy as it was at the batch's start.
                scored = iter(trainer.score([row for step in steps for row in step]))
                steps = [[next(scored) for _ in step] for step in steps]
            for rows in steps:
                yield {"rows": rows}


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards come with the episodes; TRL must not ask for them")
