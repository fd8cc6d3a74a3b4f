"""What the OpenAPI document says of the routes that pass to vLLM. Their bodies are OpenAI's, and vLLM validates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class About:
    """One route.

    Attributes:
        name: The operation's id.
        method: Of HTTP.
        summary: A line.
        description: More of it.
        required: Fields of the body without which vLLM refuses it.
        properties: Fields that the gateway itself looks at.
        streams: Whether the answer may be server-sent events.
    """

    name: str
    method: str
    summary: str
    description: str
    required: tuple[str, ...] = ()
    properties: tuple[str, ...] = ()
    streams: bool = False


_FIELDS: dict[str, dict[str, Any]] = {
    "model": {
        "type": "string",
        "description": "`name` and no model at all mean the current version, `name@latest` the newest one served, `name@12` version 12.",
        "example": "policy@latest",
    },
    "messages": {
        "type": "array",
        "items": {"type": "object"},
        "description": "The conversation.",
        "example": [{"role": "user", "content": "Hello"}],
    },
    "prompt": {"description": "A text, token ids, or a list of either.", "example": "Once upon a time"},
    "input": {"description": "A text, or a list of items.", "example": "Hello"},
    "stream": {"type": "boolean", "description": "Answer with server-sent events.", "default": False},
    "n": {"type": "integer", "minimum": 1, "description": "How many choices; each becomes a turn of its own.", "default": 1},
    "tools": {"type": "array", "items": {"type": "object"}, "description": "What the model may call."},
}

_CAPTURE = " Under an episode's URL the call is captured: each choice becomes a turn with its exact tokens."

PROXIED: dict[str, About] = {
    "/chat/completions": About(
        "create_chat_completion",
        "POST",
        "Answer a conversation",
        "As OpenAI's chat completions, with vLLM's additions." + _CAPTURE,
        ("messages",),
        ("model", "messages", "stream", "n", "tools"),
        True,
    ),
    "/completions": About(
        "create_completion",
        "POST",
        "Go on with a text",
        "As OpenAI's completions, with vLLM's additions." + _CAPTURE,
        ("prompt",),
        ("model", "prompt", "stream", "n"),
        True,
    ),
    "/responses": About(
        "create_response",
        "POST",
        "Answer with items",
        "As OpenAI's responses, with vLLM's additions; `background` is refused within an episode." + _CAPTURE,
        ("input",),
        ("model", "input", "stream", "tools"),
        True,
    ),
    "/responses/{response_id}": About(
        "get_response", "GET", "Fetch a response", "Only where vLLM stores them (`VLLM_ENABLE_RESPONSES_API_STORE=1`); else 404."
    ),
    "/responses/{response_id}/cancel": About(
        "cancel_response", "POST", "Cancel a response", "Only where vLLM stores them, and for one that was started in the background."
    ),
    "/embeddings": About(
        "create_embedding", "POST", "Embed texts", "As OpenAI's embeddings, if the model can. Never captured.", ("input",), ("model", "input")
    ),
    "/models": About("list_models", "GET", "List what is served", "vLLM's list, and the public names of the policy and its versions."),
}


def described(about: About, prefix: str) -> dict[str, Any]:
    """The operation's part that FastAPI can't know."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if about.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    extra: dict[str, Any] = {"responses": {"200": {"description": "As vLLM answered.", "content": content}}}
    names = [
        name
        for name in ("episode_id", "response_id")
        if name in prefix or (name == "response_id" and "response" in about.name and not about.required)
    ]
    if names:
        extra["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if about.properties:
        schema = {
            "type": "object",
            "required": list(about.required),
            "properties": {name: _FIELDS[name] for name in about.properties},
            "additionalProperties": True,
        }
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return extra
