"""The chat policy: a model behind the OpenAI chat-completions interface, with the exact tokens of every reply.

This module owns what a request asks for and how an answer becomes a `Reply`; connections and retries belong to `_client`.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from art_gym.errors import PolicyError, UsageError
from art_gym.messages import AssistantMessage
from art_gym.rollout.agent import Reply, ServerLoad, TurnState
from art_gym_agents._client import ChatClient
from art_gym_agents._completion import Choice, Completion, Message

# A model's generation_config may set these, and vLLM would follow it: the distribution sampled from would differ from the one trained on.
_PLAIN_SAMPLING = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

# What the server reports about a reply that it did not finish.
_UNFINISHED = ("abort", "error")

# In `TurnState.memory`: the server that holds the episode's prefix.
_HOME = "art_gym_agents.chat.server"

_ENCODER = msgspec.json.Encoder()


class ChatAgent:
    """Plays with a chat model; one agent plays any number of episodes at once.

    Against vLLM every reply carries prompt ids, completion ids and logprobs as sampled. With another provider set `exact_tokens=False`: the
    request then has standard fields only, and its episodes can be evaluated but not trained on.

    A prompt that leaves less room than `max_tokens` gets a shorter reply from vLLM, with finish reason "length"; one that leaves none raises
    `ContextOverflow`.

    Several servers of the same model share the episodes by load. The episodes of a scenario, and the turns of an episode, stay with one of them
    for its prefix cache, as long as it takes no more than a quarter over the mean. One that fails is left out until it answers again, and its
    requests go to the others.

    Args:
        base_url: Such as "http://127.0.0.1:8000/v1"; several servers as a list.
        model: The served model's name; may be set later, when another version is served.
        temperature: Of the sampling; `top_p` is always 1. The trainer must use the same.
        max_tokens: The most tokens in one reply.
        api_key: Sent as a bearer token.
        version: The policy version to record with each turn, such as "smollm2-135m@12"; may be set later. None: the model's name as answered.
        exact_tokens: Ask for token ids and logprobs, with vLLM's own request fields.
        seeded: Send a seed drawn from the episode's generator with each request. Slower in vLLM, which then samples each request by itself.
        patience: Seconds that a server which refuses connections is waited for, before it counts as gone; of several, until one is back.
        extra_body: More request fields; None as a value leaves a field out.
        name: In reports; the model's name if None.

    Raises:
        UsageError: A URL is none, or `extra_body` can't be sent as JSON.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        *,
        temperature: float = 1.0,
        max_tokens: int = 512,
        api_key: str | None = None,
        version: str | None = None,
        exact_tokens: bool = True,
        seeded: bool = False,
        patience: float = 15.0,
        extra_body: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or model
        self.model = model
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.version = version
        self.exact_tokens = exact_tokens
        self.seeded = seeded
        self.extra_body = dict(extra_body or {})
        try:
            json.dumps(self.extra_body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"extra_body can't be sent as JSON ({error}): {self.extra_body!r:.200}") from error
        self._client = ChatClient(base_url, api_key=api_key, patience=patience)

    @property
    def base_url(self) -> str:
        """The server's base URL; of several, the first one's."""
        return self._client.base_urls[0]

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The base URLs of all servers."""
        return self._client.base_urls

    async def act(self, state: TurnState) -> Reply:
        """Ask the model for the next action.

        Raises:
            ContextOverflow: The conversation no longer fits.
            PolicyError: The endpoint failed for this request after bounded retries, or answered nonsense.
            EngineError: Nothing listens at the URL.
            UsageError: The endpoint doesn't know the model or the key.
        """
        version = self.version
        # A little less than allowed, so that the error says what happened rather than that the time is over.
        timeout = state.timeout - min(0.5, 0.05 * state.timeout)
        completion, home = await self._client.complete(
            self._request(state), timeout=timeout, key=state.scenario.id, home=state.memory.get(_HOME)
        )
        state.memory[_HOME] = home
        reply = _reply(completion)
        if version is not None:
            reply.policy = version
        return reply

    async def server_load(self) -> ServerLoad | None:
        """Return how busy the servers are that answer now, as vLLM's `/metrics` shows it; None if none shows it. It raises nothing."""
        return await self._client.server_load()

    async def close(self) -> None:
        """Close this event loop's connections. The agent may be used again."""
        await self._client.close()

    def _request(self, state: TurnState) -> bytes:
        if not math.isfinite(self.temperature):
            raise UsageError(f"the temperature must be a finite number, not {self.temperature!r}")
        body: dict[str, Any] = {
            "model": self.model,
            "messages": state.messages,
            "temperature": self.temperature,
            "top_p": 1.0,
            "max_tokens": self.max_tokens,
        }
        if state.tools:
            body["tools"] = state.tools
        if self.exact_tokens:
            body |= {"logprobs": True, "return_token_ids": True, **_PLAIN_SAMPLING}
        if self.seeded:
            body["seed"] = int(state.rng.integers(2**31))
        body |= self.extra_body
        return _encode({key: value for key, value in body.items() if value is not None})

    def __repr__(self) -> str:
        urls = self.base_urls
        return f"ChatAgent({urls[0] if len(urls) == 1 else list(urls)!r}, {self.model!r})"


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return _ENCODER.encode(body)
    except (TypeError, ValueError, RecursionError):
        # A model may have written half of a surrogate pair, which UTF-8 can't hold and an escape in JSON can.
        return json.dumps(body, separators=(",", ":")).encode()


def _reply(completion: Completion) -> Reply:
    """Read the first choice of a chat completion."""
    choice = completion.choices[0]
    finish_reason = choice.finish_reason or "stop"
    if finish_reason in _UNFINISHED:
        raise PolicyError(f"the server broke off its reply (finish_reason {finish_reason!r})")
    completion_ids = choice.token_ids
    logprobs = _logprobs(choice)
    if completion_ids is not None:
        if logprobs is None and not completion_ids:
            logprobs = []
        if logprobs is not None and len(logprobs) != len(completion_ids):
            raise PolicyError(f"the server sent {len(completion_ids)} token ids but {len(logprobs)} logprobs for one reply")
    return Reply(
        action=_action(choice.message),
        finish_reason=finish_reason,
        policy=str(completion.model or ""),
        prompt_ids=completion.prompt_token_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
    )


def _logprobs(choice: Choice) -> list[float] | None:
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    if None in logprobs or not all(map(math.isfinite, cast("list[float]", logprobs))):
        raise PolicyError("the server sent a logprob that isn't finite: its weights or its sampling are broken")
    return cast("list[float]", logprobs)


def _action(message: Message) -> AssistantMessage:
    """Return the message as the server sent it, with the fields that belong into the history and no empty ones beside them."""
    action: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        action["reasoning"] = message.reasoning
    if message.reasoning_content:
        action["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        action["tool_calls"] = [
            # Some servers send none, and the tool's result has to name one.
            {
                "id": call.id if isinstance(call.id, str) and call.id else f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return cast("AssistantMessage", action)
