"""The policy on the trainer's side: a base model with a LoRA adapter, and the log-probabilities of tokens under it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from art_gym._hardware import fast_precision
from art_gym.errors import MissingExtra, UsageError

Method = Literal["lora", "qlora", "full"]
"""What is trained: an adapter, an adapter on a base of 4 bits, or all weights."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    folder: Path,
    *,
    method: Method = "lora",
    dtype: str | None = None,
    lora_rank: int = 16,
    lora_alpha: int = 32,
    saved: Path | None = None,
    seed: int = 0,
) -> PeftModel | PreTrainedModel:
    """Load a model to train.

    With "lora" and "qlora" an adapter is trained on every linear layer but the head. Its weights are float32 whatever the base's dtype is:
    small updates would be rounded away otherwise. With "full" all weights are trained, and are float32 for the same reason; passes are computed
    in bfloat16 if the trainer is told so (`grpo_config(bf16=True)`).

    Args:
        folder: A model folder, as `art_gym_trainers.models.resolve` returns it.
        method: "lora", "full", or "qlora" (arXiv 2305.14314): an adapter on a base of 4 bits, for which a GPU and bitsandbytes are needed.
        dtype: Of a LoRA's base weights: "float32" or "bfloat16"; None for bfloat16 where this machine is fast in it, else float32.
        lora_rank: Rank of a fresh adapter.
        lora_alpha: Scale of a fresh adapter; its update is multiplied by `lora_alpha / lora_rank`.
        saved: A saved adapter, or with "full" a saved model, to go on from.
        seed: Seeds a fresh adapter's weights.

    Raises:
        UsageError: "qlora" without a GPU.
        MissingExtra: "qlora" without bitsandbytes.
    """
    if method == "full":
        # Always from the base, by whose name TRL finds the reference.
        whole: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole.config.use_cache = False
        if saved is not None:
            load_saved(whole, saved)
        return whole
    kind = DTYPES[dtype or fast_precision()]
    base = _load_in_4_bits(folder, kind) if method == "qlora" else AutoModelForCausalLM.from_pretrained(folder, dtype=kind)
    base.config.use_cache = False
    if saved is not None:
        return PeftModel.from_pretrained(base, saved, is_trainable=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, LoraConfig(r=lora_rank, lora_alpha=lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert isinstance(model, PeftModel)  # get_peft_model is also typed to return mixed adapters, which LoraConfig never gives
    return model


def base_model(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model that a policy is, or that its adapter is on."""
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    return base


def keep_trained_in_float32(model: torch.nn.Module) -> None:
    """Undo what TRL does to the adapter of a quantised base, which it casts to bfloat16; before there is an optimiser."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def load_saved(model: PeftModel | PreTrainedModel, folder: Path) -> None:
    """Put what `save_pretrained` wrote of a policy into the policy, in place."""
    if isinstance(model, PeftModel):
        model.load_adapter(str(folder), adapter_name="default", is_trainable=True)
        return
    state = {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    if unexpected or not state:
        raise UsageError(f"{folder} holds no weights of this model" + (f": it has no {unexpected[0]}" if unexpected else ""))
    model.tie_weights()


def _load_in_4_bits(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not torch.cuda.is_available():
        raise UsageError("model.method qlora needs an NVIDIA GPU; use lora here")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("model.method qlora", extra="qlora", package="bitsandbytes")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantised)
    prepared: PreTrainedModel = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    return prepared


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
