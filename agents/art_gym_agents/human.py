"""The human policy: shows what the model would see, and takes what the person types.

A line is a call (`search word=gate`, `search {"word": "gate"}`, or `{"name": …, "arguments": …}`), or text to say. What isn't an action of the
environment's space is explained and asked for again, so that a slip of the fingers costs no turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from art_gym._render import lines_of
from art_gym._schema import conforms
from art_gym.errors import UsageError
from art_gym.messages import AssistantMessage, calls, say
from art_gym.rollout.agent import Reply, TurnState
from art_gym.spaces import ToolCallSpace

_STYLES = {"system": "dim", "developer": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
_HELP = (
    'TOOL arg=value …   calls a tool; so do TOOL {JSON} and {"name": …, "arguments": …}\n'
    "any other text     is said; :say TEXT says what begins like a call\n"
    ":tools             lists the tools again\n"
    ":quit              leaves"
)
_LIMITS = {
    "minimum": "of at least {}",
    "exclusiveMinimum": "of more than {}",
    "maximum": "of at most {}",
    "exclusiveMaximum": "of less than {}",
    "minLength": "of at least {} characters",
    "maxLength": "of at most {} characters",
    "minItems": "of at least {} items",
    "maxItems": "of at most {} items",
    "pattern": "matching {}",
}
_PAIR = re.compile(r"([^\s={}\"']+)=(.*)", re.DOTALL)


class PlayerLeft(UsageError):
    """The person who plays has had enough, so that the rollout ends."""


class NoActionError(ValueError):
    """A line is no action; the text says what would be one."""


class HumanAgent:
    """Lets a person play at the terminal, one episode at a time: play it with `concurrency=1` and a generous `turn_timeout`.

    Lines are read in a thread, so that the event loop goes on meanwhile.

    Args:
        name: In reports.
        console: Where things are shown; standard output if None.
        read: Gives the next line, or raises EOFError; standard input if None.
    """

    def __init__(self, *, name: str = "human", console: Console | None = None, read: Callable[[], str] | None = None) -> None:
        self.name = name
        self._console = console or Console()
        self._read = read or _reader()

    async def act(self, state: TurnState) -> Reply:
        """Ask for the next action until there is one.

        Raises:
            PlayerLeft: The person typed :quit, or the input ended.
        """
        if state.turn == 0:
            self._console.rule(Text(f"{state.env_id}, scenario {state.scenario.id}"))
            self._show_tools(state.action_space)
        for role, text in lines_of(state.observation):
            self._console.print(Panel(Text(text), title=role, title_align="left", border_style=_STYLES.get(role, "")))
        while True:
            line = (await self._line()).strip()
            if line in (":quit", ":q"):
                raise PlayerLeft("the player left")
            if line == ":tools":
                self._show_tools(state.action_space)
            elif line in ("", ":help"):
                self._console.print(Text(_HELP, style="dim"))
            else:
                try:
                    return Reply(action=read_action(line, state.action_space), policy=self.name)
                except NoActionError as problem:
                    self._console.print(Text(str(problem), style="red"))

    async def close(self) -> None:
        """Nothing to release."""

    async def _line(self) -> str:
        """Read a line in a thread of its own; one that is no longer waited for doesn't keep the process from ending."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def settle(line: str | None) -> None:
            if answer.done():
                return
            if line is None:
                self._console.print()
                answer.set_exception(PlayerLeft("the player left: the input ended"))
            else:
                answer.set_result(line)

        def ask() -> None:
            try:
                line: str | None = self._read()
            except (EOFError, OSError, ValueError):  # ValueError: the input is closed
                line = None
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(settle, line)

        self._console.print(Text("> ", style="bold"), end="")
        threading.Thread(target=ask, name="art_gym input", daemon=True).start()
        return await answer

    def _show_tools(self, space: ToolCallSpace) -> None:
        for name, schema in space.tools.items():
            self._console.print(Text(signature(name, schema), style="bold"))
        self._console.print(Text(":help tells how to call them.", style="dim"))

    def __repr__(self) -> str:
        return f"HumanAgent(name={self.name!r})"


def _reader() -> Callable[[], str]:
    """What reads standard input: with the terminal's line editing where there is a terminal."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return input
        # A thread that waits in a buffered file holds its lock, and Python aborts when it ends meanwhile, as after Ctrl-C.
        raw = io.FileIO(sys.stdin.fileno(), closefd=False)
    except (OSError, ValueError, AttributeError):
        return input

    def read() -> str:
        line = raw.readline()
        if not line:
            raise EOFError
        return line.decode(errors="replace")

    return read


def read_action(line: str, space: ToolCallSpace) -> AssistantMessage:
    """Read a typed line as an action.

    >>> space = ToolCallSpace({"guess": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}})
    >>> read_action("guess number=3", space)["tool_calls"][0]["function"]["arguments"]
    '{"number": 3}'
    >>> read_action("I give up.", space)
    {'role': 'assistant', 'content': 'I give up.'}

    Raises:
        NoActionError: It is meant as a call, and no tool takes it.
    """
    if line.startswith(":"):
        word, _, text = line.partition(" ")
        if word == ":say" and text.strip():
            return say(text.strip())
        raise NoActionError(f"{word} is no command; these are: :say TEXT, :tools, :help, :quit")
    if line[0] in "{[":
        named = _from_json(line)
    else:
        name, _, rest = line.partition(" ")
        if name not in space.tools and not _looks_like_a_call(rest):
            return say(line)
        schema = space.tools.get(name)
        named = [(name, _arguments(rest.strip(), schema if isinstance(schema, Mapping) else {}))]
    problems = [problem for name, arguments in named for problem in _problems(name, arguments, space)]
    if problems:
        raise NoActionError("; ".join(problems))
    action = calls(*named)
    if action not in space:
        raise NoActionError(f"the tool doesn't take that; its signature is {signature(named[0][0], space.tools[named[0][0]])}")
    return action


def signature(name: str, schema: Any) -> str:
    """Write a tool's parameters in one line; those that may be left out have a question mark.

    >>> signature("go", {"properties": {"to": {"enum": ["north", "south"]}, "steps": {"type": "integer", "minimum": 1}}, "required": ["to"]})
    'go(to: "north" or "south", steps?: integer of at least 1)'
    """
    properties, required = _properties(schema), schema.get("required", ()) if isinstance(schema, Mapping) else ()
    parts = (f"{key}{'' if key in required else '?'}: {_kind(part, schema)}" for key, part in properties.items())
    return f"{name}({', '.join(parts)})"


def _from_json(line: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise NoActionError(f"that is no valid JSON: {error}") from None
    entries = data if isinstance(data, list) else [data]
    named = [(entry.get("name"), entry.get("arguments", {})) if isinstance(entry, dict) else (None, None) for entry in entries]
    if not named or not all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in named):
        raise NoActionError('a call in JSON is {"name": …, "arguments": {…}}, and several are a list of these')
    return [(str(name), dict(arguments or {})) for name, arguments in named]


def _looks_like_a_call(rest: str) -> bool:
    try:
        words = shlex.split(rest)
    except ValueError:
        return False
    return bool(words) and all(_PAIR.fullmatch(word) for word in words)


def _arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise NoActionError(f"the arguments are no valid JSON: {error}") from None
        return dict(data)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise NoActionError(f"{error}: close what you quote") from None
    properties = _properties(schema)
    arguments: dict[str, Any] = {}
    for word in words:
        pair = _PAIR.fullmatch(word)
        if pair is None:
            # A single parameter needs no name.
            if len(properties) == 1 and not arguments:
                arguments[next(iter(properties))] = _value(text if len(words) > 1 else word, next(iter(properties.values())), schema)
                return arguments
            raise NoActionError(f"{word!r} has no name: write arg=value, in quotes where the value holds spaces")
        arguments[pair[1]] = _value(pair[2], properties.get(pair[1], True), schema)
    return arguments


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a word stands for: JSON where the schema takes that, else the word itself."""
    if conforms(text, schema, root) and schema is not True:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _problems(name: str, arguments: Mapping[str, Any], space: ToolCallSpace) -> Iterator[str]:
    if name not in space.tools:
        yield f"there is no tool {name!r}; the tools are: {', '.join(space.tools)} (:say says text)"
        return
    schema = space.tools[name]
    if not isinstance(schema, Mapping):
        return
    properties = _properties(schema)
    for key in schema.get("required", ()):
        if key not in arguments:
            yield f"{name} needs {key}: {_kind(properties.get(key, True), schema)}"
    for key, value in arguments.items():
        if key not in properties and schema.get("additionalProperties") is False:
            yield f"{name} takes no {key!r}; it takes: {', '.join(properties) or 'nothing'}"
        elif key in properties and not conforms(value, properties[key], schema):
            yield f"{key}: expected {_kind(properties[key], schema)}, not {json.dumps(value, ensure_ascii=False)}"


def _properties(schema: Any) -> dict[str, Any]:
    return dict(schema.get("properties", {})) if isinstance(schema, Mapping) else {}


def _kind(schema: Any, root: Any) -> str:
    """What a schema takes, in a few words."""
    if not isinstance(schema, Mapping):
        return "anything"
    if "$ref" in schema and isinstance(root, Mapping):
        name = str(schema["$ref"]).rpartition("/")[2]
        return _kind(root.get("$defs", {}).get(name, True), {})
    if "const" in schema or "enum" in schema:
        return " or ".join(json.dumps(option, ensure_ascii=False) for option in schema.get("enum", [schema.get("const")]))
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_kind(option, root) for option in options)
    kind = schema.get("type", "anything")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if "minimum" in schema and "maximum" in schema:
        return f"{text} from {schema['minimum']} to {schema['maximum']}"
    limits = [words.format(schema[key]) for key, words in _LIMITS.items() if key in schema]
    return " ".join([text, " and ".join(limits)]).strip()
