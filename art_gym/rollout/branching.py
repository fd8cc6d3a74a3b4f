"""Rules for where episodes branch off one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.rollout.agent import TurnState


def branch_at(turns: Mapping[int, int]) -> Callable[[Episode, TurnState], int]:
    """Let episodes branch off at fixed turns of those that began at a reset, not of branches.

    >>> rule = branch_at({2: 3})  # before the third turn, three more episodes begin: four go on from there

    Args:
        turns: How many episodes branch off, by the index of the turn before which they do. Before the first, 0, all of a group's episodes are
            in the same state anyway: use a larger group there.

    Raises:
        UsageError: A turn or a number isn't a whole number of at least 1.
    """
    for turn, count in turns.items():
        for name, value in (("turn", turn), ("number of branches", count)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"branch_at({dict(turns)!r:.100}): the {name} {value!r:.50} must be a whole number of at least 1")

    def rule(episode: Episode, state: TurnState) -> int:
        return turns.get(state.turn, 0) if episode.parent is None else 0

    return rule
