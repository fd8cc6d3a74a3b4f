"""The tally: adds up an evaluation's episodes group by group, and keeps figures of them rather than the episodes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import Any

from art_gym._evaluation_journal import as_json
from art_gym._outcomes import Evaluation, ScenarioOutcome, Spread, Tokens
from art_gym.episodes import Episode, EpisodeGroup
from art_gym.statistics import Interval, bootstrap, effective_size, mean_interval, pass_at_k, pass_hat_k, rate_interval


class Tally:
    """Counts the outcomes of groups of k episodes.

    Args:
        k: Episodes of each scenario.
        kept: Ids of the episodes that were played before, so that they tell nothing of this time's speed.
        replaced: By id, the kinds of the failures that an episode ended in before it was played again.
    """

    def __init__(self, k: int, *, kept: Collection[str] = (), replaced: Mapping[str, Sequence[str]] | None = None) -> None:
        self._k = k
        self._kept = kept
        self._replaced = replaced or {}
        self._replayed: Counter[str] = Counter()
        self._cut_calls = self._cut_steps = 0
        self._scenarios: list[ScenarioOutcome] = []
        self._turns = array("l")
        self._policy_seconds, self._environment_seconds, self._episode_seconds = array("d"), array("d"), array("d")
        self._invalid_calls = 0
        self._truncations: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._failure_messages: dict[str, str] = {}
        self._prompt = self._completion = self._unknown_turns = 0
        # Of the episodes whose every turn has token ids, and of those that are played now.
        self._known_episodes = self._known_prompt = self._known_completion = 0
        self._episodes_now = self._completion_now = 0

    def add(self, group: EpisodeGroup) -> None:
        """Count a scenario's episodes."""
        for episode in group.episodes:
            self._add(episode)
        self._scenarios.append(
            ScenarioOutcome(
                id=group.scenario.id,
                seed=group.scenario.seed,
                episodes=len(group.episodes),
                successes=sum(episode.success for episode in group.episodes),
                finished=len(group.finished),
                reward=sum(episode.reward for episode in group.finished),
                options=_digest(group.scenario.options),
            )
        )

    def _add(self, episode: Episode) -> None:
        self._replayed.update(self._replaced.get(episode.id, ()))
        if episode.failure is None:
            self._turns.append(len(episode.turns))
            self._episode_seconds.append(episode.seconds)
        else:
            self._failures[episode.failure.kind] += 1
            self._failure_messages.setdefault(episode.failure.kind, episode.failure.message)
            self._cut_calls += episode.failure.kind in ("policy", "engine")
            # One that failed at its reset took no step.
            self._cut_steps += episode.failure.kind in ("environment", "tool_timeout") and episode.failure.action is not None
        if episode.truncated:
            self._truncations[episode.truncation or "environment"] += 1
        prompt = completion = unknown = 0
        for turn in episode.turns:
            self._policy_seconds.append(turn.policy_seconds)
            self._environment_seconds.append(turn.environment_seconds)
            self._invalid_calls += turn.invalid_calls
            if turn.prompt_ids is None or turn.completion_ids is None:
                unknown += 1
            else:
                prompt += len(turn.prompt_ids)
                completion += len(turn.completion_ids)
        self._prompt += prompt
        self._completion += completion
        self._unknown_turns += unknown
        if episode.turns and not unknown:
            self._known_episodes += 1
            self._known_prompt += prompt
            self._known_completion += completion
        if episode.id not in self._kept:
            self._episodes_now += 1
            self._completion_now += completion

    def evaluation(self, *, env_id: str, agent: str, seconds: float, **facts: Any) -> Evaluation:
        """Return what was counted so far.

        Args:
            env_id: The environment.
            agent: The agent's name.
            seconds: Wall time of the playing.
            facts: What else the evaluation is to say of how it was played: `split`, `env_kwargs`, `played_by`, `concurrency`.
        """
        outcomes = self._scenarios
        n = sum(outcome.episodes for outcome in outcomes)
        successes = sum(outcome.successes for outcome in outcomes)
        finished = sum(outcome.finished for outcome in outcomes)
        won, played = [outcome.successes for outcome in outcomes], [outcome.episodes for outcome in outcomes]
        low, high = rate_interval(won, played) or Interval(0.0, 1.0)
        pass_at, pass_hat = (
            {k: [estimate(o.episodes, o.successes, k) for o in outcomes] for k in powers(self._k)} for estimate in (pass_at_k, pass_hat_k)
        )
        return Evaluation(
            env_id=env_id,
            agent=agent,
            n=n,
            successes=successes,
            low=low,
            high=high,
            mean_reward=sum(outcome.reward for outcome in outcomes) / finished if finished else 0.0,
            mean_turns=sum(self._turns) / len(self._turns) if self._turns else 0.0,
            invalid_calls=self._invalid_calls,
            truncated=self._truncations.total(),
            failures=dict(self._failures),
            first_failure=next(iter(self._failure_messages.values()), ""),
            seconds=seconds,
            k=self._k,
            effective_n=effective_size(won, played),
            reward_interval=mean_interval([o.reward for o in outcomes], [o.finished for o in outcomes]),
            pass_at={k: _mean(values) for k, values in pass_at.items()},
            pass_hat={k: _mean(values) for k, values in pass_hat.items()},
            pass_at_interval=_intervals(pass_at),
            pass_hat_interval=_intervals(pass_hat),
            turns=Spread.of(self._turns),
            turn_counts=dict(sorted(Counter(self._turns).items())),
            tokens=self._tokens(seconds),
            policy_seconds=Spread.of(self._policy_seconds, cut_off=self._cut_calls),
            environment_seconds=Spread.of(self._environment_seconds, cut_off=self._cut_steps),
            episode_seconds=Spread.of(self._episode_seconds, cut_off=self._failures.total()),
            truncations=dict(self._truncations),
            failure_messages=dict(self._failure_messages),
            scenarios=tuple(outcomes),
            cut_calls=self._cut_calls,
            cut_steps=self._cut_steps,
            replayed=dict(self._replayed),
            **facts,
        )

    def _tokens(self, seconds: float) -> Tokens | None:
        if not self._prompt and not self._completion:
            return None
        return Tokens(
            prompt=self._prompt,
            completion=self._completion,
            prompt_mean=self._known_prompt / max(self._known_episodes, 1),
            completion_mean=self._known_completion / max(self._known_episodes, 1),
            completion_per_second=self._completion_now / seconds if self._episodes_now and seconds > 0 else None,
            unknown_turns=self._unknown_turns,
        )


def powers(k: int) -> list[int]:
    """The powers of two up to k, and k.

    >>> powers(6)
    [1, 2, 4, 6]
    """
    return sorted({k, *(1 << exponent for exponent in range(k.bit_length()))})


def _digest(options: Mapping[str, Any]) -> str:
    return sha256(as_json(options).encode()).hexdigest()[:16] if options else ""


def _intervals(estimates: Mapping[int, Sequence[float]]) -> dict[int, Interval]:
    found = {k: bootstrap(values) for k, values in estimates.items() if k > 1}
    return {k: interval for k, interval in found.items() if interval is not None}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
