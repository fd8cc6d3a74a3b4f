"""Episodes that are kept as they are played."""

from __future__ import annotations

import copy
import json
import operator
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import gymnasium

from art_gym._steps import read_start, read_step
from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import FailureKind, ToolTimeout, UsageError
from art_gym.messages import AssistantMessage, Observation
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore, Journal, encode_or_failed
from art_gym.wrappers._base import MessageWrapper, Result
from art_gym.wrappers._wire import json_form

LOCK_SECONDS = 10.0
"""How long to wait for another environment that is writing to the same journal."""


class Record(MessageWrapper):
    """Keep every episode in an `EpisodeStore`, from where `art_gym.replay` plays it again.

    An episode is on disk when its last `step` returns; that step waits for the disk, in `astep` too. One that is left before its end, by the
    next `reset` or by `close`, is kept as truncated by "environment", with `abandoned` set, unless nothing was done in it. One in which the
    environment raised is kept with its `failure`, and the exception goes on to the caller; so is one that was interrupted in a step, with a
    failure of kind "cancelled".

    What is kept is what this wrapper sees: put it outside of those whose effect belongs to the episode, and replay through the same ones.
    Several environments, in several processes too, may record to one label.

    A `reset` without a seed takes one from the environment's generator, so that this episode, too, can be played again from its scenario, whose
    id is "seed-" and the seed.

    >>> import art_gym, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     env = Record(art_gym.make("art_gym/GuessNumber-v0", max_turns=1), folder)
    ...     _ = env.reset(seed=7)
    ...     _ = env.step(art_gym.call("guess", number=1))
    ...     (episode,) = art_gym.EpisodeStore(folder).journal("episodes").read()
    >>> episode.scenario.seed, len(episode.turns), episode.truncation
    (7, 1, 'max_turns')
    >>> print(art_gym.replay(art_gym.make("art_gym/GuessNumber-v0", max_turns=1), episode))
    None

    Args:
        env: The environment.
        folder: The store's folder, such as a run's; the episodes lie below it, in `episodes/<label>.jsonl`.
        label: The journal's label.

    Raises:
        UsageError: The label can't be a file name, or its file can't be written; in `reset`, options that aren't JSON, or a seed that is no
            integer; in `step`, `reset` and `close`, a journal that another process goes on writing to.
        TypeError: `folder` is no path.
    """

    _state = ("_episode",)

    def __init__(self, env: gymnasium.Env[Any, Any], folder: str | os.PathLike[str], label: str = "episodes") -> None:
        # At once, or what is wrong would be told at the end of the first episode.
        EpisodeStore(folder).journal(label).check()
        super().__init__(env, folder=os.fspath(folder), label=label)
        self._folder = os.path.abspath(folder)
        self._label = label
        self._episode: Episode | None = None
        self._turn: Turn | None = None
        self._began = 0.0
        self._shown = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, after an unfinished one is written down as abandoned.

        Raises:
            UsageError: The options aren't JSON, the seed is no integer, or another process goes on writing to the journal.
            Exception: Whatever the environment raises, which is kept as the episode's failure.
        """
        kept = _json_options(options)
        seed = None if seed is None else _integer(seed)
        self._abandon()
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        episode = Episode(id="", env_id="", scenario=Scenario(f"seed-{seed}", seed, kept))
        self._episode, self._turn, self._began = episode, None, perf_counter()
        try:
            observation, info = super().reset(seed=seed, options=options)
            start = read_start(self.env, observation)
        except BaseException as error:
            self._fail(error)
            raise
        episode.env_id, episode.tools = start.env_id, start.tools
        episode.final_observation = copy.deepcopy([*start.observation])
        self._shown = perf_counter()
        episode.seconds = self._shown - self._began
        return observation, info

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._go_on()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._go_on()

    def close(self) -> None:
        """Close the environment, after an unfinished episode is written down as abandoned.

        Raises:
            UsageError: Another process goes on writing to the journal; the environment is closed all the same.
        """
        try:
            self._abandon()
        finally:
            super().close()

    @contextmanager
    def _around(self, action: AssistantMessage) -> Iterator[None]:
        """Take the action down before the environment sees it, and what the environment raises."""
        begin = perf_counter()
        self._turn = Turn(observation=[], action=json_form(action), policy_seconds=begin - self._shown)
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        self._shown = perf_counter()
        self._turn.environment_seconds = self._shown - begin

    def _stepped(self, action: AssistantMessage, result: Result) -> Result:
        episode, turn = self._episode, self._turn
        if episode is None or turn is None:
            return result
        try:
            step = read_step(result)
            observation = copy.deepcopy([*step.observation])
        except Exception as error:  # noqa: BLE001  what the environment returned can't be kept: its bug, and still what it returned
            self._fail(error)
            return result
        turn.observation, episode.final_observation = episode.final_observation, observation
        turn.reward, turn.rewards, turn.invalid_calls = step.reward, step.rewards, step.invalid_calls
        episode.seconds = self._shown - self._began
        episode.turns.append(turn)
        episode.metrics.update(step.metrics)
        if step.terminated or step.truncated:
            episode.terminated, episode.truncated, episode.truncation = step.terminated, step.truncated, step.truncation
            self._keep()
        return result

    def _go_on(self) -> None:
        """Let time go on from where the episode stood, in a copy or from a snapshot; what passed meanwhile isn't the episode's."""
        self._shown = perf_counter()
        self._began = self._shown - (self._episode.seconds if self._episode is not None else 0.0)

    def _abandon(self) -> None:
        """End the episode in play, if there is one."""
        episode = self._episode
        if episode is not None and episode.turns:
            episode.truncated, episode.truncation, episode.abandoned = True, "environment", True
            self._keep()
        self._episode = None

    def _fail(self, error: BaseException) -> None:
        if self._episode is not None:
            action = None if self._turn is None else self._turn.action
            self._episode.failure = replace(Failure.of(_kind(error), error), action=action)
            self._keep()

    def _keep(self) -> None:
        """Write the episode, which is over."""
        episode, self._episode = self._episode, None
        if episode is not None:
            # Made here, as a snapshot that is gone back to may end more than once.
            episode.id = f"{self._label}/{uuid.uuid4().hex}"
            episode.seconds = perf_counter() - self._began
            _write(self._journal(), encode_or_failed(episode))

    def _journal(self) -> Journal:
        return EpisodeStore(self._folder).journal(self._label)


def _write(journal: Journal, line: bytes) -> None:
    """Write the line; the journal stays open no longer than that, so that others can write to it, too."""
    give_up = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            journal.write(line)
            return
        except UsageError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)
        finally:
            journal.close()


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, ToolTimeout):
        return "tool_timeout"
    return "environment" if isinstance(error, Exception) else "cancelled"


def _integer(seed: Any) -> int:
    try:
        return operator.index(seed)
    except TypeError:
        raise UsageError(f"the seed of reset must be an integer of at least 0, or None, not {seed!r:.100}") from None


def _json_options(options: dict[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, dict):
        raise UsageError(f"the options of reset must be a dictionary, or None, not {options!r:.100}")
    try:
        kept: dict[str, Any] = json.loads(json.dumps(options or {}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the options of reset can't be recorded as JSON ({error}): {options!r:.200}; pass JSON values only") from error
    return kept
