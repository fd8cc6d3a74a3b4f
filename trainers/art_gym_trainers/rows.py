"""Training rows: token sequences with an advantage, cut into micro-batches that fit a token budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from art_gym.episodes import EpisodeGroup
from art_gym_trainers.advantages import AdvantageScale, episode_advantages
from art_gym_trainers.sequences import TokenSequence, episode_sequences
from art_gym_trainers.trees import common_prefix


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence and the advantage of the episode that it comes from."""

    sequence: TokenSequence
    advantage: float


@dataclass(slots=True)
class RowCounts:
    """What became of the episodes of a batch.

    Attributes:
        groups: Groups seen.
        dropped_groups: Groups left out since all their returns were equal, or fewer than two of their episodes finished.
        failed_episodes: Episodes left out since they failed.
        forks: Sequences started in mid-episode, by cause.
        tokens: All tokens of the rows, context included.
        sampled_tokens: The tokens that are trained on.
    """

    groups: int = 0
    dropped_groups: int = 0
    failed_episodes: int = 0
    forks: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    sampled_tokens: int = 0


def batch_rows(groups: Sequence[EpisodeGroup], scale: AdvantageScale = "group_std") -> tuple[list[list[Row]], RowCounts]:
    """Turn episode groups into rows, one list a group, and count what was left out.

    A group whose returns are all equal has no gradient and is dropped. A fork's sequences all carry their episode's advantage.

    Raises:
        MissingTokens: A turn of a finished episode has no token ids or logprobs.
    """
    counts = RowCounts()
    kept: list[list[Row]] = []
    for group in groups:
        counts.groups += 1
        counts.failed_episodes += len(group.failed)
        advantages = episode_advantages(group, scale)
        sequences = [sequence for episode in group.finished for sequence in episode_sequences(episode)]
        for sequence in sequences:
            if sequence.fork is not None:
                counts.forks[sequence.fork] = counts.forks.get(sequence.fork, 0) + 1
        if not any(advantages.values()):
            counts.dropped_groups += 1
            continue
        # A sequence without a sampled token (an empty completion) has nothing to train.
        rows = [Row(sequence, advantages[sequence.episode_id]) for sequence in sequences if any(sequence.sampled)]
        counts.tokens += sum(len(row.sequence) for row in rows)
        counts.sampled_tokens += sum(sum(row.sequence.sampled) for row in rows)
        if rows:
            kept.append(rows)
    return kept, counts


def split_steps(groups: list[list[Row]], steps: int) -> list[list[Row]]:
    """Deal the groups out over at most `steps` optimiser steps, in order and as evenly as can be.

    >>> [len(step) for step in split_steps([[1], [2], [3]], 2)]
    [2, 1]
    """
    steps = min(steps, len(groups))
    dealt = []
    start = 0
    for step in range(steps):
        size = len(groups) // steps + (step < len(groups) % steps)
        dealt.append([row for group in groups[start : start + size] for row in group])
        start += size
    return dealt


# What a pass costs beside its tokens, in tokens: launching every layer once more.
_PASS_TOKENS = 32


def micro_batches(rows: Sequence[Row], token_budget: int, *, shared: bool = True) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `token_budget` tokens, so that the least is computed in all.

    A micro-batch computes each token of its rows' tree once (`art_gym_trainers.trees`). In lexicographic order rows that begin alike stand
    together, and the tokens of a run of rows are what each adds to the one before it. With `shared=False` it computes each row padded to the
    longest, and rows are sorted by length. The best places to cut are found by dynamic programming. A row longer than the budget makes a
    micro-batch of its own.
    """
    ordered = sorted(rows, key=(lambda row: row.sequence.token_ids) if shared else (lambda row: len(row.sequence)))
    ids = [row.sequence.token_ids for row in ordered]
    again = [0, *(common_prefix(left, right) for left, right in itertools.pairwise(ids))] if shared else []
    best: list[tuple[float, int]] = [(0, 0)]
    for end in range(1, len(ordered) + 1):
        choices = []
        tokens = 0
        for start in range(end - 1, -1, -1):
            if not shared:
                tokens = (end - start) * len(ids[end - 1])
            else:
                tokens += len(ids[start]) - (again[start + 1] if start + 1 < end else 0)
            if tokens > token_budget and start + 1 < end:
                break
            choices.append((best[start][0] + tokens + _PASS_TOKENS, start))
        best.append(min(choices))
    cuts = [len(ordered)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [ordered[start:end] for end, start in itertools.pairwise(cuts)][::-1]


def collate(rows: Sequence[Row], pad_token_id: int, total_sampled: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Pad rows into the tensors that TRL's loss reads; B rows, P prompt and T completion positions.

    A row's prompt is what lies before its first sampled token, padded on the left; the rest is its completion, padded on the right, with tool
    results and template marks masked out by `tool_mask`.

    Args:
        rows: Each with at least one sampled token.
        pad_token_id: Any id of the vocabulary.
        total_sampled: Sampled tokens of the whole optimiser step, which token-level losses divide by.
        device: Where the tensors go.

    Returns:
        `prompt_ids`, `prompt_mask` (B, P); `completion_ids`, `completion_mask`, `tool_mask` (B, T); `old_per_token_logps` (B, T), as sampled;
        `advantages` (B,); `num_items_in_batch` ().
    """
    prompts = [row.sequence.prompt_length for row in rows]
    completions = [len(row.sequence) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    prompt_width, completion_width = max(prompts), max(completions)
    size = (len(rows), prompt_width + completion_width)
    ids = torch.full(size, pad_token_id, dtype=torch.long)
    present = torch.zeros(size, dtype=torch.long)
    sampled = torch.zeros(size, dtype=torch.long)
    logprobs = torch.zeros(size, dtype=torch.float32)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        span = slice(prompt_width - prompt, prompt_width - prompt + len(row.sequence))
        ids[index, span] = torch.tensor(row.sequence.token_ids)
        present[index, span] = 1
        sampled[index, span] = torch.tensor(row.sequence.sampled, dtype=torch.long)
        logprobs[index, span] = torch.tensor(row.sequence.logprobs)
    tensors = {
        "prompt_ids": ids[:, :prompt_width],
        "prompt_mask": present[:, :prompt_width],
        "completion_ids": ids[:, prompt_width:],
        "completion_mask": present[:, prompt_width:],
        "tool_mask": sampled[:, prompt_width:],
        "old_per_token_logps": logprobs[:, prompt_width:],
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(float(total_sampled)),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}
