"""A policy made ready for training's passes, and how long these may be. The rule for the length is `art_gym_trainers.memory`'s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trl.trainer.utils import disable_dropout_in_model

from art_gym_trainers.lora import fuse_lora
from art_gym_trainers.memory import PassMemory, choose_budget, free_bytes, measure
from art_gym_trainers.policy import base_model
from art_gym_trainers.scoring import PaddedBatch, TreeBatch, add_scoring, longest_row

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel
    from trl import GRPOConfig


@dataclass(frozen=True, slots=True)
class Passes:
    """What training's passes are.

    Attributes:
        kind: What the policy scores.
        memory: What passes take.
        token_budget: Most tokens of one.
        free: Bytes that were free when the budget was chosen; None if unknown.
        longest_row: Most tokens of a row, where the model sets a bound (`art_gym_trainers.scoring.longest_row`).
    """

    kind: type[TreeBatch] | type[PaddedBatch]
    memory: PassMemory
    token_budget: int
    free: int | None
    longest_row: int | None


def prepare_passes(
    policy: PeftModel | PreTrainedModel,
    args: GRPOConfig,
    token_budget: int | None,
    *,
    kind: type[TreeBatch] | type[PaddedBatch] | None = None,
    free: Callable[[], int | None] | None = None,
    reference: bool = False,
) -> Passes:
    """Make the policy score and recompute as it does in training, measure its passes, and choose their length; done twice, it changes nothing.

    Args:
        policy: Changed in place.
        args: Says whether layers are recomputed.
        token_budget: The number that is wanted; None to choose one.
        kind: What several processes agreed on; by default what this one's policy takes.
        free: Tells the free bytes, once the passes are measured; by default those of the policy's device.
        reference: Whether a second whole model is still to be loaded, to measure the divergence from.

    Raises:
        UsageError: Passes of so many tokens don't fit into memory.
    """
    base = base_model(policy)
    if kind is None:
        kind = add_scoring(base)
    fuse_lora(policy)
    if args.disable_dropout:
        disable_dropout_in_model(policy)
    if args.gradient_checkpointing:
        # As transformers does when training begins; what passes take depends on it.
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
    vocabulary = base.get_output_embeddings().weight.shape[0]
    memory = measure(policy, kind, vocabulary=vocabulary, autocast=bool(args.bf16), reference=reference)
    available = free_bytes(base.device) if free is None else free()
    return Passes(kind, memory, choose_budget(memory, token_budget, available), available, longest_row(base))
