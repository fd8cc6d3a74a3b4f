"""Calls: what the policy was asked and answered through the gateway, and how an episode is made of them.

A call is one answer as it was sampled. Which of them belong together, and in which order they arrived, is the store's to know; `_capture` makes
calls of what the three endpoints answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from art_gym.episodes import Episode, Failure, Turn
from art_gym.messages import AssistantMessage, Message, ToolSchema
from art_gym.scenarios import Scenario

ENV_ID = "gateway"
"""The `env_id` of every episode that was captured."""

CallKind = Literal["chat", "completions", "responses"]


@dataclass(slots=True)
class Call:
    """One answer of the policy that was captured: with n > 1, one choice of it.

    Attributes:
        id: "call-" and 32 hexadecimal digits; with n > 1 "-" and the choice's index after it.
        kind: The endpoint that was called.
        messages: The conversation that was sent, as chat messages; a completion's prompt is one user message.
        tools: The tools that were offered, in the wire form of chat completions.
        action: What was answered, as an assistant message.
        finish_reason: As the endpoint said: "stop", "tool_calls", "length"…; "abandoned" if the call didn't come to its end.
        policy: The version that answered, such as "name@12".
        prompt_ids: Token ids of the whole prompt, as the engine saw them; None if it gave none.
        completion_ids: Token ids as sampled, the end token included; None if the engine gave none.
        logprobs: Log-probability of each completion token under the distribution sampled from; None if the engine gave none.
        temperature: What it was sampled with.
        began: When the request arrived, in seconds since 1970.
        seconds: From then until the last token.
        abandoned: The client left before the end, or the call was cut short; what was sampled until then is kept.
    """

    id: str
    kind: CallKind
    messages: list[Message]
    tools: list[ToolSchema]
    action: AssistantMessage
    finish_reason: str
    policy: str
    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    logprobs: list[float] | None
    temperature: float
    began: float
    seconds: float
    abandoned: bool = False


class EpisodeFacts(Protocol):
    """What is needed of an episode's record, beside its calls; times are seconds since 1970."""

    @property
    def id(self) -> str: ...
    @property
    def group(self) -> str | None: ...
    @property
    def scenario(self) -> Mapping[str, Any] | None: ...
    @property
    def state(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def created(self) -> float: ...
    @property
    def finished(self) -> float | None: ...


def episode_of(record: EpisodeFacts, calls: Sequence[Call]) -> Episode:
    """Make the episode that a record and its calls, in order of arrival, tell of.

    Each call is a turn. The reward sits on the last one. What a turn observed are the messages that its call added to the conversation it goes
    on from; a call that goes on from none, such as a sub-agent's first or one with an edited history, observed all that was sent. Calls that
    were abandoned before anything of them could be known as tokens are left out: no client went on with them, and nothing can be learned.
    """
    calls = [call for call in calls if not (call.abandoned and call.completion_ids is None)]
    turns = [
        Turn(
            observation=list(observation),
            action=call.action,
            finish_reason=call.finish_reason,
            policy=call.policy,
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion_ids,
            logprobs=call.logprobs,
            policy_seconds=call.seconds,
        )
        for call, observation in zip(calls, _observations(calls), strict=True)
    ]
    if turns:
        turns[-1].reward = float(record.reward or 0.0)
        turns[-1].rewards = {name: float(value) for name, value in record.rewards.items()}
    last = max((call.began + call.seconds for call in calls), default=record.created)
    return Episode(
        id=record.id,
        env_id=ENV_ID,
        scenario=Scenario(id=record.group or record.id, seed=0, options=dict(record.scenario or {})),
        tools=_tools(calls),
        turns=turns,
        terminated=record.state in ("finished", "failed"),
        metrics={name: float(value) for name, value in record.metrics.items()},
        failure=_failure(record),
        seconds=max(0.0, (record.finished if record.finished is not None else last) - record.created),
    )


def _failure(record: EpisodeFacts) -> Failure | None:
    if record.state == "failed":
        return Failure("environment", record.failure or "the episode was finished as failed, without a reason")
    if record.state == "expired":
        return Failure("cancelled", "the episode was never finished, and grew older than episodes may")
    return None


def _tools(calls: Iterable[Call]) -> list[ToolSchema]:
    """Every tool that a call offered, each name once as it was first offered: an agent and its sub-agents may have different ones."""
    found: dict[str, ToolSchema] = {}
    seen: set[int] = set()
    for call in calls:
        if id(call.tools) not in seen:
            seen.add(id(call.tools))
            for tool in call.tools:
                found.setdefault(str(_get(tool.get("function"), "name")), tool)
    return list(found.values())


def _observations(calls: Sequence[Call]) -> Iterator[Sequence[Message]]:
    """For each call, the messages that are new in it: after the longest earlier conversation, with its answer, that it begins with."""
    answered: set[int] = set()
    for call in calls:
        known = key = 0
        for count, message in enumerate(call.messages, 1):
            key = hash((key, *_identity(message)))
            if key in answered:
                known = count
        yield call.messages[known:]
        answered.add(hash((key, *_identity(call.action))))


def _identity(message: Any) -> tuple[Any, ...]:
    """What makes two messages the same although clients write them differently: null and empty content, a text and its one part, spare keys."""
    calls = message.get("tool_calls") or ()
    return (
        message.get("role"),
        _text(message.get("content")),
        message.get("tool_call_id"),
        tuple((_get(one, "id"), *_function(one)) for one in calls) if isinstance(calls, list) else None,
    )


def _function(call: Any) -> tuple[Any, Any]:
    function = _get(call, "function")
    arguments = _get(function, "arguments")
    return _get(function, "name"), arguments if isinstance(arguments, str) else _written(arguments)


def _text(content: Any) -> str:
    if not content:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return _written(content)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _get(mapping: Any, key: str) -> Any:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if value is None or isinstance(value, str | dict | list) else _written(value)
