"""Comparing agents that played the same scenarios: by how much they differ, and whether that is more than chance.

Two agents are compared scenario by scenario, so that what one scenario is harder than another cancels out. Where each scenario was played once,
successes are compared by McNemar's exact test; where more often, and for rewards, by flipping the signs of the scenarios' differences. An
interval never says more than the test beside it: it holds 0 where the test sees no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

from art_gym._outcomes import Evaluation, ScenarioOutcome
from art_gym._version import __version__
from art_gym.errors import UsageError
from art_gym.statistics import Interval, difference_interval, holm, mcnemar, mean_interval, rate_interval, sign_flip_test

FORMAT_VERSION = 2

FEWEST_SCENARIOS = 6
"""Of fewer, no outcome whatever has a p-value below 0.05: of 2⁵ patterns of signs two are as far from 0 as can be."""

NOTABLE = 0.02
"""Where the shares of failed episodes differ by more, rewards aren't tested: what failed is left out of them, and seldom at random."""

_Pairs = Sequence[tuple[ScenarioOutcome, ScenarioOutcome]]


@dataclass(frozen=True, slots=True)
class Contrast:
    """By how much one figure of two agents differs, over the scenarios that have it of both.

    Attributes:
        first: The first agent's mean over these scenarios.
        second: The second's.
        low: Lower bound of the difference's 95% interval; None where there is none, as `test` or the number of scenarios says.
        high: Upper bound of it.
        p: The two-sided p-value: how likely a difference at least as large is between agents that are equal; None where it can't be told.
        adjusted_p: The same, by Holm's method where several pairs are compared.
        test: What it was tested by, in words, or why it wasn't.
        scenarios: How many they are.
    """

    first: float
    second: float
    low: float | None
    high: float | None
    p: float | None
    adjusted_p: float | None
    test: str
    scenarios: int

    @property
    def difference(self) -> float:
        """The second agent's mean less the first's."""
        return self.second - self.first

    def to_dict(self) -> dict[str, Any]:
        """Return the contrast as JSON data."""
        return {"difference": self.difference, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contrast:
        """Make the contrast that `to_dict` wrote."""
        return cls(**{key: value for key, value in data.items() if key != "difference"})


@dataclass(frozen=True, slots=True)
class Difference:
    """How two agents differ.

    Attributes:
        first: The agent that the other is measured against.
        second: The other.
        scenarios: How many both played.
        success: In their success rates; a failed episode is none.
        reward: In their mean returns, over the scenarios of which both finished an episode; None if there are none.
        left_out: How many episodes of the first and of the second have no part in the rewards, since they failed or the other has none there.
        episodes: Of how many of each.
    """

    first: str
    second: str
    scenarios: int
    success: Contrast
    reward: Contrast | None
    left_out: tuple[int, int] = (0, 0)
    episodes: tuple[int, int] = (0, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON data."""
        reward = self.reward and self.reward.to_dict()
        return {**asdict(self), "left_out": [*self.left_out], "episodes": [*self.episodes], "success": self.success.to_dict(), "reward": reward}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Difference:
        """Make the difference that `to_dict` wrote."""
        reward = data["reward"] and Contrast.from_dict(data["reward"])
        pairs = {key: (data[key][0], data[key][1]) for key in ("left_out", "episodes")}
        return cls(**{**data, **pairs, "success": Contrast.from_dict(data["success"]), "reward": reward})


@dataclass(frozen=True, slots=True)
class Comparison:
    """Evaluations side by side.

    >>> from art_gym.evaluation import evaluate
    >>> from art_gym_agents import RandomAgent, ScriptedAgent
    >>> from art_gym_agents.warmstart import script_for
    >>> agents = [RandomAgent(), ScriptedAgent(script_for("art_gym/Lookup-v0"), name="script")]
    >>> comparison = Comparison.of([evaluate("art_gym/Lookup-v0", agent, n=20, k=2) for agent in agents])
    >>> comparison.differences[0].success.difference > 0
    True

    Attributes:
        evaluations: One of each agent.
        differences: Each two agents, the earlier one first.
        unfinished: Agents whose playing came to no end, and why.
    """

    evaluations: Sequence[Evaluation]
    differences: Sequence[Difference] = ()
    unfinished: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], *, seed: int = 0, unfinished: Mapping[str, str] | None = None) -> Comparison:
        """Compare each two of the evaluations, paired by scenario.

        Args:
            evaluations: Of different agents, in one environment with the same arguments, and of one split.
            seed: Of the sign patterns that are drawn at random where they are too many to try all.
            unfinished: Agents that have no evaluation, and why.

        Raises:
            UsageError: Two have the same agent, or played something else: another environment, other arguments or another split, or no scenario
                in common.
        """
        if twice := [name for name, count in Counter(evaluation.agent for evaluation in evaluations).items() if count > 1]:
            raise UsageError(f"two agents have the name {twice[0]!r}; give each a name of its own, to tell them apart")
        differences = []
        for first, second in combinations(evaluations, 2):
            _check_alike(first, second)
            differences.append(_difference(first, second, seed))
        return cls(tuple(evaluations), tuple(_adjusted(differences)), dict(unfinished or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        return {
            "format": FORMAT_VERSION,
            "art_gym": __version__,
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "differences": [difference.to_dict() for difference in self.differences],
            "unfinished": dict(self.unfinished),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """Make the comparison that `to_dict` wrote.

        Raises:
            ValueError: It is of another format.
            KeyError: Something is missing in it.
            TypeError: It holds something else.
        """
        if data["format"] != FORMAT_VERSION:
            raise ValueError(f"the evaluation has format {data['format']!r}; this version of art_gym reads format {FORMAT_VERSION}")
        return cls(
            tuple(Evaluation.from_dict(evaluation) for evaluation in data["evaluations"]),
            tuple(Difference.from_dict(difference) for difference in data["differences"]),
            dict(data["unfinished"]),
        )


def _check_alike(first: Evaluation, second: Evaluation) -> None:
    for what in ("env_id", "env_kwargs", "split"):
        one, two = getattr(first, what), getattr(second, what)
        # Scenarios that were given may be a split's; whether they are tells the pairing.
        if one != two and not (what == "split" and None in (one, two)):
            raise UsageError(
                f"{first.agent} and {second.agent} played different things: {what} is {one!r:.200} and {two!r:.200}; "
                "let them play the same, or compare each with its own kind"
            )


def _difference(first: Evaluation, second: Evaluation, seed: int) -> Difference:
    pairs = list(_pairs(first.scenarios, second.scenarios))
    if not pairs:
        raise UsageError(f"{first.agent} and {second.agent} played no scenario in common; let them play the same ones")
    success = _successes(pairs, once=first.k == second.k == 1, seed=seed)
    finished = [(before, after) for before, after in pairs if before.finished and after.finished]
    failed, episodes = _summed(pairs, lambda outcome: outcome.episodes - outcome.finished), _summed(pairs, lambda outcome: outcome.episodes)
    used = _summed(finished, lambda outcome: outcome.finished)
    reward = _rewards(finished, (failed[0] / episodes[0], failed[1] / episodes[1]), seed) if finished else None
    left_out = (episodes[0] - used[0], episodes[1] - used[1])
    return Difference(first.agent, second.agent, len(pairs), success, reward, left_out, episodes)


def _successes(pairs: _Pairs, *, once: bool, seed: int) -> Contrast:
    played = [([o.successes for o in side], [o.episodes for o in side]) for side in zip(*pairs, strict=True)]
    first, second = ([won / episodes for won, episodes in zip(*side, strict=True)] for side in played)
    p, test = _mcnemar(first, second) if once else _flipped(first, second, seed)
    bounds = [rate_interval(*side) for side in played]
    interval = difference_interval(first, second, *(bound or Interval(0.0, 1.0) for bound in bounds))
    return _contrast(first, second, interval, p, test)


def _rewards(pairs: _Pairs, failed: tuple[float, float], seed: int) -> Contrast:
    first, second = ([outcome.reward / outcome.finished for outcome in side] for side in zip(*pairs, strict=True))
    if abs(failed[0] - failed[1]) > NOTABLE:
        why = f"not tested: {failed[0]:.1%} and {failed[1]:.1%} of the episodes failed, and what failed is seldom like what didn't"
        return _contrast(first, second, None, None, why)
    p, test = _flipped(first, second, seed)
    return _contrast(first, second, mean_interval([after - before for before, after in zip(first, second, strict=True)]), p, test)


def _mcnemar(first: Sequence[float], second: Sequence[float]) -> tuple[float, str]:
    won = sum(after > before for before, after in zip(first, second, strict=True))
    lost = sum(after < before for before, after in zip(first, second, strict=True))
    return mcnemar(lost, won), f"McNemar's exact test, {won} won against {lost} lost"


def _flipped(first: Sequence[float], second: Sequence[float], seed: int) -> tuple[float, str]:
    differences = [after - before for before, after in zip(first, second, strict=True)]
    if not any(differences):
        return 1.0, "no scenario differs"
    found = sign_flip_test(differences, seed=seed)
    patterns = f"all {found.patterns:,}" if found.exact else f"{found.patterns:,} random"
    return found.p, f"sign-flip permutation test, {patterns} patterns"


def _contrast(first: Sequence[float], second: Sequence[float], interval: Interval | None, p: float | None, test: str) -> Contrast:
    n = len(first)
    low, high = interval if interval is not None and n >= FEWEST_SCENARIOS else (None, None)
    if low is not None and high is not None and p is not None and p > 0.05:
        # The test is exact and the interval isn't.
        low, high = min(low, 0.0), max(high, 0.0)
    return Contrast(sum(first) / n, sum(second) / n, low, high, p, p, test, n)


def _summed(pairs: _Pairs, count: Callable[[ScenarioOutcome], int]) -> tuple[int, int]:
    return sum(count(before) for before, _ in pairs), sum(count(after) for _, after in pairs)


def _pairs(first: Sequence[ScenarioOutcome], second: Sequence[ScenarioOutcome]) -> Iterator[tuple[ScenarioOutcome, ScenarioOutcome]]:
    others = dict(_numbered(second))
    for key, outcome in _numbered(first):
        if key in others:
            yield outcome, others[key]


def _numbered(outcomes: Sequence[ScenarioOutcome]) -> Iterator[tuple[tuple[str, int, str, int], ScenarioOutcome]]:
    """Key outcomes by their scenario; one that was played twice is told apart by a number."""
    seen: Counter[tuple[str, int, str]] = Counter()
    for outcome in outcomes:
        scenario = outcome.id, outcome.seed, outcome.options
        seen[scenario] += 1
        yield (*scenario, seen[scenario]), outcome


def _adjusted(differences: Sequence[Difference]) -> Iterator[Difference]:
    successes, rewards = _holm([difference.success for difference in differences]), _holm([difference.reward for difference in differences])
    for difference, success, reward in zip(differences, successes, rewards, strict=True):
        yield replace(difference, success=success or difference.success, reward=reward)


def _holm(contrasts: Sequence[Contrast | None]) -> Iterator[Contrast | None]:
    """Correct the p-values of one figure of several pairs, of those that have one."""
    corrected = iter(holm([contrast.p for contrast in contrasts if contrast is not None and contrast.p is not None]))
    for contrast in contrasts:
        yield contrast if contrast is None or contrast.p is None else replace(contrast, adjusted_p=next(corrected))
