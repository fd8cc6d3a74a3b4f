"""The chat agent: what it asks for, what it keeps of the answer, and what it makes of errors."""

import asyncio
import gc
import json
import math
import socket
import time
from contextlib import asynccontextmanager
from email.utils import formatdate

import pytest
from aiohttp import web

import art_gym_agents._client as client
import art_gym_agents._responses as responses
from art_gym import Runner, Scenario
from art_gym.errors import ContextOverflow, EngineError, PolicyError, UsageError
from art_gym_agents import ChatAgent

# The texts of vLLM 0.32 for a prompt that leaves no room.
OVERFLOWS = [
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which exceeds this limit "
    "even without any output tokens. Please reduce the length of the input prompt.",
    "The decoder prompt (length 2048) plus the number of requested output tokens (at least 1) is longer than the maximum model length of 2048. "
    "Make sure that `max_model_len` is no smaller than the number of text tokens (prompt + requested output tokens).",
    "Input length (2050) exceeds model's maximum context length (2048).",
]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client, "_FIRST_DELAY", 0.01)


@asynccontextmanager
async def chat(endpoint_or_url, **options):
    url = endpoint_or_url if isinstance(endpoint_or_url, str) else endpoint_or_url.url
    agent = ChatAgent(url, "served", **options)
    try:
        yield agent
    finally:
        await agent.close()


async def test_the_request_asks_for_exact_tokens_from_the_plain_distribution(endpoint, make_state):
    state = make_state()
    async with chat(endpoint, temperature=0.7, max_tokens=64, api_key="secret") as agent:
        await agent.act(state)
    assert endpoint.requests == [
        {
            "model": "served",
            "messages": state.messages,
            "tools": state.tools,
            "temperature": 0.7,
            "top_p": 1.0,
            "max_tokens": 64,
            "logprobs": True,
            "return_token_ids": True,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
    ]
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"


async def test_other_providers_get_standard_fields_only(endpoint, make_state):
    async with chat(endpoint, exact_tokens=False, extra_body={"top_p": None, "user": "me"}) as agent:
        await agent.act(make_state(tools=()))
    assert set(endpoint.requests[0]) == {"model", "messages", "temperature", "max_tokens", "user"}


async def test_a_seeded_agent_sends_the_episodes_own_seeds(endpoint, make_state):
    async with chat(endpoint, seeded=True) as agent:
        for state in (make_state(seed=1), make_state(seed=1), make_state(seed=2), make_state(seed=1, member=1)):
            await agent.act(state)
    first, again, other_scenario, other_member = (request["seed"] for request in endpoint.requests)
    assert first == again
    assert len({first, other_scenario, other_member}) == 3


async def test_the_reply_holds_the_tokens_as_sampled(endpoint, make_state):
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    assert (reply.prompt_ids, reply.completion_ids, reply.logprobs) == ([1, 5, 6], [7, 8, 2], [-0.5, -0.25, 0.0])
    assert (reply.finish_reason, reply.policy) == ("tool_calls", "served")


@pytest.mark.parametrize("content", [None, "", "Let me see."])
async def test_the_action_has_the_fields_of_the_history_and_no_others(endpoint, make_state, make_completion, content):
    calls = [{"id": "a", "type": "function", "index": 0, "function": {"name": "guess", "arguments": '{"number": 3', "odd": 1}}]
    endpoint.script = [make_completion({"content": content, "tool_calls": calls})]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    assert reply.action == {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "guess", "arguments": '{"number": 3'}}],
    }


@pytest.mark.parametrize("given", [{}, {"id": None}, {"id": ""}, {"id": 7}], ids=repr)
async def test_a_call_without_an_id_is_given_one(endpoint, make_state, make_completion, given):
    calls = [{**given, "type": "function", "function": {"name": "guess", "arguments": "{}"}} for _ in range(2)]
    endpoint.script = [make_completion({"content": None, "tool_calls": calls})]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    first, second = (made["id"] for made in reply.action["tool_calls"])
    assert isinstance(first, str)
    assert first
    assert first != second


async def test_a_text_has_no_tool_calls_and_reasoning_is_kept(endpoint, make_state, make_completion):
    endpoint.script = [
        make_completion({"content": "Hm.", "tool_calls": []}, finish_reason="stop"),
        make_completion({"content": "Hm.", "reasoning": "I think."}, finish_reason=None),
    ]
    async with chat(endpoint) as agent:
        first, second = await agent.act(make_state()), await agent.act(make_state())
    assert first.action == {"role": "assistant", "content": "Hm."}
    assert second.action == {"role": "assistant", "content": "Hm.", "reasoning": "I think."}
    assert second.finish_reason == "stop"


async def test_the_recorded_version_is_the_one_set_when_it_was_asked(endpoint, make_state):
    endpoint.script = [0.2]
    async with chat(endpoint, version="tiny@1") as agent:
        asked = asyncio.create_task(agent.act(make_state()))
        await asyncio.sleep(0.1)
        agent.version = "tiny@2"
        assert (await asked).policy == "tiny@1"
        assert (await agent.act(make_state())).policy == "tiny@2"


async def test_without_token_ids_the_reply_has_none(endpoint, make_state, make_completion):
    endpoint.script = [make_completion(token_ids=None, logprobs=None, prompt=None)]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    assert (reply.prompt_ids, reply.completion_ids, reply.logprobs) == (None, None, None)


@pytest.mark.parametrize("logprobs", [(), None])
async def test_an_empty_completion_is_legal(endpoint, make_state, make_completion, logprobs):
    endpoint.script = [make_completion({"content": ""}, finish_reason="length", token_ids=(), logprobs=logprobs)]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    assert (reply.action["content"], reply.finish_reason, reply.completion_ids, reply.logprobs) == ("", "length", [], [])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"logprobs": (-0.5,)}, "3 token ids but 1 logprobs"),
        ({"logprobs": (-0.5, math.nan, 0.0)}, "isn't finite"),
        ({"logprobs": (-0.5, None, 0.0)}, "isn't finite"),
        ({"logprobs": ("-0.5", -0.25, 0.0)}, "isn't a chat completion"),
        ({"finish_reason": "abort"}, "broke off"),
        ({"choices": []}, "isn't a chat completion"),
        ({"choices": None}, "isn't a chat completion"),
        ({"token_ids": (1, 2.5, 3)}, "isn't a chat completion"),
        ({"message": {"tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]}}, "isn't a chat completion .*`name`"),
    ],
)
async def test_a_broken_answer_is_a_policy_error(endpoint, make_state, make_completion, answer, words):
    endpoint.script = [make_completion(**answer)]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match=words):
            await agent.act(make_state())


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"", b"\xff", b'{"choices": ' + b"[" * 200_000], ids=lambda body: str(body[:10]))
async def test_an_answer_that_is_no_object_is_a_policy_error(endpoint, make_state, body):
    endpoint.script = [(200, body, {})]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="JSON"):
            await agent.act(make_state())


async def test_what_an_error_shows_of_an_odd_answer_is_its_beginning(endpoint, make_state):
    endpoint.script = [(200, json.dumps({"detail": "x" * 5000}).encode(), {})]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError) as caught:
            await agent.act(make_state())
    assert "choices" in str(caught.value)
    assert '{"detail": "xxx' in str(caught.value)
    assert len(str(caught.value)) < 1000


async def test_a_provider_may_add_fields_and_leave_out_what_is_not_needed(endpoint, make_state):
    endpoint.script = [
        {"choices": [{"message": {"content": "Hm."}}]},
        {"choices": [{"message": {}, "logprobs": None, "finish_reason": None, "score": {"a": [1]}}], "usage": None, "x": [{"y": 1e999}]},
        {
            "choices": [{"message": {"content": "Hm.", "tool_calls": None}, "logprobs": {"tokens": ["a"], "token_logprobs": [-1.0]}}],
            "model": None,
        },
    ]
    async with chat(endpoint) as agent:
        replies = [await agent.act(make_state()) for _ in range(3)]
    assert [reply.action for reply in replies] == [{"role": "assistant", "content": content} for content in ("Hm.", None, "Hm.")]
    assert {(reply.finish_reason, reply.policy, reply.logprobs, reply.completion_ids) for reply in replies} == {("stop", "", None, None)}


async def test_half_of_a_surrogate_pair_is_kept_and_sent_back_as_it_came(endpoint, make_state, make_completion):
    endpoint.script = [make_completion({"content": "a \ud83d b"}, finish_reason="stop")]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
        await agent.act(make_state([{"role": "user", "content": "Begin."}, reply.action]))
    assert reply.action["content"] == "a \ud83d b"
    assert endpoint.requests[1]["messages"][1] == {"role": "assistant", "content": "a \ud83d b"}


async def test_every_text_arrives_as_it_is(endpoint, make_state):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000), 0x1F600, 0x10FFFF]))
    async with chat(endpoint) as agent:
        await agent.act(make_state([{"role": "user", "content": text}]))
    assert endpoint.requests[0]["messages"] == [{"role": "user", "content": text}]


async def test_a_huge_answer_is_read_whole(endpoint, make_state, make_completion):
    ids = list(range(100_000))
    endpoint.script = [make_completion({"content": "x" * 3_000_000}, token_ids=ids, logprobs=[-0.5] * len(ids), prompt=ids)]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state(timeout=60.0))
    assert (len(reply.action["content"]), reply.completion_ids, reply.prompt_ids) == (3_000_000, ids, ids)
    assert reply.logprobs == [-0.5] * len(ids)


@pytest.mark.parametrize("value", [math.nan, math.inf, object()])
def test_an_extra_field_that_json_has_no_form_for_is_refused(value):
    with pytest.raises(UsageError, match="extra_body can't be sent as JSON"):
        ChatAgent("http://127.0.0.1:1/v1", "served", extra_body={"logit_bias": {"5": value}})


async def test_a_temperature_that_is_no_number_is_refused(endpoint, make_state):
    async with chat(endpoint, temperature=math.nan) as agent:
        with pytest.raises(UsageError, match="temperature must be a finite number"):
            await agent.act(make_state())
    assert endpoint.requests == []


# Errors


@pytest.mark.parametrize("text", OVERFLOWS)
async def test_a_prompt_that_leaves_no_room_is_a_context_overflow(endpoint, make_state, make_error, text):
    endpoint.script = [make_error(400, text)]
    async with chat(endpoint) as agent:
        with pytest.raises(ContextOverflow):
            await agent.act(make_state())
    assert len(endpoint.requests) == 1


async def test_openais_code_for_it_counts_too(endpoint, make_state, make_error):
    endpoint.script = [make_error(400, "Too much.", code="context_length_exceeded")]
    async with chat(endpoint) as agent:
        with pytest.raises(ContextOverflow):
            await agent.act(make_state())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, "max_tokens=4096 cannot be greater than max_model_len=2048.", {"param": "max_tokens"}), "lower max_tokens"),
        ((404, "The model `tiny@9` does not exist.", {}), "The model `tiny@9` does not exist.; check the URL"),
        ((401, "Unauthorized", {}), "API key"),
    ],
)
async def test_a_mistake_in_the_setup_is_the_users(endpoint, make_state, make_error, answer, words):
    status, text, more = answer
    endpoint.script = [make_error(status, text, **more)]
    async with chat(endpoint) as agent:
        with pytest.raises(UsageError, match=words):
            await agent.act(make_state())


async def test_another_400_is_a_policy_error_with_the_servers_text_and_no_retry(endpoint, make_state, make_error):
    endpoint.script = [make_error(400, "Can only get item pairs from a mapping.")]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="answered 400: Can only get item pairs"):
            await agent.act(make_state())
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("trouble", [429, 500, 503, "reset"])
async def test_passing_trouble_is_retried(endpoint, make_state, trouble):
    endpoint.script = [trouble, trouble]
    async with chat(endpoint) as agent:
        reply = await agent.act(make_state())
    assert reply.completion_ids == [7, 8, 2]
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("trouble", [500, "reset"])
async def test_lasting_trouble_is_a_policy_error_after_bounded_retries(endpoint, make_state, trouble, monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_DELAY", 0.01)
    endpoint.script = [trouble] * 50
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="8 retries"):
            await agent.act(make_state())
    assert len(endpoint.requests) == 9


@pytest.mark.parametrize("header", ["0.3", lambda: formatdate(time.time() + 2, usegmt=True)])
async def test_retry_after_is_obeyed(endpoint, make_state, header):
    endpoint.script = [(429, {}, {"Retry-After": header if isinstance(header, str) else header()})]
    begin = time.perf_counter()
    async with chat(endpoint) as agent:
        await agent.act(make_state())
    # A date has no fractions of a second.
    assert time.perf_counter() - begin >= 0.3


async def test_a_retry_after_beyond_the_deadline_fails_at_once(endpoint, make_state):
    endpoint.script = [(429, {"error": {"message": "slow down"}}, {"Retry-After": "3600"})]
    begin = time.perf_counter()
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="answered 429: slow down"):
            await agent.act(make_state())
    assert time.perf_counter() - begin < 3


async def test_no_answer_is_a_policy_error_within_the_deadline(endpoint, make_state):
    endpoint.script = [3.0]
    begin = time.perf_counter()
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="no answer within"):
            await agent.act(make_state(timeout=0.4))
    assert time.perf_counter() - begin < 2


async def test_what_is_no_http_is_a_policy_error(make_state, monkeypatch):
    monkeypatch.setattr(client, "_LONGEST_DELAY", 0.01)

    async def babble(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example.org ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server, chat(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1") as agent:
        with pytest.raises(PolicyError, match="the connection broke"):
            await agent.act(make_state())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(("patience", "timeout"), [(0.3, 5.0), (60.0, 0.5)])
async def test_a_dead_endpoint_is_an_engine_error_within_the_deadline(make_state, patience, timeout):
    begin = time.perf_counter()
    async with chat(f"http://127.0.0.1:{free_port()}/v1", patience=patience) as agent:
        with pytest.raises(EngineError, match="nothing answers at http://127"):
            await agent.act(make_state(timeout=timeout))
    assert time.perf_counter() - begin < 3


async def test_an_endpoint_may_be_waited_for_as_long_as_one_likes(make_state, monkeypatch):
    monkeypatch.setattr(client, "_FIRST_DELAY", 1e-5)
    monkeypatch.setattr(client, "_LONGEST_DELAY", 1e-5)
    async with chat(f"http://127.0.0.1:{free_port()}/v1", patience=60.0) as agent:
        with pytest.raises(EngineError, match="nothing answers"):
            await agent.act(make_state(timeout=4.0))  # more than a thousand attempts


async def test_a_server_that_is_away_for_a_moment_is_waited_for(make_state, make_completion):
    port = free_port()

    async def answer(request):
        return web.json_response(make_completion())

    async with chat(f"http://127.0.0.1:{port}/v1") as agent:
        asked = asyncio.create_task(agent.act(make_state()))
        await asyncio.sleep(0.3)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert (await asked).completion_ids == [7, 8, 2]
    await runner.cleanup()


async def test_connections_are_reused(endpoint, make_state):
    async with chat(endpoint) as agent:
        for _ in range(5):
            await agent.act(make_state())
    assert len(endpoint.connections) == 1


async def test_more_than_a_hundred_requests_are_in_flight_at_once(endpoint, make_state):
    endpoint.script = [1.0] * 150
    async with chat(endpoint) as agent:
        await asyncio.gather(*(agent.act(make_state(timeout=30.0)) for _ in range(150)))
    assert endpoint.most_in_flight > 100


async def test_a_closed_agent_can_be_used_again(endpoint, make_state):
    async with chat(endpoint) as agent:
        await agent.act(make_state())
        await agent.close()
        await agent.act(make_state())


async def test_a_request_in_flight_when_the_agent_is_closed_is_sent_again(endpoint, make_state):
    endpoint.script = [10.0]
    async with chat(endpoint) as agent:
        asked = asyncio.create_task(agent.act(make_state(timeout=30.0)))
        while not endpoint.requests:
            await asyncio.sleep(0.01)
        await agent.close()
        assert (await asked).completion_ids == [7, 8, 2]


async def test_a_connection_that_the_server_closed_meanwhile_costs_no_retry(endpoint, make_state, monkeypatch):
    monkeypatch.setattr(client, "RETRIES", 0)
    async with chat(endpoint) as agent:
        await agent.act(make_state())
        endpoint.script = ["reset"]
        await agent.act(make_state())
    assert len(endpoint.requests) == 3


async def test_a_redirect_is_the_users_to_follow(endpoint, make_state):
    endpoint.script = [(307, {}, {"Location": "https://elsewhere.example/v1/chat/completions"})]
    async with chat(endpoint) as agent:
        with pytest.raises(UsageError, match=r"answered 307, pointing to https://elsewhere\.example/v1/chat/completions.*base_url"):
            await agent.act(make_state())


async def test_an_encoding_that_was_not_asked_for_is_a_policy_error_at_once_if_it_is_unknown(endpoint, make_state):
    endpoint.script = [(200, b"x", {"Content-Encoding": "br"})]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="encoded as b'br'"):
            await agent.act(make_state())
    assert len(endpoint.requests) == 1


async def test_an_answer_beyond_all_bounds_is_a_policy_error_at_once(endpoint, make_state, monkeypatch):
    monkeypatch.setattr(responses, "_LARGEST", 100_000)
    endpoint.script = [(200, b"x" * 200_000, {})]
    async with chat(endpoint) as agent:
        with pytest.raises(PolicyError, match="more than 100,000 bytes"):
            await agent.act(make_state())
    assert len(endpoint.requests) == 1


async def test_a_base_url_may_have_a_query(endpoint, make_state):
    async with chat(f"{endpoint.url}/?api-version=3") as agent:
        await agent.act(make_state())
    assert len(endpoint.requests) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the connections that the loops left open
def test_one_agent_serves_any_number_of_loops_and_keeps_none(make_completion, make_state):
    async def once():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            assert (await agent.act(make_state())).completion_ids == [7, 8, 2]

    body = json.dumps(make_completion()).encode()
    port = free_port()
    agent = ChatAgent(f"http://127.0.0.1:{port}/v1", "served")
    for _ in range(20):
        asyncio.run(once())
    gc.collect()
    # Not closed, the last one is still there.
    assert len(agent._client._pools) == 1


def test_a_base_url_with_a_user_name_is_refused_without_showing_it():
    with pytest.raises(UsageError, match="base_url holds a user name") as caught:
        ChatAgent("http://user:secret@127.0.0.1:8000/v1", "served")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["secret\n", "secret\r\nEvil: 1", "sec\0ret"])
def test_an_api_key_that_no_header_can_hold_is_refused_without_showing_it(key):
    with pytest.raises(UsageError, match="api_key") as caught:
        ChatAgent("http://127.0.0.1:8000/v1", "served", api_key=key)
    assert "sec" not in str(caught.value)


def test_a_base_url_without_a_scheme_is_refused():
    with pytest.raises(UsageError, match="must start with http"):
        ChatAgent("127.0.0.1:8000/v1", "served")


# With the runner


async def test_episodes_hold_what_was_sent_and_sampled(endpoint, make_completion):
    def guess(number, prompt):
        arguments = f'{{"number": {number}}}'
        return make_completion(
            {"content": "", "tool_calls": [{"id": f"c{number}", "type": "function", "function": {"name": "guess", "arguments": arguments}}]},
            prompt=prompt,
        )

    endpoint.script = [guess(1, (1, 2)), guess(2, (1, 2, 7, 8, 2, 9))]
    async with chat(endpoint, version="tiny@3") as agent:
        runner = Runner("art_gym/GuessNumber-v0", agent, env_kwargs={"max_turns": 2})
        # Seed 0 hides 14.
        ((episode,),) = [group.episodes async for group in runner.run([Scenario("s", seed=0)])]
    assert [turn.prompt_ids for turn in episode.turns] == [[1, 2], [1, 2, 7, 8, 2, 9]]
    assert [(turn.policy, turn.trainable) for turn in episode.turns] == [("tiny@3", True)] * 2
    assert episode.truncation == "max_turns"
    first, second = endpoint.requests
    assert second["messages"] == [*first["messages"], episode.turns[0].action, *episode.turns[1].observation]
    assert second["messages"] == episode.messages[:-2]


async def test_a_prompt_too_long_on_the_first_turn_is_a_truncated_episode(endpoint, make_error):
    endpoint.script = [make_error(400, OVERFLOWS[0])]
    async with chat(endpoint) as agent:
        groups = [group async for group in Runner("art_gym/GuessNumber-v0", agent).run([Scenario("s", 0), Scenario("t", 1)])]
    first = groups[0].episodes[0]
    assert (first.truncation, first.reward, first.turns, first.failure) == ("context_length", 0.0, [], None)
    assert groups[1].finished


async def test_a_dead_endpoint_stops_a_rollout(make_state):
    async with chat(f"http://127.0.0.1:{free_port()}/v1", patience=0.2) as agent:
        runner = Runner("art_gym/GuessNumber-v0", agent)
        with pytest.raises(EngineError, match="nothing answers"):
            [group async for group in runner.run(Scenario(str(seed), seed) for seed in range(10**9))]
