"""A random model of 3 million parameters with a real tokenizer and chat template: real vLLM and real training in seconds."""

from __future__ import annotations

from pathlib import Path

from art_gym_trainers.models import ALIASES, _packaged_weights, chat_template


def build(folder: Path, *, seed: int = 0) -> Path:
    """Write a random Llama with SmolLM2's tokenizer and our chat template into `folder`, loadable by transformers and vLLM."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    alias = ALIASES["smollm2-135m"]
    source = _packaged_weights("smollm2-135m", alias)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = chat_template(alias.template)
    tokenizer.model_max_length = 2048
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # vLLM's attention on the CPU takes multiples of 32
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
