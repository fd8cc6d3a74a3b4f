"""What a turn costs a client: each plays the same ledgers against the endpoint, in a process of its own, and prints its figures as JSON.

    python -m rollout.clients art_gym|aiohttp|openai|verifiers|verifiers_saved URL [--episodes 256] [--concurrency 64] [--core 0]

They differ in what they do beyond playing: art_gym validates every call and puts every turn on disk, with its tokens; the plain loops decode
JSON, run the tool, and keep nothing; verifiers keeps its rollouts in memory, and as `verifiers_saved` on disk, too, with their tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from rollout import ledger as task

ENTRIES = 4
TURNS = ENTRIES + 1

TOOLS: dict[str, Callable[..., str]] = {"look": task.look, "report": task.report}

Play = Callable[[range], Awaitable[None]]
"""Plays the ledgers of that range, and checks that each was played to its end."""


async def art_gym(url: str, concurrency: int, stack: AsyncExitStack) -> Play:
    from art_gym.rollout import Runner
    from art_gym.store import EpisodeStore
    from art_gym_agents import ChatAgent
    from rollout.ledger_env import LedgerEnv, scenarios

    store = stack.enter_context(EpisodeStore(stack.enter_context(tempfile.TemporaryDirectory())))
    agent = ChatAgent(url, "mock", max_tokens=64)
    stack.push_async_callback(agent.close)
    runner = Runner(LedgerEnv, agent, concurrency=concurrency)

    async def play(ledgers: range) -> None:
        journal = store.journal(f"from-{ledgers.start}")
        async for group in runner.run(scenarios(len(ledgers), ledgers.start), journal=journal):
            (episode,) = group.finished
            assert episode.success
            assert len(episode.turns) == TURNS

    return play


async def aiohttp(url: str, concurrency: int, stack: AsyncExitStack) -> Play:
    from aiohttp import ClientSession, TCPConnector

    session = await stack.enter_async_context(ClientSession(connector=TCPConnector(limit=0)))

    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        async with session.post(f"{url}/chat/completions", json=_request(messages)) as response:
            answer = await response.json()
        return answer["choices"][0]["message"]  # type: ignore[no-any-return]  # an object

    return _loop(ask, concurrency)


async def openai(url: str, concurrency: int, stack: AsyncExitStack) -> Play:
    from openai import AsyncOpenAI

    client = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key="none"))

    async def ask(messages: list[Any]) -> dict[str, Any]:
        request: dict[str, Any] = _request(messages)
        more = {"return_token_ids": request.pop("return_token_ids")}
        completion = await client.chat.completions.create(**request, extra_body=more)
        return completion.choices[0].message.model_dump(exclude_none=True)

    return _loop(ask, concurrency)


async def verifiers(url: str, concurrency: int, stack: AsyncExitStack) -> Play:
    from rollout.verifiers_client import player

    return await player(url, concurrency, stack, saves=False)


async def verifiers_saved(url: str, concurrency: int, stack: AsyncExitStack) -> Play:
    from rollout.verifiers_client import player

    return await player(url, concurrency, stack, saves=True)


def _request(messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": "mock",
        "messages": messages,
        "tools": task.TOOLS,
        "temperature": 1.0,
        "max_tokens": 64,
        "logprobs": True,
        "return_token_ids": True,
    }


def _loop(ask: Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]], concurrency: int) -> Play:
    """The loop that everyone writes: ask, run what is called, append, until the total is reported."""

    async def episode(ledger: int) -> None:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": task.INSTRUCTIONS},
            {"role": "user", "content": task.question(ledger, ENTRIES)},
        ]
        for _ in range(TURNS):
            message = await ask(messages)
            messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": message["tool_calls"]})
            for call in message["tool_calls"]:
                function = call["function"]
                result = TOOLS[function["name"]](**json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        assert messages[-1]["content"] == task.report(ledger, task.total(ledger, ENTRIES))

    async def play(ledgers: range) -> None:
        numbers = iter(ledgers)

        async def worker() -> None:
            for number in numbers:
                await episode(number)

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    return play


CLIENTS = {"art_gym": art_gym, "aiohttp": aiohttp, "openai": openai, "verifiers": verifiers, "verifiers_saved": verifiers_saved}
_PACKAGES = {"art_gym": "art-gym", "verifiers_saved": "verifiers"}


async def measure(name: str, url: str, episodes: int, concurrency: int) -> dict[str, Any]:
    """Play once to warm up, then once for the figures: seconds of CPU of the whole process, with all its threads."""
    async with AsyncExitStack() as stack:
        play = await CLIENTS[name](url, concurrency, stack)
        await play(range(min(episodes, 2 * concurrency)))
        cpu, wall = time.process_time(), time.perf_counter()
        await play(range(100_000, 100_000 + episodes))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu": cpu, "wall": wall, "turns": episodes * TURNS, "version": importlib.metadata.version(_PACKAGES.get(name, name))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--core", type=int)
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    print(json.dumps(asyncio.run(measure(options.client, options.url, options.episodes, options.concurrency))), flush=True)


if __name__ == "__main__":
    main()
