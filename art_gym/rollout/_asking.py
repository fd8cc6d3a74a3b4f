"""Asking an agent: for a bounded time, whatever it does, and with a reply that can be trusted to be one."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from art_gym._actions import message_of
from art_gym.errors import ContextOverflow, PolicyError, UsageError
from art_gym.messages import AssistantMessage
from art_gym.rollout._cancelling import ends_the_task
from art_gym.rollout._threads import Outcome
from art_gym.rollout.agent import Agent, Reply, TurnState

GRACE_SECONDS = 1.0
"""How long an agent that was cut off may take to give back what it holds, before it is left behind."""

_log = logging.getLogger(__name__)

_left: set[asyncio.Task[Any]] = set()
"""Those that were left behind; the event loop itself keeps no task alive."""


class NoReply(PolicyError):
    """The agent gave no reply in time."""


async def ask(agent: Agent, state: TurnState) -> Reply | None:
    """Return the agent's reply; None if the conversation no longer fits its context.

    Raises:
        NoReply: There was none within `state.timeout` seconds.
        PolicyError: The agent raised something, or what it returned is no reply.
        EngineError: The server is gone.
        UsageError: The agent can't play as it was set up.
    """
    # In a task of its own: one that doesn't end when it is cancelled must not hold its episode.
    task = asyncio.create_task(_acting(agent, state))
    try:
        await asyncio.wait((task,), timeout=state.timeout)
    except asyncio.CancelledError:
        await _leave(task, agent)
        raise
    if not task.done():
        await _leave(task, agent)
        raise NoReply(f"the agent {agent.name!r} gave no reply within {state.timeout:.3g} s")
    try:
        reply = task.result().unwrap()
    except ContextOverflow:
        return None
    return _checked(agent, reply)


async def _acting(agent: Agent, state: TurnState) -> Outcome[Reply]:
    """Let the agent act. What isn't an `Exception` would end the event loop, if it left a task."""
    try:
        reply: Any = agent.act(state)
        if not inspect.isawaitable(reply):
            raise UsageError(f"the agent {agent.name!r} must be asynchronous, and its act returned {reply!r:.100}: write async def act")
        return Outcome(await reply)
    except Exception as error:  # noqa: BLE001  # told where it was asked
        return Outcome(error=error)
    except BaseException as error:
        if ends_the_task(error):
            raise
        wrapped = RuntimeError(f"raised {error!r}")
        wrapped.__cause__ = error
        return Outcome(error=wrapped)


async def _leave(task: asyncio.Task[Any], agent: Agent) -> None:
    """Cancel the task, and wait a little for it to end."""
    task.cancel()
    _left.add(task)
    task.add_done_callback(_left.discard)
    await asyncio.wait((task,), timeout=GRACE_SECONDS)
    if not task.done():
        _log.warning("the agent %r doesn't end when it is cancelled, and is left behind", agent.name)


def _checked(agent: Agent, reply: Reply) -> Reply:
    if not isinstance(reply, Reply):
        raise TypeError(f"the agent {agent.name!r} must return a Reply, such as Reply(call(…)), not {reply!r:.100}")
    action: Any = reply.action
    if not isinstance(action, Mapping):
        # A message object of the OpenAI SDK.
        message = message_of(action)
        if message is None:
            raise TypeError(f"the agent {agent.name!r} must reply with an assistant message, such as call(…) or say(…), not {action!r:.100}")
        _check_tokens(agent, reply)
        return replace(reply, action=cast("AssistantMessage", dict(message)))
    if action.get("role", "assistant") != "assistant" or not ("content" in action or "tool_calls" in action):
        raise TypeError(f"the agent {agent.name!r} must reply with an assistant message, such as call(…) or say(…), not {dict(action)!r:.100}")
    _check_tokens(agent, reply)
    return reply


def _check_tokens(agent: Agent, reply: Reply) -> None:
    for name in ("prompt_ids", "completion_ids"):
        ids = getattr(reply, name)
        if ids is not None and not (isinstance(ids, list) and _is_of(int, ids)):
            raise TypeError(f"the agent {agent.name!r} must give {name} as a list of whole numbers, not {ids!r:.100}")
    logprobs, ids = reply.logprobs, reply.completion_ids
    if logprobs is None:
        return
    if not (isinstance(logprobs, list) and _is_of(float, logprobs) and all(map(math.isfinite, logprobs))):
        raise ValueError(f"the agent {agent.name!r} must give logprobs as a list of finite numbers, not {logprobs!r:.100}")
    if ids is not None and len(logprobs) != len(ids):
        raise ValueError(f"the agent {agent.name!r} gave {len(ids)} completion_ids and {len(logprobs)} logprobs; there must be one for each")


def _is_of(kind: type, values: list[Any]) -> bool:
    """Whether the values are of the kind; by their sum, since there may be thousands."""
    try:
        total = sum(values)
    except TypeError:
        return False
    return isinstance(total, int) if kind is int else isinstance(total, int | float)
