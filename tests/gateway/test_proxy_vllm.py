"""The same against a real vLLM: what the stand-in is believed to do, vLLM does."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from mock_vllm import serving

from art_gym.engine import Engine, EngineConfig
from art_gym.gateway import GatewaySettings, create_app

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CALL = '<tool_call>\n{"name": "guess", "arguments": {"number": 3}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}}
FLAT = {"type": "function", "name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}
ASK = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."}]


def _forced(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "temperature": 0}


CASES = {
    "text": ("/chat/completions", {"messages": ASK, **_forced("It is three.")}),
    "call": ("/chat/completions", {"messages": ASK, "tools": [TOOL], **_forced(CALL)}),
    "text and call": ("/chat/completions", {"messages": ASK, "tools": [TOOL], **_forced(f"I guess. {CALL}{CALL}")}),
    "cut off": ("/chat/completions", {"messages": ASK, "max_tokens": 2, **_forced("It is three.")}),
    "several": ("/chat/completions", {"messages": ASK, "n": 2, **_forced("It is three.")}),
    "completion": ("/completions", {"prompt": "Guess:", **_forced("It is three.")}),
    "completions": ("/completions", {"prompt": ["Guess:", "Say:"], "n": 2, **_forced("It is three.")}),
    "response": ("/responses", {"input": "Guess.", "instructions": "Play.", **_forced("It is three.")}),
    "response with a call": ("/responses", {"input": "Guess.", "instructions": "Play.", "tools": [FLAT], **_forced(CALL)}),
    "too long": ("/chat/completions", {"messages": [{"role": "user", "content": "word " * 2000}]}),
    "no messages": ("/chat/completions", {}),
    "top_logprobs alone": ("/chat/completions", {"messages": ASK, "top_logprobs": 2}),
    "unknown response": ("/responses", {"input": "Guess.", "previous_response_id": "resp_none"}),
}


@pytest.fixture(scope="module")
def stage(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """(base URL of vLLM, address of a gateway before it, its application)."""
    folder = tmp_path_factory.mktemp("gateway")
    config = EngineConfig(model=str(tiny_model), dtype="float32", max_model_len=512, kv_cache_gib=0.25, max_num_seqs=8)
    with Engine(config, log=folder / "engine.log") as engine:
        app = create_app(GatewaySettings.of(upstream=engine.base_url, model=engine.model, folder=folder, sampling=None))
        with serving(app) as address:
            yield engine.base_url, address, app


def _run(app: Any, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, app.state.loop).result(20)


def _episode(app: Any) -> str:
    store = app.state.gateway.store
    return str(_run(app, store.create(group=None, scenario=None, metadata={}, key_hash="", idempotency=None)).id)


def _same(text: str) -> str:
    text = re.sub(r"(chatcmpl-tool|chatcmpl|cmpl|resp|msg|fc|call|rs)[-_][0-9a-f]+", r"\1", text)
    text = re.sub(r'"(id|call_id|item_id)":"[^"]*"', r'"\1":""', text)
    return re.sub(r'"(created|created_at|cached_tokens)":\s*\d+', r'"\1":0', text)


def _pieces(text: str) -> list[Any]:
    """A stream's events, without their numbers, and with texts in one piece: into how many vLLM cuts them depends on the moment."""
    found: list[Any] = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            found += [line] if line.startswith("data: ") else []
            continue
        event = json.loads(line.removeprefix("data: "))
        event.pop("sequence_number", None)
        last = found[-1] if found and isinstance(found[-1], dict) else {}
        if isinstance(event.get("delta"), str) and event["type"] == last.get("type"):
            last["delta"] += event["delta"]
        elif _is_text(event) and _is_text(last):
            last["choices"][0]["delta"]["content"] += event["choices"][0]["delta"]["content"]
        else:
            found.append(event)
    return found


def _is_text(event: dict[str, Any]) -> bool:
    """Whether a chunk of a chat holds a piece of text, and nothing else."""
    choices = event.get("choices") or [{}]
    return list(choices[0].get("delta") or {}) == ["content"] and choices[0].get("finish_reason") is None and not choices[0].get("logprobs")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_episodes_answers_are_vllms_to_the_letter(stage, name, stream):
    base, address, app = stage
    path, body = CASES[name]
    body = {**body, "stream": stream}
    direct = httpx.post(base + path, json=body, timeout=120)
    answer = httpx.post(f"{address}/episodes/{_episode(app)}/v1{path}", json=body, timeout=120)
    assert answer.status_code == direct.status_code
    told, expected = _same(answer.text), _same(direct.text)
    assert (_pieces(told) == _pieces(expected)) if told.startswith(("data:", "event:")) else (told == expected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["text", "call", "text and call", "cut off", "completion"])
def test_captured_tokens_are_those_that_vllm_reports(stage, name, stream):
    base, address, app = stage
    path, body = CASES[name]
    asked = {"return_token_ids": True, "logprobs": True if path == "/chat/completions" else 0}
    direct = httpx.post(base + path, json={**body, **asked}, timeout=120).json()
    episode = _episode(app)
    httpx.post(f"{address}/episodes/{episode}/v1{path}", json={**body, "stream": stream}, timeout=120)
    (call,) = _run(app, app.state.gateway.store.calls(episode))
    choice = direct["choices"][0]
    logprobs = choice["logprobs"]
    assert call.prompt_ids == direct.get("prompt_token_ids", choice.get("prompt_token_ids"))
    assert call.completion_ids == choice["token_ids"]
    told = logprobs["token_logprobs"] if path == "/completions" else [entry["logprob"] for entry in logprobs["content"]]
    assert call.logprobs == pytest.approx(told, abs=1e-4)
    assert call.finish_reason == choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_tokens_and_logprobs_of_the_same_chat(stage, stream):
    base, address, app = stage
    sampled = {"temperature": 1.0, "top_p": 1.0}
    episode = _episode(app)
    body = {"input": "Guess.", "instructions": "Play.", "tools": [FLAT], "max_output_tokens": 12, "stream": stream, **sampled}
    httpx.post(f"{address}/episodes/{episode}/v1/responses", json=body, timeout=120)
    (call,) = _run(app, app.state.gateway.store.calls(episode))
    assert len(call.logprobs) == len(call.completion_ids) == 12
    assert call.finish_reason == "length"
    # The prompt is that of the chat; and each token's log-probability is what vLLM says of it when it is forced to sample the same.
    chat = {"messages": ASK, "tools": [TOOL], "return_token_ids": True, "max_tokens": 1, **sampled}
    assert httpx.post(f"{base}/chat/completions", json=chat, timeout=120).json()["prompt_token_ids"] == call.prompt_ids
    for index, (token, logprob) in enumerate(zip(call.completion_ids, call.logprobs, strict=True)):
        asked = {"prompt": call.prompt_ids + call.completion_ids[:index], "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [token]}
        told = httpx.post(f"{base}/completions", json={**asked, "return_tokens_as_token_ids": True, **sampled}, timeout=120).json()
        assert logprob == pytest.approx(told["choices"][0]["logprobs"]["top_logprobs"][0][f"token_id:{token}"], abs=1e-3)


def test_a_stream_that_is_left_is_aborted_and_kept(stage):
    base, address, app = stage
    episode = _episode(app)
    body = {"messages": ASK, "stream": True, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True}
    with httpx.stream("POST", f"{address}/episodes/{episode}/v1/chat/completions", json=body, timeout=60) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number > 8:
                break
    for _ in range(500):
        calls = _run(app, app.state.gateway.store.calls(episode))
        if calls:
            break
    (call,) = calls
    assert call.abandoned
    assert 0 < len(call.completion_ids) == len(call.logprobs) < 400
    metrics = base.removesuffix("/v1") + "/metrics"
    for _ in range(200):
        running = re.search(r"^vllm:num_requests_running\{.*\} ([\d.]+)$", httpx.get(metrics).text, re.MULTILINE)
        if running and float(running[1]) == 0:
            return
    raise AssertionError(json.dumps({"running": running and running[1]}))
