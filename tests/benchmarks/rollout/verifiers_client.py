"""verifiers plays the ledgers: its `ToolEnv`, as its users write one. Releases from 0.4 on have none."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import verifiers
from datasets import Dataset
from verifiers.clients import resolve_client
from verifiers.types import ClientConfig

from rollout import ledger as task
from rollout.clients import ENTRIES, TOOLS, TURNS


async def player(url: str, concurrency: int, stack: AsyncExitStack, *, saves: bool) -> Callable[[range], Awaitable[None]]:
    logging.disable(logging.INFO)
    os.environ["NO_KEY"] = "none"
    client = resolve_client(ClientConfig(api_key_var="NO_KEY", api_base_url=url))
    stack.push_async_callback(client.close)

    async def reward(completion: Any) -> float:
        return 1.0 if completion[-1].tool_calls[0].name == "report" else 0.0

    row = {"prompt": [{"role": "user", "content": "unused"}], "answer": ""}
    env = verifiers.ToolEnv(
        tools=list(TOOLS.values()), max_turns=TURNS, rubric=verifiers.Rubric(funcs=[reward]), eval_dataset=Dataset.from_list([row])
    )
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    sampling = {"temperature": 1.0, "max_tokens": 64, "logprobs": True, "extra_body": {"return_token_ids": True}}

    async def play(ledgers: range) -> None:
        rows = [
            {
                "prompt": [
                    {"role": "system", "content": task.INSTRUCTIONS},
                    {"role": "user", "content": task.question(ledger, ENTRIES)},
                ],
                "example_id": ledger,
                "answer": "",
            }
            for ledger in ledgers
        ]
        saving = {"save_results": True, "results_path": folder / f"from-{ledgers.start}", "state_columns": ["trajectory"]} if saves else {}
        results = await env.generate(
            rows, client, "mock", sampling, max_concurrent=concurrency, independent_scoring=True, on_start=_quiet, on_progress=_quiet, **saving
        )
        assert len(results["outputs"]) == len(ledgers)
        assert all(output["reward"] == 1.0 and output["metrics"]["num_turns"] == TURNS for output in results["outputs"])

    return play


def _quiet(*_: Any) -> None:
    """Its progress bar costs time, too."""
