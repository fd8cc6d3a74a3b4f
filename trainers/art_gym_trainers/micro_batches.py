"""Micro-batches: rows cut into passes by token budget, and laid out for the loss.

A pass of the model and a row of the loss are different things. The model is given the token tree of all sequences of the pass. The loss is
given one row an episode, with the episode's sampled tokens and nothing else: the sequences that a fork makes of an episode are one row, so that
losses that weight by row, and ratios of whole sequences, see episodes and not the accidents of a template.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from art_gym.errors import UsageError
from art_gym_trainers.rows import Row
from art_gym_trainers.trees import TokenTree, common_prefix

_PASS_TOKENS = 32
"""What a pass costs beside its tokens, in tokens: launching every layer once more."""


def episodes_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Put the rows of an episode together, in the order in which the episodes appear.

    Raises:
        UsageError: Two episodes have the same id.
    """
    episodes: dict[str, list[Row]] = {}
    for row in rows:
        own = episodes.setdefault(row.sequence.episode_id, [])
        if own and row.sequence.fork is None:
            raise UsageError(
                f"two episodes of an optimiser step have the id {row.sequence.episode_id!r}; give the runner a journal, or each its own id"
            )
        own.append(row)
    return list(episodes.values())


def sampled_tokens(rows: Sequence[Row]) -> int:
    """How many tokens of the rows were sampled, and so are trained on."""
    return sum(sum(row.sequence.sampled) for row in rows)


def micro_batches(rows: Sequence[Row], token_budget: int, *, shared: bool = True) -> list[list[Row]]:
    """Cut rows into micro-batches of at most `token_budget` tokens, so that the least is computed in all; an episode's rows stay together.

    A micro-batch computes each token of its rows' tree once (`art_gym_trainers.trees`). In lexicographic order episodes that begin alike stand
    together, and the tokens of a run of them are what each adds to the one before it. With `shared=False` it computes each row padded to the
    longest, and episodes are sorted by length. The best places to cut are found by dynamic programming. An episode longer than the budget makes
    a micro-batch of its own, which `passes_of` cuts.
    """
    return _cut(episodes_of(rows), token_budget, shared=shared)


def passes_of(rows: Sequence[Row], token_budget: int, *, shared: bool = True) -> list[list[Row]]:
    """Cut a micro-batch into the passes of the model that score it: one, unless its episode is longer than the budget and has several rows."""
    rows = list(rows)
    return [rows] if _computed(rows, shared=shared) <= token_budget else _cut([[row] for row in rows], token_budget, shared=shared)


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch as one process computes it.

    Attributes:
        rows: The micro-batch.
        passes: Its rows as the model is given them.
        weight: 1, or 0 where it is another's, and computed only since all processes compute equally many.
        idle: How many passes more another process has meanwhile: the first is computed again so often, for nothing.
    """

    rows: list[Row]
    passes: list[list[Row]]
    weight: int = 1
    idle: int = 0


def deal(batches: Sequence[list[Row]], processes: int, token_budget: int, *, shared: bool = True) -> list[list[Work]]:
    """Deal micro-batches out to processes, the longest first to whoever has least; gives the work of each.

    Processes gather figures after each micro-batch, and sharded models their weights in each pass, so that all compute equally many of both.
    """
    hands: list[list[Work]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for rows in sorted(batches, key=lambda rows: -_tokens(rows)):
        poorest = loads.index(min(loads))
        hands[poorest].append(Work(rows, passes_of(rows, token_budget, shared=shared)))
        loads[poorest] += _tokens(rows)
    works = [work for hand in hands for work in hand]
    spare = replace(min(works, key=lambda work: _tokens(work.rows)), weight=0) if works else None
    for hand in hands:
        while spare is not None and len(hand) < max(map(len, hands)):
            hand.append(spare)
    most = [max(len(work.passes) for work in place) for place in zip(*hands, strict=True)]
    return [[replace(work, idle=count - len(work.passes)) for work, count in zip(hand, most, strict=True)] for hand in hands]


def _tokens(rows: list[Row]) -> int:
    return sum(len(row.sequence) for row in rows)


def _cut(units: list[list[Row]], token_budget: int, *, shared: bool) -> list[list[Row]]:
    """Cut units, whose rows stay together, into runs of at most so many tokens."""
    units = sorted(units, key=(lambda unit: unit[0].sequence.token_ids) if shared else _longest)
    own = [_computed(unit, shared=True) for unit in units] if shared else []
    again = [0, *(_common(left, right) for left, right in itertools.pairwise(units))] if shared else []
    best: list[tuple[float, int]] = [(0, 0)]
    for end in range(1, len(units) + 1):
        choices = []
        tokens = count = 0
        for start in range(end - 1, -1, -1):
            count += len(units[start])
            if shared:
                tokens += own[start] - (again[start + 1] if start + 1 < end else 0)
            else:
                tokens = count * _longest(units[end - 1])
            if tokens > token_budget and start + 1 < end:
                break
            choices.append((best[start][0] + tokens + _PASS_TOKENS, start))
        best.append(min(choices))
    cuts = [len(units)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [[row for unit in units[start:end] for row in unit] for end, start in itertools.pairwise(cuts)][::-1]


def _computed(rows: list[Row], *, shared: bool) -> int:
    """Tokens that one pass computes."""
    return len(TokenTree.build([row.sequence.token_ids for row in rows])) if shared else len(rows) * _longest(rows)


def _longest(rows: list[Row]) -> int:
    return max(len(row.sequence) for row in rows)


def _common(left: list[Row], right: list[Row]) -> int:
    return common_prefix(left[0].sequence.token_ids, right[0].sequence.token_ids)


def collate(rows: Sequence[Row], total_sampled: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Lay rows out as the tensors that TRL's loss reads: one row an episode, B in all, with its T sampled tokens, padded on the right.

    Args:
        rows: Each with at least one sampled token; an episode's are put together.
        total_sampled: Sampled tokens of the whole optimiser step, which token-level losses divide by.
        device: Where the tensors go.

    Returns:
        `prompt_ids`, `prompt_mask` (B, 0), as no context is left; `completion_ids`, `completion_mask` (B, T); `sampling_per_token_logps`
        (B, T), as sampled; `old_per_token_logps` (B, T), the trainer's own at the batch's start where they were worked out, else as sampled;
        `advantages` (B, T); `num_items_in_batch` ().
    """
    episodes = episodes_of(rows)
    lines = [[place for row in episode for place in _sampled_places(row)] for episode in episodes]
    size = (len(lines), max(map(len, lines)))
    ids, mask = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
    figures = torch.zeros(3, *size)
    for index, line in enumerate(lines):
        tokens, *values = zip(*line, strict=True)
        ids[index, : len(line)] = torch.tensor(tokens)
        mask[index, : len(line)] = 1
        figures[:, index, : len(line)] = torch.tensor(values)
    tensors = {
        "prompt_ids": ids[:, :0],
        "prompt_mask": mask[:, :0],
        "completion_ids": ids,
        "completion_mask": mask,
        "sampling_per_token_logps": figures[0],
        "old_per_token_logps": figures[1],
        "advantages": figures[2],
        "num_items_in_batch": torch.tensor(float(total_sampled)),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _sampled_places(row: Row) -> list[tuple[int, float, float, float]]:
    """Give each sampled token with its log-probability as sampled, the one that the ratio is taken to, and its advantage."""
    sequence = row.sequence
    old = sequence.logprobs if row.old_logprobs is None else row.old_logprobs
    places = zip(sequence.token_ids, sequence.logprobs, old, row.advantages, strict=True)
    return [place for place, sampled in zip(places, sequence.sampled, strict=True) if sampled]
