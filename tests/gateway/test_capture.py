"""What is kept of a call: the tokens that vLLM reports for the same request, and how they were sampled."""

import itertools
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_vllm import Fault, Said

ASK = [{"role": "user", "content": "Where is Ana's flight?"}]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def _fixed(body: dict) -> Said:
    return Said("I look.", [("search", '{"query": "Ana"}')]) if body.get("tools") else Said("At gate B12.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{}, {"tools": [TOOL]}, {"max_tokens": 2}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
def test_a_chats_tokens_are_those_that_vllm_reports(mock, upstream, capture, body, stream):
    mock.say = _fixed
    episode = capture()
    direct = httpx.post(f"{upstream}/chat/completions", json={"messages": ASK, **body, "logprobs": True, "return_token_ids": True}).json()
    httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, **body, "stream": stream})
    (call,) = episode.calls()
    choice = direct["choices"][0]
    assert call.prompt_ids == direct["prompt_token_ids"]
    assert call.completion_ids == choice["token_ids"]
    assert call.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert call.finish_reason == choice["finish_reason"]
    assert call.action["content"] == choice["message"]["content"]
    functions = [one["function"] for one in call.action.get("tool_calls", [])]
    assert functions == [one["function"] for one in choice["message"].get("tool_calls", [])]
    assert (call.messages, call.tools, call.policy) == (ASK, body.get("tools", []), "mock@0")
    assert call.seconds > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_tokens_are_those_of_the_same_chat(mock, upstream, capture, stream):
    mock.say = _fixed
    episode = capture()
    direct = httpx.post(
        f"{upstream}/chat/completions", json={"messages": ASK, "logprobs": True, "return_token_ids": True, "tools": [TOOL]}
    ).json()
    tool = {"type": "function", "name": "search", "parameters": {"type": "object"}}
    answer = httpx.post(f"{episode.base_url}/responses", json={"input": ASK[0]["content"], "tools": [tool], "stream": stream})
    assert answer.status_code == 200
    (call,) = episode.calls()
    choice = direct["choices"][0]
    assert call.prompt_ids == direct["prompt_token_ids"]
    assert call.completion_ids == choice["token_ids"]
    assert call.logprobs == [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (call.messages, call.tools, call.finish_reason) == (ASK, [TOOL], "tool_calls")
    assert call.action["content"] == "I look."
    assert call.action["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "Ana"}'}
    assert "raw_message_tokens" not in answer.text


def test_a_response_that_goes_on_has_its_history_as_chat_messages(capture):
    episode = capture()
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where?"}, {"type": "input_image", "image_url": "data:x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "B12"},
    ]
    httpx.post(f"{episode.base_url}/responses", json={"instructions": "Be kind.", "input": given})
    calls = [{"id": name, "type": "function", "function": {"name": "search", "arguments": "{}"}} for name in ("c1", "c2")]
    parts = [{"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    assert episode.calls()[0].messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "B12"},
    ]


def test_logprobs_that_cant_be_had_leave_the_response_as_it_is(mock, capture, caplog):
    episode = capture(sampling={"temperature": 0.5})
    assert httpx.post(f"{episode.base_url}/responses", json={"input": "a"}).json()["status"] == "completed"
    (call,) = episode.calls()
    assert (call.temperature, call.logprobs) == (0.5, None)
    assert call.completion_ids
    assert "for 1.0 only" in caplog.text
    mock.seen.clear()
    other = capture()
    mock.faults = [None, Fault(status=400)]
    assert httpx.post(f"{other.base_url}/responses", json={"input": "a"}).json()["status"] == "completed"
    assert other.calls()[0].logprobs is None
    assert [one.path for one in mock.seen] == ["/v1/responses", "/v1/completions"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon", [0, 1, 2], ["One", "Two three"]], ids=str)
def test_a_completions_tokens_are_those_that_vllm_reports(mock, upstream, capture, prompt, stream):
    mock.say = _fixed
    mock.encode("a b c d")
    episode = capture()
    direct = httpx.post(f"{upstream}/completions", json={"prompt": prompt, "n": 2, "logprobs": 0, "return_token_ids": True}).json()
    httpx.post(f"{episode.base_url}/completions", json={"prompt": prompt, "n": 2, "stream": stream})
    calls = episode.calls()
    for call, choice in zip(calls, direct["choices"], strict=True):
        assert call.prompt_ids == choice["prompt_token_ids"]
        assert call.completion_ids == choice["token_ids"]
        assert call.logprobs == choice["logprobs"]["token_logprobs"]
        assert call.action == {"role": "assistant", "content": choice["text"]}
    if len(calls) == 4:
        assert [call.messages[0]["content"] for call in calls] == ["One", "One", "Two three", "Two three"]
    assert [call.id.rsplit("-", 1)[1] for call in calls] == [str(index) for index in range(len(calls))]


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_a_call(capture, stream):
    episode = capture()
    httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "n": 3, "stream": stream})
    calls = episode.calls()
    assert len({tuple(call.completion_ids) for call in calls}) == 3
    assert all(call.prompt_ids == calls[0].prompt_ids and call.messages == ASK for call in calls)
    assert len({call.id for call in calls}) == 3


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_calls_of_an_episode_are_sampled_as_the_gateway_says(mock, capture, path):
    asked = {
        "messages": ASK,
        "prompt": "a",
        "input": "a",
        "temperature": 0.1,
        "top_p": 0.5,
        "seed": 7,
        "max_tokens": 3,
        "frequency_penalty": 1.0,
    }
    episode = capture()
    httpx.post(episode.base_url + path, json=asked)
    sent = mock.seen[0].body
    assert {key: sent[key] for key in NEUTRAL} == NEUTRAL
    assert "seed" not in sent
    assert sent["max_tokens"] == 3
    assert episode.calls()[0].temperature == 1.0
    httpx.post(episode.base_url.replace(f"/episodes/{episode.id}", "") + path, json=asked)
    assert mock.seen[-1].body == {**asked, "model": "mock"}


def test_calls_are_sampled_as_the_client_asks_if_the_gateway_leaves_it_to_them(mock, capture):
    episode = capture(sampling=None)
    httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "temperature": 0.25, "seed": 7})
    assert (mock.seen[0].body["temperature"], mock.seen[0].body["seed"], "top_p" in mock.seen[0].body) == (0.25, 7, False)
    assert episode.calls()[0].temperature == 0.25


def test_a_hidden_reasoning_is_kept_with_its_tokens(mock, capture):
    mock.reasoning_parser, mock.say = True, lambda body: Said("Late.", reasoning="I look.")
    episode = capture()
    for stream in (False, True):
        answer = httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "include_reasoning": False, "stream": stream})
        assert "I look" not in answer.text
        assert "look" not in answer.text
    first, second = episode.calls()
    assert mock.decode(first.completion_ids) == "<think>I look.</think>Late.<|im_end|>\n"
    assert first.completion_ids == second.completion_ids
    assert first.action["reasoning"] == second.action["reasoning"] == "I look."


def test_beams_and_echoes_have_no_tokens(capture):
    episode = capture()
    httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "use_beam_search": True})
    httpx.post(f"{episode.base_url}/completions", json={"prompt": "a b", "echo": True})
    assert [call.completion_ids for call in episode.calls()] == [None, None]


@pytest.mark.parametrize("answer", [b"not json", b"{}", b'{"choices": [{"index": "x"}]}'])
def test_an_answer_in_another_form_passes_and_makes_no_call(mock, capture, answer, caplog):
    episode = capture()
    mock.faults = [Fault(status=200, body=json.loads(answer) if answer != b"not json" else "not json")]
    got = httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK})
    assert got.status_code == 200
    assert episode.calls() == []
    assert "could not be captured" in caplog.text


def test_observations_are_what_each_call_added(capture):
    episode = capture()

    def ask(*messages: dict) -> dict:
        answer = httpx.post(f"{episode.base_url}/chat/completions", json={"messages": messages, "tools": [TOOL]}).json()
        return answer["choices"][0]["message"]

    system, user = {"role": "system", "content": "Be kind."}, ASK[0]
    first = ask(system, user)
    # As some clients send it: the content as parts, empty fields left out, others added.
    sent_back = {"role": "assistant", "content": "", "tool_calls": [{**first["tool_calls"][0], "index": 0}], "refusal": None}
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "B12"}
    second = ask(system, {"role": "user", "content": [{"type": "text", "text": user["content"]}]}, sent_back, result)
    elsewhere = {"role": "user", "content": "Summarise."}
    ask(elsewhere)
    more = {"role": "user", "content": "Sure?"}
    ask(system, user, sent_back, result, second, more)
    ask(system, user, sent_back, {**result, "content": "edited"}, more)
    turns = episode.finish(0.5).turns
    assert [turn.observation for turn in turns] == [[system, user], [result], [elsewhere], [more], [{**result, "content": "edited"}, more]]
    assert [turn.reward for turn in turns] == [0, 0, 0, 0, 0.5]


def test_an_episode_has_each_tool_once_as_it_was_first_offered(capture):
    episode = capture()
    other = {"type": "function", "function": {"name": "answer", "parameters": {}}}
    changed = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "title": "new"}}}
    for tools in ([TOOL], [changed, other]):
        httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK, "tools": tools})
    done = episode.finish()
    assert done.tools == [TOOL, other]
    assert done.env_id == "gateway"
    assert done.scenario.id == "g"
    assert all(turn.trainable for turn in done.turns)
    assert done.success


def test_events_are_cut_wherever_the_bytes_are():
    from art_gym.gateway._streams import Events

    text = b'data: {"a": 1}\n\n: keep-alive\n\ndata: [DONE]\n\nrest'
    whole = [b'data: {"a": 1}\n\n', b": keep-alive\n\n", b"data: [DONE]\n\n"]
    for cuts in itertools.combinations(range(len(text)), 2):
        events = Events()
        pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        assert [event for piece in pieces for event in events.feed(piece)] == whole
        assert events.rest == b"rest"


@pytest.mark.parametrize("model", ["mock", None, "mock@latest"])
def test_an_error_tells_of_the_clients_own_request(mock, capture, model):
    episode = capture()
    asked = {"messages": 3, **({"model": model} if model else {})}
    answer = httpx.post(f"{episode.base_url}/chat/completions", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body.messages"
    assert mock.seen[-1].body == {"messages": 3, **({"model": "mock"} if model else {})}


def test_an_error_that_only_the_captured_request_has_is_told_of(mock, capture):
    episode = capture()
    mock.faults = [Fault(status=400)]
    answer = httpx.post(f"{episode.base_url}/chat/completions", json={"messages": ASK})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the mock fails as told")
    assert episode.calls() == []


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_a_call_is_in_the_episode_before_the_client_knows_of_its_end(mock, capture, path):
    episode = capture()
    mock.hold_end = True
    with httpx.stream("POST", episode.base_url + path, json={"messages": ASK, "prompt": "a", "stream": True}, timeout=10) as answer:
        got = ""
        for text in answer.iter_text():
            got += text
            if '"finish_reason":"stop"' in got and not mock.go.is_set():
                assert len(episode.calls()) == 1
                mock.go.set()
    assert mock.go.is_set()
    (call,) = episode.calls()
    assert not call.abandoned


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "name", "a"]), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ["messages", "prompt", "input", "instructions", "tools", "n", "stream", "logprobs", "return_token_ids", "temperature", "model"]
_MORE = ["use_beam_search", "echo", "include_reasoning", "top_logprobs", "stream_options", "background", "seed", "enable_response_messages"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/chat/completions", "/completions", "/responses", "/embeddings"]),
    body=st.dictionaries(st.sampled_from(_FIELDS + _MORE), _JSON, max_size=5) | _JSON,
)
def test_no_body_brings_the_gateway_down(stage, path, body):
    # As clients may send it: with NaN, and with halves of surrogate pairs as escapes.
    answer = stage.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.fixture
def stage(capture):
    with httpx.Client(base_url=capture(limits={"calls_per_episode": 1000}).base_url, timeout=20) as client:
        yield client
