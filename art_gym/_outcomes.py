"""What an evaluation found: the figures of one agent's playing, and their JSON form.

Who counts them is `art_gym._tally`, and who plays `art_gym.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from art_gym.statistics import Interval


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread: mean, percentiles (linearly interpolated) and the largest."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Measure the figures; None for none.

        >>> spread = Spread.of([1.0, 2.0, 6.0])
        >>> spread.mean, spread.p50, spread.max
        (3.0, 2.0, 6.0)
        """
        if not values:
            return None
        figures = np.asarray(values, dtype=np.float64)
        p50, p90, p99 = np.percentile(figures, (50, 90, 99))
        return cls(*(float(figure) for figure in (figures.mean(), p50, p90, p99, figures.max())))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of the turns whose ids the endpoint gave.

    Attributes:
        prompt: Of all prompts, each turn's whole one, though a server's prefix cache spares it most of them.
        completion: Sampled ones.
        prompt_mean: Of an episode; of those only whose every turn has ids.
        completion_mean: Likewise.
        completion_per_second: Sampled tokens by wall time, over the episodes that weren't taken from a journal; None if all were.
        unknown_turns: Turns without ids, which count nowhere.
    """

    prompt: int
    completion: int
    prompt_mean: float
    completion_mean: float
    completion_per_second: float | None = None
    unknown_turns: int = 0


@dataclass(frozen=True, slots=True)
class ScenarioOutcome:
    """What became of a scenario's episodes.

    Attributes:
        id: The scenario's.
        seed: The scenario's.
        episodes: How many were played, failed ones included.
        successes: How many succeeded.
        finished: How many did not fail.
        reward: The sum of the returns of these.
    """

    id: str
    seed: int
    episodes: int
    successes: int
    finished: int
    reward: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one agent's playing.

    Attributes:
        env_id: The environment's registered id.
        agent: The agent's name.
        n: Episodes played, failed ones included.
        successes: Episodes that succeeded.
        low: Lower bound of the success rate's 95% interval, Wilson's; it takes episodes for independent, which those of one scenario aren't.
        high: Upper bound of it.
        mean_reward: Mean return of the episodes that did not fail; 0 if all failed.
        mean_turns: Mean number of turns of the episodes that did not fail; 0 if all failed.
        invalid_calls: Tool calls that were answered with an error text, over all episodes.
        truncated: Episodes that were cut short.
        failures: How many episodes failed, by kind.
        first_failure: What the first failure said; empty if there is none.
        seconds: Wall time of the playing; of a resumed evaluation that of its last part.
        k: Episodes of each scenario.
        success_interval: 95% interval of the success rate, by bootstrap over scenarios; the one to go by for k > 1.
        reward_interval: 95% interval of the mean reward, by bootstrap over scenarios.
        pass_at: By k: the chance that at least one of k episodes of a scenario succeeds.
        pass_hat: By k: the chance that all of k episodes of a scenario succeed.
        turns: How many turns an episode took, of those that did not fail.
        turn_counts: How many episodes took so many turns.
        tokens: None where the endpoint gives no token ids, as for scripts.
        policy_seconds: How long a policy call took.
        environment_seconds: How long a step of the environment took.
        episode_seconds: How long an episode took, of those that did not fail.
        truncations: How many episodes were cut short, by reason.
        failure_messages: What the first failure of each kind said.
        scenarios: What became of each scenario, in their order.
    """

    env_id: str
    agent: str
    n: int
    successes: int
    low: float
    high: float
    mean_reward: float
    mean_turns: float
    invalid_calls: int
    truncated: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    first_failure: str = ""
    seconds: float = 0.0
    k: int = 1
    success_interval: Interval | None = None
    reward_interval: Interval | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    pass_hat: Mapping[int, float] = field(default_factory=dict)
    turns: Spread | None = None
    turn_counts: Mapping[int, int] = field(default_factory=dict)
    tokens: Tokens | None = None
    policy_seconds: Spread | None = None
    environment_seconds: Spread | None = None
    episode_seconds: Spread | None = None
    truncations: Mapping[str, int] = field(default_factory=dict)
    failure_messages: Mapping[str, str] = field(default_factory=dict)
    scenarios: Sequence[ScenarioOutcome] = ()

    @property
    def rate(self) -> float:
        """Share of the episodes that succeeded; 0 for none."""
        return self.successes / self.n if self.n else 0.0

    @property
    def failed(self) -> int:
        """How many episodes failed."""
        return sum(self.failures.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as JSON data."""
        return {**asdict(self), "rate": self.rate}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        """Make the outcome that `to_dict` wrote. One that an earlier version wrote lacks what that version didn't measure.

        Raises:
            KeyError: Something is missing in it that was always there.
            TypeError: It holds something else.
        """
        values = {entry.name: data[entry.name] for entry in fields(cls) if entry.name in data or _is_required(entry)}
        for name, read in _READERS.items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        return cls(**values)

    def __str__(self) -> str:
        return f"{self.rate:.1%} ({self.successes} of {self.n}, 95% interval {self.low:.1%} to {self.high:.1%})"


def _is_required(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def _by_number(values: Mapping[Any, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in values.items()}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "success_interval": lambda value: Interval(*value),
    "reward_interval": lambda value: Interval(*value),
    "pass_at": _by_number,
    "pass_hat": _by_number,
    "turn_counts": _by_number,
    "turns": lambda value: Spread(**value),
    "policy_seconds": lambda value: Spread(**value),
    "environment_seconds": lambda value: Spread(**value),
    "episode_seconds": lambda value: Spread(**value),
    "tokens": lambda value: Tokens(**value),
    "scenarios": lambda value: tuple(ScenarioOutcome(**outcome) for outcome in value),
}
"""How JSON data become fields again that aren't of JSON's own types."""
