"""Columns: an episode as a row of a table, and back, exactly.

What is counted, compared and filtered by has a column of its own; messages, tools and options, whose form is anybody's, are JSON texts, and
so are mappings, since `datasets` knows no map type. The columns can't hold everything that JSON can (a lone surrogate in an id, a seed beyond
64 bits): a row that would not give back the very episode has the whole of it in `record`, as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from art_gym.episodes import Episode, Failure, Turn
from art_gym.errors import FailureKind
from art_gym.scenarios import Scenario
from art_gym.store._lines import encode

FORMAT = 1
"""The version of the columns; another one reads otherwise."""

HEAD = ["id", "reward", "success", "failure_kind", "parent", "shared_turns", "record"]
"""The columns that a `Head` is read from."""

_STEP = re.compile(r"train-([0-9]{4,9})(?:-from-[0-9]{4,9})?|eval-grpo-([0-9]{1,9})")
"""Labels that a training run gives; any other may hold a model's size, a port or whatever else is a number."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An episode, and what the store knows of it.

    Attributes:
        label: Its label.
        episode: The episode.
        superseded: Whether one with the same id was appended later, such as a failed episode that was played again.
    """

    label: str
    episode: Episode
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """An episode's outcome and where it branched off, without what was said and sampled."""

    id: str
    reward: float
    success: bool
    failure: FailureKind | None
    parent: str | None = None
    shared_turns: int = 0

    @classmethod
    def of(cls, episode: Episode) -> Head:
        kind = episode.failure.kind if episode.failure else None
        return cls(episode.id, float(episode.reward), episode.success, kind, episode.parent, episode.shared_turns)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Head:
        if row["record"] is not None:
            return cls.of(from_row(row))
        return cls(row["id"], row["reward"], row["success"], row["failure_kind"], row["parent"], row["shared_turns"])


def schema(pa: Any) -> Any:
    """The Arrow schema of a table of episodes, made with the pyarrow that is given."""
    text, real, whole, flag = pa.string(), pa.float64(), pa.int32(), pa.bool_()
    turn = pa.struct(
        {
            "observation": text,
            "action": text,
            "reward": real,
            "rewards": text,
            "finish_reason": text,
            "policy": text,
            "prompt_ids": pa.list_(whole),
            "completion_ids": pa.list_(whole),
            # What was sampled from is compared to the last bit; half as long wouldn't be exact.
            "logprobs": pa.list_(real),
            "invalid_calls": whole,
            "policy_seconds": real,
            "environment_seconds": real,
        }
    )
    return pa.schema(
        {
            "id": text,
            "label": text,
            "step": whole,
            "env_id": text,
            "scenario_id": text,
            "seed": pa.int64(),
            "options": text,
            "member": whole,
            "parent": text,
            "shared_turns": whole,
            "branches": pa.list_(whole),
            "reward": real,
            "success": flag,
            "terminated": flag,
            "truncated": flag,
            "truncation": text,
            "abandoned": flag,
            "failure_kind": text,
            "failure_message": text,
            "failure_traceback": text,
            "failure_action": text,
            "seconds": real,
            "metrics": text,
            "superseded": flag,
            "tools": text,
            "turns": pa.list_(turn),
            "final_observation": text,
            "record": text,
        }
    )


def to_row(stored: Stored) -> dict[str, Any]:
    """Return the episode's columns."""
    episode, failure = stored.episode, stored.episode.failure
    row = {
        "id": episode.id,
        "label": stored.label,
        "step": step_of(stored.label),
        "env_id": episode.env_id,
        "scenario_id": episode.scenario.id,
        "seed": episode.scenario.seed,
        "options": _text(dict(episode.scenario.options)),
        "member": episode.member,
        "parent": episode.parent,
        "shared_turns": episode.shared_turns,
        "branches": episode.branches,
        "reward": episode.reward,
        "success": episode.success,
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "truncation": episode.truncation,
        "abandoned": episode.abandoned,
        "failure_kind": failure.kind if failure else None,
        "failure_message": failure.message if failure else None,
        "failure_traceback": failure.traceback if failure else None,
        "failure_action": _text(failure.action) if failure and failure.action is not None else None,
        "seconds": episode.seconds,
        "metrics": _text(episode.metrics),
        "superseded": stored.superseded,
        "tools": _text(episode.tools),
        "turns": [_turn_row(turn) for turn in episode.turns],
        "final_observation": _text(episode.final_observation),
        "record": None,
    }
    # Such as a field that has no column yet.
    return row if from_row(row) == episode else with_record(row, episode)


def with_record(row: dict[str, Any], episode: Episode) -> dict[str, Any]:
    """Return the row with the whole episode in it."""
    return {**row, "record": encode(episode).decode().rstrip("\n")}


def from_row(row: Mapping[str, Any]) -> Episode:
    """Make the episode that `to_row` wrote."""
    if row["record"] is not None:
        return Episode.from_dict(json.loads(row["record"]))
    return Episode(
        id=row["id"],
        env_id=row["env_id"],
        scenario=Scenario(row["scenario_id"], row["seed"], json.loads(row["options"])),
        member=row["member"],
        tools=json.loads(row["tools"]),
        turns=[_turn(turn) for turn in row["turns"]],
        final_observation=json.loads(row["final_observation"]),
        terminated=row["terminated"],
        truncated=row["truncated"],
        truncation=row["truncation"],
        metrics=json.loads(row["metrics"]),
        failure=_failure(row),
        seconds=row["seconds"],
        abandoned=row["abandoned"],
        parent=row["parent"],
        shared_turns=row["shared_turns"],
        branches=row["branches"],
    )


def step_of(label: str) -> int | None:
    """Return the batch that a training run's label names; None for any other label.

    >>> step_of("train-0003-from-0008"), step_of("eval-grpo-12"), step_of("eval-untrained"), step_of("eval-smollm2-135m")
    (3, 12, None, None)
    """
    found = _STEP.fullmatch(label)
    return int(found[1] or found[2]) if found else None


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "observation": _text(turn.observation),
        "action": _text(turn.action),
        "reward": turn.reward,
        "rewards": _text(turn.rewards),
        "finish_reason": turn.finish_reason,
        "policy": turn.policy,
        "prompt_ids": turn.prompt_ids,
        "completion_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
        "invalid_calls": turn.invalid_calls,
        "policy_seconds": turn.policy_seconds,
        "environment_seconds": turn.environment_seconds,
    }


def _turn(row: Mapping[str, Any]) -> Turn:
    texts = {name: json.loads(row[name]) for name in ("observation", "action", "rewards")}
    return Turn(**{**row, **texts})


def _failure(row: Mapping[str, Any]) -> Failure | None:
    if row["failure_kind"] is None:
        return None
    action = row["failure_action"]
    return Failure(row["failure_kind"], row["failure_message"], row["failure_traceback"], None if action is None else json.loads(action))


def _text(value: Any) -> str:
    """The value as JSON, in letters as they are unless UTF-8 has none for them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text
