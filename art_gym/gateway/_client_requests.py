"""What the client asks of each route, and how it reads the answers; the same for both ways of waiting."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.gateway._client_errors import GatewayError, TrainingFailed
from art_gym.gateway._client_http import Request
from art_gym.scenarios import Scenario

TERMINAL = frozenset({"finished", "failed", "cancelled"})
"""The types of a job's last event."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a job came to.

    Attributes:
        job: Its id.
        step: The number of the version that it made; None if there was nothing to learn from, and nothing was changed.
        version: The version that answers, such as "smollm2-135m@3".
        reason: Why nothing was changed; empty if something was.
        advice: What to do about that.
        warnings: Figures beyond their limits, each with what to do.
        figures: The job's figures, such as its loss.
        seconds: Wall time.
    """

    job: str
    step: int | None
    version: str
    reason: str = ""
    advice: str = ""
    warnings: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def create(group: str | None, scenario: Any, metadata: Mapping[str, Any] | None) -> Request:
    """Begin an episode.

    Raises:
        UsageError: The scenario or the metadata are no JSON.
    """
    body: dict[str, Any] = {"group": group, "scenario": scenario_data(scenario), "metadata": dict(metadata or {})}
    for name in ("scenario", "metadata"):
        try:
            json.dumps(body[name], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"the {name} of an episode must be JSON data ({error}): {body[name]!r:.200}") from error
    return Request.changing("/episodes", body)


def scenario_data(scenario: Any) -> dict[str, Any] | None:
    """A scenario as JSON data; what isn't an object is put into one, as "input"."""
    if scenario is None:
        return None
    if isinstance(scenario, Scenario):
        return scenario.to_dict()
    return dict(scenario) if isinstance(scenario, Mapping) else {"input": scenario}


def reward_body(reward: Any, rewards: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check what an episode earned.

    Raises:
        UsageError: A figure is no finite number.
    """
    return {
        "reward": None if reward is None else figure("reward", reward),
        "rewards": {name: figure(f"rewards[{name!r}]", value) for name, value in (rewards or {}).items()},
        "metrics": {name: figure(f"metrics[{name!r}]", value) for name, value in (metrics or {}).items()},
    }


def figure(name: str, value: Any) -> float:
    """Read a number.

    Raises:
        UsageError: It's none, or not finite.
    """
    # numpy's and torch's numbers have `item`.
    value = value.item() if callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1 else value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name} is {value!r:.100}; it must be a finite number")
    return float(value)


def train(groups: Iterable[Any], config: Mapping[str, Any], *, dry_run: bool) -> Request:
    """Begin a job.

    Raises:
        UsageError: There is nothing to train on, or something in a group is no episode.
    """
    if isinstance(groups, str | Mapping):
        raise UsageError("train takes groups of episodes, such as [[episode, episode], [episode, episode]]")
    listed = [_group(group) for group in groups]
    if not any(listed):
        raise UsageError("there is no episode to train on: train takes groups of episodes, such as [[episode, episode], [episode, episode]]")
    body: dict[str, Any] = {"groups": [group for group in listed if group], "config": dict(config)}
    return Request.changing("/train", body | {"dry_run": True} if dry_run else body)


def _group(group: Any) -> list[Any]:
    if isinstance(group, str):
        raise UsageError(f"train takes groups of episodes, and {group!r:.100} is none: write [[{group!r:.100}, …], …]")
    return [_episode(episode) for episode in getattr(group, "episodes", group)]


def _episode(episode: Any) -> Any:
    """An id, or an episode in full."""
    if isinstance(episode, str):
        return episode
    if isinstance(episode, Episode):
        return episode.to_dict()
    if isinstance(episode, Mapping):
        return episode if "turns" in episode else episode.get("id", episode)
    if isinstance(found := getattr(episode, "id", None), str):
        return found
    raise UsageError(f"{episode!r:.100} is no episode: give its id, what `episode` or `gather` gave, or an art_gym Episode")


def outcome(event: Mapping[str, Any]) -> Trained:
    """Read a job's last event.

    Raises:
        TrainingFailed: It failed, or was cancelled.
    """
    job, reason, advice = str(event.get("job", "")), str(event.get("reason") or ""), str(event.get("advice") or "")
    if event["type"] != "finished":
        cancelled = event["type"] == "cancelled"
        raise TrainingFailed(reason or ("the job was cancelled" if cancelled else "no reason was given"), advice, job=job, cancelled=cancelled)
    return Trained(
        job=job,
        step=event.get("step"),
        version=str(event.get("version", "")),
        reason=reason,
        advice=advice,
        warnings=list(event.get("warnings") or ()),
        figures=dict(event.get("figures") or {}),
        seconds=float(event.get("seconds") or 0.0),
    )


def outcome_of_job(job: Mapping[str, Any]) -> Trained:
    """The same of a job's record, where its events can't be had any more."""
    state = job.get("state")
    if state not in TERMINAL:
        raise GatewayError(f"the events of job {job.get('id')} ended, and it is {state}")
    return outcome({**job, "type": state, "job": job.get("id")})


class EventLines:
    """Reads a job's events from the lines of an answer: NDJSON, or server-sent events.

    Attributes:
        last: The number of the newest event.
    """

    def __init__(self, after: int = 0) -> None:
        self.last = after
        self._data: list[str] = []

    def feed(self, line: str) -> dict[str, Any] | None:
        """Return the event that the line completes; None if it completes none, or one that was read before.

        Raises:
            GatewayError: It is no event.
        """
        if line.startswith("{"):
            return self._read(line)
        if line.startswith("data:"):
            self._data.append(line[5:].removeprefix(" "))
        elif not line and self._data:
            text, self._data = "\n".join(self._data), []
            return self._read(text)
        return None

    def cut(self) -> None:
        """Forget what a broken connection left unfinished."""
        self._data = []

    def _read(self, text: str) -> dict[str, Any] | None:
        try:
            event = json.loads(text)
        except ValueError:
            # A line that a broken connection cut comes again, whole.
            return None
        number = event.get("number") if isinstance(event, dict) else None
        if not isinstance(number, int) or number <= self.last:
            return None
        self.last = number
        return dict(event)
