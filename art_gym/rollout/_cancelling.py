"""Telling what ends a task from what only looks like it."""

from __future__ import annotations

import asyncio


def ends_the_task(error: BaseException) -> bool:
    """Whether what was raised in a task must go on: Ctrl-C, its collection, or a cancellation that was meant for it.

    Code of the user's may raise a `CancelledError` of its own, such as that of a task that it cancelled, or the SystemExit of a library that
    gives up; neither is the rollout's end.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)
