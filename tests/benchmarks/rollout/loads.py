"""The runner under load: many episodes at once, and many one after the other. Each load is a process, and prints its figures as JSON.

python -m rollout.loads flight URL [--episodes 10000] [--core 0]
python -m rollout.loads stream URL [--episodes 100000] [--concurrency 64] [--journal] [--core 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from art_gym.rollout import Runner
from art_gym.store import EpisodeStore
from art_gym_agents import ChatAgent
from rollout.ledger_env import LedgerEnv, scenarios
from rollout.mock_server import raise_file_limit

TICK = 0.01


def resident() -> int:
    """Bytes of memory that the process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most bytes that it ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@asynccontextmanager
async def watched(lags: list[float]) -> AsyncGenerator[None, None]:
    """Note by how many seconds a task that sleeps for 10 ms is woken up late, all the time."""
    clock = time.perf_counter

    async def watch() -> None:
        while True:
            due = clock() + TICK
            await asyncio.sleep(TICK)
            lags.append(clock() - due)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def flight(url: str, episodes: int) -> dict[str, Any]:
    """All episodes at once, each of five turns, with a journal."""
    agent = ChatAgent(url, "mock", max_tokens=64)
    runner = Runner(LedgerEnv, agent, concurrency=episodes, turn_timeout=300.0, episode_timeout=1800.0)
    lags: list[float] = []
    finished = turns = 0
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder) as store:
        async for _ in runner.run(scenarios(64), journal=store.journal("warm-up")):
            pass
        before, cpu, wall = resident(), time.process_time(), time.perf_counter()
        async with watched(lags):
            async for group in runner.run(scenarios(episodes, 1000), journal=store.journal("flight")):
                finished += sum(episode.success for episode in group.finished)
                turns += sum(len(episode.turns) for episode in group.episodes)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await agent.close()
    cuts = statistics.quantiles(lags, n=100)
    return {
        "episodes": episodes,
        "finished": finished,
        "turns": turns,
        "wall": wall,
        "cpu": cpu,
        "lag_p50": cuts[49],
        "lag_p99": cuts[98],
        "lag_max": max(lags),
        "peak": peak(),
        "bytes_per_episode": (peak() - before) / episodes,
    }


async def stream(url: str, episodes: int, concurrency: int, journaled: bool) -> dict[str, Any]:
    """Short episodes of two turns one after the other; memory is looked at every so often."""
    agent = ChatAgent(url, "mock", max_tokens=64)
    runner = Runner(lambda: LedgerEnv(entries=1), agent, concurrency=concurrency)
    sizes: list[int] = []
    finished = 0
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() if journaled else nullcontext() as folder:
        store = EpisodeStore(folder) if folder else None
        journal = store.journal("stream") if store else None
        async with aclosing(runner.run(scenarios(episodes), journal=journal)) as groups:
            async for group in groups:
                finished += sum(episode.success for episode in group.finished)
                if finished % 500 == 0:
                    sizes.append(resident())
        if store:
            store.close()
    await agent.close()
    # The first twentieth warms up caches and the allocator.
    sizes = sizes[len(sizes) // 20 :]
    quarter = max(len(sizes) // 4, 1)
    first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    return {
        "episodes": episodes,
        "finished": finished,
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "first_quarter": first,
        "last_quarter": last,
        "peak": max(peak(), *sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("load", choices=["flight", "stream"])
    parser.add_argument("url")
    parser.add_argument("--episodes", type=int)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--journal", action="store_true")
    parser.add_argument("--core", type=int)
    options = parser.parse_args()
    raise_file_limit()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    if options.load == "flight":
        load = flight(options.url, options.episodes or 10_000)
    else:
        load = stream(options.url, options.episodes or 100_000, options.concurrency, options.journal)
    print(json.dumps(asyncio.run(load)), flush=True)


if __name__ == "__main__":
    main()
