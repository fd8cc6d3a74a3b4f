"""Strategies for what a policy may send and where an episode may start."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from art_gym.messages import AssistantMessage, say
from art_gym.scenarios import SPLITS, Scenario, Split
from art_gym.spaces import ToolCallSpace
from art_gym.testing._json_values import ANYTHING, json_values

__all__ = ["actions", "broken_actions", "json_values", "scenarios"]

_SCENARIOS = 64
"""Scenarios of a split that are drawn from."""

Named = tuple[str, dict[str, Any]]


def actions(space: gymnasium.Space[Any], *, words: Sequence[str] = ()) -> SearchStrategy[Any]:
    """Build a strategy for the actions of a space: of a `ToolCallSpace` assistant messages with a call, several, text, or both.

    Every action is in the space. Calls carry ids of several styles, and now and then a message is as bare as a model's empty completion, or
    its text holds what UTF-8 can't carry. Other spaces are sampled as Gymnasium does it, from a seed.

    Args:
        space: The environment's action space.
        words: Texts worth a try as arguments, such as those that the environment's own messages hold.
    """
    if not isinstance(space, ToolCallSpace):
        return st.integers(0, 2**32 - 1).map(lambda seed: _sampled(space, seed))
    texts = _texts(words)
    said = texts.map(say) | st.sampled_from(_EMPTY).map(copy.deepcopy)
    if not space.tools:
        return said
    calls = _named_calls(space, words)

    @st.composite
    def messages(draw: DrawFn) -> AssistantMessage:
        kind = draw(st.integers(0, 7))
        if kind == 7:
            return draw(said)
        named = draw(st.lists(calls, min_size=2, max_size=3)) if kind >= 5 else [draw(calls)]
        return _message(named, draw(_ids), draw(texts) if kind in (4, 6) else None, draw(_nothing))

    return messages()


def broken_actions(space: gymnasium.Space[Any], *, words: Sequence[str] = ()) -> SearchStrategy[Any]:
    """Build a strategy for what a model may write instead of an action of the space: each is outside of it.

    Things that are no message, messages of another role, calls without a name, an id or arguments, unknown and nearly right names, arguments
    that aren't JSON, aren't an object, or don't fit the schema; alone, and among calls that are well-formed.

    Args:
        space: A `ToolCallSpace`; of other spaces nothing is broken, and the strategy is empty.
        words: Texts worth a try as arguments.
    """
    if not isinstance(space, ToolCallSpace):
        return st.nothing()
    calls = _named_calls(space, words) if space.tools else st.just(cast("Named", ("look", {})))
    names = list(space.tools)

    @st.composite
    def with_broken_calls(draw: DrawFn) -> AssistantMessage:
        message = _message(draw(st.lists(calls, min_size=1, max_size=3)), draw(_ids), draw(st.none() | st.text(max_size=5)))
        written: list[Any] = list(message["tool_calls"])
        where = draw(st.integers(0, len(written) - 1))
        for index in range(len(written)):
            if index == where or draw(st.integers(0, 2)) == 2:
                breaks = draw(st.sampled_from(_BREAKS))
                written[index] = breaks(draw, copy.deepcopy(written[index]), names)
        if len(written) > 1 and draw(st.integers(0, 4)) == 4:  # two calls of one id
            written[0] = {**written[-1]} if isinstance(written[-1], dict) else written[-1]
        return {**message, "tool_calls": written}

    return (with_broken_calls() | st.sampled_from(_NO_MESSAGES).map(copy.deepcopy)).filter(lambda action: not space.contains(action))


def scenarios(env: gymnasium.Env[Any, Any], split: Split = "train") -> SearchStrategy[Scenario]:
    """Build a strategy for the starting points of episodes: the first 64 scenarios of a split, or seeds where an environment has no scenarios.

    Args:
        env: The environment, wrapped or not.
        split: "train", "validation" or "test".

    Raises:
        ValueError: The split has no scenario.
    """
    found = first_scenarios(env, split, _SCENARIOS)
    if found is None:
        return st.integers(0, 2**31 - 1).map(lambda seed: Scenario(f"seed-{seed}", seed))
    if not found:
        raise ValueError(f"the environment's scenarios({split!r}) yields none: an episode needs one to start from")
    return st.sampled_from(found)


def first_scenarios(env: gymnasium.Env[Any, Any], split: Split, count: int) -> list[Scenario] | None:
    """Return the first scenarios of a split; None if the environment has no such method."""
    make = getattr(env.unwrapped, "scenarios", None)
    return list(itertools.islice(make(split), count)) if callable(make) else None


def starting_split(env: gymnasium.Env[Any, Any]) -> Split:
    """Return the first split that has a scenario, for an environment may be for evaluation only; "train" if none has."""
    return next((split for split in SPLITS if first_scenarios(env, split, 1)), "train")


def _sampled(space: gymnasium.Space[Any], seed: int) -> Any:
    space = copy.deepcopy(space)
    space.seed(seed)
    return space.sample()


def _texts(words: Sequence[str]) -> SearchStrategy[str]:
    plain = st.text("abcdefghij ", max_size=8) | st.text(max_size=12) | st.sampled_from(["", "\ud800", "half of it: \udfff."])
    return plain | st.sampled_from(words) if words else plain


def _named_calls(space: ToolCallSpace, words: Sequence[str]) -> SearchStrategy[Named]:
    def of_one(name: str, schema: Mapping[str, Any]) -> SearchStrategy[Named]:
        return st.tuples(st.just(name), json_values(schema, words=words))

    # An integer picks the tool: branches of a union inside the arguments would otherwise weigh as tools of their own.
    each = [of_one(name, schema) for name, schema in space.tools.items()]
    return st.integers(0, len(each) - 1).flatmap(lambda index: each[index])


_ids = st.sampled_from(["call_{0}", "call_1{0}", "chatcmpl-tool-{0}f", "{0}"])
"""How a server names calls; the first is what `art_gym.call` writes."""


_nothing = st.sampled_from(["{}", "", " ", "null"])
"""How models write that a call has no arguments."""


def _message(named: Sequence[Named], ids: str, text: str | None, nothing: str = "{}") -> AssistantMessage:
    # As `art_gym.calls` builds it, with other ids.
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {
                "id": ids.format(index),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False) if arguments else nothing},
            }
            for index, (name, arguments) in enumerate(named)
        ],
    }


_EMPTY: list[AssistantMessage] = [
    {"role": "assistant", "content": None},
    {"role": "assistant"},
    {"role": "assistant", "content": None, "tool_calls": []},
]
"""Empty completions, as servers write them."""

_NO_MESSAGES: list[Any] = [
    {"role": "user", "content": "hello"},
    {},
    None,
    "",
    "guess 3",
    3,
    [],
    {"role": "assistant", "content": 3},
    {"role": "assistant", "content": {"text": "hello"}},
    {"role": "assistant", "content": [{"type": "text"}, None, 3]},
    {"role": "tool", "tool_call_id": "call_0", "content": "hello"},
    {"role": None, "content": "hello"},
    {"role": "user", "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
    {"content": "hello"},
    {"role": "assistant", "content": None, "tool_calls": {}},
    {"role": "assistant", "content": None, "tool_calls": "look()"},
    {"role": "assistant", "content": None, "tool_calls": 1},
    {"role": "assistant", "content": None, "tool_calls": [None, "look", 3, [], {}]},
]
"""Actions that are in no space of tool calls, whatever the tools."""

_NO_ARGUMENTS: list[Any] = [
    "[]", "[1, 2]", "3", "null", '"text"', "true", "{", "}", "{]", "{'number': 3}", '{"number": 3,}', "number=3", '{"number": NaN}',
    '{"number": Infinity}', '{"number": 1e999}', '{"number": 1, "number": 2}', '{"a": "\\ud800"}', '{"a": "\\u0000"}', "\ud800", "\0",
    '```json\n{"number": 3}\n```', '"{\\"number\\": 3}"', '{"number": 3} {"number": 4}', '{"number": ' + "9" * 5000 + "}",
    "[" * 2000, '{"a":' * 200 + "1" + "}" * 200, " ", "", None, 3, 0.5, True, [], [1], {}, {"number": None}, b"{}",
]  # fmt: skip
"""Arguments that aren't the text of a JSON object, or are an object that hardly any tool takes."""

_NO_NAMES: list[Any] = ["nothing_of_that_name", "", None, 3, [], {}, "reset", "step", "close", "__init__", "\ud800", "a" * 300, "a b"]

_NO_IDS: list[Any] = ["", None, 3, [], {}, "\ud800", "call_\udfff"]

_NO_CALLS: list[Any] = [
    None, "look", 3, [], {}, {"id": "call_0"}, {"id": "call_0", "type": "function"}, {"id": "call_0", "type": "function", "function": None},
    {"id": "call_0", "type": "function", "function": "look"}, {"id": "call_0", "type": "custom", "custom": {"name": "look", "input": "x"}},
    {"name": "look", "arguments": {}},
]  # fmt: skip

_Call = dict[str, Any]
_Break = Callable[[DrawFn, _Call, list[str]], Any]


def _break_arguments(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    written["function"]["arguments"] = copy.deepcopy(draw(st.sampled_from(_NO_ARGUMENTS)))
    return written


def _cut_arguments(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    text = written["function"]["arguments"]
    written["function"]["arguments"] = text[: draw(st.integers(0, len(text) - 1))]
    return written


def _add_argument(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    arguments = {**json.loads(written["function"]["arguments"]), draw(st.sampled_from(["other", "self", ""])): draw(ANYTHING)}
    written["function"]["arguments"] = json.dumps(arguments)
    return written


def _drop_argument(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    arguments = json.loads(written["function"]["arguments"])
    if arguments:
        del arguments[draw(st.sampled_from(sorted(arguments)))]
    written["function"]["arguments"] = json.dumps(arguments)
    return written


def _change_argument(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    arguments = json.loads(written["function"]["arguments"])
    if arguments:
        value: Any = draw(st.sampled_from([None, -1, 0, 0.5, 10**30, "", "x", "3", True, [], {}]) | ANYTHING)
        arguments[draw(st.sampled_from(sorted(arguments)))] = value
    written["function"]["arguments"] = json.dumps(arguments)
    return written


def _read_arguments(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    # Some endpoints hand the arguments over as an object.
    written["function"]["arguments"] = json.loads(written["function"]["arguments"])
    return written


def _break_name(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    name = written["function"]["name"]
    near = [name.upper(), name[:-1], f"{name} ", f"functions.{name}", f"{name}s", name.replace("_", "-")]
    written["function"]["name"] = draw(
        st.sampled_from(_NO_NAMES).map(copy.deepcopy) | st.sampled_from([text for text in near if text not in names])
    )
    return written


def _break_call(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    return copy.deepcopy(draw(st.sampled_from(_NO_CALLS)))


def _drop_key(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    part = draw(st.sampled_from([written, written["function"]]))
    del part[draw(st.sampled_from(sorted(part)))]
    return written


def _break_id(draw: DrawFn, written: _Call, names: list[str]) -> Any:
    if draw(st.booleans()):
        return {**written, "id": copy.deepcopy(draw(st.sampled_from(_NO_IDS)))}
    return {key: value for key, value in written.items() if key != "id"}


_BREAKS: list[_Break] = [
    _break_name, _break_arguments, _break_arguments, _cut_arguments, _add_argument, _drop_argument, _change_argument, _change_argument,
    _read_arguments, _break_call, _drop_key, _break_id,
]  # fmt: skip
