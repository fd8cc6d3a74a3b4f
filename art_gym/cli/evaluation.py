"""Measuring a policy: a set of scenarios is played once each, and the outcomes are counted.

The success rate comes with Wilson's interval, since a rate without one says little. Failed episodes (the endpoint broke, a tool hung) count as
not successful, so that a failing set-up can't look good, and they are counted by kind.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from art_gym.episodes import Episode
from art_gym.statistics import wilson

if TYPE_CHECKING:
    from art_gym.rollout import Agent, Progress
    from art_gym.scenarios import Scenario
    from art_gym.store import Journal


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome of playing `n` scenarios.

    Attributes:
        env_id: The environment's registered id.
        agent: The agent's name.
        n: Episodes played, failed ones included.
        successes: Episodes that succeeded.
        low: Lower bound of the success rate's 95% interval.
        high: Upper bound of it.
        mean_reward: Mean return of the episodes that did not fail; 0 if all failed.
        mean_turns: Mean number of turns of the episodes that did not fail; 0 if all failed.
        invalid_calls: Tool calls that were answered with an error text, over all episodes.
        truncated: Episodes cut by the limit on turns or by the context's length.
        failures: How many episodes failed, by kind.
        first_failure: What the first failure said; empty if there is none.
        seconds: Wall time of the whole evaluation.
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

    @property
    def rate(self) -> float:
        """Share of the episodes that succeeded; 0 for none."""
        return self.successes / self.n if self.n else 0.0

    @classmethod
    def of(cls, episodes: Sequence[Episode], *, env_id: str, agent: str, seconds: float = 0.0) -> Evaluation:
        """Count the outcomes of episodes that were played."""
        finished = [episode for episode in episodes if episode.failure is None]
        failures = [episode.failure for episode in episodes if episode.failure]
        successes = sum(episode.success for episode in episodes)
        low, high = wilson(successes, len(episodes))
        return cls(
            env_id=env_id,
            agent=agent,
            n=len(episodes),
            successes=successes,
            low=low,
            high=high,
            mean_reward=sum(episode.reward for episode in finished) / len(finished) if finished else 0.0,
            mean_turns=sum(len(episode.turns) for episode in finished) / len(finished) if finished else 0.0,
            invalid_calls=sum(turn.invalid_calls for episode in episodes for turn in episode.turns),
            truncated=sum(episode.truncated for episode in episodes),
            failures=dict(Counter(failure.kind for failure in failures)),
            first_failure=failures[0].message if failures else "",
            seconds=seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rate": self.rate}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evaluation:
        return cls(**{entry.name: data[entry.name] for entry in fields(cls)})

    def __str__(self) -> str:
        return f"{self.rate:.1%} ({self.successes} of {self.n}, 95% interval {self.low:.1%} to {self.high:.1%})"


def evaluate(
    env_id: str,
    agent: Agent,
    scenarios: Iterable[Scenario],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 32,
    turn_timeout: float = 60.0,
    tool_timeout: float = 30.0,
    episode_timeout: float = 600.0,
    journal: Journal | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    engine_check: Callable[[], None] | None = None,
) -> Evaluation:
    """Play each scenario once and count the outcomes.

    Args:
        env_id: The environment's registered id.
        agent: Who plays. Its connections are closed at the end.
        scenarios: Finitely many.
        env_kwargs: Arguments of the environment.
        concurrency: The most episodes in play at once.
        turn_timeout: Seconds that one policy call may take.
        tool_timeout: Seconds that one step of the environment may take.
        episode_timeout: Seconds that an episode may take.
        journal: Where the episodes are kept as they end; they are not kept if not given.
        resume: Play only what the journal doesn't hold yet.
        progress: Told of each episode as it ends.
        engine_check: Raises `EngineError` when the engine is dead.

    Raises:
        EngineError: The engine died.
        UsageError: Unknown environment or model, or a journal that already holds other episodes.
    """
    from art_gym.rollout import Runner

    runner = Runner(
        env_id,
        agent,
        env_kwargs=env_kwargs,
        concurrency=concurrency,
        turn_timeout=turn_timeout,
        tool_timeout=tool_timeout,
        episode_timeout=episode_timeout,
        engine_check=engine_check,
    )
    started = time.monotonic()
    groups = runner.collect(scenarios, journal=journal, resume=resume, progress=progress)
    episodes = [episode for group in groups for episode in group.episodes]
    return Evaluation.of(episodes, env_id=env_id, agent=agent.name, seconds=time.monotonic() - started)
