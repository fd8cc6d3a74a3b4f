"""Whatever an agent does with its conversations, each token that was sampled is trained on once."""

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mock_vllm import MockVLLM, serving

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["go on", "branch", "retry", "edit", "compact", "new", "parallel", "abandon", "choices", "cut off"]),
        st.integers(0, 7),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


class _Player:
    """An agent that plays moves against an endpoint; it keeps every conversation that it ever had."""

    def __init__(self, base_url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = f"{base_url}/chat/completions", session
        self.conversations: list[list[Any]] = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Find it."}]]
        self.asked: list[list[Any]] = []
        self._number = 0

    async def play(self, move: str, which: int, stream: bool, tools: bool) -> None:
        conversation = self.conversations[-1] if move == "go on" else self.conversations[which % len(self.conversations)]
        body: dict[str, Any] = {"messages": conversation, "stream": stream, **({"tools": TOOLS} if tools else {})}
        if move == "retry" and self.asked:
            body["messages"] = self.asked[which % len(self.asked)]
        elif move == "edit":
            body["messages"] = [*conversation[:-1], {**conversation[-1], "content": f"edited {self._next()}"}]
        elif move == "compact":
            body["messages"] = [conversation[0], {"role": "user", "content": f"So far: {self._next()}."}]
        elif move == "new":
            body["messages"] = [{"role": "user", "content": f"A task for a sub-agent: {self._next()}"}]
        elif move == "cut off":
            body["max_tokens"] = 1 + which % 3
        elif move == "choices":
            body["n"] = 2
        if move == "parallel":
            await asyncio.gather(*(self._ask(body) for _ in range(3)))
        elif move == "abandon":
            await self._leave({**body, "stream": True}, which)
        else:
            await self._ask(body)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, body: dict[str, Any]) -> None:
        self.asked.append(body["messages"])
        async with self._session.post(self._url, json=body) as answer:
            assert answer.status == 200
            text = await answer.text()
        for message in _streamed(text) if body["stream"] else [choice["message"] for choice in json.loads(text)["choices"]]:
            said = {key: part for key, part in message.items() if part is not None}
            results = [{"role": "tool", "tool_call_id": one["id"], "content": f"result {self._next()}"} for one in said.get("tool_calls", ())]
            self.conversations.append([*body["messages"], said, *(results or [{"role": "user", "content": f"And {self._next()}?"}])])

    async def _leave(self, body: dict[str, Any], after: int) -> None:
        self.asked.append(body["messages"])
        async with self._session.post(self._url, json=body) as answer:
            seen = 0
            async for line in answer.content:
                seen += line.startswith(b"data")
                if seen > after % 4:
                    break


def _streamed(text: str) -> list[dict[str, Any]]:
    """The messages of a stream, as a client puts them together."""
    messages: dict[int, dict[str, Any]] = {}
    for event in text.split("\n\n"):
        if event in ("", "data: [DONE]"):
            continue
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            message = messages.setdefault(choice["index"], {"role": "assistant", "content": ""})
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for key, part in call["function"].items():
                    calls[call["index"]]["function"][key] += part or ""
    return list(messages.values())


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory):
    """A gateway before a slow mock, for all examples."""
    from art_gym.gateway import GatewaySettings, create_app

    mock = MockVLLM(token_seconds=0.001)
    with serving(mock.app()) as upstream:
        app = create_app(GatewaySettings.of(upstream=f"{upstream}/v1", model="mock", folder=tmp_path_factory.mktemp("gateway")))
        with serving(app) as address:
            yield mock, app, address


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=MOVES)
def test_each_sampled_token_is_in_one_sequences_loss(stage, moves):
    sequences_of = pytest.importorskip("art_gym_trainers.sequences").episode_sequences
    mock, app, address = stage
    store = app.state.gateway.store

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, app.state.loop).result(20)

    record = run(store.create(group=None, scenario=None, metadata={}, key_hash="", idempotency=None))

    async def play() -> None:
        async with aiohttp.ClientSession() as session:
            player = _Player(f"{address}/episodes/{record.id}/v1", session)
            for move in moves:
                await player.play(*move)

    async def settled() -> None:
        while mock.running or app.state.gateway.policy.running:
            await asyncio.sleep(0.005)

    asyncio.run(play())
    asyncio.run(settled())
    run(store.finish(record.id, reward=1.0, rewards={}, metrics={}, failure=None, idempotency=None))
    calls, episode = run(store.calls(record.id)), run(store.episode(record.id))
    sequences = sequences_of(episode)

    trained = Counter(
        (turn, token)
        for sequence in sequences
        for turn, token, sampled in zip(sequence.turns, sequence.token_ids, sequence.sampled, strict=True)
        if sampled
    )
    sampled = Counter((index, token) for index, call in enumerate(calls) for token in call.completion_ids)
    assert trained == sampled
    for sequence in sequences:
        for position, (token, turn, logprob) in enumerate(zip(sequence.token_ids, sequence.turns, sequence.logprobs, strict=True)):
            # The mock's log-probabilities depend on the place: a token that were moved would have another one.
            assert turn < 0 or logprob == mock.logprob(position, token)
    # A turn whose prompt goes on from an answer shares its sequence: as many sequences as there are calls that go on from none, or from
    # one that another call has gone on from already.
    ends: Counter[tuple[int, ...]] = Counter()
    begun = 0
    for call in calls:
        whole = (*call.prompt_ids, *call.completion_ids)
        known = max((end for end, free in ends.items() if free and tuple(call.prompt_ids[: len(end)]) == end), key=len, default=None)
        if known is None:
            begun += 1
        else:
            ends[known] -= 1
        ends[whole] += 1
    assert len(sequences) == begun
