"""Replay: a recorded episode played again without a model, and the first difference.

It owns the comparison. What an episode holds belongs to `art_gym.episodes`; who recorded it is the runner or `art_gym.wrappers.Record`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium

from art_gym._steps import Step, reset_env, step_env
from art_gym.episodes import Episode, EpisodeGroup, Failure, Turn
from art_gym.messages import Message
from art_gym.registration import make

EXCERPT = 80
"""Characters of a differing text that are shown."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between a recorded episode and its replay. As text, one line.

    Attributes:
        turn: Index of the turn, from 0. An observation belongs to the turn that was played after it, the final one to the last turn.
        field: What differs: "observation", "reward", "rewards", "invalid_calls", "terminated", "truncated", "truncation", "metrics",
            "final_observation", "failure"; or "exception", where the replay raised one.
        expected: What was recorded; None for an exception.
        actual: What the replay gave; an exception as text.
    """

    turn: int
    field: str
    expected: Any
    actual: Any

    def __str__(self) -> str:
        if self.field == "exception":
            return f"turn {self.turn}: the replay raised {self.actual}"
        place, expected, actual = _first_difference(self.field, self.expected, self.actual)
        if isinstance(expected, str) and isinstance(actual, str):
            expected, actual = _excerpts(expected, actual)
        return f"turn {self.turn}: {place} was {_shown(expected)} when it was recorded, and is {_shown(actual)} now"


def replay(env: str | gymnasium.Env[Any, Any] | Callable[[], gymnasium.Env[Any, Any]], episode: Episode) -> Divergence | None:
    """Play a recorded episode again: reset to its scenario, take its actions, and compare what the environment returns.

    Compared are the observations, the reward and its components, refused calls, flags, the reason of a truncation, metrics and the final
    observation. Numbers must be equal to the last bit. An episode that its model's context cut, that was abandoned, or whose policy failed is
    compared as far as it goes; one whose environment raised an exception must raise it again. What ran past its time is left out.

    >>> import art_gym
    >>> scenario = art_gym.Scenario("s", seed=3)
    >>> env = art_gym.make("art_gym/GuessNumber-v0")
    >>> said = [*env.reset(seed=3)[0]]
    >>> said[1] = {"role": "user", "content": "Make your guess."}
    >>> print(art_gym.replay(env, art_gym.Episode("e", "art_gym/GuessNumber-v0", scenario, final_observation=said)))
    turn 0: final_observation[1].content was 'Make your guess.' when it was recorded, and is 'Make your first guess.' now

    Args:
        env: The environment that the episode was played in, with the same options and wrappers: an id, an instance (which is left open), or a
            function that makes one.
        episode: Recorded by `Runner` or by `art_gym.wrappers.Record`.

    Returns:
        The first difference; None if there is none.

    Raises:
        UsageError: There is no such environment.
        TypeError: `env` is none of these, or `episode` is no episode.
    """
    if not isinstance(episode, Episode):
        raise TypeError(f"episode must be an art_gym.Episode, not {episode!r:.100}{_way_to_episode(episode)}")
    if isinstance(env, gymnasium.Env):
        return next(_differences(env, episode), None)
    if not isinstance(env, str) and not callable(env):
        raise TypeError(f"env must be an environment, its id, or a function that makes one, not {env!r:.100}")
    made = make(env) if isinstance(env, str) else env()
    if not isinstance(made, gymnasium.Env):
        raise TypeError(f"env must be a function that makes an environment, and it returned {made!r:.100}")
    try:
        return next(_differences(made, episode), None)
    finally:
        made.close()


def _way_to_episode(value: Any) -> str:
    if isinstance(value, Mapping):
        return ": Episode.from_dict makes one of its JSON data"
    if isinstance(value, EpisodeGroup | Iterable) and not isinstance(value, str | bytes):
        return ": replay them one at a time"
    return ": EpisodeStore(folder).journal(label).read() yields those on disk"


def _differences(env: gymnasium.Env[Any, Any], episode: Episode) -> Iterator[Divergence]:
    """Yield what differs, in the order in which it happens; what comes after the first is of no use."""
    try:
        observation: list[Message] = [*reset_env(env, episode.scenario).observation]
    except Exception as error:  # noqa: BLE001  the environment may raise anything
        if episode.turns or episode.failure is None:
            yield _raised(0, error)
        return
    metrics: dict[str, float] = {}
    last = max(len(episode.turns) - 1, 0)
    for index, turn in enumerate(episode.turns):
        yield from _compare(index, observation=(turn.observation, observation))
        try:
            # A copy, as the recorded one isn't the environment's to change.
            step = step_env(env, copy.deepcopy(turn.action))
        except Exception as error:  # noqa: BLE001  the same
            yield _raised(index, error)
            return
        yield from _compare_step(index, episode, turn, step)
        metrics.update(step.metrics)
        observation = [*step.observation]
    failure = episode.failure
    if failure is not None and failure.kind == "environment" and failure.action is not None:
        yield from _compare_failure(env, len(episode.turns), failure)
    yield from _compare(last, metrics=(episode.metrics, metrics))
    if episode.turns or episode.final_observation or episode.failure is None:
        yield from _compare(last, final_observation=(episode.final_observation, observation))


def _compare_failure(env: gymnasium.Env[Any, Any], index: int, failure: Failure) -> Iterator[Divergence]:
    """Take the action that an environment failed at."""
    try:
        step_env(env, copy.deepcopy(failure.action))
    except Exception as error:  # noqa: BLE001  the same
        yield from _compare(index, failure=(failure.message, Failure.of("environment", error).message))
    else:
        yield Divergence(index, "failure", failure.message, "")


def _compare_step(index: int, episode: Episode, turn: Turn, step: Step) -> Iterator[Divergence]:
    last = index == len(episode.turns) - 1
    truncated = last and episode.truncated and not episode.abandoned and episode.truncation != "context_length"
    yield from _compare(
        index,
        reward=(turn.reward, step.reward),
        rewards=(turn.rewards, step.rewards),
        invalid_calls=(turn.invalid_calls, step.invalid_calls),
        terminated=(last and episode.terminated, step.terminated),
        truncated=(truncated, step.truncated),
        truncation=(episode.truncation if truncated else None, step.truncation),
    )


def _compare(turn: int, **fields: tuple[Any, Any]) -> Iterator[Divergence]:
    for field, values in fields.items():
        expected, actual = map(_through_json, values)
        if expected != actual:
            yield Divergence(turn, field, expected, actual)


def _raised(turn: int, error: Exception) -> Divergence:
    return Divergence(turn, "exception", None, f"{type(error).__name__}: {error}")


def _through_json(value: Any) -> Any:
    """Return the value as it comes back from a file: what is a tuple in memory is a list there."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):  # it can't have come from a file
        return value


def _first_difference(place: str, expected: Any, actual: Any) -> tuple[str, Any, Any]:
    """Follow two values down to where they first differ."""
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        for index, (before, now) in enumerate(zip(expected, actual, strict=True)):
            if before != now:
                return _first_difference(f"{place}[{index}]", before, now)
    if isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        for key, before in expected.items():
            if before != actual[key]:
                return _first_difference(f"{place}.{key}", before, actual[key])
    return place, expected, actual


def _excerpts(expected: str, actual: str) -> tuple[str, str]:
    """Cut two long texts down to where they first differ."""
    same = next((index for index, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), min(len(expected), len(actual)))
    start = max(same - EXCERPT // 4, 0) if max(len(expected), len(actual)) > EXCERPT else 0

    def cut(text: str) -> str:
        return f"{'…' if start else ''}{text[start : start + EXCERPT]}{'…' if len(text) > start + EXCERPT else ''}"

    return cut(expected), cut(actual)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 4 * EXCERPT else f"{text[: 4 * EXCERPT]}…"
