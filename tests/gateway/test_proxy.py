"""What a client sees through the gateway is what vLLM answers it."""

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from mock_vllm import Fault, Said, serving

from art_gym.gateway import GatewaySettings, create_app
from art_gym.gateway.store import SessionStore

TOOL = {"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "Where is Ana's flight?"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGE = [{"role": "user", "content": [{"type": "text", "text": "What?"}, PICTURE]}]

CHAT = {
    "text": {},
    "no model": {"model": None},
    "tools": {"tools": [TOOL]},
    "two calls": {"tools": [TOOL], "user": "two calls"},
    "named tool": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "search"}}},
    "required tool": {"tools": [TOOL], "tool_choice": "required"},
    "structured output": {"response_format": SCHEMA},
    "several choices": {"n": 3},
    "image": {"messages": IMAGE},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "token ids": {"return_token_ids": True},
    "both": {"logprobs": True, "return_token_ids": True},
    "cut off": {"max_tokens": 2},
    "cut off in a call": {"tools": [TOOL], "max_completion_tokens": 3},
    "reasoning": {"user": "think"},
    "reasoning hidden": {"user": "think", "include_reasoning": False},
    "odd text": {"messages": [{"role": "user", "content": "\u00e4\U0001f600\u2028"}]},
    "no messages": {"messages": None},
    "top_logprobs alone": {"top_logprobs": 2},
    "unknown model": {"model": "other"},
}
STREAMED = {
    "usage": {"stream_options": {"include_usage": True}},
    "counting": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
COMPLETIONS = {
    "text": {"prompt": "Once upon"},
    "tokens": {"prompt": [0, 1, 2]},
    "several prompts": {"prompt": ["One", "Two"], "n": 2},
    "logprobs": {"prompt": "Once", "logprobs": 1},
    "token ids": {"prompt": "Once", "return_token_ids": True},
    "echo": {"prompt": "Once upon", "echo": True},
    "cut off": {"prompt": "Once", "max_tokens": 1},
}
RESPONSES = {
    "text": {"input": "Hello"},
    "tools": {"input": "Hello", "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}}]},
    "instructions": {"instructions": "Be kind.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]},
    "messages": {"input": "Hello", "enable_response_messages": True},
    "cut off": {"input": "Hello", "max_output_tokens": 2},
}
CASES = [
    *((f"chat, {name}", "/chat/completions", {"model": "mock", "messages": ASK, **body}) for name, body in CHAT.items()),
    *(
        (f"chat streamed, {name}", "/chat/completions", {"model": "mock", "messages": ASK, "stream": True, **body})
        for name, body in (CHAT | STREAMED).items()
    ),
    *((f"completion, {name}", "/completions", {"model": "mock", **body}) for name, body in COMPLETIONS.items()),
    *(
        (f"completion streamed, {name}", "/completions", {"model": "mock", "prompt": "a", "stream": True, **body})
        for name, body in (COMPLETIONS | STREAMED).items()
    ),
    *((f"response, {name}", "/responses", {"model": "mock", **body}) for name, body in RESPONSES.items()),
    *((f"response streamed, {name}", "/responses", {"model": "mock", "stream": True, **body}) for name, body in RESPONSES.items()),
    ("embedding", "/embeddings", {"model": "mock", "input": ["a", "bc"]}),
    ("stream options alone", "/chat/completions", {"model": "mock", "messages": ASK, "stream_options": {"include_usage": True}}),
]


def _say(body: dict) -> Said:
    """The same whenever it's asked the same."""
    if body.get("user") == "think":
        return Said("It is late.", reasoning="I look.")
    if body.get("user") == "two calls":
        return Said("I look.", [("search", '{"a": 1}'), ("search", '{"b": [2]}')])
    if body.get("tools"):
        return Said(calls=[("search", '{"query": "Ana"}')])
    return Said('{"answer": "B12"}' if body.get("response_format") else "At gate B12, \u00e4\U0001f600.")


def _same(text: str) -> str:
    """What differs from call to call, made the same."""
    text = re.sub(r"(chatcmpl-tool|chatcmpl|cmpl|resp|msg|fc)[-_][0-9a-f]+", r"\1", text)
    return re.sub(r'"(created|created_at)":\s*\d+', r'"\1":0', text)


def _without_empty(body: dict) -> dict:
    return {key: part for key, part in body.items() if part is not None}


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_answers_are_vllms_to_the_letter(mock, upstream, capture, path, body):
    mock.say, mock.reasoning_parser = _say, True
    episode = capture(model="mock", aliases=("other",) if body.get("model") == "other" else ())
    body = _without_empty(body)
    direct = httpx.post(upstream + path, json=body)
    for base in (episode.base_url, episode.base_url.replace(f"/episodes/{episode.id}", "")):
        if body.get("model") == "other":
            assert httpx.post(base + path, json=body).status_code == 200  # known here by another name
            continue
        answer = httpx.post(base + path, json=body)
        assert answer.status_code == direct.status_code
        assert answer.headers["content-type"] == direct.headers["content-type"]
        assert _same(answer.text) == _same(direct.text)


def test_the_sdk_works_through_an_episode(capture):
    episode = capture()
    client = openai.OpenAI(base_url=episode.base_url, api_key="none")
    assert client.models.list().data[0].id == "mock"
    first = client.chat.completions.create(model="mock", messages=ASK, tools=[TOOL])
    call = first.choices[0].message.tool_calls[0]
    history = [*ASK, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "B12"}]
    said = ""
    for chunk in client.chat.completions.create(model="mock@latest", messages=history, tools=[TOOL], stream=True):
        said += chunk.choices[0].delta.content or ""
    assert client.responses.create(model="mock@0", input="Hi").output_text
    calls = episode.calls()
    assert [one.kind for one in calls] == ["chat", "chat", "responses"]
    assert calls[1].action["content"] == said
    assert calls[1].prompt_ids[: len(calls[0].prompt_ids)] == calls[0].prompt_ids
    assert calls[1].prompt_ids[len(calls[0].prompt_ids) :][: len(calls[0].completion_ids)] == calls[0].completion_ids


async def test_the_async_sdk_streams_tools_and_responses(capture):
    episode = capture()
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key="none") as client:
        async with client.chat.completions.stream(model="mock", messages=ASK, tools=[TOOL]) as stream:
            done = await stream.get_final_completion()
        assert done.choices[0].message.tool_calls[0].function.name == "search"
        async with client.responses.stream(model="mock", input="Hello") as events:
            response = await events.get_final_response()
    assert [one.action.get("content") for one in await asyncio.to_thread(episode.calls)] == [None, response.output_text]


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (b"{", 400, "no JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b"", 400, "no JSON"),
        (b"\xff\xfe", 400, "no JSON"),
        (b'{"model": 3, "messages": []}', 400, "`model` must be a text"),
        (b'{"model": "nobody", "messages": []}', 404, "mock, mock@latest, mock@0"),
        (b'{"model": "mock@7", "messages": []}', 404, "mock, mock@latest, mock@0"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    ],
)
def test_what_is_no_request_gets_an_openai_error(gateway, sent, status, text):
    answer = httpx.post(f"{gateway}/v1/chat/completions", content=sent, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert text in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_another_content_type_is_vllms_to_refuse(gateway, upstream):
    sent = {"content": b'{"messages": []}', "headers": {"content-type": "text/plain"}}
    direct, answer = (httpx.post(f"{base}/chat/completions", **sent) for base in (upstream, f"{gateway}/v1"))
    assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())


def test_json_that_vllm_takes_although_it_isnt_to_the_letter_arrives(mock, capture):
    episode = capture()
    sent = b'{"messages": [{"role": "user", "content": "\\ud83d"}], "temperature": 0.5, "user": NaN}'
    assert httpx.post(f"{episode.base_url}/chat/completions", content=sent, headers={"content-type": "application/json"}).status_code == 200
    assert mock.seen[0].body["messages"][0]["content"] == "\ud83d"


def test_an_error_of_vllm_passes_with_its_status_and_body(mock, gateway):
    mock.faults = [Fault(status=429, body={"error": {"message": "busy", "type": "RateLimit", "param": None, "code": 429}})]
    answer = httpx.post(f"{gateway}/v1/chat/completions", json={"messages": ASK})
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "busy")


def test_no_server_is_503_and_a_broken_connection_502(mock, make_gateway):
    gone, _ = make_gateway(upstream="http://127.0.0.1:9/v1")
    answer = httpx.post(f"{gone}/v1/chat/completions", json={"messages": ASK})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    here, _ = make_gateway()
    mock.faults = [Fault(breaks=True, after_chunks=2)]
    text = httpx.post(f"{here}/v1/chat/completions", json={"messages": ASK, "stream": True}).text
    assert '"type":"BadGatewayError"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_silent_server_is_504(mock, make_gateway):
    here, _ = make_gateway(silence_seconds=0.3)
    mock.token_seconds = 2.0
    answer = httpx.post(f"{here}/v1/chat/completions", json={"messages": ASK}, timeout=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, 504)


def test_the_clients_key_stays_here_and_the_servers_goes_there(mock, make_gateway):
    here, _ = make_gateway(upstream_key="the key of the server")
    headers = {"Authorization": "Bearer mine", "Cookie": "a=b", "X-Request-Id": "r1", "X-Api-Key": "mine"}
    httpx.post(f"{here}/v1/chat/completions", json={"messages": ASK}, headers=headers)
    seen = mock.seen[0].headers
    assert seen["authorization"] == "Bearer the key of the server"
    assert seen["x-request-id"] == "r1"
    assert not {"cookie", "x-api-key"} & set(seen)


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_a_stream_is_passed_on_as_it_comes(mock, capture, path):
    episode = capture()
    mock.hold_after = 3
    body = {"messages": ASK, "prompt": "a", "input": "a", "stream": True}
    with httpx.stream("POST", episode.base_url + path, json=body, timeout=10) as answer:
        got = ""
        for text in answer.iter_text():
            got += text
            if got.count("w") >= 3 and not mock.go.is_set():
                assert "[DONE]" not in got
                assert "response.completed" not in got
                mock.go.set()
    assert mock.go.is_set()


def _wait(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_a_gateway_that_ends_tells_its_clients_and_keeps_what_was_sampled(mock, upstream, tmp_path, stream):
    mock.hold_after = 2
    app = create_app(GatewaySettings.of(upstream=upstream, model="mock", folder=tmp_path))
    with ThreadPoolExecutor(1) as thread:
        with serving(app, timeout_graceful_shutdown=1) as address:
            episode = httpx.post(f"{address}/episodes", json={}).json()["id"]
            body = {"messages": ASK, "stream": stream}
            answer = thread.submit(httpx.post, f"{address}/episodes/{episode}/v1/chat/completions", json=body, timeout=30)
            _wait(lambda: mock.running == 1)
            time.sleep(0.2)
        answer = answer.result()
    assert answer.status_code == (200 if stream else 503)
    assert "The gateway is shutting down." in answer.text

    async def stored() -> list:
        store = SessionStore(tmp_path)
        try:
            return await store.calls(episode)
        finally:
            await store.close()

    assert [mock.decode(call.completion_ids) for call in asyncio.run(stored())] == (["w1 w2"] if stream else [])


def test_a_client_may_leave_while_its_call_waits_for_a_publish(mock, make_gateway):
    address, app = make_gateway()
    policy, published = app.state.gateway.policy, threading.Event()

    async def publish() -> None:
        async with policy.publishing():
            await asyncio.to_thread(published.wait, 10)

    publishing = asyncio.run_coroutine_threadsafe(publish(), app.state.loop)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK}, timeout=0.3)
    published.set()
    publishing.result(10)
    assert httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK}).status_code == 200
    assert len(mock.seen) == 1
    assert policy.running == 0


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_a_stream_that_the_client_leaves_is_cancelled_and_kept_as_far_as_it_came(mock, capture, path):
    episode = capture()
    mock.hold_after = 2
    body = {"messages": ASK, "prompt": "a", "input": "a", "stream": True}
    with httpx.stream("POST", episode.base_url + path, json=body, timeout=10) as answer:
        got = ""
        for text in answer.iter_text():
            got += text
            if "w2" in got:
                break
    _wait(lambda: mock.cancelled == 1 and mock.running == 0)
    _wait(lambda: len(episode.calls()) == 1)
    (call,) = episode.calls()
    assert call.abandoned
    assert call.finish_reason == "abandoned"
    assert call.action["content"] == "w1 w2"
    if path == "/responses":  # whose tokens vLLM tells with the end
        assert call.completion_ids is None
        assert episode.finish().turns == []
    else:
        assert mock.decode(call.completion_ids) == "w1 w2"
        assert len(call.logprobs) == 2


def test_a_client_that_leaves_before_the_answer_cancels_it(mock, capture):
    episode = capture()
    mock.hold_after = 1
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK}, timeout=0.3)
    _wait(lambda: mock.cancelled == 1)
    assert episode.calls() == []
    mock.hold_after = None
    assert httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK}).status_code == 200


def test_the_same_request_twice_is_two_calls(capture):
    episode = capture()
    for _ in range(2):
        httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK})
    first, second = episode.calls()
    assert first.messages == second.messages
    assert first.completion_ids != second.completion_ids
    assert first.id != second.id


def test_an_episode_that_is_over_or_unknown_takes_no_calls(mock, capture):
    episode = capture()
    episode.finish()
    over = httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK})
    unknown = httpx.post(episode.base_url.replace(episode.id, "ep-none") + "/chat/completions", json={"messages": ASK})
    assert (over.status_code, unknown.status_code) == (409, 404)
    assert "finished" in over.json()["error"]["message"]
    assert mock.seen == []


def test_a_background_response_is_refused_within_an_episode(capture):
    answer = httpx.post(f"{capture().base_url}/responses", json={"input": "a", "background": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


@pytest.mark.parametrize("name", ["../models", "..%2f..%2fcollective_rpc", "a%20b", "%2e%2e"])
def test_no_response_id_leads_elsewhere(mock, gateway, name):
    for method, ending in (("GET", ""), ("POST", "/cancel")):
        answer = httpx.request(method, f"{gateway}/v1/responses/{name}{ending}")
        assert answer.status_code in (200, 404)
        assert mock.seen == mock.done == []


def test_a_stored_response_is_asked_of_vllm(gateway, upstream):
    direct, answer = (httpx.get(f"{base}/responses/resp_1?stream=false") for base in (upstream, f"{gateway}/v1"))
    assert (answer.status_code, answer.json()) == (404, direct.json())


@pytest.mark.parametrize("stream", [False, True])
def test_with_capture_all_a_plain_call_becomes_an_episode(make_gateway, stream):
    here, app = make_gateway(capture_all=True)
    answer = httpx.post(f"{here}/v1/chat/completions", json={"messages": ASK, "stream": stream})
    name = answer.headers["x-art-gym-episode"]
    store = app.state.gateway.store
    calls = asyncio.run_coroutine_threadsafe(store.calls(name), app.state.loop).result(10)
    record = asyncio.run_coroutine_threadsafe(store.get(name), app.state.loop).result(10)
    assert len(calls) == 1
    assert record.state == "finished"
    assert "x-art-gym-episode" not in httpx.post(f"{here}/v1/embeddings", json={"input": "a"}).headers


def test_the_routes_are_documented(gateway):
    document = httpx.get(f"{gateway}/openapi.json").json()
    for prefix in ("/v1", "/episodes/{episode_id}/v1"):
        for path in ("chat/completions", "completions", "responses", "embeddings"):
            body = document["paths"][f"{prefix}/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert body["required"]
    names = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(names) == len(set(names))


def test_many_streams_at_once_end_well(mock, capture):
    episode = capture()
    mock.token_seconds = 0.02

    def one(_: int) -> str:
        return httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "stream": True}, timeout=60).text

    with ThreadPoolExecutor(32) as threads:
        assert all(text.endswith("data: [DONE]\n\n") for text in threads.map(one, range(32)))
    calls = episode.calls()
    assert len(calls) == 32
    assert len({json.dumps(call.completion_ids) for call in calls}) == 32
