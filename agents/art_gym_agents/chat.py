"""The chat policy: a model behind the OpenAI chat-completions interface, with the exact tokens of every reply.

This module owns what a request asks for and how an answer becomes a `Reply`; connections and retries belong to `_client`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from art_gym.errors import PolicyError
from art_gym.messages import AssistantMessage
from art_gym.rollout.agent import Reply, TurnState
from art_gym_agents._client import ChatClient

# A model's generation_config may set these, and vLLM would follow it: the distribution sampled from would differ from the one trained on.
_PLAIN_SAMPLING = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}

# What the server reports about a reply that it did not finish.
_UNFINISHED = ("abort", "error")


class ChatAgent:
    """Plays with a chat model; one agent plays any number of episodes at once.

    Against vLLM every reply carries prompt ids, completion ids and logprobs as sampled. With another provider set `exact_tokens=False`: the
    request then has standard fields only, and its episodes can be evaluated but not trained on.

    A prompt that leaves less room than `max_tokens` gets a shorter reply from vLLM, with finish reason "length"; one that leaves none raises
    `ContextOverflow`.

    Args:
        base_url: Such as "http://127.0.0.1:8000/v1".
        model: The served model's name; may be set later, when another version is served.
        temperature: Of the sampling; `top_p` is always 1. The trainer must use the same.
        max_tokens: The most tokens in one reply.
        api_key: Sent as a bearer token.
        version: The policy version to record with each turn, such as "smollm2-135m@12"; may be set later. None: the model's name as answered.
        exact_tokens: Ask for token ids and logprobs, with vLLM's own request fields.
        seeded: Send a seed drawn from the episode's generator with each request. Slower in vLLM, which then samples each request by itself.
        patience: Seconds that a server which refuses connections is waited for, before it counts as gone.
        extra_body: More request fields; None as a value leaves a field out.
        name: In reports; the model's name if None.
    """

    def __init__(
        self,
        base_url: str,
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
        self._client = ChatClient(base_url, api_key=api_key, patience=patience)

    @property
    def base_url(self) -> str:
        return self._client.base_url

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
        answer = await self._client.complete(self._request(state), timeout=timeout)
        reply = _reply(answer)
        if version is not None:
            reply.policy = version
        return reply

    async def close(self) -> None:
        """Close this event loop's connections. The agent may be used again."""
        await self._client.close()

    def _request(self, state: TurnState) -> dict[str, Any]:
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
        return {key: value for key, value in body.items() if value is not None}

    def __repr__(self) -> str:
        return f"ChatAgent({self.base_url!r}, {self.model!r})"


def _reply(answer: dict[str, Any]) -> Reply:
    """Read the first choice of a chat completion."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        finish_reason = choice.get("finish_reason") or "stop"
        entries = (choice.get("logprobs") or {}).get("content")
        logprobs = None if entries is None else [float(entry["logprob"]) for entry in entries]
        prompt_ids, completion_ids = answer.get("prompt_token_ids"), choice.get("token_ids")
        action = _action(message)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise PolicyError(f"the endpoint's answer isn't a chat completion ({error!r}): {str(answer)[:500]}") from error
    if finish_reason in _UNFINISHED:
        raise PolicyError(f"the server broke off its reply (finish_reason {finish_reason!r})")
    if completion_ids is not None:
        if logprobs is None and not completion_ids:
            logprobs = []
        if logprobs is not None and len(logprobs) != len(completion_ids):
            raise PolicyError(f"the server sent {len(completion_ids)} token ids but {len(logprobs)} logprobs for one reply")
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        raise PolicyError("the server sent a logprob that isn't finite: its weights or its sampling are broken")
    return Reply(
        action=action,
        finish_reason=finish_reason,
        policy=str(answer.get("model") or ""),
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=logprobs,
    )


def _action(message: dict[str, Any]) -> AssistantMessage:
    """Return the message as the server sent it, with the fields that belong into the history and no empty ones beside them."""
    action: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    for key in ("reasoning", "reasoning_content"):
        if message.get(key):
            action[key] = message[key]
    if message.get("tool_calls"):
        action["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            }
            for call in message["tool_calls"]
        ]
    return cast("AssistantMessage", action)
