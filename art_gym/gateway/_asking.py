"""What is asked of vLLM when a call is captured: the client's request, with tokens asked for and the episode's sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from art_gym.gateway._wire import TRUE, Fields, encode, raw, value
from art_gym.gateway.calls import CallKind
from art_gym.gateway.settings import Sampling
from art_gym.messages import Message, ToolSchema

PATHS: dict[CallKind, str] = {"chat": "/chat/completions", "completions": "/completions", "responses": "/responses"}


@dataclass(slots=True)
class Asked:
    """A captured request.

    Attributes:
        kind: The endpoint.
        body: As it goes to vLLM, but for the model.
        conversations: What was sent, as chat messages: one conversation, or one for each prompt of a completion.
        tools: As chat completions have them.
        n: Choices for each conversation.
        temperature: What is sampled with, as far as it is known before the answer.
        logprobs: The client asked for them itself.
        token_ids: The same.
        hide_reasoning: The client asked for none; its token ids come only with it.
        messages: The client asked for a response's messages itself.
        tokens: Token ids can be had.
    """

    kind: CallKind
    body: Fields
    conversations: list[list[Message]] = field(default_factory=list)
    tools: list[ToolSchema] = field(default_factory=list)
    n: int = 1
    temperature: float = 1.0
    logprobs: bool = False
    token_ids: bool = False
    hide_reasoning: bool = False
    messages: bool = False
    tokens: bool = True

    @property
    def unchanged(self) -> bool:
        """Whether the answer goes to the client as it is."""
        if self.kind == "responses":
            return self.messages or not self.tokens
        return not self.tokens or (self.logprobs and self.token_ids)

    def encoded(self, upstream_model: str) -> bytes:
        """The request for a model of vLLM's."""
        self.body["model"] = raw(upstream_model)
        return encode(self.body)


def ask(kind: CallKind, body: Fields, sampling: Sampling | None) -> Asked:
    """Make the request to vLLM out of a client's."""
    asked = {"chat": _chat, "completions": _completion, "responses": _response}[kind](body)
    count = value(body, "n", 1)
    asked.n = count if isinstance(count, int) and count > 0 else 1
    if sampling is not None and not value(body, "use_beam_search", False):
        for name, setting in sampling.model_dump().items():
            body[name] = raw(setting)
        # With a seed of the client's, all episodes of a group would be one.
        body.pop("seed", None)
        asked.temperature = sampling.temperature
    else:
        temperature = value(body, "temperature", 1.0)
        asked.temperature = float(temperature) if isinstance(temperature, int | float) else 1.0
    return asked


def _chat(body: Fields) -> Asked:
    asked = Asked("chat", body, [_listed(body, "messages")], _listed(body, "tools"))
    asked.logprobs, asked.token_ids = bool(value(body, "logprobs")), bool(value(body, "return_token_ids"))
    # vLLM refuses top_logprobs without logprobs, and has to be asked for the same to say so; beams aren't sampled.
    asked.tokens = not (value(body, "use_beam_search") or (value(body, "top_logprobs") and not asked.logprobs))
    if asked.tokens:
        body["logprobs"] = body["return_token_ids"] = TRUE
        if value(body, "include_reasoning", True) is False and not (asked.logprobs or asked.token_ids):
            asked.hide_reasoning = True
            body["include_reasoning"] = TRUE
    return asked


def _completion(body: Fields) -> Asked:
    prompt = value(body, "prompt", "")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    asked = Asked("completions", body, [[_prompt(one)] for one in (prompt if several else [prompt])])
    asked.logprobs, asked.token_ids = value(body, "logprobs") is not None, bool(value(body, "return_token_ids"))
    # An echoed prompt is left out of the text where token ids are asked for.
    asked.tokens = not (value(body, "use_beam_search") or value(body, "echo"))
    if asked.tokens:
        body["return_token_ids"] = TRUE
        if not asked.logprobs:
            body["logprobs"] = raw(0)
    return asked


def _response(body: Fields) -> Asked:
    messages = [{"role": "system", "content": text}] if isinstance(text := value(body, "instructions"), str) else []
    given = value(body, "input", "")
    messages += _messages_of([{"role": "user", "content": given}] if isinstance(given, str) else given)
    tools = [
        {"type": "function", "function": {key: part for key, part in tool.items() if key in ("name", "description", "parameters", "strict")}}
        for tool in _listed(body, "tools")
        if tool.get("type") == "function"
    ]
    asked = Asked("responses", body, [cast("list[Message]", messages)], cast("list[ToolSchema]", tools))
    asked.messages = bool(value(body, "enable_response_messages"))
    body["enable_response_messages"] = TRUE
    return asked


def _prompt(prompt: Any) -> Message:
    if isinstance(prompt, list):
        return {"role": "user", "content": f"({len(prompt)} token ids)"}
    return {"role": "user", "content": prompt if isinstance(prompt, str) else ""}


def _listed(body: Fields, key: str) -> list[Any]:
    """The objects of a list; what is something else is for vLLM to refuse."""
    found = value(body, key, [])
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _messages_of(items: Any) -> list[dict[str, Any]]:
    """Items of the responses API as chat messages; reasoning and references have no such form."""
    messages: list[dict[str, Any]] = []
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role", "user"), "content": content_of(item.get("content"))})
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(tool_call_of(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content_of(item.get("output"))})
    return messages


def tool_call_of(item: dict[str, Any]) -> dict[str, Any]:
    """A call of the responses API as chat messages have it."""
    arguments = item.get("arguments") if item.get("type") == "function_call" else item.get("input")
    return {"id": item.get("call_id"), "type": "function", "function": {"name": item.get("name"), "arguments": arguments or ""}}


def content_of(content: Any) -> Any:
    """A text, or parts as chat messages have them; texts alone become one."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = []
    for part in content:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif isinstance(part, dict) and part.get("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": part.get("image_url")}})
        else:
            parts.append(part)
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
