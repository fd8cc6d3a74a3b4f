"""Failures of a rollout: how many episodes failed, of which kind, and when that is too many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from art_gym.episodes import Episode
from art_gym.errors import FailureKind, TooManyFailures, UsageError

LEAST_EPISODES = 20
"""While a rollout goes on, rates are taken of at least so many episodes, and of as many as make one failure the rate, so that one early failure
doesn't end it."""

_ROUNDING = 1e-9

_COUNTED: tuple[FailureKind, ...] = ("environment", "tool_timeout", "policy")
"""A dead engine ends the rollout by itself, and what was cancelled didn't fail."""

MaxFailureRate = float | Mapping[FailureKind, float]
"""The share of episodes that may fail, of all kinds together or by kind; 1.0 for no limit."""


class FailureCount:
    """Counts the episodes that ended and those that failed, by kind. Episodes that were cancelled count as neither.

    Args:
        most: The share that may fail.

    Raises:
        UsageError: A share isn't one, or a kind is unknown.
    """

    def __init__(self, most: MaxFailureRate = 1.0) -> None:
        self._limits = _limits(most)
        self.ended = 0
        self.by_kind: Counter[FailureKind] = Counter()
        self._first: dict[FailureKind, Episode] = {}

    def add(self, episode: Episode) -> None:
        """Count an episode.

        Raises:
            TooManyFailures: More have failed than may.
        """
        failure = episode.failure
        if failure is not None and failure.kind == "cancelled":
            return
        self.ended += 1
        if failure is not None:
            self.by_kind[failure.kind] += 1
            self._first.setdefault(failure.kind, episode)
            self._check(least=LEAST_EPISODES)

    def check(self) -> None:
        """See at the end whether more failed than may, however few there were.

        Raises:
            TooManyFailures: More have.
        """
        self._check(least=0)

    def _check(self, *, least: int) -> None:
        for kinds, most in self._limits.items():
            failed = sum(self.by_kind[kind] for kind in kinds)
            # A share of 2% says nothing before 50 episodes have ended.
            of = max(self.ended, least and max(least, math.ceil(1 / most) if most else 0))
            if failed > most * of + _ROUNDING:
                what = f" (kind {kinds[0]!r})" if len(kinds) == 1 else ""
                raise TooManyFailures(
                    f"{failed} of {self.ended} episodes failed{what}, more than the {most:.3g} that max_failure_rate allows; "
                    f"what ended is recorded\n{self.summary()}"
                )

    def summary(self) -> str:
        """Say how many failed, a line for each kind with what the first of them said; empty if none did."""
        lines = []
        for kind, count in self.by_kind.most_common():
            first = self._first[kind]
            message = first.failure.message if first.failure is not None else ""
            lines.append(f"{kind}: {count}, such as episode {first.id} (scenario {first.scenario.id}): {message}")
        return "\n".join(lines)


def _limits(most: Any) -> dict[tuple[FailureKind, ...], float]:
    by_kind = {(kind,): share for kind, share in most.items()} if isinstance(most, Mapping) else {_COUNTED: most}
    for kinds, share in by_kind.items():
        if unknown := [kind for kind in kinds if kind not in _COUNTED]:
            raise UsageError(f"max_failure_rate names the kind {unknown[0]!r:.100}; those that count are {', '.join(_COUNTED)}")
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise UsageError(
                f"max_failure_rate is {share!r:.100}; it must be a share of episodes from 0 to 1, or a mapping from kinds to shares"
            )
    return cast("dict[tuple[FailureKind, ...], float]", by_kind)
