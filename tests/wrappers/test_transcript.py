"""The transcript wrapper: what the model wrote, in wire form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art_gym import ToolEnv, say, tool
from art_gym.wrappers import Transcript


class Shelf(ToolEnv):
    @tool
    def put(self, name: str = "", count: int | None = None) -> str:
        return f"{name} {count}"


def shown(action: Any) -> Any:
    """The action as the transcript shows it."""
    env: Any = Transcript(Shelf())
    env.reset(seed=0)
    observation, *_ = env.step(action)
    assert observation in env.observation_space
    json.dumps(observation, ensure_ascii=False).encode()
    return observation[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "blå", "count": None}, '{"name": "blå", "count": null}'),
        ('{"name":  "a"}', '{"name":  "a"}'),
        ("{'name': 'a'}", "{'name': 'a'}"),
        ({}, "{}"),
        (None, ""),
        ("", ""),
        ([True], "[true]"),
        (0, "0"),
        # No JSON: shown as what stands for it in a record.
        ({"name": {1, 2}}, "0"),
        (b"{}", "0"),
        ("\ud800", "?"),
    ],
    ids=repr,
)
def test_arguments_are_shown_as_json_text(arguments: Any, text: str) -> None:
    action = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "put", "arguments": arguments}}]}
    assert shown(action)["tool_calls"] == [{"id": "a", "type": "function", "function": {"name": "put", "arguments": text}}]


def test_arguments_that_hold_themselves_are_shown_as_they_can_be() -> None:
    arguments: dict[Any, Any] = {}
    arguments["name"] = arguments
    action = {"role": "assistant", "tool_calls": [{"function": {"name": "put", "arguments": arguments}}]}
    assert isinstance(shown(action)["tool_calls"][0]["function"]["arguments"], str)


@pytest.mark.parametrize(
    ("action", "content"),
    [
        ({"role": "assistant", "content": None}, None),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "put"}}]}, None),
        ({"role": "assistant"}, None),
        (say(""), ""),
        (say("hm"), "hm"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}]}, "a"),
        ({"role": "assistant", "content": 3}, ""),
        (say("\ud800"), "?"),
    ],
    ids=repr,
)
def test_content_is_kept_and_none_stays_none(action: Any, content: Any) -> None:
    assert shown(action)["content"] == content


def test_a_message_of_the_sdk_keeps_its_content() -> None:
    class Message:
        def model_dump(self) -> Any:
            return {"role": "assistant", "content": None}

    assert shown(Message()) == {"role": "assistant", "content": None}
