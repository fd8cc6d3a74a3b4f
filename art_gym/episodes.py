"""Episodes: what was said, sampled and earned, exactly as it happened.

This module owns the data and its JSON form. Who fills it is the runner, where it lies on disk is `art_gym.store`, and how it becomes training
rows is `art_gym_trainers`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from art_gym._transcripts import new_messages
from art_gym.errors import FailureKind
from art_gym.messages import AssistantMessage, Message, ToolSchema
from art_gym.scenarios import Scenario

FORMAT_VERSION = 1

TruncationReason = Literal["max_turns", "max_tokens", "context_length", "environment"]
"""Why an episode was truncated: its turns or tokens ran out, the context was full, or the environment (or a wrapper) said so."""


@dataclass(slots=True)
class Turn:
    """One action of the policy, and what the environment made of it.

    Attributes:
        observation: What the environment returned before the action: the new messages, or the whole transcript where a wrapper shows that.
        action: The assistant message as the endpoint returned it.
        reward: The step's reward.
        rewards: The named components of `reward`; they add up to it.
        finish_reason: As the endpoint said: "stop", "tool_calls", "length"…
        policy: The policy version that answered, such as "smollm2-135m@12".
        prompt_ids: Token ids of the whole prompt, as the engine saw them; None if the endpoint gives none.
        completion_ids: Token ids as sampled, the end token included; None if the endpoint gives none.
        logprobs: Log-probability of each completion token under the distribution sampled from; as long as `completion_ids`.
        invalid_calls: How many of the action's tool calls were answered with an error text.
        policy_seconds: Wall time of the policy call.
        environment_seconds: Wall time of `step`.
    """

    observation: list[Message]
    action: AssistantMessage
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"
    policy: str = ""
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
    logprobs: list[float] | None = None
    invalid_calls: int = 0
    policy_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def trainable(self) -> bool:
        """Whether the turn carries what training needs: token ids and one log-probability for each sampled token."""
        return (
            self.prompt_ids is not None
            and self.completion_ids is not None
            and self.logprobs is not None
            and len(self.logprobs) == len(self.completion_ids)
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode could not be finished.

    Attributes:
        kind: Who failed.
        message: What happened, in a line or a few.
        traceback: Of the exception, if there was one.
        action: What the environment was given when it failed, so that a replay gets to the same place; None if it failed at reset, or did not
            fail itself.
    """

    kind: FailureKind
    message: str
    traceback: str = ""
    action: AssistantMessage | None = None

    @classmethod
    def of(cls, kind: FailureKind, error: BaseException) -> Failure:
        """Make the failure that an exception means, with its traceback."""
        return cls(kind, "".join(traceback.format_exception_only(error)).strip(), "".join(traceback.format_exception(error)))


@dataclass(slots=True)
class Episode:
    """One episode: a scenario played from reset to its end, or to its failure.

    Attributes:
        id: Unique within a run.
        env_id: The environment's registered id.
        scenario: Where the episode started.
        member: Its place in its group, from 0; a branch has its parent's.
        tools: The tool schemas that the policy was offered, in OpenAI wire form.
        turns: In order; empty if the episode failed at reset.
        final_observation: What the environment returned after the last action.
        terminated: The environment ended the episode.
        truncated: The episode was cut short; `truncation` says why. Never both.
        metrics: The environment's own figures (`ToolEnv.metric`), such as "success".
        failure: None unless the episode failed; failed episodes stay out of baselines.
        seconds: Wall time from reset to the end.
        abandoned: Whoever played left it before it ended, by another reset or by `close` (see `art_gym.wrappers.Record`); it then counts as
            truncated by "environment".
        parent: The id of the episode that it branched off; None unless it is a branch.
        shared_turns: How many of its first turns are the parent's, which sampled them.
        branches: For each episode that branched off it, in the order of their ids, before which turn.
    """

    id: str
    env_id: str
    scenario: Scenario
    member: int = 0
    tools: list[ToolSchema] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_observation: list[Message] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False
    truncation: TruncationReason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    abandoned: bool = False
    parent: str | None = None
    shared_turns: int = 0
    branches: list[int] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """The return: the sum of the rewards of all turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def success(self) -> bool:
        """The metric "success" where the environment reports one, else whether the return is positive."""
        return self.failure is None and self.metrics.get("success", self.reward) > 0

    @property
    def messages(self) -> list[Message]:
        """The whole transcript, each message once, whether the environment returned the new messages only or a transcript."""
        observations = [*(turn.observation for turn in self.turns), self.final_observation]
        transcript = [*observations[0]]
        for turn, answer in zip(self.turns, observations[1:], strict=True):
            transcript += [turn.action, *new_messages(answer, turn.observation, turn.action)]
        return transcript

    def to_dict(self) -> dict[str, Any]:
        """Return the episode as JSON data. It shares its lists with the episode: copying every token id would cost more than writing them."""
        return {
            "format": FORMAT_VERSION,
            "id": self.id,
            "env_id": self.env_id,
            "scenario": self.scenario.to_dict(),
            "member": self.member,
            # For readers of the file; derived again when it is loaded.
            "reward": self.reward,
            "success": self.success,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "truncation": self.truncation,
            "metrics": self.metrics,
            "failure": None if self.failure is None else _fields(self.failure),
            "seconds": self.seconds,
            "abandoned": self.abandoned,
            "parent": self.parent,
            "shared_turns": self.shared_turns,
            "branches": self.branches,
            "tools": self.tools,
            "turns": [_fields(turn) for turn in self.turns],
            "final_observation": self.final_observation,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """Make the episode that `to_dict` wrote; what it derives, such as the return, is derived again.

        Raises:
            ValueError: The data are of another format.
            KeyError: Something is missing in them.
            TypeError: They hold what an episode of this format doesn't have.
        """
        version = data.get("format")
        if version != FORMAT_VERSION:
            raise ValueError(f"an episode record has format {version!r}; this version of art_gym reads format {FORMAT_VERSION}")
        values = {key: value for key, value in data.items() if key not in ("format", "reward", "success")}
        values["scenario"] = Scenario.from_dict(values["scenario"])
        values["turns"] = [Turn(**turn) for turn in values["turns"]]
        values["failure"] = Failure(**values["failure"]) if values["failure"] else None
        return cls(**values)


@dataclass(slots=True)
class EpisodeGroup:
    """Episodes of one scenario, compared with each other by group-relative advantages."""

    scenario: Scenario
    episodes: list[Episode]

    @property
    def finished(self) -> list[Episode]:
        """The episodes that did not fail; only these count in a baseline."""
        return [episode for episode in self.episodes if episode.failure is None]

    @property
    def failed(self) -> list[Episode]:
        """The episodes that could not be finished; `Episode.failure` says why."""
        return [episode for episode in self.episodes if episode.failure is not None]


def _fields(record: Turn | Failure) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record)}


def success_rate(episodes: Iterable[Episode]) -> float:
    """Share of the episodes that succeeded; failed episodes count as not successful. 0.0 for none."""
    outcomes = [episode.success for episode in episodes]
    return sum(outcomes) / len(outcomes) if outcomes else 0.0
