"""What an evaluation found: the figures of one agent's playing, and their JSON form.

Who counts them is `art_gym._tally`, and who plays `art_gym.evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

import numpy as np

from art_gym.statistics import Interval

_SHARES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure is spread: mean, percentiles (linearly interpolated) and the largest.

    Of what was cut off, such as a call that timed out, only a least value could be known. It counts as long as the longest that was measured,
    so that cutting off what is slow makes nothing look faster; figures that depend on that are bounds, "at least so much".

    Attributes:
        mean: Of all.
        p50: Median.
        p90: 90th percentile.
        p99: 99th percentile.
        max: The largest that was measured.
        count: How many there are, those that were cut off included.
        cut_off: How many of them were cut off.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    count: int = 0
    cut_off: int = 0

    @classmethod
    def of(cls, values: Sequence[float], *, cut_off: int = 0) -> Spread | None:
        """Measure the figures, of which `cut_off` more were cut off; None where none was measured.

        >>> spread = Spread.of([1.0, 2.0, 6.0])
        >>> spread.mean, spread.p50, spread.max
        (3.0, 2.0, 6.0)
        >>> spread = Spread.of([1.0, 2.0, 3.0], cut_off=2)  # 1, 2, 3, and two of at least 3
        >>> spread.p50, spread.is_bound("p50"), spread.p90, spread.is_bound("p90")
        (3.0, False, 3.0, True)
        """
        if not values:
            return None
        figures = np.asarray(values, dtype=np.float64)
        longest = figures.max()
        figures = np.concatenate((figures, np.full(cut_off, longest)))
        p50, p90, p99 = map(float, np.percentile(figures, list(_SHARES.values())))
        return cls(float(figures.mean()), p50, p90, p99, float(longest), len(figures), cut_off)

    def is_bound(self, figure: str) -> bool:
        """Whether one of the figures, such as "p99", is only known to be at least so much."""
        if not self.cut_off or figure not in _SHARES:
            return self.cut_off > 0
        return _SHARES[figure] / 100 * (self.count - 1) > self.count - self.cut_off - 1


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
        options: A digest of the scenario's options; empty if it has none.
    """

    id: str
    seed: int
    episodes: int
    successes: int
    finished: int
    reward: float
    options: str = ""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of one agent's playing.

    Attributes:
        env_id: The environment's registered id.
        agent: The agent's name.
        n: Episodes played, failed ones included.
        successes: Episodes that succeeded.
        low: Lower bound of the success rate's 95% interval: Wilson's, with `effective_n` episodes (`art_gym.statistics.rate_interval`).
        high: Upper bound of it.
        mean_reward: Mean return of the episodes that did not fail; 0 if all failed.
        mean_turns: Mean number of turns of the episodes that did not fail; 0 if all failed.
        invalid_calls: Tool calls that were answered with an error text, over all episodes.
        truncated: Episodes that were cut short.
        failures: How many episodes failed, by kind.
        first_failure: What the first failure said; empty if there is none.
        seconds: Wall time of the playing; of a resumed evaluation that of its last part.
        k: Episodes of each scenario.
        effective_n: How many independent episodes say as much about the success rate, since those of one scenario resemble one another.
        reward_interval: 95% interval of the mean reward, Student's over scenarios; None where all are alike, or of fewer than two.
        pass_at: By k: the chance that at least one of k episodes of a scenario succeeds.
        pass_hat: By k: the chance that all of k episodes of a scenario succeed.
        pass_at_interval: By k: the 95% interval of `pass_at`, by bootstrap over scenarios; without k = 1, which is the success rate, and where
            all scenarios are alike.
        pass_hat_interval: Likewise, of `pass_hat`.
        turns: How many turns an episode took, of those that did not fail.
        turn_counts: How many episodes took so many turns.
        tokens: None where the endpoint gives no token ids, as for scripts.
        policy_seconds: How long a policy call took; one that failed or timed out was cut off.
        environment_seconds: How long a step of the environment took; one that failed or timed out was cut off.
        episode_seconds: How long an episode took; one that failed was cut off.
        truncations: How many episodes were cut short, by reason.
        failure_messages: What the first failure of each kind said.
        scenarios: What became of each scenario, in their order.
        cut_calls: Policy calls that failed or timed out.
        cut_steps: Steps of the environment that failed or timed out.
        replayed: How many attempts at an episode failed and were played again, by kind of failure; cancelled ones aren't counted.
        concurrency: Under how many episodes at once it was played; several where parts of it were resumed under another.
        split: Whose scenarios were played; None for scenarios of one's own.
        env_kwargs: The environment's arguments, as JSON data.
        played_by: What else is known of the agent, such as its model and step.
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
    effective_n: float = 0.0
    reward_interval: Interval | None = None
    pass_at: Mapping[int, float] = field(default_factory=dict)
    pass_hat: Mapping[int, float] = field(default_factory=dict)
    pass_at_interval: Mapping[int, Interval] = field(default_factory=dict)
    pass_hat_interval: Mapping[int, Interval] = field(default_factory=dict)
    turns: Spread | None = None
    turn_counts: Mapping[int, int] = field(default_factory=dict)
    tokens: Tokens | None = None
    policy_seconds: Spread | None = None
    environment_seconds: Spread | None = None
    episode_seconds: Spread | None = None
    truncations: Mapping[str, int] = field(default_factory=dict)
    failure_messages: Mapping[str, str] = field(default_factory=dict)
    scenarios: Sequence[ScenarioOutcome] = ()
    cut_calls: int = 0
    cut_steps: int = 0
    replayed: Mapping[str, int] = field(default_factory=dict)
    concurrency: Sequence[int] = ()
    split: str | None = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    played_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of the episodes that succeeded; 0 for none."""
        return self.successes / self.n if self.n else 0.0

    @property
    def failed(self) -> int:
        """How many episodes failed."""
        return sum(self.failures.values())

    @property
    def finished(self) -> int:
        """How many episodes did not fail."""
        return self.n - self.failed

    @property
    def interval(self) -> Interval:
        """The success rate's 95% interval, the only one there is."""
        return Interval(self.low, self.high)

    @property
    def attempts(self) -> int:
        """How many times an episode was begun and came to an end or a failure: once each, and again where a failed one was replayed."""
        return self.n + sum(self.replayed.values())

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
    "reward_interval": lambda value: Interval(*value),
    "pass_at": _by_number,
    "pass_hat": _by_number,
    "pass_at_interval": lambda value: {k: Interval(*bounds) for k, bounds in _by_number(value).items()},
    "pass_hat_interval": lambda value: {k: Interval(*bounds) for k, bounds in _by_number(value).items()},
    "turn_counts": _by_number,
    "turns": lambda value: Spread(**value),
    "policy_seconds": lambda value: Spread(**value),
    "environment_seconds": lambda value: Spread(**value),
    "episode_seconds": lambda value: Spread(**value),
    "tokens": lambda value: Tokens(**value),
    "concurrency": tuple,
    "scenarios": lambda value: tuple(ScenarioOutcome(**outcome) for outcome in value),
}
"""How JSON data become fields again that aren't of JSON's own types."""
