"""The figures of a trained batch: its row of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from art_gym.episodes import EpisodeGroup
from art_gym_trainers.alarms import not_finite

if TYPE_CHECKING:
    from art_gym_trainers.publish import Published
    from art_gym_trainers.rows import RowCounts
    from art_gym_trainers.sampling import SampledBatch
    from art_gym_trainers.statistics import BatchStatistics


def batch_row(batch: int, published: Published, sampled: SampledBatch, counts: RowCounts, statistics: BatchStatistics) -> dict[str, Any]:
    """A batch's row, seconds left out.

    Args:
        batch: Its number.
        published: The policy that played it.
        sampled: What was played.
        counts: What became of its episodes.
        statistics: What training on it gave.
    """
    forks = sum(counts.forks.values())
    return {
        "step": batch,
        "phase": "grpo",
        "policy": published.version,
        **_outcome(sampled.played),
        **statistics.to_dict(),
        "not_finite": not_finite(statistics.losses, statistics.gradient_norms),
        "forks": forks,
        "fork_rate": _share(forks, forks + sum(len(group.finished) for group in sampled.groups)),
        "fork_causes": counts.forks,
        "realigned": counts.realigned,
        "sampling_rounds": sampled.rounds,
        "surplus_groups": len(sampled.surplus),
        "dropped_groups": counts.dropped_groups,
        "failed_episodes": counts.failed_episodes,
        "tokens": counts.tokens,
        "sampled_tokens": counts.sampled_tokens,
        "publish_difference": published.difference,
    }


def _outcome(groups: Sequence[EpisodeGroup]) -> dict[str, Any]:
    """The figures of the finished episodes; rates of calls are None where there were none."""
    finished = [episode for group in groups for episode in group.finished]
    count = max(len(finished), 1)
    turns = [turn for episode in finished for turn in episode.turns]
    calls = len([call for turn in turns for call in turn.action.get("tool_calls") or ()])
    invalid = sum(turn.invalid_calls for turn in turns)
    return {
        "episodes": len(finished),
        "reward": sum(episode.reward for episode in finished) / count,
        "success_rate": sum(episode.success for episode in finished) / count,
        "turns": len(turns) / count,
        "calls": calls,
        "invalid_calls": invalid,
        "invalid_call_rate": _share(invalid, calls),
    }


def _share(part: int, whole: int) -> float | None:
    """Which share a part is; None of nothing."""
    return part / whole if whole else None
