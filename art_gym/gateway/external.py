"""An agent that already exists, as an `Agent`: it plays registered environments through the Runner, so that evaluation and training are shared.

The agent's program keeps its own loop. For each episode it is given an OpenAI endpoint, which asks the policy and captures the exact tokens,
and the environment's messages and tools:

    async def program(episode):
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        messages = episode.messages
        while True:
            answer = await client.chat.completions.create(model=episode.model, messages=messages, tools=episode.tools)
            messages.append(answer.choices[0].message)
            messages += await episode.aobserve()

    evaluate("art_gym/Lookup-v0", ExternalAgent(program, "http://127.0.0.1:8000/v1", "smollm2-135m"))

Each answer of the model is the environment's next action, and one turn. Needs the extra `gateway`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_gym.errors import MissingExtra, UsageError
from art_gym.messages import Message, ToolSchema
from art_gym.rollout.agent import Reply, TurnState
from art_gym.scenarios import Scenario

try:
    from art_gym.gateway._external_server import ExternalServer
    from art_gym.gateway._external_session import EpisodeOver, OutOfStep, Session
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("art_gym"):
        raise
    raise MissingExtra("ExternalAgent", extra="gateway", package=error.name) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EpisodeOver", "ExternalAgent", "ExternalEpisode", "OutOfStep"]

_KEY = "art_gym.gateway.external"


class ExternalEpisode:
    """What a program is given to play one episode.

    Attributes:
        base_url: For any OpenAI client; what is asked there goes to the policy, and is captured.
        api_key: Opens this episode only.
        model: The policy's name.
        scenario: Where the episode starts.
        member: Its place in its group.
    """

    def __init__(self, session: Session, model: str, scenario: Scenario, member: int) -> None:
        self._session = session
        self.base_url, self.api_key, self.model = session.base_url, session.key, model
        self.scenario, self.member = scenario, member

    @property
    def messages(self) -> list[Message]:
        """The conversation so far as the environment tells it, with its instructions; a copy."""
        return [*self._session.messages]

    @property
    def instructions(self) -> str:
        """The system message, for agents that take it apart from the rest; empty if there is none."""
        first: Any = self._session.messages[0] if self._session.messages else {}
        return str(first.get("content") or "") if first.get("role") == "system" else ""

    @property
    def prompt(self) -> str:
        """The newest user message's text, for agents that take a question."""
        found: Any = next((message for message in reversed(self._session.messages) if message["role"] == "user"), {})
        return str(found.get("content") or "")

    @property
    def tools(self) -> list[ToolSchema]:
        """The environment's tools, in OpenAI wire form."""
        return self._session.tools

    @property
    def over(self) -> bool:
        """Whether the environment has ended."""
        return self._session.over

    def call(self, name: str, arguments: Mapping[str, Any] | str | None = None, *, call_id: str | None = None) -> str:
        """Return what the environment answers to a tool call of the model's last message; for plain functions, in a thread.

        Args:
            name: The tool.
            arguments: As the model gave them, or as a framework read them; they say which is meant where it called the tool twice.
            call_id: The tool call's id, which says it exactly.

        Raises:
            EpisodeOver: The environment ended with this call, or before.
            OutOfStep: The model's last message holds no such call, or it was taken before.
        """
        return str(self._blocking(self._session.call(name, arguments, call_id)))

    async def acall(self, name: str, arguments: Mapping[str, Any] | str | None = None, *, call_id: str | None = None) -> str:
        """The same, for coroutine functions."""
        return str(await self._awaiting(self._session.call(name, arguments, call_id)))

    def observe(self) -> list[Message]:
        """Return the messages with which the environment answers the model's last message: tool results, and what a user says.

        Raises:
            EpisodeOver: The environment ended with that message.
        """
        found: list[Message] = self._blocking(self._session.observe())
        return found

    async def aobserve(self) -> list[Message]:
        """The same, for coroutine functions."""
        found: list[Message] = await self._awaiting(self._session.observe())
        return found

    def _blocking(self, coroutine: Any) -> Any:
        loop = self._session.loop
        try:
            inside = asyncio.get_running_loop() is loop
        except RuntimeError:
            inside = False
        if inside:
            coroutine.close()
            raise UsageError("this would block the event loop that it waits for; in a coroutine function write await episode.acall / aobserve")
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    async def _awaiting(self, coroutine: Any) -> Any:
        if asyncio.get_running_loop() is self._session.loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._session.loop))


class _Playing:
    """Lies in the episode's memory: when that goes, the episode is over, and the program is told."""

    def __init__(self, session: Session) -> None:
        self.session = session
        weakref.finalize(self, session.end_soon).atexit = False

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("an external program can't be played on from the middle; play without branches")


class ExternalAgent:
    """Lets a program that speaks to an OpenAI endpoint play episodes; one agent plays any number at once.

    The program is a function of an `ExternalEpisode`. A coroutine function runs in the rollout's event loop, and is cancelled when the episode
    is over. A plain one runs in a thread of its own; then its next call raises `EpisodeOver`, and its next request is answered with status 410.

    Whatever the model answers is the environment's next action at once, so that the program may only ask one thing after the other. History
    that the program edits is sampled from as it is, and starts a new sequence in training. What the program raises fails the episode, with kind
    "policy". When it returns before the environment has ended, a text that it returns is said, without sampled tokens; after that it says
    nothing in each turn that follows, until the environment ends or truncates the episode.

    Args:
        program: Plays one episode.
        upstream: The base URL of vLLM, or of a gateway, such as "http://127.0.0.1:8000/v1".
        model: The name that the policy is served under.
        api_key: Sent to the upstream.
        temperature: Of the sampling, whatever the program asks for; the trainer must use the same.
        version: The policy version to record, such as "smollm2-135m@12"; may be set later.
        name: In reports; the program's name if None.

    Raises:
        UsageError: The program is no function, or the upstream no address.
    """

    def __init__(
        self,
        program: Callable[[ExternalEpisode], Any],
        upstream: str,
        model: str,
        *,
        api_key: str | None = None,
        temperature: float = 1.0,
        version: str | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(program):
            raise UsageError(f"the program must be a function of an ExternalEpisode, not {program!r:.100}")
        self.program, self.model, self.version = program, model, version
        self.name = name or str(getattr(program, "__name__", "external"))
        self._server = ExternalServer(upstream, model, api_key=api_key, temperature=temperature)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._ready = threading.Lock()

    async def act(self, state: TurnState) -> Reply:
        """Return the program's next action.

        Raises:
            ContextOverflow: The conversation no longer fits.
            PolicyError: The program failed.
            EngineError: Its endpoint could not be started.
        """
        playing = state.memory.get(_KEY)
        if playing is None:
            await asyncio.to_thread(self._server.start)
            session = Session(self._server, state, self.version)
            self._sessions.add(session)
            playing = state.memory[_KEY] = _Playing(session)
            session.start(self.program, ExternalEpisode(session, self.model, state.scenario, state.member))
        return await playing.session.next(state)

    async def close(self) -> None:
        """End its endpoint and what still plays. The agent may be used again."""
        for session in [*self._sessions]:
            session.end_soon()
        await asyncio.to_thread(self._server.stop)

    def __repr__(self) -> str:
        return f"ExternalAgent({self.name!r}, model={self.model!r})"
