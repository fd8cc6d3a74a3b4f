"""Comparing agents that played the same scenarios: by how much they differ, and whether that is more than chance.

Two agents are compared scenario by scenario, so that what one scenario is harder than another cancels out. Where each scenario was played once,
successes are compared by McNemar's exact test; where more often, and for rewards, by flipping the signs of the scenarios' differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

from art_gym._outcomes import Evaluation, ScenarioOutcome
from art_gym.errors import UsageError
from art_gym.statistics import bootstrap, holm, mcnemar, sign_flip_test

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Contrast:
    """By how much one figure of two agents differs.

    Attributes:
        difference: The second agent's mean less the first's, over the scenarios that both played.
        low: Lower bound of its 95% interval, by bootstrap over these.
        high: Upper bound of it.
        p: The two-sided p-value: how likely a difference at least as large is between agents that are equal.
        adjusted_p: The same, by Holm's method where several pairs are compared.
        test: What it was tested by, in words.
    """

    difference: float
    low: float
    high: float
    p: float
    adjusted_p: float
    test: str


@dataclass(frozen=True, slots=True)
class Difference:
    """How two agents differ.

    Attributes:
        first: The agent that the other is measured against.
        second: The other.
        scenarios: How many both played.
        success: In their success rates; a failed episode is none.
        reward: In their mean returns, over the scenarios of which both finished an episode; None if there are none.
    """

    first: str
    second: str
    scenarios: int
    success: Contrast
    reward: Contrast | None


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
    """

    evaluations: Sequence[Evaluation]
    differences: Sequence[Difference] = ()

    @classmethod
    def of(cls, evaluations: Sequence[Evaluation], *, seed: int = 0) -> Comparison:
        """Compare each two of the evaluations, paired by scenario.

        Args:
            evaluations: Of different agents.
            seed: Of what is drawn at random: the bootstrap, and sign patterns where they are too many to try all.

        Raises:
            UsageError: Two have the same agent, or played no scenario in common.
        """
        if twice := [name for name, count in Counter(evaluation.agent for evaluation in evaluations).items() if count > 1]:
            raise UsageError(f"two agents have the name {twice[0]!r}; give each a name of its own, to tell them apart")
        differences = [_difference(first, second, seed) for first, second in combinations(evaluations, 2)]
        return cls(tuple(evaluations), tuple(_adjusted(differences)))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        return {
            "format": FORMAT_VERSION,
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "differences": [asdict(difference) for difference in self.differences],
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
            tuple(
                Difference(
                    **{
                        **difference,
                        "success": Contrast(**difference["success"]),
                        "reward": difference["reward"] and Contrast(**difference["reward"]),
                    }
                )
                for difference in data["differences"]
            ),
        )


def _difference(first: Evaluation, second: Evaluation, seed: int) -> Difference:
    pairs = list(_pairs(first.scenarios, second.scenarios))
    if not pairs:
        raise UsageError(f"{first.agent} and {second.agent} played no scenario in common; let them play the same ones")
    rates = [after.successes / after.episodes - before.successes / before.episodes for before, after in pairs]
    returns = [after.reward / after.finished - before.reward / before.finished for before, after in pairs if after.finished and before.finished]
    if first.k == second.k == 1:
        lost, won = rates.count(-1.0), rates.count(1.0)
        success = _contrast(rates, mcnemar(lost, won), f"McNemar's exact test, {won} won against {lost} lost", seed)
    else:
        success = _flipped(rates, seed)
    return Difference(first.agent, second.agent, len(pairs), success, _flipped(returns, seed) if returns else None)


def _pairs(first: Sequence[ScenarioOutcome], second: Sequence[ScenarioOutcome]) -> Iterator[tuple[ScenarioOutcome, ScenarioOutcome]]:
    others = dict(_numbered(second))
    for key, outcome in _numbered(first):
        if key in others:
            yield outcome, others[key]


def _numbered(outcomes: Sequence[ScenarioOutcome]) -> Iterator[tuple[tuple[str, int, int], ScenarioOutcome]]:
    """Key outcomes by their scenario; one that was played twice is told apart by a number."""
    seen: Counter[tuple[str, int]] = Counter()
    for outcome in outcomes:
        scenario = outcome.id, outcome.seed
        seen[scenario] += 1
        yield (*scenario, seen[scenario]), outcome


def _flipped(differences: Sequence[float], seed: int) -> Contrast:
    if not any(differences):
        return _contrast(differences, 1.0, "no scenario differs", seed)
    found = sign_flip_test(differences, seed=seed)
    patterns = f"all {found.patterns:,}" if found.exact else f"{found.patterns:,} random"
    return _contrast(differences, found.p, f"sign-flip permutation test, {patterns} patterns", seed)


def _contrast(differences: Sequence[float], p: float, test: str, seed: int) -> Contrast:
    mean = sum(differences) / len(differences)
    low, high = bootstrap(differences, seed=seed) or (mean, mean)
    return Contrast(mean, low, high, p, p, test)


def _adjusted(differences: Sequence[Difference]) -> Iterator[Difference]:
    successes = holm([difference.success.p for difference in differences])
    rewards = iter(holm([difference.reward.p for difference in differences if difference.reward is not None]))
    for difference, success in zip(differences, successes, strict=True):
        reward = difference.reward
        yield replace(
            difference,
            success=replace(difference.success, adjusted_p=success),
            reward=None if reward is None else replace(reward, adjusted_p=next(rewards)),
        )
