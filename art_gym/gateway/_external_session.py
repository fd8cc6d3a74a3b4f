"""One episode of an external program: who waits for whom between the program, the policy and the environment.

Everything here happens in the runner's event loop, but for what says otherwise. There is one action at a time: the policy's answer is handed to
the runner, and until the environment has answered it nothing else is asked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from art_gym.errors import ContextOverflow, PolicyError, UsageError
from art_gym.gateway._errors import ApiError
from art_gym.gateway._external_server import ExternalServer, in_loop
from art_gym.gateway.calls import Call
from art_gym.messages import AssistantMessage, Message, ToolSchema, say
from art_gym.rollout._threads import DaemonThread
from art_gym.rollout.agent import Reply, TurnState

_OVERFLOW = re.compile(r"context[ _](?:length|size|window)|maximum model length", re.IGNORECASE)

_RELEASE_SECONDS = 2.0
"""How long a call waits for the one before it to be over, which a client may have left a moment ago."""

MOST_SILENT_TURNS = 100
"""Turns for which a program that has ended says nothing, in an environment that goes on."""


class EpisodeOver(Exception):
    """The environment has ended, so that there is nothing more to do; programs may let it pass."""


class OutOfStep(UsageError):
    """A program asked for something that the model's last message doesn't."""


@dataclass(slots=True)
class Result:
    """What the environment answered to a tool call, until the program takes it."""

    id: str
    name: str
    arguments: str
    content: str


class Session:
    """An episode that a program plays.

    Args:
        server: Where its calls arrive.
        state: The episode's first.
        version: The policy version to note, if not the one that the endpoint names.
    """

    def __init__(self, server: ExternalServer, state: TurnState, version: str | None) -> None:
        self.key = secrets.token_urlsafe(24)
        self.loop = asyncio.get_running_loop()
        self.messages: list[Message] = [*state.messages]
        self.observation: Sequence[Message] = state.observation
        self.tools: list[ToolSchema] = state.tools
        self.over = False
        self._server, self._version = server, version
        self.base_url = server.add(self)
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._pending: AssistantMessage | None = None
        self._last: Reply | None = None
        self._results: list[Result] = []
        self._calling = False
        self._changed = asyncio.Event()
        self._program: asyncio.Task[Any] | None = None
        self._thread: DaemonThread | None = None
        self._refusal = (0, "")
        self._silent = 0
        self._said = False

    # ------------------------------------------------------------- the program

    def start(self, program: Callable[[Any], Any], episode: Any) -> None:
        """Let the program begin: a coroutine function in this loop, another in a thread."""
        if inspect.iscoroutinefunction(program) or inspect.iscoroutinefunction(type(program).__call__):
            running = program(episode)
        else:
            self._thread = DaemonThread("art_gym external program")
            running = self._thread.run(program, episode)
        self._program = asyncio.ensure_future(running)
        self._program.add_done_callback(self._ended)

    def _ended(self, program: asyncio.Future[Any]) -> None:
        if not program.cancelled():
            program.exception()
        if self._thread is not None:
            self._thread.stop()
        self._replies.put_nowait(None)

    def end(self) -> None:
        """The episode is over: whoever waits is told, and an asynchronous program is cancelled."""
        if self.over:
            return
        self.over = True
        self._server.remove(self)
        self._changed.set()
        if self._program is not None and self._thread is None:
            self._program.cancel()

    def end_soon(self) -> None:
        """The same, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, and all that was in it gone
            self.loop.call_soon_threadsafe(self.end)

    # ------------------------------------------------------------- the runner's side

    async def next(self, state: TurnState) -> Reply:
        """Tell the program what the environment answered, and return its next action.

        Raises:
            ContextOverflow: The program failed since its conversation no longer fits.
            PolicyError: It failed, or ended without asking the model.
        """
        self._observe(state)
        reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
            return self._after_the_end()
        return reply

    def _observe(self, state: TurnState) -> None:
        self.messages, self.observation, self.tools = [*state.messages], state.observation, state.tools
        action, self._pending = self._pending, None
        if action is not None:
            answers = {message["tool_call_id"]: message.get("content") for message in self.observation if message["role"] == "tool"}
            self._results = [Result(id, name, arguments, _text(answers.get(id))) for id, name, arguments in _calls(action) if id in answers]
        self._changed.set()

    def _after_the_end(self) -> Reply:
        program = self._program
        assert program is not None
        error = None if program.cancelled() else program.exception()
        if program.cancelled() or error is not None:
            status, message = self._refusal
            if status == 400 and _OVERFLOW.search(message):
                raise ContextOverflow(message)
            told = f"the program raised {type(error).__name__}: {error}" if error is not None else "the program was cancelled"
            raise PolicyError(told + (f" (the endpoint had answered {status}: {message})" if status else "")) from error
        last = self._last
        if last is None:
            raise PolicyError("the program ended without asking the model: does its client use episode.base_url and episode.api_key?")
        text = program.result()
        if not self._said and isinstance(text, str) and text and not last.action.get("content"):
            self._said = True
            return self._unsampled(last, text)
        self._silent += 1
        if self._silent > MOST_SILENT_TURNS:
            raise PolicyError(f"the program ended, and the environment goes on after {MOST_SILENT_TURNS} turns without a word")
        return self._unsampled(last, "")

    def _unsampled(self, last: Reply, text: str) -> Reply:
        """What the program says by itself: nothing of it was sampled, so that nothing is trained."""
        seen = None if last.prompt_ids is None or last.completion_ids is None else [*last.prompt_ids, *last.completion_ids]
        none: list[Any] | None = None if seen is None else []
        return Reply(say(text), policy=last.policy, prompt_ids=seen, completion_ids=none, logprobs=none)

    # ------------------------------------------------------------- the endpoint's side

    async def admit(self) -> None:
        """Wait until the policy may be asked. Called in the server's thread.

        Raises:
            ApiError: The episode is over, or another call is under way.
        """
        await in_loop(self.loop, self._admit())

    async def _admit(self) -> None:
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._until(lambda: not self._calling)
        except TimeoutError:
            raise ApiError(
                400, "Another call of this episode is under way: an environment takes one action at a time, so ask one after the other."
            ) from None
        self._calling = True
        await self._until(lambda: self._pending is None)
        if self.over:
            self._calling = False
            raise ApiError(410, "The episode is over: the environment has ended, or its time has.")

    def release(self) -> None:
        """Tell that a call is over. Called in the server's thread."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        self._calling = False
        self._changed.set()

    def captured(self, call: Call) -> None:
        """Take an answer. Called in the server's thread, before the program gets it."""
        # What the program left before its end is no action of its own.
        if not call.abandoned:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._captured, call)

    def _captured(self, call: Call) -> None:
        if self.over:
            return
        self._refusal = (0, "")
        self._pending, self._results = call.action, []
        self._last = Reply(
            action=call.action,
            finish_reason=call.finish_reason,
            policy=self._version or call.policy,
            prompt_ids=call.prompt_ids,
            completion_ids=call.completion_ids,
            logprobs=call.logprobs,
        )
        self._replies.put_nowait(self._last)

    def refused(self, status: int, message: str) -> None:
        """Take note of an error that the program was answered. Called in the server's thread."""
        self._refusal = (status, message)

    # ------------------------------------------------------------- the program's side

    async def observe(self) -> list[Message]:
        """Wait for the environment's answer to the last action, and return its new messages.

        Raises:
            EpisodeOver: It has ended.
        """
        await self._answered()
        return [*self.observation]

    async def call(self, name: str, arguments: Any, call_id: str | None) -> str:
        """Return what the environment answered to a tool call of the model's last message.

        Raises:
            EpisodeOver: The environment ended with it, or before.
            OutOfStep: The message holds no such call.
        """
        await self._answered()
        wanted = _parsed(arguments)
        named = [one for one in self._results if one.name == name and call_id in (None, one.id)]
        # A framework may have filled in defaults; then the order says which call is meant.
        found = next((one for one in named if _parsed(one.arguments) == wanted), named[0] if named else None)
        if found is None:
            made = ", ".join(one.name for one in self._results) or "none that isn't answered"
            raise OutOfStep(
                f"the model's last message doesn't call {name!r} (its calls: {made}); the environment does what the model says, so call it for "
                "a tool call that the model made, once each"
            )
        self._results.remove(found)
        return found.content

    async def _answered(self) -> None:
        await self._until(lambda: self._pending is None)
        if self.over:
            raise EpisodeOver("the environment has ended; there is nothing more to do")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (self.over or condition()):
            self._changed.clear()
            await self._changed.wait()


def _calls(action: AssistantMessage) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    for call in action.get("tool_calls") or ():
        function: Any = call.get("function") or {}
        found.append((str(call.get("id")), str(function.get("name")), str(function.get("arguments") or "")))
    return found


def _parsed(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments) if arguments else {}
        except ValueError:
            return arguments
    return dict(arguments or {})


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))
