"""The versions that jobs make: put in front of the calls, changed by hand, and brought back when a publish fails.

What a version is served by is `policy`'s to know, where it lies `_jobs_checkpoints`', and how it gets into the engine the trainer process's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from art_gym.gateway import _jobs_checkpoints as checkpoints
from art_gym.gateway._errors import ApiError
from art_gym.gateway._trainer import Cancelled, Message, Trainer, TrainerFailed

if TYPE_CHECKING:
    from art_gym.gateway.policy import PolicyState


class Versions:
    """Changes which version answers.

    Args:
        policy: Told of it.
        trainer: Publishes.
        folder: The gateway's, with its checkpoints.
        in_place: Whether a version is written over the one before, so that calls have to wait.
        on_broken: Called with a reason when the engine can't be brought back to the version that answers: nothing may be served then.

    Attributes:
        working: Held by a job, and by whatever else changes versions.
        busy: Whether a job is running that hasn't told its end.
    """

    def __init__(self, policy: PolicyState, trainer: Trainer, folder: Path, *, in_place: bool, on_broken: Callable[[str], None]) -> None:
        self.policy, self.folder, self.in_place = policy, folder, in_place
        self._trainer, self._on_broken = trainer, on_broken
        self.working = asyncio.Lock()
        self.busy = False

    async def let_publish(self, gate: AsyncExitStack) -> float:
        """Keep calls out where weights are written over, then let the trainer process publish; returns the seconds that were waited."""
        began, drop = time.monotonic(), []
        if self.in_place:
            await gate.enter_async_context(self.policy.publishing())
        else:
            # The version that answers stays, so that calls under way end with it.
            for step in self.policy.steps:
                version = self.policy.version(step)
                if step != self.policy.current.step and self.policy.resolve(version).upstream_model == version:
                    self.policy.remove(step)
                    drop.append(version)
        await self._trainer.tell({"do": "go", "drop": drop})
        return time.monotonic() - began

    async def serve(self, published: Message, gate: AsyncExitStack) -> None:
        """Let what was published answer, and calls in."""
        step, model = published["step"], published["model"]
        if self.in_place:
            self.policy.replace(step, model)
        else:
            self.policy.add(step, model)
            self.policy.activate(step)
        await gate.aclose()

    async def restore(self, step: int) -> None:
        """Bring the engine back to the version that answers; calls must be kept out."""
        await self._trainer.stop()
        try:
            async for message in self._trainer.work({"do": "publish", "from": step}):
                if message["event"] == "ready_to_publish":
                    await self._trainer.tell({"do": "go", "drop": []})
        except (TrainerFailed, Cancelled) as error:
            self._on_broken(f"after a publish that failed the engine can't be brought back to {self.policy.version(step)}: {error}")

    async def activate(self, step: int) -> None:
        """Let the public name mean a version that is kept.

        Raises:
            ApiError: There is none, a job is running, or the engine refuses it.
        """
        await self._check_kept(step)
        if self.busy:
            raise ApiError(409, "A job is running, which will put its own version in front; wait for it, or cancel it.")
        # A client that leaves must not leave the engine between two versions.
        await asyncio.shield(asyncio.ensure_future(self._activate(step)))

    async def _activate(self, step: int) -> None:
        async with self.working:
            before = self.policy.current.step
            if step == before:
                return
            if step in self.policy.steps:
                self.policy.activate(step)
            else:
                await self._put_back(step, before)
            await asyncio.to_thread(checkpoints.pin, self.folder, step)

    async def _put_back(self, step: int, before: int) -> None:
        touched = False
        async with AsyncExitStack() as gate:
            try:
                async for message in self._trainer.work({"do": "publish", "from": step}):
                    if message["event"] == "ready_to_publish":
                        touched = True
                        await self.let_publish(gate)
                    elif message["event"] == "published":
                        await self.serve(message, gate)
            except (TrainerFailed, Cancelled) as error:
                if self.policy.current.step == step:
                    return  # It is served; what the process did afterwards is no matter.
                if touched and self.in_place:
                    await self.restore(before)
                raise ApiError(409, f"Version {step} can't be published: {error}") from error

    async def delete(self, step: int) -> None:
        """Remove a checkpoint, and stop serving it.

        Raises:
            ApiError: There is none, it is the one that answers, or a job is running.
        """
        await self._check_kept(step)
        if step == 0:
            raise ApiError(409, "Version 0 is what the gateway was started with, and stays.")
        if self.busy:
            raise ApiError(409, "A job is running, and may go on from it; wait for it, or cancel it.")
        async with self.working:
            if step == self.policy.current.step:
                raise ApiError(409, f"Version {step} is the one that answers; activate another one first.")
            self.policy.remove(step)
            await asyncio.to_thread(checkpoints.remove, self.folder, step)

    async def _check_kept(self, step: int) -> None:
        there = [0, *await asyncio.to_thread(checkpoints.steps, self.folder)]
        if step not in there:
            raise ApiError(404, f"There is no checkpoint {step}; there are: {', '.join(map(str, there))}.")

    async def next_step(self, made: int) -> int:
        """A number that no version ever had, since episodes are recorded with it; `made` is the highest that a job is known to have made."""
        return max([made, *await asyncio.to_thread(checkpoints.steps, self.folder), *self.policy.steps]) + 1
