"""The runner against a bare load generator, on one real vLLM: the same prompts, lengths and concurrency.

The runner plays first. Then the load generator posts the very requests that the runner's episodes made, encoded beforehand, each episode's
turns one after the other, and does nothing with the answers but count their tokens. Sampling is greedy, so that the replayed episodes meet the
prefix cache as the played ones did; it is emptied before each run. Every reply has the same length.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

from aiohttp import ClientSession, TCPConnector

from art_gym.engine import Engine, EngineConfig
from art_gym.episodes import Episode
from art_gym.rollout import Runner
from art_gym.scenarios import Scenario
from art_gym.store import EpisodeStore
from art_gym_agents import ChatAgent
from art_gym_trainers.models import resolve

ENV = "art_gym/GuessNumber-v0"
MAX_TOKENS = 32
CONCURRENCY = 16

Run = dict[str, float]


def compare(*, rounds: int, episodes: int, note: Callable[[str], None]) -> dict[str, list[Run]]:
    """Alternate the two; each run gives its `tokens` and `seconds`."""
    runs: dict[str, list[Run]] = {"runner": [], "load generator": []}
    config = EngineConfig(model=str(resolve("smollm2-135m")), max_model_len=2048, kv_cache_gib=1.0, max_num_seqs=CONCURRENCY)
    with Engine(config) as engine, tempfile.TemporaryDirectory() as folder, EpisodeStore(folder) as store:
        agent = ChatAgent(engine.base_url, engine.model, temperature=0.0, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True})
        runner = Runner(ENV, agent, concurrency=CONCURRENCY, engine_check=engine.check, turn_timeout=300.0, episode_timeout=1800.0)
        for number in range(-1, rounds):  # the first round warms up
            seeds = itertools.count(1000 * (number + 1))
            starts = [Scenario(f"s{seed}", seed=seed) for seed in itertools.islice(seeds, episodes)]
            engine.reset_prefix_cache()
            begin = time.perf_counter()
            groups = runner.collect(starts, journal=store.journal(f"round-{number + 1}"))
            seconds = time.perf_counter() - begin
            played = [episode for group in groups for episode in group.finished]
            run = {"tokens": sum(len(turn.completion_ids or ()) for episode in played for turn in episode.turns), "seconds": seconds}
            requests = [[json.dumps(body).encode() for body in bodies(agent, episode)] for episode in played]
            engine.reset_prefix_cache()
            bare = asyncio.run(generate_load(engine.base_url, requests))
            if number >= 0:
                runs["runner"].append(run)
                runs["load generator"].append(bare)
                rates = " and ".join(f"{one['tokens'] / one['seconds']:.1f}" for one in (run, bare))
                note(f"vllm: round {number + 1} of {rounds}: {rates} tokens/s")
    return runs


def bodies(agent: ChatAgent, episode: Episode) -> list[dict[str, Any]]:
    """The requests that an episode made."""
    fields = {
        "model": agent.model,
        "tools": episode.tools,
        "temperature": agent.temperature,
        "max_tokens": agent.max_tokens,
        "logprobs": True,
        "return_token_ids": True,
        **agent.extra_body,
    }
    messages = episode.messages
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [{**fields, "messages": messages[:index]} for index in asked]


async def generate_load(base_url: str, requests: list[list[bytes]]) -> Run:
    """Post each episode's requests in their order, several episodes at once."""
    waiting = iter(requests)
    tokens = 0
    headers = {"Content-Type": "application/json"}
    begin = time.perf_counter()
    async with ClientSession(connector=TCPConnector(limit=0), headers=headers) as session:

        async def post_all() -> None:
            nonlocal tokens
            for episode in waiting:
                for body in episode:
                    async with session.post(f"{base_url}/chat/completions", data=body) as response:
                        response.raise_for_status()
                        tokens += json.loads(await response.read())["usage"]["completion_tokens"]

        await asyncio.gather(*(post_all() for _ in range(CONCURRENCY)))
    return {"tokens": tokens, "seconds": time.perf_counter() - begin}
