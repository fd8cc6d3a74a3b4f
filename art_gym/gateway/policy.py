"""Which version of the policy answers, and when it may be replaced.

A version of adapters is served beside the others; one of merged weights is written over the one before it, which no call may be under way for.
How a version gets into the engine is the trainer process's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from art_gym.errors import ArtGymError


class UnknownModel(ArtGymError):
    """The client asked for a model that isn't served; the text names those that are."""


class VersionInUse(ArtGymError):
    """The version that answers can't be taken away."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a model's name means.

    Attributes:
        upstream_model: The name that the engine knows it by.
        version: The version, such as "name@12".
        step: Its number.
    """

    upstream_model: str
    version: str
    step: int


@dataclass(slots=True, eq=False)
class Ticket:
    """A call under way.

    Attributes:
        resolved: What answers it.
        task: Does the work.
        interrupted: The weights are about to be written over; the task was cancelled for it.
    """

    resolved: Resolved
    task: asyncio.Task[object] | None
    interrupted: bool = field(default=False)


class PolicyState:
    """The versions that are served, the one that answers, and the calls under way. It belongs to one event loop.

    Args:
        name: The public name.
        upstream_model: The name that the engine knows the first version by.
        step: The first version's number; 0 is the policy before any training.
        drain_seconds: How long `publishing` lets calls go on.
        aliases: Other names for the current version; "*" stands for any.
    """

    def __init__(self, name: str, upstream_model: str, *, step: int = 0, drain_seconds: float = 60.0, aliases: tuple[str, ...] = ()) -> None:
        self.name = name
        self.drain_seconds = drain_seconds
        self._aliases = frozenset(aliases)
        self._served: dict[int, Resolved] = {}
        self._running: set[Ticket] = set()
        self._publishing = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.add(step, upstream_model)
        self._current = step

    @property
    def current(self) -> Resolved:
        """The version that the public name means."""
        return self._served[self._current]

    @property
    def steps(self) -> list[int]:
        """The numbers of the versions that are served, in order."""
        return sorted(self._served)

    @property
    def running(self) -> int:
        """Calls under way."""
        return len(self._running)

    def version(self, step: int) -> str:
        """The name of a version, served or not."""
        return f"{self.name}@{step}"

    def resolve(self, model: str | None) -> Resolved:
        """Tell what a client's `model` means.

        No model, and the public name, mean the current version; `name@latest` the newest that is served, `name@12` that one. The names that the
        engine itself answers with are understood too.

        Raises:
            UnknownModel: None of these.
        """
        if not model or model == self.name:
            return self.current
        name, at, step = model.rpartition("@")
        if at and name == self.name:
            if step == "latest":
                return self._served[max(self._served)]
            if step.isascii() and step.isdigit() and len(step) < 20 and (found := self._served.get(int(step))) is not None:
                return found
        elif model == self.current.upstream_model or model in self._aliases:
            return self.current
        else:
            for found in self._served.values():
                if model == found.upstream_model:
                    return found
            if "*" in self._aliases:
                return self.current
        known = [self.name, f"{self.name}@latest", *(one.version for _, one in sorted(self._served.items()))]
        raise UnknownModel(f"The model `{model:.200}` does not exist. What is served here: {', '.join(known)}.")

    async def enter(self, model: str | None) -> Ticket:
        """Wait until calls may run, and begin one; `leave` must follow.

        Raises:
            UnknownModel: No such version is served.
        """
        while not self._open.is_set():
            await self._open.wait()
        ticket = Ticket(self.resolve(model), asyncio.current_task())
        self._running.add(ticket)
        self._idle.clear()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Tell that a call is over, whatever its end; twice does no harm."""
        self._running.discard(ticket)
        if not self._running:
            self._idle.set()

    @asynccontextmanager
    async def call(self, model: str | None) -> AsyncIterator[Resolved]:
        """Hold a version while a call runs.

        Raises:
            UnknownModel: No such version is served.
        """
        ticket = await self.enter(model)
        try:
            yield ticket.resolved
        finally:
            self.leave(ticket)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Keep calls out while weights are written over.

        Calls that come in wait. Those under way may go on for `drain_seconds`; then they are interrupted: their tasks are cancelled, and tell
        their clients why.
        """
        async with self._publishing:
            self._open.clear()
            try:
                try:
                    async with asyncio.timeout(self.drain_seconds):
                        await self._idle.wait()
                except TimeoutError:
                    for ticket in [*self._running]:
                        ticket.interrupted = True
                        if ticket.task is not None:
                            ticket.task.cancel()
                    await self._idle.wait()
                yield
            finally:
                self._open.set()

    def add(self, step: int, upstream_model: str) -> Resolved:
        """Serve a version beside the others; it answers to its number and, as the newest, to `name@latest`, and to the name once activated."""
        self._served[step] = Resolved(upstream_model, self.version(step), step)
        return self._served[step]

    def activate(self, step: int) -> Resolved:
        """Let the public name mean a version that is served.

        Raises:
            UnknownModel: It isn't.
        """
        if step not in self._served:
            raise UnknownModel(f"Version {step} isn't served. What is: {', '.join(map(self.version, self.steps))}.")
        self._current = step
        return self._served[step]

    def replace(self, step: int, upstream_model: str) -> Resolved:
        """Serve a version instead of all others, whose weights were written over; within `publishing`."""
        self._served.clear()
        self.add(step, upstream_model)
        return self.activate(step)

    def remove(self, step: int) -> None:
        """Stop serving a version; what isn't served does no harm.

        Raises:
            VersionInUse: It's the one that the public name means.
        """
        if step == self._current:
            raise VersionInUse(f"version {step} is the one that answers; activate another one first")
        self._served.pop(step, None)
