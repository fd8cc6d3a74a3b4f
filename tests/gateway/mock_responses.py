"""The responses API of the stand-in for vLLM: as vLLM 0.32 answers where no built-in tools run."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from mock_answers import Stream, calls_of, content_of, paced
from mock_vllm import END, Fault, MockVLLM, Sampled
from starlette.responses import JSONResponse, Response


async def responses(mock: MockVLLM, body: dict[str, Any], name: str, fault: Fault | None) -> Response:
    prompt = mock.encode(mock.render(_as_messages(body), body.get("tools") or ()))
    one = mock.sample(prompt, {**body, "messages": _as_messages(body)}, body.get("max_output_tokens"))
    whole = _response(mock, body, name, one)
    if body.get("stream"):
        return Stream(mock, _response_events(mock, body, whole, one), fault)
    async for _ in paced(mock, len(one.ids)):
        pass
    return JSONResponse(whole)


def _as_messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message":
            messages.append({"role": item["role"], "content": item["content"]})
    return messages


def _items(one: Sampled) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if text := content_of(one):
        content = [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
        items.append(
            {"id": f"msg_{uuid.uuid4().hex}", "content": content, "role": "assistant", "status": "completed", "type": "message", "phase": None}
        )
    for call in calls_of(one):
        items.append(
            {
                "arguments": call["function"]["arguments"],
                "call_id": call["id"],
                "name": call["function"]["name"],
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "namespace": None,
                "status": "completed",
            }
        )
    return items


def _response(mock: MockVLLM, body: dict[str, Any], name: str, one: Sampled) -> dict[str, Any]:
    shown = body.get("enable_response_messages")
    sampled = [{"message": one.text, "tokens": one.ids, "type": "raw_message_tokens"}] if one.ids else []
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "created_at": int(time.time()),
        "incomplete_details": None if one.whole else {"reason": "max_output_tokens"},
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": name,
        "object": "response",
        "output": _items(one),
        "parallel_tool_calls": True,
        "temperature": body.get("temperature") or 1.0,
        "tool_choice": body.get("tool_choice", "auto" if body.get("tools") else "none"),
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p") or 1.0,
        "background": False,
        "max_output_tokens": body.get("max_output_tokens") or 1000,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": "completed" if one.whole else "incomplete",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": len(one.prompt),
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []},
            "output_tokens": len(one.ids),
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": len(one.prompt) + len(one.ids),
        },
        "user": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": [{"message": mock.decode(one.prompt), "tokens": one.prompt, "type": "raw_message_tokens"}] if shown else None,
        "output_messages": sampled if shown else None,
    }


async def _response_events(mock: MockVLLM, body: dict[str, Any], whole: dict[str, Any], one: Sampled) -> AsyncIterator[str]:
    number = -1

    def event(kind: str, **data: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\ndata: {json.dumps({**data, 'sequence_number': number, 'type': kind}, separators=(',', ':'))}\n\n"

    begun = {**whole, "output": [], "status": "in_progress", "usage": None, "input_messages": None, "output_messages": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        here = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield event("response.output_item.added", item={**item, "content": [], "status": "in_progress"}, output_index=index)
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            yield event("response.content_part.added", **here, content_index=0, part=part)
            text = item["content"][0]["text"]
            async for position in paced(mock, len(one.ids)):
                piece = one.pieces()[position]
                if piece in ("<tool_call>", END):
                    break
                yield event("response.output_text.delta", **here, content_index=0, delta=piece, logprobs=[])
            yield event("response.output_text.done", **here, content_index=0, logprobs=[], text=text)
            yield event("response.content_part.done", **here, content_index=0, part={**part, "text": text, "logprobs": None})
        else:
            yield event("response.output_item.added", item={**item, "arguments": "", "status": "in_progress"}, output_index=index)
            yield event("response.function_call_arguments.delta", **here, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **here, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", item=item, output_index=index)
    yield event("response.completed", response=whole)
