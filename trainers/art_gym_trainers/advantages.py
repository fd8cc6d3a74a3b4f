"""Group-relative advantages: how much better an episode, or a turn, was than the others of its scenario."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

from art_gym.episodes import Episode, EpisodeGroup

AdvantageScheme = Literal["group_std", "group_mean", "batch_std", "leave_one_out"]
"""What is taken off a return, and what the rest is divided by; the formulas are at `group_advantages`."""

Credit = Literal["episode", "turn", "tree"]
"""Whether all tokens of an episode have its advantage, those of each turn their own, or those between two places where episodes branch off."""

EPSILON = 1e-4
"""Added to a standard deviation before it divides; TRL's value."""

_EQUAL = 1e-9
"""Returns that are no further apart (in proportion to the largest, if that is over 1) differ by rounding only."""


def group_advantages(returns: Sequence[float], scheme: AdvantageScheme = "group_std", *, batch: Sequence[float] | None = None) -> list[float]:
    """Compare the returns R_i of n episodes of one scenario with one another.

    - `group_std`: (R_i - mean(R)) / (std(R) + 1e-4). GRPO, arXiv 2402.03300, section 4.1.2.
    - `group_mean`: R_i - mean(R). Dr. GRPO, arXiv 2503.20783: a division by the group's deviation weights easy and hard scenarios more.
    - `batch_std`: (R_i - mean(R)) / (std(batch) + 1e-4), with the deviation of all returns of the batch: arXiv 2508.08221; TRL's
      `scale_rewards="batch"`. (REINFORCE++, arXiv 2501.03262, divides by the deviation of the advantages instead.)
    - `leave_one_out`: R_i minus the mean of the other n - 1, which is n / (n - 1) times `group_mean`. RLOO, arXiv 2402.14740; the baseline
      doesn't depend on the episode itself, so that the gradient is unbiased.

    Deviations are those of samples (n - 1). A group of one, or of equal returns, tells nothing: all advantages are 0.

    >>> group_advantages([1.0, 0.0], "group_mean")
    [0.5, -0.5]
    >>> group_advantages([1.0, 0.0], "leave_one_out")
    [1.0, -1.0]
    >>> group_advantages([0.3, 0.3, 0.3])
    [0.0, 0.0, 0.0]

    Args:
        returns: Of the group's finished episodes.
        scheme: How they are compared.
        batch: For `batch_std`, the returns of all groups of the batch, this one's among them; by default this one's alone.

    Raises:
        ValueError: A return is NaN or infinite.
    """
    _check_finite(returns)
    count = len(returns)
    if not _differ(returns):
        return [0.0] * count
    mean = math.fsum(returns) / count
    centred = [value - mean for value in returns]
    match scheme:
        case "group_mean":
            return centred
        case "leave_one_out":
            return [value * count / (count - 1) for value in centred]
        case "group_std":
            scale = _deviation(returns) + EPSILON
        case "batch_std":
            scale = _deviation(returns if batch is None else batch) + EPSILON
    return [value / scale for value in centred]


def returns_to_go(rewards: Sequence[float], discount: float = 1.0) -> list[float]:
    """What is still earned from each turn on: G_t = r_t + discount * G_(t+1).

    >>> returns_to_go([0.0, 1.0, 2.0], discount=0.5)
    [1.0, 2.0, 2.0]
    """
    returns: list[float] = []
    later = 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        returns.append(later)
    return returns[::-1]


def batch_advantages(
    groups: Sequence[EpisodeGroup], scheme: AdvantageScheme = "group_std", *, credit: Credit = "episode", discount: float = 1.0
) -> list[dict[str, list[float]]]:
    """The advantages of a batch: for each group, by episode id, one for each turn.

    With credit by episode all turns have the advantage of the episode's return, the plain sum of its rewards. With credit by turn, turn t of
    episode i has the advantage of its return-to-go G_(i,t) among those of the group's episodes that came to a turn t. This is the step-level
    advantage of GiGPO (arXiv 2505.10978) with the turn's number for the anchor state, and without the episode's advantage added to it:
    at the first turn a group's episodes are in the same state, later the number stands for how far they came. A turn that only one episode came
    to has nothing to be compared with, and advantage 0.

    With credit by tree, for groups whose episodes branched (`Runner(branch=…)`), the value V of a place is the mean return of all finished
    episodes that went through it. The turns from one place where episodes branch off to the next have the advantage
    (V(next) - V(root) + V(next) - V(this)) / sqrt(episodes through next): what they did for the outcome, against all of the group's episodes
    and against those that were in the same place (TreeRL, arXiv 2506.11902, equations 2 to 4), divided by what `scheme` divides by. The end of
    an episode is a place of its own, with its return as the value.

    Failed episodes neither get an advantage nor count in a mean or deviation.

    Args:
        groups: Of the whole batch; for `batch_std` all its finished episodes count, also those of groups that tell nothing.
        scheme: How returns are compared; with credit by turn n is the number of episodes that came to the turn.
        credit: By episode, by turn or by tree.
        discount: Of later rewards, a turn; with credit by turn only.

    Raises:
        ValueError: Credit by tree with `leave_one_out`: a place's value is a mean over episodes that its turns led to.
    """
    if credit == "tree":
        return _tree_advantages(groups, scheme)
    cohorts = [_cohorts(group, credit, discount) for group in groups]
    batch = [value for group in cohorts for cohort in group for value in cohort]
    return [
        _by_episode(group, [group_advantages(cohort, scheme, batch=batch) for cohort in compared], credit)
        for group, compared in zip(groups, cohorts, strict=True)
    ]


def tells_something(group: EpisodeGroup, *, credit: Credit = "episode", discount: float = 1.0) -> bool:
    """Whether any of a group's advantages isn't 0: at least two of its episodes finished, and not all alike."""
    return any(_differ(cohort) for cohort in _cohorts(group, credit, discount))


def _cohorts(group: EpisodeGroup, credit: Credit, discount: float) -> list[list[float]]:
    """The values that are compared with one another: returns, or the returns-to-go at each turn; of finished episodes, in order."""
    if credit != "turn":
        return [[episode.reward for episode in group.finished]]
    returns = [returns_to_go([turn.reward for turn in episode.turns], discount) for episode in group.finished]
    return [[values[turn] for values in returns if turn < len(values)] for turn in range(max(map(len, returns), default=0))]


def _tree_advantages(groups: Sequence[EpisodeGroup], scheme: AdvantageScheme) -> list[dict[str, list[float]]]:
    if scheme == "leave_one_out":
        raise ValueError("credit by tree takes a place's value from the episodes through it; use it with group_std, group_mean or batch_std")
    returns = [[episode.reward for episode in group.finished] for group in groups]
    batch = [value for own in returns for value in own]
    advantages = []
    for group, own in zip(groups, returns, strict=True):
        _check_finite(own)
        scale = 1.0 if scheme == "group_mean" else _deviation(own if scheme == "group_std" else batch) + EPSILON if _differ(own) else math.inf
        advantages.append({episode.id: [value / scale for value in _by_place(group, episode)] for episode in group.finished})
    return advantages


def _by_place(group: EpisodeGroup, episode: Episode) -> list[float]:
    """The advantage of each turn of an episode, before it is scaled; 0.0 for those of its parent."""
    root = _mean([each.reward for each in group.finished])
    own = len(episode.turns) - episode.shared_turns
    places = sorted({episode.shared_turns, *episode.branches} & set(range(episode.shared_turns, len(episode.turns))))
    if not own:
        return [0.0] * len(episode.turns)
    parent = next((each for each in group.episodes if each.id == episode.parent), None)
    here = root if parent is None else _mean(_returns_through(group, parent, episode.shared_turns))
    values = [0.0] * episode.shared_turns
    for begin, end in itertools.pairwise([*places, len(episode.turns)]):
        through = _returns_through(group, episode, end) if end < len(episode.turns) else [episode.reward]
        there = _mean(through)
        values += [(2 * there - root - here) / math.sqrt(len(through))] * (end - begin)
        here = there
    return values


def _returns_through(group: EpisodeGroup, episode: Episode, turn: int) -> list[float]:
    """Returns of the finished episodes that came to the place before a turn: the episode itself, and what branched off it there or later."""
    found = [] if episode.failure is not None else [episode.reward]
    for child in group.episodes:
        if child.parent == episode.id and child.shared_turns >= turn:
            found += _returns_through(group, child, child.shared_turns)
    return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _by_episode(group: EpisodeGroup, compared: list[list[float]], credit: Credit) -> dict[str, list[float]]:
    """Deal the advantages of each cohort out again, to the episodes that they came from."""
    if credit == "episode":
        return {episode.id: [value] * len(episode.turns) for episode, value in zip(group.finished, compared[0], strict=True)}
    cohorts = [iter(cohort) for cohort in compared]
    return {episode.id: [next(cohorts[turn]) for turn in range(len(episode.turns))] for episode in group.finished}


def _differ(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) >= _EQUAL * max(1.0, *map(abs, values))


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check_finite(values: Sequence[float]) -> None:
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"a return is {value}; rewards must be finite")
