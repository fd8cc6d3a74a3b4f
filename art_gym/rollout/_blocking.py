"""Asynchronous work for code that isn't asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import Thread
from typing import Any, TypeVar

from art_gym.rollout._threads import Outcome, outcome_of

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine to its end: in this thread, or in another one if this one's event loop is running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    outcomes: list[Outcome[T]] = []

    def target() -> None:
        with asyncio.Runner(loop_factory=lambda: loop):
            outcomes.append(outcome_of(loop.run_until_complete, task))

    thread = Thread(target=target, name="art_gym rollout", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return outcomes[0].unwrap()
