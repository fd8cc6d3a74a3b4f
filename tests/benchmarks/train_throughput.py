"""Training throughput against TRL's own loss path: the same rows, the same process, alternating runs, medians.

    python tests/benchmarks/train_throughput.py [--runs 5] [--shapes shared-600] [--dtype bfloat16] [--threads N]

A step is the forward and backward pass of one group of eight rows through SmolLM2-135M with a LoRA adapter (no optimiser). Stock is
`trl.GRPOTrainer._compute_loss` on the padded rows, as its own dataloader would give them; where eight rows don't fit into memory, fewer at a
time (`--stock-rows`), as its users would. "allowed" is the number of tokens that stock computes, padding included, over the number of different
tokens that there are; "reached" is the ratio over the allowed one. Of FLOP/s, four operations a parameter are counted for each different token,
the head's for scored ones (the backward pass through frozen weights takes no more than the forward one; attention is left out), over what a
large matrix product reaches here.
Peak memory is what a step adds to the process's resident size.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset

from art_gym_trainers.grpo import GRPOTrainer
from art_gym_trainers.grpo_config import grpo_config
from art_gym_trainers.models import resolve
from art_gym_trainers.policy import base_model, load_policy, load_tokenizer
from art_gym_trainers.rows import Row
from art_gym_trainers.scoring import TreeBatch
from art_gym_trainers.sequences import TokenSequence
from art_gym_trainers.trees import TokenTree

GROUP = 8


def rows_of(shared: int, own: int, turns: int = 1, seed: int = 0) -> list[Row]:
    """A group: a prompt of `shared` tokens, and `own` more of each row over `turns` turns, half of whose later tokens are tool results."""
    rng = random.Random(seed)
    prompt = [rng.randrange(100, 40_000) for _ in range(shared)]
    rows = []
    for member in range(GROUP):
        ids, sampled = list(prompt), [False] * len(prompt)
        for turn in range(turns):
            size = own // turns
            context = 0 if turn == 0 else size // 2
            ids += [rng.randrange(100, 40_000) for _ in range(size)]
            sampled += [False] * context + [True] * (size - context)
        if not shared:
            sampled[0] = False
        logprobs = [-9.0 if flag else 0.0 for flag in sampled]
        sequence = TokenSequence(f"e{member}", ids, sampled, logprobs, [0 if flag else -1 for flag in sampled])
        rows.append(Row.uniform(sequence, rng.gauss(0, 1)))
    return rows


SHAPES = {
    "shared-600": lambda: rows_of(600, 60),
    "shared-150": lambda: rows_of(150, 100),
    "shared-2000": lambda: rows_of(2000, 50, turns=3),
    "none": lambda: rows_of(0, 300),
}


def padded(rows: list[Row], pad_token_id: int, total_sampled: int) -> dict[str, torch.Tensor]:
    """Pad rows as TRL's own trainer does: a row's prompt on the left, the rest, its completion, on the right."""
    prompts = [row.sequence.prompt_length for row in rows]
    completions = [len(row.sequence) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    prompt_width, completion_width = max(prompts), max(completions)
    size = (len(rows), prompt_width + completion_width)
    ids = torch.full(size, pad_token_id, dtype=torch.long)
    present = torch.zeros(size, dtype=torch.long)
    sampled = torch.zeros(size, dtype=torch.long)
    logprobs, advantages = torch.zeros(size, dtype=torch.float32), torch.zeros(size, dtype=torch.float32)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        span = slice(prompt_width - prompt, prompt_width - prompt + len(row.sequence))
        ids[index, span] = torch.tensor(row.sequence.token_ids)
        present[index, span] = 1
        sampled[index, span] = torch.tensor(row.sequence.sampled, dtype=torch.long)
        logprobs[index, span] = torch.tensor(row.sequence.logprobs)
        advantages[index, span] = torch.tensor(row.advantages)
    tensors = {
        "prompt_ids": ids[:, :prompt_width],
        "prompt_mask": present[:, :prompt_width],
        "completion_ids": ids[:, prompt_width:],
        "completion_mask": present[:, prompt_width:],
        "tool_mask": sampled[:, prompt_width:],
        "old_per_token_logps": logprobs[:, prompt_width:],
        "advantages": advantages[:, prompt_width:],
        "num_items_in_batch": torch.tensor(float(total_sampled)),
    }
    return tensors


def peak_of(step: Callable[[], Any]) -> int:
    """Bytes that a step adds to the resident size at its peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def matmul_peak(dtype: torch.dtype, rows: int = 2048, width: int = 1536) -> float:
    """FLOP/s of a plain matrix product, the best of ten."""
    left, right = torch.randn(rows, width).to(dtype), torch.randn(width, width).to(dtype)
    best = 0.0
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        best = max(best, 2 * rows * width * width / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--stock-rows", type=int, help="rows that stock computes at once (default: 8, and 2 of shared-2000)")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = resolve(options.model)
    tokenizer = load_tokenizer(folder)
    scratch = Path(tempfile.mkdtemp())
    config = grpo_config(scratch)
    stock_policy, policy = (load_policy(folder, dtype=options.dtype) for _ in range(2))
    stock = trl.GRPOTrainer(stock_policy, lambda **_: [], config, train_dataset=Dataset.from_dict({"prompt": [""]}), processing_class=tokenizer)
    ours = GRPOTrainer(policy, config, batches=[], processing_class=tokenizer)
    for trainer in (stock, ours):
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    peak = matmul_peak(getattr(torch, options.dtype))
    head = base_model(policy).get_output_embeddings().weight.numel()
    body = sum(parameter.numel() for parameter in policy.parameters()) - head
    print(f"{torch.get_num_threads()} threads, {options.dtype}, matrix product {peak / 1e9:.0f} GFLOP/s")
    print("| shape | stock tokens/s | ours tokens/s | ratio | allowed | reached | FLOP/s of peak | stock MB | ours MB | predicted MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in options.shapes:
        rows = SHAPES[name]()
        sampled = sum(sum(row.sequence.sampled) for row in rows)

        at_once = options.stock_rows or (2 if name == "shared-2000" else GROUP)

        def step_stock(rows: list[Row] = rows, sampled: int = sampled, at_once: int = at_once) -> None:
            for start in range(0, GROUP, at_once):
                loss = stock._compute_loss(stock.model, padded(rows[start : start + at_once], tokenizer.pad_token_id, sampled))
                stock.accelerator.backward(loss)
            stock.model.zero_grad()

        def step_ours(rows: list[Row] = rows) -> None:
            ours.training_step(ours.model, {"rows": rows})
            ours.model.zero_grad()

        steps = {"stock": step_stock, "ours": step_ours}
        peaks = {which: peak_of(step) for which, step in steps.items()}
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        for _ in range(options.runs):
            for which, step in steps.items():
                start = time.perf_counter()
                step()
                times[which].append(time.perf_counter() - start)
        stock_time, our_time = (statistics.median(times[which]) for which in ("stock", "ours"))
        tokens = sum(len(row.sequence) for row in rows)
        different = len(TokenTree.build([row.sequence.token_ids for row in rows]))
        scored = len(TreeBatch.build([row.sequence.token_ids for row in rows], [row.sequence.sampled for row in rows]).targets)
        ratio, allowed = stock_time / our_time, GROUP * max(len(row.sequence) for row in rows) / different
        print(
            f"| {name} | {tokens / stock_time:.0f} | {tokens / our_time:.0f} | {ratio:.2f} | {allowed:.2f} | {ratio / allowed:.0%} "
            f"| {4 * (body * different + head * scored) / our_time / peak:.0%} | {peaks['stock'] / 1e6:.0f} | {peaks['ours'] / 1e6:.0f} "
            f"| {ours.pass_memory.peak(min(different, ours.token_budget)) / 1e6:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
