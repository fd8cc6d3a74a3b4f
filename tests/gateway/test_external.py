"""Programs that have their own loop play registered environments: through the openai SDK, against a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import time

import pytest
from mock_vllm import Said
from openai import APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

import art_gym_envs  # noqa: F401  registers the environments
from art_gym import Runner, Scenario, evaluate
from art_gym.gateway.external import EpisodeOver, ExternalAgent, OutOfStep

LOOKUP = "art_gym/Lookup-v0"
SCENARIOS = [Scenario("a", 1), Scenario("b", 2)]


def knows_how(body):
    """Searches for the person, and answers what the first mail about the topic says."""
    question = next(message["content"] for message in body["messages"] if message["role"] == "user")
    person, topic = re.fullmatch(r"What is (\w+)'s (.+)\?", question).groups()
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if not results:
        return Said(calls=[("search", json.dumps({"word": person}))])
    value = re.search(rf"From {person}: the {topic} is (\w+)\.", "\n".join(results))
    return Said(calls=[("answer", json.dumps({"value": value[1] if value else "?"}))])


@pytest.fixture
def play(mock, upstream):
    """Plays the scenarios with a program, and gives the episodes."""
    mock.say = knows_how

    def run(program, scenarios=SCENARIOS, env=LOOKUP, **options):
        agent = ExternalAgent(program, upstream, "mock")
        runner = Runner(env, agent, turn_timeout=10, env_kwargs={"topics": 2} if env == LOOKUP else None, **options)
        return [episode for group in runner.collect(scenarios) for episode in group.episodes]

    return run


def plain(episode):
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    messages = episode.messages
    while True:
        message = client.chat.completions.create(model=episode.model, messages=messages, tools=episode.tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = episode.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def asynchronous(episode):
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    messages = episode.messages
    while True:
        answer = await client.chat.completions.create(model=episode.model, messages=messages, tools=episode.tools)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages += await episode.aobserve()


async def streaming(episode):
    client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
    messages = episode.messages
    while True:
        async with client.chat.completions.stream(model=episode.model, messages=messages, tools=episode.tools) as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        calls = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in message.tool_calls
        ]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in calls:
            result = await episode.acall(call["function"]["name"], call["function"]["arguments"], call_id=call["id"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


@pytest.mark.parametrize("program", [plain, asynchronous, streaming])
def test_a_program_plays_an_environment_to_its_end(program, play, mock):
    episodes = play(program, group_size=2)
    assert [episode.failure for episode in episodes] == [None] * 4
    assert all(episode.success and episode.terminated for episode in episodes)
    # 1 for the right answer and 0.2 for having found the mail.
    assert [episode.reward for episode in episodes] == pytest.approx([1.2] * 4)
    for episode in episodes:
        search, answer = episode.turns
        assert search.action["tool_calls"][0]["function"]["name"] == "search"
        assert answer.action["tool_calls"][0]["function"]["name"] == "answer"
        # The program asked with what the environment said, word for word, so that the second prompt goes on from the first answer.
        assert answer.prompt_ids[: len(search.prompt_ids + search.completion_ids)] == search.prompt_ids + search.completion_ids
        for turn in episode.turns:
            assert turn.trainable
            # What the stand-in says a token's probability is, worked out anew.
            at = len(turn.prompt_ids)
            assert turn.logprobs == [mock.logprob(at + index, token) for index, token in enumerate(turn.completion_ids)]
            assert json.loads(turn.action["tool_calls"][0]["function"]["arguments"]) is not None


def test_it_is_evaluated(mock, upstream):
    mock.say = knows_how
    agent = ExternalAgent(plain, upstream, "mock", version="mock@7", name="mine")
    result = evaluate(LOOKUP, agent, SCENARIOS, k=2, env_kwargs={"topics": 2}, turn_timeout=10)
    assert (result.agent, result.n, result.successes, result.failed) == ("mine", 4, 4, 0)
    assert result.tokens is not None
    assert result.tokens.unknown_turns == 0


def test_nothing_is_left_of_an_episode_that_is_over(mock, upstream):
    mock.say = knows_how
    ended = []

    def program(episode):
        try:
            plain(episode)
        except (EpisodeOver, APIStatusError) as error:
            ended.append(type(error))
            raise

    agent = ExternalAgent(program, upstream, "mock")

    async def run():
        runner = Runner(LOOKUP, agent, env_kwargs={"topics": 2}, turn_timeout=10)
        async for _ in runner.run(SCENARIOS):
            pass
        gc.disable()
        try:
            for _ in range(100):
                if len(ended) == 2 and not agent._server._sessions:
                    break
                await asyncio.sleep(0.02)
            assert agent._server._sessions == {}
        finally:
            gc.enable()
            await agent.close()

    asyncio.run(run())
    assert ended == [EpisodeOver, EpisodeOver]
    assert not any(thread.name == "art_gym external agents" for thread in threading.enumerate())


def test_what_a_program_raises_fails_its_episode_only(play):
    def program(episode):
        if episode.scenario.id == "b":
            raise ZeroDivisionError("boom")
        plain(episode)

    good, bad = play(program)
    assert good.success
    assert bad.failure.kind == "policy"
    assert "the program raised ZeroDivisionError: boom" in bad.failure.message


def test_a_text_that_a_program_returns_is_said_and_trains_nothing(play):
    def program(episode):
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        client.chat.completions.create(model=episode.model, messages=episode.messages, tools=episode.tools)
        episode.observe()
        return "I give up."

    episode, _ = play(program)
    assert episode.failure is None
    # Lookup ends at a message without a call: 0.2 at most for the search, -0.1 for not answering by the tool.
    assert [turn.action["content"] for turn in episode.turns] == [None, "I give up."]
    last = episode.turns[-1]
    assert (last.completion_ids, last.logprobs, last.trainable) == ([], [], True)
    assert last.prompt_ids == episode.turns[0].prompt_ids + episode.turns[0].completion_ids


def test_a_text_of_the_models_is_the_action(play, mock):
    mock.say = lambda body: Said(text="It is B12.")

    def program(episode):
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        return client.chat.completions.create(model=episode.model, messages=episode.messages).choices[0].message.content

    (episode,) = play(program, SCENARIOS[:1])
    (turn,) = episode.turns
    assert turn.action["content"] == "It is B12."
    assert mock.decode(turn.completion_ids).startswith("It is B12.")
    assert episode.reward == pytest.approx(-0.1)


def test_calls_at_once_are_refused(play, mock):
    mock.token_seconds = 0.2
    found = []

    async def program(episode):
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)

        async def ask():
            return await client.chat.completions.create(model=episode.model, messages=episode.messages, tools=episode.tools)

        found.extend(await asyncio.gather(ask(), ask(), return_exceptions=True))
        await asyncio.sleep(30)

    mock.say = lambda body: Said(text="a b c d e f g h i j k l m n")
    (episode,) = play(program, SCENARIOS[:1])
    assert len(episode.turns) == 1
    refused = [error for error in found if isinstance(error, BadRequestError)]
    assert len(refused) <= 1
    if refused:
        assert "one action at a time" in str(refused[0])


def test_several_answers_to_one_question_are_refused(play):
    def program(episode):
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        client.chat.completions.create(model=episode.model, messages=episode.messages, tools=episode.tools, n=2)

    (episode,) = play(program, SCENARIOS[:1])
    assert "ask with n = 1" in episode.failure.message


def test_a_call_that_the_model_did_not_make_is_refused(play):
    def program(episode):
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        client.chat.completions.create(model=episode.model, messages=episode.messages, tools=episode.tools)
        with pytest.raises(OutOfStep, match="doesn't call 'answer' \\(its calls: search\\)"):
            episode.call("answer", {"value": "B12"})
        assert episode.call("search", {})  # a framework changed the arguments; there is only one call that can be meant
        with pytest.raises(OutOfStep):
            episode.call("search", {})
        raise RuntimeError("as expected")

    (episode,) = play(program, SCENARIOS[:1])
    assert "RuntimeError: as expected" in episode.failure.message


def test_a_full_context_truncates_the_episode(play, mock):
    mock.max_model_len = 60

    (episode,) = play(plain, SCENARIOS[:1])
    assert episode.failure is None
    assert (episode.truncated, episode.truncation) == (True, "context_length")


def test_a_program_that_asks_nobody_is_told_how(play):
    (episode,) = play(lambda episode: "42", SCENARIOS[:1])
    assert "does its client use episode.base_url" in episode.failure.message


def test_another_episodes_key_opens_nothing(play):
    keys = []

    def program(episode):
        OpenAI(base_url=episode.base_url, api_key="x" * 20, max_retries=0).chat.completions.create(model="m", messages=episode.messages)

    (episode,) = play(program, SCENARIOS[:1])
    assert "401" in episode.failure.message
    assert keys == []


def test_waiting_in_the_event_loop_is_refused_rather_than_for_ever(play):
    async def program(episode):
        episode.observe()

    (episode,) = play(program, SCENARIOS[:1])
    assert "await episode.acall / aobserve" in episode.failure.message


def test_a_program_that_waits_too_long_fails_and_is_ended(play):
    ended = threading.Event()

    async def program(episode):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    agent_time = time.monotonic()
    (episode,) = play(program, SCENARIOS[:1], episode_timeout=0.5)
    assert time.monotonic() - agent_time < 8
    assert episode.failure.kind == "policy"
    assert ended.wait(2)
