"""The policy on the trainer's side: a base model with a LoRA adapter, and the log-probabilities of tokens under it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

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
