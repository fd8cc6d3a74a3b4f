"""The policy on the trainer's side: a base model with a LoRA adapter, and the log-probabilities of tokens under it."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    folder: Path,
    *,
    dtype: str = "bfloat16",
    lora_rank: int = 16,
    lora_alpha: int = 32,
    adapter: Path | None = None,
    seed: int = 0,
) -> PeftModel:
    """Load a base model with a trainable LoRA adapter on every linear layer but the head.

    The adapter's weights are float32 whatever the base's dtype is: small updates would be rounded away otherwise.

    Args:
        folder: A model folder, as `art_gym_trainers.models.resolve` returns it.
        dtype: Of the base weights: "float32" or "bfloat16".
        lora_rank: Rank of a fresh adapter.
        lora_alpha: Scale of a fresh adapter; its update is multiplied by `lora_alpha / lora_rank`.
        adapter: A saved adapter to go on from, instead of a fresh one.
        seed: Seeds a fresh adapter's weights.
    """
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    base.config.use_cache = False
    if adapter is not None:
        return PeftModel.from_pretrained(base, adapter, is_trainable=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=lora_rank, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert isinstance(model, PeftModel)  # get_peft_model is also typed to return mixed adapters, which LoraConfig never gives
    return model


@torch.no_grad()
def token_logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of `token_ids[1:]` at temperature 1; one fewer than `token_ids`."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([list(token_ids)], device=device)
    logits = model(input_ids=ids).logits[0, :-1].float()
    model.train(was_training)
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


def add_scoring_head(model: PreTrainedModel, temperature: float) -> None:
    """Teach `model` to score chosen tokens only: `model(input_ids, scored=mask)` returns their log-probabilities and entropies.

    The head is the widest layer of a small model (a third of the work with a vocabulary of 49,000), and most positions of a multi-turn episode
    are context, so that only the hidden states that predict a scored token go through it. The tokens that all rows begin with are computed
    once, forward and backward, and their keys and values stand for all rows (Prefix Grouper, arXiv 2506.05433).

    With `scored`, a bool mask (B, L) over `input_ids` (B, L) whose padding, if any, is on the right, and whose first column is False,
    `model(...)` returns two float32 tensors (N,): for each scored token, in row-major order, its log-probability and the entropy in nats of the
    distribution that it was drawn from, both after dividing the logits by `temperature`. Entropies carry no gradient. No attention mask is
    needed: a causal model doesn't see the padding on its right.
    """
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, scored: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if scored is None:
            return original_forward(*args, **kwargs)
        input_ids = kwargs["input_ids"]
        shared = _shared_prefix(input_ids, scored) if not self.is_gradient_checkpointing else 0
        hidden = _hidden_states(self.base_model, input_ids, shared)
        # The state before a token predicts it; those of the shared prefix but the last predict nothing that is scored.
        logits = self.get_output_embeddings()(hidden[scored[:, shared + 1 :]]).float() / temperature
        log_normaliser = torch.logsumexp(logits, -1)
        logprobs = logits.gather(-1, input_ids[scored][:, None])[:, 0] - log_normaliser
        with torch.no_grad():
            entropies = log_normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        return logprobs, entropies

    model.forward = types.MethodType(forward, model)


# Below this the second pass through the model costs more than it saves.
_WORTH_SHARING = 16


def _shared_prefix(input_ids: torch.Tensor, scored: torch.Tensor) -> int:
    """How many tokens all rows begin with, short of the one that predicts the first scored token; 0 if sharing doesn't pay."""
    if len(input_ids) == 1:
        return 0
    same = (input_ids == input_ids[:1]).all(0) & ~scored.any(0)
    length = int(same.long().cumprod(0).sum()) - 1
    return length if length >= _WORTH_SHARING else 0


def _hidden_states(backbone: torch.nn.Module, input_ids: torch.Tensor, shared: int) -> torch.Tensor:
    """The last layer's states from position `shared` to the last but one, (B, L - 1 - shared, H): those that predict the tokens after."""
    if not shared:
        return backbone(input_ids=input_ids, use_cache=False).last_hidden_state[:, :-1]
    cache = DynamicCache()
    backbone(input_ids=input_ids[:1, :shared], past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(input_ids))
    return backbone(input_ids=input_ids[:, shared:], past_key_values=cache, use_cache=True).last_hidden_state[:, :-1]
