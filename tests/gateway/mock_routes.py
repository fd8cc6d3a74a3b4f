"""The routes of the stand-in for vLLM: the keys, their order and the chunks are those of vLLM 0.32."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from mock_answers import Stream, calls_of, cancelled_with_the_client, content_of, paced
from mock_responses import responses
from mock_vllm import END, FINGERPRINT, Fault, MockVLLM, Sampled, Seen, error
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

Answer = Callable[[dict[str, Any], str], Response]


def routes(mock: MockVLLM) -> list[Route]:
    """All of them."""

    def post(path: str, answer: Callable[[MockVLLM, dict[str, Any], str, Fault | None], Awaitable[Response]]) -> Route:
        async def handle(request: Request) -> Response:
            if request.headers.get("content-type", "").split(";")[0] != "application/json":
                return error(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
            raw = await request.body()
            try:
                body = json.loads(raw)
            except ValueError:
                return error(400, "1 validation error:\n  {'type': 'json_invalid'}", "Bad Request", "body.1")
            mock.seen.append(Seen(path, dict(request.headers), body))
            fault = mock.faults.pop(0) if mock.faults else None
            if fault is not None and not fault.breaks:
                return JSONResponse(fault.body or error_body(fault.status), fault.status)
            if fault is not None and not (body.get("stream") and fault.after_chunks):
                raise RuntimeError("the connection is broken off")
            if (name := mock.serves(body.get("model"))) is None:
                return error(404, f"The model `{body['model']}` does not exist.", "NotFoundError", "model")
            if (refused := _refused(path, body)) is not None:
                return refused
            try:
                return await answered(request, answer(mock, body, name, fault), body)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as problem:
                # vLLM validates bodies; what the mock stumbles on, it would refuse.
                return error(400, f"1 validation error:\n  {problem!r}", "Bad Request")

        async def answered(request: Request, work: Awaitable[Response], body: dict[str, Any]) -> Response:
            if body.get("stream"):
                return await work
            return await cancelled_with_the_client(mock, work, request.receive) or Response(status_code=499)

        return Route(path, handle, methods=["POST"])

    async def models(request: Request) -> Response:
        cards = [_card(mock.model, "/models/mock", None, mock.max_model_len)]
        return JSONResponse({"object": "list", "data": cards + [_card(name, path, mock.model, None) for name, path in mock.adapters.items()]})

    async def load(request: Request) -> Response:
        body = await request.json()
        if body["lora_name"] in mock.adapters and not body.get("load_inplace"):
            return error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.", "InvalidUserInput")
        mock.adapters[body["lora_name"]] = body["lora_path"]
        mock.done.append(f"load {body['lora_name']}")
        return PlainTextResponse(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    async def unload(request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if mock.adapters.pop(name, None) is None:
            return error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        mock.done.append(f"unload {name}")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def control(request: Request) -> Response:
        raw = await request.body()
        mock.done.append(json.loads(raw)["method"] if request.url.path == "/collective_rpc" else request.url.path.strip("/"))
        return JSONResponse({"results": [None]})

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(f"vllm:num_requests_running {mock.running}\n")

    async def stored(request: Request) -> Response:
        found = f"Response with id '{request.path_params['id']}' not found."
        return error(404, found, "invalid_request_error", "response_id")

    return [
        post("/v1/chat/completions", _chat),
        post("/v1/completions", _completions),
        post("/v1/responses", responses),
        post("/v1/embeddings", _embeddings),
        Route("/v1/responses/{id}", stored),
        Route("/v1/responses/{id}/cancel", stored, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/load_lora_adapter", load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload, methods=["POST"]),
        *(
            Route(path, control, methods=["POST"])
            for path in ("/collective_rpc", "/reset_prefix_cache", "/sleep", "/wake_up", "/pause", "/resume")
        ),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


def error_body(status: int) -> dict[str, Any]:
    return {"error": {"message": "the mock fails as told", "type": "InternalServerError", "param": None, "code": status}}


def _refused(path: str, body: dict[str, Any]) -> Response | None:
    if path == "/v1/chat/completions":
        if not isinstance(body.get("messages"), list):
            return error(400, "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages')}", "Bad Request", "body.messages")
        if body.get("top_logprobs") and not body.get("logprobs"):
            return error(400, "when using `top_logprobs`, `logprobs` must be set to true.", "BadRequestError", "top_logprobs")
    if body.get("stream_options") and not body.get("stream") and path != "/v1/responses":
        return error(400, "Stream options can only be defined when `stream=True`.", "BadRequestError", "stream_options")
    return None


def _card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 1,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": length,
        "permission": [{"id": "modelperm-1", "object": "model_permission", "allow_sampling": True}],
    }


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **details}


def _sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


async def _chat(mock: MockVLLM, body: dict[str, Any], name: str, fault: Fault | None) -> Response:
    prompt = mock.encode(mock.render(body["messages"], body.get("tools") or ()))
    if len(prompt) >= mock.max_model_len:
        text = f"This model's maximum context length is {mock.max_model_len} tokens. However, your prompt has {len(prompt)} tokens."
        return error(400, text, "BadRequestError", "input_tokens")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    choices = [mock.sample(prompt, body, most) for _ in range(body.get("n") or 1)]
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time()), "model": name}
    if body.get("stream"):
        return Stream(mock, _chat_chunks(mock, body, {**head, "object": "chat.completion.chunk"}, choices), fault)
    async for _ in paced(mock, max(len(one.ids) for one in choices)):
        pass
    hidden = mock.reasoning_parser and body.get("include_reasoning") is False
    return JSONResponse(
        {
            **head,
            "choices": [_chat_choice(index, one, body, hidden) for index, one in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage(len(prompt), sum(len(one.ids) for one in choices)),
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _chat_choice(index: int, one: Sampled, body: dict[str, Any], hidden: bool) -> dict[str, Any]:
    calls = calls_of(one)
    reasoning = one.said.reasoning if one.said.reasoning and not hidden else None
    message: dict[str, Any] = {"role": "assistant", "content": content_of(one), "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, **({"tool_calls": calls} if calls else {}), "reasoning": reasoning}
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": one.logprobs_content(body.get("top_logprobs") or 0)} if body.get("logprobs") and not hidden else None,
        "finish_reason": _finish(one, body, bool(calls)),
        "stop_reason": None,
        "token_ids": one.ids if body.get("return_token_ids") and not hidden else None,
        "routed_experts": None,
    }


def _finish(one: Sampled, body: dict[str, Any], called: bool) -> str:
    return "tool_calls" if called and not isinstance(body.get("tool_choice"), dict) else one.finish


async def _chat_chunks(mock: MockVLLM, body: dict[str, Any], head: dict[str, Any], choices: list[Sampled]) -> AsyncIterator[str]:
    options = body.get("stream_options") or {}
    usage, continuous = options.get("include_usage"), options.get("include_usage") and options.get("continuous_usage_stats")
    prompt = choices[0].prompt
    ids, hidden = body.get("return_token_ids"), mock.reasoning_parser and body.get("include_reasoning") is False
    for index in range(len(choices)):
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        counted = {"usage": _usage(len(prompt), 0)} if continuous else {}
        yield _sse({**head, "choices": [first], **counted, "prompt_token_ids": prompt if ids else None, "prompt_text": None})
    deltas = [_deltas(one) for one in choices]
    async for position in paced(mock, max(len(one.ids) for one in choices)):
        for index, one in enumerate(choices):
            if position >= len(one.ids):
                continue
            last = position == len(one.ids) - 1
            span = slice(position, position + 1)
            logprobs = {"content": one.logprobs_content(body.get("top_logprobs") or 0, span)} if body.get("logprobs") and not hidden else None
            delta = deltas[index][position]
            if hidden and delta is not None and "reasoning" in delta:
                delta = None
            if delta is None:
                if not last and logprobs is None and (not ids or hidden):
                    continue
                delta = {}
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": logprobs,
                "finish_reason": _finish(one, body, bool(calls_of(one))) if last else None,
            }
            if last:
                choice["stop_reason"] = None
            choice["token_ids"] = one.ids[span] if ids and not hidden else None
            chunk = {**head, "choices": [choice]}
            if continuous:
                chunk["usage"] = _usage(len(prompt), position + 1)
            if last and not usage:
                chunk["system_fingerprint"] = FINGERPRINT
            yield _sse(chunk)
    if usage:
        total = _usage(len(prompt), sum(len(one.ids) for one in choices))
        shown = {key: value for key, value in total.items() if value is not None}
        yield _sse({**head, "choices": [], "usage": shown, "system_fingerprint": FINGERPRINT})
    if mock.hold_end:
        await mock.go.wait()
    yield "data: [DONE]\n\n"


def _deltas(one: Sampled) -> list[dict[str, Any] | None]:
    """What each token adds to the message; None where it adds nothing, as within the marks of a call."""
    deltas: list[dict[str, Any] | None] = []
    thinking = bool(one.said.reasoning)
    within, number = False, -1
    calls = calls_of(one)
    for piece in one.pieces():
        if piece == END:
            deltas.append({"content": ""} if not calls else None)
        elif thinking:
            thinking = "</think>" not in piece
            plain = piece.replace("<think>", "").replace("</think>", "")
            deltas.append({"reasoning": plain} if plain else None)
        elif piece == "<tool_call>" and calls:
            within, number = True, number + 1
            call = calls[number]
            named = {"id": call["id"], "type": "function", "index": number, "function": {"name": call["function"]["name"]}}
            deltas.append({"tool_calls": [named]})
        elif piece == "</tool_call>" and within:
            within = False
            arguments = calls[number]["function"]["arguments"]
            deltas.append({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
        else:
            deltas.append(None if within else {"content": piece})
    return deltas


async def _completions(mock: MockVLLM, body: dict[str, Any], name: str, fault: Fault | None) -> Response:
    given = body.get("prompt")
    many = isinstance(given, list) and given and not isinstance(given[0], int)
    prompts = [one if isinstance(one, list) else mock.encode(one) for one in (given if many else [given])]
    if any(len(prompt) + 1 > mock.max_model_len for prompt in prompts):
        return error(400, f"This model's maximum context length is {mock.max_model_len} tokens.", "BadRequestError", "input_tokens")
    most = body["max_tokens"] if body.get("max_tokens") is not None else 16
    choices = [mock.sample(prompt, body, most) for prompt in prompts for _ in range(body.get("n") or 1)]
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": name}
    if body.get("stream"):
        return Stream(mock, _completion_chunks(mock, body, head, choices), fault)
    async for _ in paced(mock, max(len(one.ids) for one in choices)):
        pass
    ids = body.get("return_token_ids")
    return JSONResponse(
        {
            **head,
            "choices": [
                {
                    "index": index,
                    "text": ("" if ids or not body.get("echo") else mock.decode(one.prompt)) + one.text,
                    "logprobs": _completion_logprobs(one, slice(None)) if body.get("logprobs") is not None else None,
                    "finish_reason": one.finish,
                    "stop_reason": None,
                    "token_ids": one.ids if ids else None,
                    "prompt_logprobs": _prompt_logprobs(mock, one.prompt) if body.get("prompt_logprobs") is not None else None,
                    "prompt_token_ids": one.prompt if ids else None,
                    "routed_experts": None,
                }
                for index, one in enumerate(choices)
            ],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": _usage(sum(map(len, prompts)), sum(len(one.ids) for one in choices)),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def _prompt_logprobs(mock: MockVLLM, prompt: list[int]) -> list[Any]:
    entries: list[Any] = [None]
    for position, token in enumerate(prompt[1:], 1):
        entries.append({str(token): {"logprob": mock.logprob(position, token), "rank": 1, "decoded_token": mock.pieces[token]}})
    return entries


def _completion_logprobs(one: Sampled, span: slice) -> dict[str, Any]:
    pieces, logprobs = one.pieces()[span], one.logprobs[span]
    offsets = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
    top = [{piece: logprob} for piece, logprob in zip(pieces, logprobs, strict=True)]
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": pieces, "top_logprobs": top}


async def _completion_chunks(mock: MockVLLM, body: dict[str, Any], head: dict[str, Any], choices: list[Sampled]) -> AsyncIterator[str]:
    ids, usage = body.get("return_token_ids"), (body.get("stream_options") or {}).get("include_usage")
    async for position in paced(mock, max(len(one.ids) for one in choices)):
        for index, one in enumerate(choices):
            if position >= len(one.ids):
                continue
            last, span = position == len(one.ids) - 1, slice(position, position + 1)
            choice = {
                "index": index,
                "text": mock.decode(one.ids[span]).removesuffix(END),
                "logprobs": _completion_logprobs(one, span) if body.get("logprobs") is not None else None,
                "finish_reason": one.finish if last else None,
                "stop_reason": None,
                "prompt_token_ids": one.prompt if ids and position == 0 else None,
                "token_ids": one.ids[span] if ids else None,
            }
            yield _sse({**head, "choices": [choice], **({"system_fingerprint": FINGERPRINT} if last and not usage else {})})
    if usage:
        total = _usage(len(choices[0].prompt), sum(len(one.ids) for one in choices))
        shown = {key: value for key, value in total.items() if value is not None}
        yield _sse({**head, "choices": [], "usage": shown, "system_fingerprint": FINGERPRINT})
    if mock.hold_end:
        await mock.go.wait()
    yield "data: [DONE]\n\n"


async def _embeddings(mock: MockVLLM, body: dict[str, Any], name: str, fault: Fault | None) -> Response:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    data = [{"index": index, "object": "embedding", "embedding": [0.5, float(len(text))]} for index, text in enumerate(texts)]
    return JSONResponse({"id": "embd-1", "object": "list", "created": 1, "model": name, "data": data, "usage": _usage(1, 0)})
