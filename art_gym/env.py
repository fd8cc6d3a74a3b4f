"""ToolEnv: a Gymnasium environment whose observations are chat messages and whose actions are assistant messages.

It owns the episode's rules: what is answered, what counts, when it ends. Around it, each in a module of its own: what an episode opens with
(`art_gym._prompt`), which tools there are (`art_gym._toolbox`), reading an action (`art_gym._actions`), checking arguments (`art_gym.tools`),
refusing a call (`art_gym._refusals`), running one (`art_gym._calls`), and keeping its own attributes from being hidden (`art_gym._attributes`).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from string import Template
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import gymnasium
from gymnasium.error import ResetNeeded

from art_gym import _calls
from art_gym._actions import WrittenCall, printable, read_action
from art_gym._annotations import stop_waiting, wait_for_names
from art_gym._attributes import check_assignment, check_class
from art_gym._figures import check_limit, finite, with_reward
from art_gym._prompt import first_messages, kind, system_messages
from art_gym._refusals import RefusedError, check_count, checked
from art_gym._render import Line, lines_of, print_lines, render_text
from art_gym._results import result_content
from art_gym._snapshots import copy_in, copy_out
from art_gym._toolbox import class_tools, given_tools, names_of, refuse_hidden, unknown_tool
from art_gym.errors import ToolError
from art_gym.messages import AssistantMessage, Message, Observation, ToolSchema
from art_gym.scenarios import SPLITS, Scenario, Split
from art_gym.spaces import ChatSpace, ToolCallSpace
from art_gym.tools import Tool

StepResult: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]

_Phase = Literal["not initialised", "not reset", "starting", "running", "over", "failed"]

_NOT_STATE = frozenset({"action_space", "observation_space", "spec", "render_mode", "_tools", "_offered", "_underway"})
"""Attributes that belong to the instance and not to its episode: snapshots leave them out."""

_INSTANCE_ATTRIBUTES = frozenset(
    {"action_space", "observation_space", "_tools", "_offered", "_functions", "_metrics", "_rewards", "_transcript", "_underway"}
)
"""Attributes that only instances have; the class has the others that a tool must not hide."""


class ToolEnv(gymnasium.Env[Observation, AssistantMessage]):
    """A multi-turn task that is played by calling tools.

    A subclass sets `instructions`, overrides `start`, and marks methods with `@tool`; `finish` ends the episode.

    >>> from art_gym import ToolEnv, call, tool
    >>> class Door(ToolEnv):
    ...     instructions = "Open the door."
    ...     def start(self) -> str:
    ...         return "The door is shut."
    ...     @tool
    ...     def push(self) -> str:
    ...         '''Push the door.'''
    ...         self.finish(reward=1.0, success=True)
    ...         return "It opens."
    >>> env = Door()
    >>> [message["role"] for message in env.reset(seed=1)[0]]
    ['system', 'user']
    >>> observation, reward, terminated, truncated, info = env.step(call("push"))
    >>> observation[0]["content"], reward, terminated, info["metrics"]
    ('It opens.', 1.0, True, {'success': 1.0})

    Attributes:
        instructions: The system message: text, as it is; a `string.Template` whose names are filled in from the environment's attributes; or a
            method that returns either. Read after `start`; "" for none.
        max_turns: Actions after which an unfinished episode is truncated; None for no limit.
        max_parallel_calls: Tool calls of one message that are executed; those beyond are answered, not executed. None for no limit.
        reward_range: The least and the greatest reward that one step may give. A promise that `art_gym.testing` checks, not `step`.
        instant: Whether every tool returns at once (no I/O, no sleeping), so that a runner may step the environment on its event loop.
        options: The options of the last reset.
        turn: Actions taken since the last reset.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 4}  # noqa: RUF012  as gymnasium.Env declares it
    instructions: str | Template | Callable[[], str | Template] = ""
    max_turns: int | None = None
    max_parallel_calls: int | None = None
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    instant: ClassVar[bool] = False
    options: Mapping[str, Any] = MappingProxyType({})
    turn: int = 0
    action_space: ToolCallSpace
    observation_space: ChatSpace

    _phase: _Phase = "not initialised"
    _class_tools: ClassVar[dict[str, Tool] | None] = None
    _tools: dict[str, Tool]  # by wire name
    _offered: Mapping[str, Tool]  # those of them that the rules of a step know; a wrapper may leave some out
    _functions: dict[str, Callable[..., Any]]  # by wire name
    _metrics: dict[str, float]
    _rewards: dict[str, float]
    _transcript: list[Line]
    _underway: _calls.Underway

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_hidden(cls, ToolEnv, _INSTANCE_ATTRIBUTES)
        check_class(cls, ToolEnv)
        if not isinstance(inspect.getattr_static(cls, "tools"), property | cached_property):
            raise TypeError(
                f"{cls.__name__}.tools hides the environment's own 'tools', the schemas that a model is shown: "
                "hand functions over in __init__, as super().__init__(tools=[…]), or mark methods with @tool"
            )
        try:
            cls._class_tools = class_tools(cls)
        except NameError:
            # An annotation names a class that is defined further down; the first instance tries again.
            cls._class_tools = None
            wait_for_names(cls)

    def __init__(self, *, render_mode: str | None = None, tools: Sequence[Callable[..., Any] | Tool] = ()) -> None:
        """Set up the spaces from the tools; subclasses with options of their own pass `render_mode` on.

        Args:
            render_mode: One of `metadata["render_modes"]`, or None.
            tools: Functions that are tools beside the marked methods: functions, methods of other objects, objects that can be called, and
                `Tool`s made by `Tool.from_function`. An environment with them pickles if they do. What such a method or object holds belongs to
                the episode's state: snapshots and copies of the environment get their own.

        Raises:
            ValueError: The render mode isn't one of `metadata["render_modes"]`.
            TypeError: One of `tools` can't be a tool, or has another tool's name.
        """
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be one of {', '.join(self.metadata['render_modes'])}, not {render_mode!r}")
        cls = type(self)
        if cls.__dict__.get("_class_tools") is None:
            cls._class_tools = class_tools(cls)
            stop_waiting(cls)
        marked = cls._class_tools or {}
        given = given_tools(self, tools, marked)
        self.render_mode = render_mode
        self.observation_space = ChatSpace()
        tools_by_name = {**marked, **given}
        functions = {tool.name: tool.function for tool in given.values() if not tool.attribute}
        self._keep(_tools=tools_by_name, _offered=tools_by_name, _functions=functions)
        self._keep(_phase="not reset", _metrics={}, _rewards={}, _transcript=[], _underway=_calls.Underway())
        self.action_space = self._make_action_space()

    def __setattr__(self, name: str, value: Any) -> None:
        check_assignment(type(self), ToolEnv, name, value)
        super().__setattr__(name, value)

    # What a task overrides.

    def start(self) -> str | Sequence[Message] | None:
        """Set up a new episode from `self.np_random` and `self.options`, and return the user's first message (or messages, or None)."""
        return None

    def on_text(self, text: str) -> str | None:
        """Answer a message without tool calls; may be async.

        None gives the default nudge, or no message if the episode has ended here. The text of a `ToolError` that it raises is the answer, too,
        and isn't counted among the `tool_errors`.
        """
        return None

    def on_invalid(self, problem: str) -> None:
        """Take note of a call that was refused (unknown tool, bad arguments, too many calls), or of an action that is no message; may be async.

        `problem` is what the model is told. Does nothing by default; an environment may take a reward for it, or end the episode by `finish`.
        Whatever it raises is a bug of the environment, a `ToolError` too: the model is told the problem and nothing else.
        """

    def scenarios(self, split: Split, count: int | None = None) -> Iterator[Scenario]:
        """Yield the scenarios of a split: disjoint between splits, the same in every process. Endless by default, from seeds of their own.

        An environment whose tasks are the rows of a data set overrides it with `art_gym.from_rows`.

        Args:
            split: "train", "validation" or "test".
            count: How many at most; None for all.

        Raises:
            TypeError: The count is no number.
            ValueError: There is no such split.
        """
        if split not in SPLITS:
            raise ValueError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
        check_limit("count", count)
        # Every third seed is the split's own, so that no count of scenarios reaches into another split.
        seeds = itertools.count(SPLITS.index(split), len(SPLITS))
        endless = (Scenario(f"{split}-{index}", seed) for index, seed in enumerate(seeds))
        return itertools.islice(endless, count)

    # What a task's methods call.

    def finish(self, reward: float = 0.0, success: bool | None = None, name: str = "outcome") -> None:
        """End the episode with this action.

        Args:
            reward: Reward for the outcome, as the component `name`.
            success: Reported as the metric "success", 1.0 or 0.0; None reports none.
            name: Name of the reward component.

        Raises:
            TypeError: The reward is no number.
            ValueError: The reward isn't finite.
            RuntimeError: No episode is running.
        """
        self._check_running("finish", "a tool may end it once")
        self.reward(name, reward)
        if success is not None:
            self.metric("success", float(success))
        self._keep(_phase="over")

    def reward(self, name: str, value: float) -> None:
        """Add to this action's reward, under a name that tells where it comes from.

        Raises:
            TypeError: The value is no number.
            ValueError: The value isn't finite, or the action's components no longer add up to a finite number.
            RuntimeError: No episode is running.
        """
        self._check_running(f"reward {name!r}", "give it before finish, or as finish(reward=…)")
        self._keep(_rewards=with_reward(self._rewards, name, value))

    def metric(self, name: str, value: float) -> None:
        """Report a figure of the episode that isn't reward; a later value replaces an earlier one.

        Raises:
            TypeError: The value is no number.
            ValueError: The value isn't finite.
        """
        self._metrics[name] = finite(f"metric {name!r}", value)

    def constrain(self, tool: str, /, **annotations: Any) -> None:
        """Give parameters of one of this instance's tools other types: `self.constrain("guess", number=Annotated[int, Field(le=high)])`.

        Schema, validation and action space follow. Belongs into `__init__`, after `super().__init__()`.

        Raises:
            ValueError: There is no such tool.
            TypeError: It has no such parameter.
        """
        if tool not in self._tools:
            raise ValueError(unknown_tool(tool, self._tools))
        self._tools[tool] = self._tools[tool].constrained(annotations)
        self.action_space = self._make_action_space()

    # What a policy or a runner calls.

    @property
    def tools(self) -> list[ToolSchema]:
        """The tools in OpenAI wire form; new objects each time."""
        return [tool.schema for tool in self._tools.values()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Start an episode, as `gymnasium.Env.reset`; the observation is the system message and the user's first one.

        Raises:
            TypeError: The options are no mapping, or a limit is no number; or `start` or `instructions` returned something else than text or
                messages.
            RuntimeError: A call that ran past its time limit, or whose step was cancelled, still runs and could change the new episode. Make a
                new environment.
            Exception: Whatever else they raise: a bug of the environment.
        """
        if self._phase == "not initialised":
            raise RuntimeError(f"{type(self).__name__}.__init__ doesn't call super().__init__()")
        self._check_alone("reset")
        if not isinstance(options, Mapping | None):
            raise TypeError(f"options must be a dictionary or None, not {printable(repr(options)):.60}: write reset(options={{…}})")
        super().reset(seed=seed)
        self._keep(options=copy.deepcopy(dict(options or {})), turn=0, _metrics={}, _rewards={}, _transcript=[], _phase="starting")
        opening = first_messages(self)
        messages = system_messages(self) + opening
        for name in ("max_turns", "max_parallel_calls"):
            check_limit(f"{type(self).__name__}.{name}", getattr(self, name))
        self._keep(_phase="running")
        return self._shown(messages), self._info(invalid_calls=0, tool_errors=0, truncation="")

    def step(self, action: AssistantMessage) -> StepResult:
        """Answer an action, as `gymnasium.Env.step`; the observation is the new messages only.

        Whatever the model wrote is answered, never raised.

        Returns:
            observation: One tool message for each call, in order and with its id; or a user message where there is no call.
            reward: The sum of this action's components, which are `info["rewards"]`.
            terminated: The task ended the episode.
            truncated: The turns ran out; never together with `terminated`.
            info: `turn`, `rewards`, `metrics`, `invalid_calls` (calls that were refused), `tool_errors` (calls whose tool raised
                `ToolError`), and `truncation` ("max_turns" or "").

        Raises:
            ResetNeeded: No episode is running.
            ToolTimeout: A tool ran past its limit. Make a new environment: the call may still be changing this one, whose `reset` raises
                until it is over.
            Exception: Whatever a tool raises besides `ToolError`: a bug of the environment.
        """
        return _calls.drive(self._transition(action))

    async def astep(self, action: AssistantMessage) -> StepResult:
        """`step` without blocking the event loop.

        Async tools run on it, those with a timeout on a loop of the process's own. Sync ones run in a thread, or in place if the environment is
        instant.
        """
        return await _calls.drive_async(self._transition(action), inline=self.instant)

    def snapshot(self) -> dict[str, Any]:
        """Return the episode's state, as a deep copy. Environments with outside resources override this and `restore`.

        What refers to the environment itself, such as a bound method, refers to the one that the snapshot is restored to.
        """
        return copy_out({name: value for name, value in vars(self).items() if name not in _NOT_STATE}, [self])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a snapshot, of this instance or of another one made alike; the snapshot can be used again.

        Raises:
            RuntimeError: A call of an earlier step still runs, as for `reset`.
        """
        self._check_alone("restore")
        state = copy_in(state, [self])
        for name in vars(self).keys() - state.keys() - _NOT_STATE:
            delattr(self, name)
        vars(self).update(state)

    def render(self) -> str | None:
        """Return the transcript as text in mode "ansi"; nothing in mode "human", which prints each message as it comes."""
        return render_text(self._transcript) if self.render_mode == "ansi" else None

    # The episode's rules.

    def _transition(self, action: Any) -> Generator[_calls.Call, Any, StepResult]:
        """One step, as a generator of the calls that it needs made; the driver sends back results, and throws in `ToolError`s."""
        if self._phase != "running":
            raise ResetNeeded(f"step needs an episode that is running, this one is {self._phase}: call reset first")
        self._keep(turn=self.turn + 1, _rewards={})
        written = read_action(action)
        if self.render_mode is not None:
            self._show([action])
        messages: list[Message] = []
        invalid = errors = 0
        succeeded = False
        try:
            if written.problem:
                invalid = 1
                yield from self._note_invalid(written.problem)
                told = written.problem if self._ended() else f"{written.problem}. {self._nudge()}"
                messages.append({"role": "user", "content": told})
            elif not written.calls:
                what = f"{type(self).__name__}.on_text"
                try:
                    reply = yield _calls.Call(partial(self.on_text, written.text), what, underway=self._underway)
                except ToolError as error:
                    reply = str(error)
                if not isinstance(reply, str | None):
                    raise TypeError(f"{what} must return text, not {kind(reply)}")
                if reply is not None or self._phase == "running":
                    messages.append({"role": "user", "content": printable(self._nudge() if reply is None else reply)})
            for index, call in enumerate(written.calls):
                content: Any
                refused = False
                try:
                    prepared = self._prepare(call, index)
                    content = prepared if isinstance(prepared, str) else result_content(call.name, (yield prepared))
                except RefusedError as refusal:
                    content, refused = str(refusal), True
                except ToolError as error:
                    content, errors = printable(str(error)), errors + 1
                if refused:
                    invalid += 1
                    yield from self._note_invalid(content)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
            succeeded = True
        finally:
            if not succeeded:
                self._keep(_phase="failed")
        terminated = self._ended()
        truncated = not terminated and self.max_turns is not None and bool(self.turn >= self.max_turns)
        if truncated:
            self._keep(_phase="over")
        info = self._info(invalid_calls=invalid, tool_errors=errors, truncation="max_turns" if truncated else "")
        return self._shown(messages), math.fsum(self._rewards.values()), terminated, truncated, info

    def _note_invalid(self, problem: str) -> Generator[_calls.Call, Any, None]:
        """Let `on_invalid` hear of a problem, if the environment has one of its own.

        Raises:
            RuntimeError: It raised a `ToolError`.
        """
        if getattr(self.on_invalid, "__func__", None) is ToolEnv.on_invalid:
            return  # saves a thread
        what = f"{type(self).__name__}.on_invalid"
        try:
            yield _calls.Call(partial(self.on_invalid, problem), what, underway=self._underway)
        except ToolError as error:
            raise RuntimeError(
                f"{what} raised {error!r}, and a ToolError answers a call: the model is told the problem itself, so return, or call finish"
            ) from error

    def _prepare(self, call: WrittenCall, index: int) -> _calls.Call | str:
        """Return what runs a call that the model wrote, or what answers it if nothing needs to run.

        Raises:
            RefusedError: The call can't be executed as it is.
        """
        if self._ended():
            return "not executed: the episode has ended"
        check_count(index, self.max_parallel_calls)
        tool, arguments = checked(call, self._offered)
        function = getattr(self, tool.attribute) if tool.attribute else self._functions[tool.name]
        return _calls.Call(partial(function, **arguments), f"tool '{tool.name}'", tool.timeout, self._underway)

    def _check_alone(self, what: str) -> None:
        if (left := self._underway.left()) is not None:
            raise RuntimeError(
                f"{what} needs an environment that nothing else changes, and {left} of an earlier step still runs: "
                f"make a new {type(self).__name__}, or wait until that call has returned"
            )

    @contextmanager
    def _offering(self, names: Collection[str]) -> Iterator[None]:
        """Let the rules know only these of the tools for a step, so that they answer in their own words and order. For wrappers."""
        whole = self._offered
        self._keep(_offered={name: tool for name, tool in whole.items() if name in names})
        try:
            yield
        finally:
            self._keep(_offered=whole)

    def _keep(self, **values: Any) -> None:
        """Set attributes that only the environment itself may set."""
        vars(self).update(values)

    def _nudge(self) -> str:
        return f"Call a tool; {names_of(self._offered)}." if self._offered else "Go on."

    def _ended(self) -> bool:
        return self._phase == "over"

    def _check_running(self, what: str, when_over: str) -> None:
        if self._phase != "running":
            ways_out = {"starting": "it belongs to an action, in a tool, on_text or on_invalid", "over": when_over}
            way_out = ways_out.get(self._phase, "call reset first")
            raise RuntimeError(f"{what} needs an episode that is running, this one is {self._phase}: {way_out}")

    def _info(self, *, invalid_calls: int, tool_errors: int, truncation: str) -> dict[str, Any]:
        return {
            "turn": self.turn,
            "rewards": dict(self._rewards),
            "metrics": dict(self._metrics),
            "invalid_calls": invalid_calls,
            "tool_errors": tool_errors,
            "truncation": truncation,
        }

    def _shown(self, messages: list[Message]) -> Observation:
        if self.render_mode is not None:
            self._show(messages)
        return tuple(messages)

    def _show(self, messages: Sequence[Any]) -> None:
        lines = [*lines_of(messages)]
        self._transcript.extend(lines)
        if self.render_mode == "human":
            print_lines(lines)

    def _make_action_space(self) -> ToolCallSpace:
        return ToolCallSpace({tool.name: tool.parameters for tool in self._tools.values()})
