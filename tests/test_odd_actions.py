"""Whatever a model writes is answered as the contract says, and never raised: one row for each odd or malformed action.

A row holds what was written, what is answered, and how many calls count as invalid. The rest holds for all rows, and is checked for each.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import types
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

from art_gym import ToolEnv, ToolError, tool
from art_gym.wrappers import Transcript

TOOLS = "the tools are: add, look, note, keep, stop"
CAPITAL_TOOLS = TOOLS.replace("the", "The", 1)
NUDGE = f"Call a tool; {TOOLS}."
NO_MESSAGE = f"the action must be an assistant message. {NUDGE}"
NO_CALL = f"a tool call must be an object with 'id', 'type' and 'function'; {TOOLS}"
NO_FUNCTION = f"a tool call's 'function' must be an object with 'name' and 'arguments'; {TOOLS}"
NO_NAME = f"the call names no tool; {TOOLS}"
NO_OBJECT = "arguments must be an object, written as JSON text"
SURROGATE = "arguments are not valid JSON: they hold an unpaired surrogate, which is no character"
DEEP = "arguments are nested too deeply: 100 levels at most"
DIGITS = f"the number {'9' * 20} is out of range"
ENDED = "not executed: the episode has ended"
NOT_AN_INTEGER = "invalid arguments: 'a' should be a valid integer"


class Box(ToolEnv):
    """Takes anything, and remembers what was refused."""

    max_parallel_calls = 50

    def start(self) -> str:
        self.total = 0
        self.heard: list[str] = []
        return "Go."

    def on_invalid(self, problem: str) -> None:
        self.heard.append(problem)

    @tool
    def add(self, a: int, b: int = 1) -> str:
        """Add two numbers."""
        self.total += 1
        return f"{(a + b) % 1000}"

    @tool
    def look(self) -> str:
        return "a room"

    @tool
    def note(self, text: str) -> int:
        if text == "?":
            raise ToolError("say more")
        return len(text)

    @tool
    def keep(self, value: Any) -> Any:
        return value

    @tool
    def stop(self) -> str:
        self.finish()
        return "stopped"


class Message:
    """A message object of an SDK."""

    def __init__(self, dumped: Any) -> None:
        self.dumped = dumped

    def model_dump(self) -> Any:
        if isinstance(self.dumped, Exception):
            raise self.dumped
        return self.dumped


def written(name: Any = "look", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def act(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def add(arguments: Any) -> dict[str, Any]:
    return act(written("add", arguments))


def keep(value: str) -> dict[str, Any]:
    return act(written("keep", f'{{"value": {value}}}'))


def note(text: str) -> dict[str, Any]:
    return act(written("note", f'{{"text": {text}}}'))


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


ITSELF: dict[str, Any] = {}
ITSELF["value"] = ITSELF

ROWS: dict[str, tuple[Any, list[str], int]] = {
    # No message at all.
    "nothing": (None, [NO_MESSAGE], 1),
    "text instead of a message": ("look()", [NO_MESSAGE], 1),
    "bytes": (b"{}", [NO_MESSAGE], 1),
    "a number": (7, [NO_MESSAGE], 1),
    "a list": ([act(written())], [NO_MESSAGE], 1),
    "an object": (object(), [NO_MESSAGE], 1),
    "a class that could dump": (Message, [NO_MESSAGE], 1),
    "an object that fails to dump": (Message(RuntimeError("broken")), [NO_MESSAGE], 1),
    "an object that dumps nothing": (Message(None), [NO_MESSAGE], 1),
    "another role": ({"role": "user", "content": "look"}, [f"the message's role must be 'assistant'. {NUDGE}"], 1),
    "no role": ({"role": None}, [f"the message's role must be 'assistant'. {NUDGE}"], 1),
    "a role that is a list": ({"role": ["assistant"]}, [f"the message's role must be 'assistant'. {NUDGE}"], 1),
    # A message without a call.
    "an empty message": ({}, [NUDGE], 0),
    "an empty text": ({"role": "assistant", "content": ""}, [NUDGE], 0),
    "no content": ({"role": "assistant", "content": None}, [NUDGE], 0),
    "a megabyte of text": ({"role": "assistant", "content": "x" * 2**20}, [NUDGE], 0),
    "a lone surrogate as text": ({"role": "assistant", "content": "\ud800"}, [NUDGE], 0),
    "content that is an object": ({"role": "assistant", "content": {"text": "hi"}}, [NUDGE], 0),
    "content parts that are none": ({"role": "assistant", "content": [None, 3, {"text": 3}, {"type": "text"}]}, [NUDGE], 0),
    "a call written as text": ({"role": "assistant", "content": '<tool_call>{"name": "look"}</tool_call>'}, [NUDGE], 0),
    "an empty list of calls": (act(), [NUDGE], 0),
    "no list of calls": ({"role": "assistant", "content": "", "tool_calls": None}, [NUDGE], 0),
    "the old way to call": ({"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}, [NUDGE], 0),
    "calls that are an object": (act(tool_calls={}), [f"tool_calls must be a list of calls. {NUDGE}"], 1),
    "calls that are text": (act(tool_calls="look"), [f"tool_calls must be a list of calls. {NUDGE}"], 1),
    # A call that can't be one.
    "a call that is nothing": (act(None), [NO_CALL], 1),
    "a call that is text": (act("look"), [NO_CALL], 1),
    "a call that is a list": (act(["look"]), [NO_CALL], 1),
    "an empty call": (act({}), [NO_FUNCTION], 1),
    "a function that is text": (act(written(function="look")), [NO_FUNCTION], 1),
    "a function that is nothing": (act(written(function=None)), [NO_FUNCTION], 1),
    "another type": (act(written(type="custom")), [f"a tool call's type must be 'function'; {TOOLS}"], 1),
    "a type that is a list": (act(written(type=[])), [f"a tool call's type must be 'function'; {TOOLS}"], 1),
    "no name": (act(written(function={"arguments": "{}"})), [NO_NAME], 1),
    "an empty name": (act(written("")), [NO_NAME], 1),
    "a name that is a number": (act(written(3)), [NO_NAME], 1),
    "a name that is an object": (act(written({"look": 1})), [NO_NAME], 1),
    # A name that isn't a tool's.
    "an unknown name": (act(written("subtract")), [f"unknown tool 'subtract'; {TOOLS}"], 1),
    "a misspelt name": (act(written("lok")), [f"unknown tool 'lok'; did you mean 'look'? {CAPITAL_TOOLS}"], 1),
    "a name in capitals": (act(written("ADD", '{"a": 1}')), [f"unknown tool 'ADD'; did you mean 'add'? {CAPITAL_TOOLS}"], 1),
    "a name with spaces": (act(written(" look ")), [f"unknown tool ' look '; did you mean 'look'? {CAPITAL_TOOLS}"], 1),
    "a name with a namespace": (act(written("functions.look")), [f"unknown tool 'functions.look'; did you mean 'look'? {CAPITAL_TOOLS}"], 1),
    "a method of the environment": (act(written("reset")), [f"unknown tool 'reset'; {TOOLS}"], 1),
    "a private method": (act(written("_transition")), [f"unknown tool '_transition'; {TOOLS}"], 1),
    "a special method": (act(written("__class__")), [f"unknown tool '__class__'; {TOOLS}"], 1),
    "a name with NUL": (act(written("xyz\0")), [f"unknown tool 'xyz\0'; {TOOLS}"], 1),
    "a lone surrogate as name": (act(written("\udfff")), [f"unknown tool '?'; {TOOLS}"], 1),
    "a megabyte of name": (act(written("n" * 2**20)), [f"unknown tool '{'n' * 60}…'; {TOOLS}"], 1),
    # Arguments that mean none, or that are taken.
    "arguments that are empty": (act(written(arguments="")), ["a room"], 0),
    "arguments that are blank": (act(written(arguments=" \n\t")), ["a room"], 0),
    "arguments that are null": (act(written(arguments="null")), ["a room"], 0),
    "arguments that are nothing": (act(written(arguments=None)), ["a room"], 0),
    "no arguments": (act(written(function={"name": "look"})), ["a room"], 0),
    "arguments already read": (add({"a": 1}), ["2"], 0),
    "arguments in another mapping": (add(types.MappingProxyType({"a": 1})), ["2"], 0),
    "arguments between blanks": (add(' \n{"a": 1}\r\n'), ["2"], 0),
    "a number as text": (add('{"a": "2", "b": "3"}'), ["5"], 0),
    "a whole number with a fraction of nothing": (add('{"a": 2.0}'), ["3"], 0),
    "null for a default": (add('{"a": 1, "b": null}'), ["2"], 0),
    "a number of 300 digits": (add(f'{{"a": {"9" * 300}}}'), ["0"], 0),
    "the largest float, in digits": (add(f'{{"a": {int(sys.float_info.max)}}}'), [f"{(int(sys.float_info.max) + 1) % 1000}"], 0),
    "escapes and NUL": (note('"\\u0000\\n\\ud83d\\ude00"'), ["3"], 0),
    "a megabyte of argument": (note(f'"{"x" * 2**20}"'), [str(2**20)], 0),
    "a hundred levels": (keep(f"{'[' * 99}{']' * 99}"), [f"{'[' * 99}{']' * 99}"], 0),
    # Arguments that aren't JSON, or no object.
    "a list as arguments": (add("[1, 2]"), ["arguments must be an object, not a list"], 1),
    "a text as arguments": (add('"a"'), ["arguments must be an object, not a string"], 1),
    "JSON within JSON": (add(json.dumps('{"a": 1}')), ["arguments must be an object, not a string"], 1),
    "a bare number": (add("3"), ["arguments must be an object, not a number"], 1),
    "a number of no JSON": (add(3), [NO_OBJECT], 1),
    "a list already read": (add([1, 2]), [NO_OBJECT], 1),
    "bytes as arguments": (add(b'{"a": 1}'), [NO_OBJECT], 1),
    "cut off": (add('{"a": 1'), ["arguments are not valid JSON: Expecting ',' delimiter at character 7"], 1),
    "a text cut off": (note('"abc'), ["arguments are not valid JSON: Unterminated string starting at character 9"], 1),
    "single quotes": (
        add("{'a': 1}"),
        ["arguments are not valid JSON: Expecting property name enclosed in double quotes at character 1"],
        1,
    ),
    "a trailing comma": (
        add('{"a": 1,}'),
        ["arguments are not valid JSON: Expecting property name enclosed in double quotes at character 8"],
        1,
    ),
    "two objects": (add('{"a": 1} {"a": 2}'), ["arguments are not valid JSON: Extra data at character 9"], 1),
    "words after the object": (add('{"a": 1}; done'), ["arguments are not valid JSON: Extra data at character 8"], 1),
    "a fence of Markdown": (add('```json\n{"a": 1}\n```'), ["arguments are not valid JSON: Expecting value at character 0"], 1),
    "a byte order mark": (add('\ufeff{"a": 1}'), ["arguments are not valid JSON: Expecting value at character 0"], 1),
    "Python's constants": (add('{"a": True}'), ["arguments are not valid JSON: Expecting value at character 6"], 1),
    "a hexadecimal number": (add('{"a": 0x10}'), ["arguments are not valid JSON: Expecting ',' delimiter at character 7"], 1),
    "a leading zero": (add('{"a": 01}'), ["arguments are not valid JSON: Expecting ',' delimiter at character 7"], 1),
    "a bare NUL": (note('"\0"'), ["arguments are not valid JSON: Invalid control character at character 10"], 1),
    "a bad escape": (note('"\\x"'), ["arguments are not valid JSON: Invalid \\escape at character 10"], 1),
    "NaN": (add('{"a": NaN}'), ["NaN is not a JSON number: give a finite one"], 1),
    "Infinity": (add('{"a": -Infinity}'), ["-Infinity is not a JSON number: give a finite one"], 1),
    "NaN already read": (add({"a": float("nan")}), ["NaN is not a JSON number: give a finite one"], 1),
    "beyond a float": (add('{"a": 1e999}'), ["the number 1e999 is out of range"], 1),
    "a number of 309 digits": (add(f'{{"a": {"9" * 309}}}'), [DIGITS], 1),
    "a number of 309 digits, negative": (add(f'{{"a": -{"9" * 309}}}'), [f"the number -{'9' * 19} is out of range"], 1),
    "a number of 309 digits, inside": (keep(f'[{{"b": {"9" * 309}}}]'), [DIGITS], 1),
    "a number of 309 digits, already read": (add({"a": 10**309 - 1}), [DIGITS], 1),
    "a number of 4,300 digits": (add(f'{{"a": {"9" * 4300}}}'), [DIGITS], 1),
    "a number of 5,000 digits": (add(f'{{"a": {"9" * 5000}}}'), [DIGITS], 1),
    "a key twice": (add('{"a": 1, "a": 2}'), ["'a' is given more than once"], 1),
    "a key twice, inside": (keep('{"k": 1, "k": 1}'), ["'k' is given more than once"], 1),
    "a key twice, already read": (add({1: 1, "1": 2}), ["'1' is given more than once"], 1),
    "a lone surrogate": (note('"\ud800"'), [SURROGATE], 1),
    "a lone surrogate, escaped": (note('"\\udc00"'), [SURROGATE], 1),
    "a lone surrogate as key": (add('{"\\ud800": 1}'), [SURROGATE], 1),
    "a lone surrogate already read": (act(written("note", {"text": "\ud800"})), [SURROGATE], 1),
    "too deep": (keep(f"{'[' * 100}{']' * 100}"), [DEEP], 1),
    "far too deep": (keep("[" * 10**6), [DEEP], 1),
    "too deep already read": (act(written("keep", {"value": nested(5000)})), [DEEP], 1),
    "what holds itself": (act(written("keep", ITSELF)), ["arguments must be a JSON object"], 1),
    "what has no JSON form": (act(written("keep", {"value": object()})), ["arguments must be a JSON object"], 1),
    # Arguments that don't fit.
    "a missing argument": (add("{}"), ["invalid arguments: 'a' is required"], 1),
    "null for what is required": (add('{"a": null}'), [f"{NOT_AN_INTEGER}, got null"], 1),
    "a misspelt argument": (
        add('{"a": 1, "c": 2}'),
        ["invalid arguments: 'c' is not an argument; the arguments are: a, b"],
        1,
    ),
    "an argument where none is taken": (
        act(written("look", '{"at": 1}')),
        ["invalid arguments: 'at' is not an argument; this tool takes no arguments"],
        1,
    ),
    "an empty key": (add('{"a": 1, "": 2}'), ["invalid arguments: '' is not an argument; the arguments are: a, b"], 1),
    "self as an argument": (add('{"a": 1, "self": 2}'), ["invalid arguments: 'self' is not an argument; the arguments are: a, b"], 1),
    "half a number": (add('{"a": 1.5}'), [f"{NOT_AN_INTEGER}, got a number with a fractional part, got 1.5"], 1),
    "words for a number": (add('{"a": "two"}'), [f"{NOT_AN_INTEGER}, unable to parse string as an integer, got 'two'"], 1),
    "a list for a number": (add('{"a": [1]}'), [f"{NOT_AN_INTEGER}, got a list"], 1),
    "a megabyte for a number": (
        add(f'{{"a": "{"x" * 2**20}"}}'),
        [f"{NOT_AN_INTEGER}, unable to parse string as an integer, got '{'x' * 60}…'"],
        1,
    ),
    "a number for a text": (note("3"), ["invalid arguments: 'text' should be a valid string, got 3"], 1),
    # Several calls.
    "text beside a call": (act(written(), content="I look."), ["a room"], 0),
    "calls in a tuple": (act(tool_calls=(written(),)), ["a room"], 0),
    "a message object of an SDK": (Message(act(written())), ["a room"], 0),
    "a broken call before good ones": (act(None, written("nope"), add("[")["tool_calls"][0], written()), [NO_CALL, "", "", "a room"], 3),
    "a call that a tool refuses, before a good one": (act(note('"?"')["tool_calls"][0], written()), ["say more", "a room"], 0),
    "an id for two": (act(written(), written(), written(id="b")), ["a room"] * 3, 0),
    "no ids": (act(*({"function": {"name": "look"}} for _ in range(3))), ["a room"] * 3, 0),
    "empty ids, and one that would be given": (act(written(id=""), written(id="call_0"), written(id="")), ["a room"] * 3, 0),
    "ids that are no text": (act(written(id=0), written(id=None), written(id=["a"])), ["a room"] * 3, 0),
    "lone surrogates as ids": (
        act(written(id="\ud800"), written(id="\udc00"), written(id="?"), written(id="\ud800"), written(id="é"), written(id="é")),
        ["a room"] * 6,
        0,
    ),
    "a megabyte of id": (act(written(id="i" * 2**20)), ["a room"], 0),
    "more calls than are allowed": (
        act(*[written()] * 52),
        ["a room"] * 50 + ["not executed: a message may hold 50 tool calls at most"] * 2,
        2,
    ),
    "calls after the end": (act(written("stop"), written(), None, written("nope")), ["stopped", ENDED, ENDED, ENDED], 0),
}


def box(**options: Any) -> Box:
    env = Box(**options)
    env.reset(seed=0)
    return env


def calls_of(action: Any) -> list[Any]:
    message = action.dumped if isinstance(action, Message) else action
    calls = message.get("tool_calls") if isinstance(message, dict) and message.get("role", "assistant") == "assistant" else None
    return list(calls) if isinstance(calls, list | tuple) else []


def is_text(id_: Any) -> bool:
    return isinstance(id_, str) and not any("\ud800" <= character <= "\udfff" for character in id_[:100])


def test_there_are_enough_rows() -> None:
    assert len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS)
def test_an_odd_action_is_answered(row: str) -> None:
    action, contents, invalid = ROWS[row]
    env = box()
    before = len(repr(action)) if "deep already" not in row else 0
    observation, reward, terminated, truncated, info = env.step(action)
    messages: list[Any] = list(observation)
    # What the row says; an empty text stands for one that other rows spell out.
    assert [shown if wanted else "" for shown, wanted in zip((message["content"] for message in messages), contents, strict=True)] == contents
    assert info["invalid_calls"] == invalid
    # What holds for all.
    calls = calls_of(action)
    assert observation in env.observation_space
    assert [message["role"] for message in messages] == ["tool"] * len(calls) or [message["role"] for message in messages] == ["user"]
    given = [call.get("id") if isinstance(call, dict) and is_text(call.get("id")) else None for call in calls]
    answered = [message["tool_call_id"] for message in messages] if calls else []
    assert all(mine == theirs for mine, theirs in zip(given, answered, strict=True) if isinstance(mine, str) and mine)
    made_up = [theirs for mine, theirs in zip(given, answered, strict=True) if not (isinstance(mine, str) and mine)]
    assert all(made_up)
    assert len({*made_up}) == len(made_up)
    assert not any(id_ in given for id_ in made_up)
    refused = [message["content"] for message in messages if message["content"] in env.heard]
    assert len(env.heard) == invalid
    assert len(refused) == invalid or messages[0]["role"] == "user"
    assert all(len(text) < 300 for text in env.heard)
    json.dumps(messages, ensure_ascii=False).encode()
    assert (reward, terminated, truncated) == (0.0, "stopped" in contents, False)
    assert json.loads(json.dumps(info)) == info
    assert before == (len(repr(action)) if before else 0)
    # The next action finds an environment that works, or one that says that it has ended.
    if terminated:
        with pytest.raises(ResetNeeded):
            env.step(act(written()))
    else:
        assert env.step(act(written()))[0][0]["content"] == "a room"


@pytest.mark.parametrize("row", ROWS)
def test_an_odd_action_is_shown(row: str) -> None:
    env = box(render_mode="ansi")
    env.step(ROWS[row][0])
    text = env.render()
    assert text is not None
    text.encode()


@pytest.mark.parametrize("row", ROWS)
async def test_an_odd_action_is_answered_alike_in_an_async_step(row: str) -> None:
    action = ROWS[row][0]
    assert await box().astep(action) == await asyncio.to_thread(box().step, action)


@pytest.mark.parametrize("row", ROWS)
def test_an_odd_action_stands_in_the_transcript_as_a_message(row: str) -> None:
    env: Any = Transcript(Box())
    env.reset(seed=0)
    observation, *_ = env.step(ROWS[row][0])
    assert observation in env.observation_space


def test_an_action_is_not_changed() -> None:
    for row, (action, _, _) in ROWS.items():
        if isinstance(action, dict | list) and "already read" not in row and "mapping" not in row and row != "what has no JSON form":
            kept = copy.deepcopy(action)
            box().step(action)  # type: ignore[arg-type]
            assert repr(action) == repr(kept), row


def test_an_environment_is_given_text_that_can_be_written() -> None:
    class Listener(ToolEnv):
        def start(self) -> str:
            return "Go."

        def on_text(self, text: str) -> str:
            text.encode()
            return text

    for content, text in {"\ud800!": "?!", "é": "é"}.items():
        env = Listener()
        env.reset(seed=0)
        for written_as in (content, [{"type": "text", "text": content}]):
            assert env.step({"role": "assistant", "content": written_as})[0][0]["content"] == text  # type: ignore[typeddict-item]
