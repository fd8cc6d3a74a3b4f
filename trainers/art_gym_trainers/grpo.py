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
from typing import Any, NamedTuple

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
from art_gym_trainers.micro_batches import Work, collate, deal, episodes_of, micro_batches, sampled_tokens
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
        self._scores: Scores
        self._inputs: dict[str, torch.Tensor] = {}
        self._entropy_floor = -torch.inf
        self._size: StepSize
        self._uncertain: int
        self._weight: int
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
        self._size = StepSize(len(episodes_of(rows)), sampled_tokens(rows))
        own = self._own(rows)
        self._uncertain = self._find_entropy_floor(own) if self.top_entropy_quantile < 1.0 else self._size.tokens
        total = torch.zeros((), device=self.args.device)
        for index, work in enumerate(own):
            total += self._backward(model, work, last=index == len(own) - 1)
        self._step += 1
        sums = torch.tensor([*self._statistics.step_sums(), float(total)], dtype=torch.float64)
        *sums, loss_sum = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").tolist()
        self._statistics.end_step(sums, loss_sum / self.accelerator.num_processes)
        return total

    # ---------------------------------------------------------- what TRL asks

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        # TRL passes only ids to the log-probability computation, which also needs what they were compared with.
        self._inputs = inputs
        with self._gathering_unequal_rows():
            return super()._compute_loss(model, inputs)

    @contextlib.contextmanager
    def _gathering_unequal_rows(self) -> Iterator[None]:
        """TRL gathers a figure for each row of a micro-batch, and processes needn't have equally many: gloo then fails, or mixes them up."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            yield
            return
        gather = accelerator.gather
        # TRL takes least and largest values, and passes over NaN.
        accelerator.gather = lambda figures: gather(accelerator.pad_across_processes(figures, pad_index=torch.nan) if figures.ndim else figures)
        try:
            yield
        finally:
            del accelerator.gather

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
        logprobs, entropies = self._scores
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

    def _backward(self, model: torch.nn.Module, work: Work, *, last: bool) -> torch.Tensor:
        """Add the gradients of a micro-batch's loss, and return the loss.

        An episode that takes several passes is scored without gradients first; the loss gives the gradient of each score, and each pass is
        computed once more to carry its own to the parameters (arXiv 2101.06983, section 3.2). So a loss of whole episodes stays exact.
        """
        tensors = self._tensors(work)
        options = {"entropy_gradients": bool(self.entropy_coef)}
        if len(work.passes) + work.idle == 1:
            with self._pass(model, last=last):
                loss = self._loss(model, work, tensors, self._score(model, work.rows, **options))
                self.accelerator.backward(loss)
            return loss.detach()
        with torch.no_grad():
            scores = self._score_all(model, work, **options)
        scores = Scores(*(values.requires_grad_() for values in scores))
        with self.compute_loss_context_manager():
            loss = self._loss(model, work, tensors, scores)
        gradients = _by_row(work.rows, Scores(*torch.autograd.grad(loss, scores, materialize_grads=True)))
        passes = [(rows, 1.0) for rows in work.passes] + [(work.passes[0], 0.0)] * work.idle
        for index, (rows, factor) in enumerate(passes):
            with self._pass(model, last=last and index == len(passes) - 1):
                found = self._score(model, rows, **options)
                wanted = _joined(gradients[id(row)] for row in rows)
                carried = (found.logprobs * wanted.logprobs).sum() + (found.entropies * wanted.entropies).sum()
                self.accelerator.backward(carried * factor)
        return loss.detach()

    def _loss(self, model: torch.nn.Module, work: Work, tensors: dict[str, torch.Tensor], scores: Scores) -> torch.Tensor:
        """A micro-batch's share in the loss of its step."""
        self._scores, self._weight = scores, work.weight
        processes = self.accelerator.num_processes
        size = StepSize(len(episodes_of(work.rows)), sampled_tokens(work.rows))
        loss = self.compute_loss(model, tensors) * share(self.loss_type, size, self._size, processes)
        if self.entropy_coef:
            kept = scores.entropies[scores.entropies >= self._entropy_floor]
            # Gradients are averaged over the processes, and the bonus is a mean over the tokens of all of them.
            loss = loss - self.entropy_coef * kept.sum() / self._uncertain * processes
        return loss * work.weight

    @contextlib.contextmanager
    def _pass(self, model: torch.nn.Module, *, last: bool) -> Iterator[None]:
        """A forward and backward pass; gradients are exchanged with the other processes in the last of a step."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model), self.compute_loss_context_manager():
            # DeepSpeed takes an optimiser step with any backward pass that it isn't told to wait after.
            self.accelerator.gradient_state._set_sync_gradients(last)
            yield

    def _score(self, model: torch.nn.Module, rows: list[Row], **options: Any) -> Scores:
        """Score the rows in one pass."""
        with self.accelerator.autocast():
            return Scores(*model(batch=self._build(rows), temperature=self.temperature, **options))

    def _score_all(self, model: torch.nn.Module, work: Work, **options: Any) -> Scores:
        """Score a micro-batch in all its passes."""
        found: dict[int, Scores] = {}
        for rows in [*work.passes, *[work.passes[0]] * work.idle]:
            found |= _by_row(rows, self._score(model, rows, **options))
        return _joined(found[id(row)] for row in work.rows)

    def _tensors(self, work: Work) -> dict[str, torch.Tensor]:
        """Lay a micro-batch out for the loss."""
        tensors = collate(work.rows, self._size.tokens, self.args.device)
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
                logprobs = self._score_all(reference, work).logprobs
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
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for work in self._own(rows):
                logprobs = self._score_all(self.model, work).logprobs
                if work.weight:
                    values = iter(logprobs.tolist())
                    found |= {id(row): [next(values) if flag else 0.0 for flag in row.sequence.sampled] for row in work.rows}
        numbers = {id(row): index for index, row in enumerate(rows)}
        gathered = gather_object([(numbers[key], values) for key, values in found.items()])
        old = dict(gathered)
        return [dataclasses.replace(row, old_logprobs=old[index]) for index, row in enumerate(rows)]

    def _find_entropy_floor(self, own: list[Work]) -> int:
        """Find the entropy that the most uncertain tokens of the step have at least, and how many these are."""
        entropies: list[float] = []
        with torch.no_grad():
            for work in own:
                # In the same way as in the step itself, since rounding may decide at the floor.
                values = self._score_all(self.model, work, entropy_gradients=bool(self.entropy_coef)).entropies
                if work.weight:
                    entropies += values.tolist()
        everywhere = torch.tensor(gather_object(entropies))
        self._entropy_floor = float(torch.quantile(everywhere, 1 - self.top_entropy_quantile))
        return int((everywhere >= self._entropy_floor).sum())

    def _own(self, rows: Sequence[Row]) -> list[Work]:
        """Cut rows into micro-batches; gives this process's share of them."""
        shared = self._batch is TreeBatch
        batches = micro_batches(rows, self.token_budget, shared=shared)
        hands = deal(batches, self.accelerator.num_processes, self.token_budget, shared=shared)
        return hands[self.accelerator.process_index]

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


class Scores(NamedTuple):
    """Of the sampled tokens of some rows, row by row.

    Attributes:
        logprobs: (M,)
        entropies: (M,)
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor


def _by_row(rows: Sequence[Row], scores: Scores) -> dict[int, Scores]:
    """Part scores by row, by its identity."""
    sizes = [sampled_tokens([row]) for row in rows]
    parts = zip(*(values.split(sizes) for values in scores), strict=True)
    return {id(row): Scores(*part) for row, part in zip(rows, parts, strict=True)}


def _joined(scores: Iterable[Scores]) -> Scores:
    return Scores(*map(torch.cat, zip(*scores, strict=True)))


def _no_reward(**_: Any) -> list[float]:
    raise AssertionError("rewards come with the episodes; TRL must not ask for them")
