"""Training rows: token sequences with an advantage for each token, dealt out over optimiser steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from art_gym.episodes import EpisodeGroup
from art_gym_trainers.advantages import AdvantageScheme, Credit, batch_advantages, tells_something
from art_gym_trainers.forks import Decode
from art_gym_trainers.sequences import TokenSequence, episode_sequences


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence, and what each of its tokens is worth; lists as long as the sequence.

    Attributes:
        sequence: Context and sampled tokens.
        advantages: Of each sampled token; 0.0 on context.
        old_logprobs: The trainer's own log-probability of each sampled token when the batch began, 0.0 on context; None where the sampler's
            stand for them.
    """

    sequence: TokenSequence
    advantages: list[float]
    old_logprobs: list[float] | None = None

    @classmethod
    def uniform(cls, sequence: TokenSequence, advantage: float) -> Row:
        """Give every sampled token of the sequence the same advantage."""
        return cls(sequence, [advantage if sampled else 0.0 for sampled in sequence.sampled])

    @classmethod
    def by_turn(cls, sequence: TokenSequence, advantages: Sequence[float]) -> Row:
        """Give every sampled token the advantage of the turn that sampled it."""
        return cls(sequence, [advantages[turn] if flag else 0.0 for turn, flag in zip(sequence.turns, sequence.sampled, strict=True)])


@dataclass(slots=True)
class RowCounts:
    """What became of the episodes of a batch.

    Attributes:
        groups: Groups seen.
        dropped_groups: Groups left out since all their advantages are 0: fewer than two of their episodes finished, or all returns were equal.
        failed_episodes: Episodes left out since they failed; those that were cut, or else cancelled, don't count.
        forks: Sequences started in mid-episode, by cause.
        realigned: Turns that would have forked, but for `realign`.
        tokens: All tokens of the rows, context included.
        sampled_tokens: The tokens that are trained on.
    """

    groups: int = 0
    dropped_groups: int = 0
    failed_episodes: int = 0
    forks: dict[str, int] = field(default_factory=dict)
    realigned: int = 0
    tokens: int = 0
    sampled_tokens: int = 0


def batch_rows(
    groups: Sequence[EpisodeGroup],
    scheme: AdvantageScheme = "group_std",
    *,
    credit: Credit = "episode",
    discount: float = 1.0,
    decode: Decode | None = None,
    realign: bool = False,
) -> tuple[list[list[Row]], RowCounts]:
    """Turn episode groups into rows, one list a group, and count what was left out.

    A group that tells nothing has no gradient and is dropped. Each of a fork's sequences carries the advantages of its own turns, which with
    credit by episode are the episode's.

    Args:
        groups: Of the whole batch.
        scheme: How returns are compared; see `art_gym_trainers.advantages`.
        credit: By episode, by turn or by tree.
        discount: Of later rewards, a turn; with credit by turn only.
        decode: The tokens' text, by which the causes of forks are told apart; see `episode_sequences`.
        realign: Whether context that is only spelled in other tokens makes no fork; see `episode_sequences`.

    Raises:
        MissingTokens: A turn of a finished episode has no token ids or logprobs.
    """
    counts = RowCounts()
    kept: list[list[Row]] = []
    for group, advantages in zip(groups, batch_advantages(groups, scheme, credit=credit, discount=discount), strict=True):
        counts.groups += 1
        counts.failed_episodes += sum(episode.failure is not None and episode.failure.kind != "cancelled" for episode in group.failed)
        sequences = []
        for episode in group.finished:
            for sequence in episode_sequences(episode, decode=decode, realign=realign):
                sequences.append(sequence)
                counts.realigned += sequence.realigned
                # What a branch shares forked in its parent, and is counted there.
                if sequence.fork is not None and sequence.first_turn >= episode.shared_turns:
                    counts.forks[sequence.fork] = counts.forks.get(sequence.fork, 0) + 1
        if not tells_something(group, credit=credit, discount=discount):
            counts.dropped_groups += 1
            continue
        # A sequence without a sampled token (an empty completion) has nothing to train.
        rows = [Row.by_turn(sequence, advantages[sequence.episode_id]) for sequence in sequences if any(sequence.sampled)]
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
