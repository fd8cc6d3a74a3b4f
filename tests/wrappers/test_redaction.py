"""Redact: what the model is shown, and what stays whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from art_gym import ToolEnv, call, tool
from art_gym.wrappers import Redact, Transcript


class Talk(ToolEnv):
    """Says the secret in every form that a message has."""

    instructions = "The secret is swordfish."

    def start(self) -> Any:
        function = {"name": "tell", "arguments": self.options.get("arguments", '{"word": "swordfish"}')}
        return [
            {
                "role": "user",
                "content": [{"type": "text", "text": "swordfish!"}, {"type": "image_url", "image_url": {"url": "data:swordfish"}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": "no swordfish"},
        ]

    @tool
    def tell(self, word: str) -> str:
        """Tell the word."""
        self.told = f"{word} is not swordfish"
        return self.told


def opening(env: Any, **options: Any) -> Any:
    return env.reset(seed=0, options=options)[0]


def test_every_text_of_the_observation_is_redacted() -> None:
    system, user, assistant, answer = opening(Redact(Talk(), "swordfish"))
    assert system["content"] == "The secret is [redacted]."
    assert user["content"] == [{"type": "text", "text": "[redacted]!"}, {"type": "image_url", "image_url": {"url": "data:swordfish"}}]
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"] == {"name": "tell", "arguments": '{"word": "[redacted]"}'}
    assert answer == {"role": "tool", "tool_call_id": "a", "content": "no [redacted]"}


def test_what_a_step_answers_is_redacted() -> None:
    env = Redact(Talk(), "swordfish")
    opening(env)
    assert env.step(call("tell", word="cod"))[0][0]["content"] == "cod is not [redacted]"


def test_the_environment_keeps_the_whole_text() -> None:
    env: Any = Redact(Talk(render_mode="ansi"), "swordfish")
    opening(env)
    env.step(call("tell", word="cod"))
    assert env.unwrapped.told == "cod is not swordfish"
    assert "The secret is swordfish." in env.render()


def test_messages_that_the_environment_keeps_are_not_changed(plain: Any) -> None:
    class Keeping(plain):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.message = {"role": "user", "content": [{"type": "text", "text": "swordfish"}]}
            return (self.message,), {}

    env: Any = Redact(Keeping(), "swordfish")
    assert opening(env)[0]["content"] == [{"type": "text", "text": "[redacted]"}]
    assert env.unwrapped.message == {"role": "user", "content": [{"type": "text", "text": "swordfish"}]}


def test_a_transcript_beneath_stays_whole() -> None:
    inner: Any = Transcript(Talk())
    env = Redact(inner, "swordfish")
    opening(env)
    shown = env.step(call("tell", word="swordfish"))[0]
    assert "swordfish" not in json.dumps([message["content"] for message in shown if isinstance(message["content"], str)])
    assert shown[-2]["tool_calls"][0]["function"]["arguments"] == '{"word": "[redacted]"}'
    assert inner.snapshot()["wrapper"]["_messages"][-1]["content"] == "swordfish is not swordfish"


def test_patterns_are_regular_expressions_applied_one_after_the_other() -> None:
    env = Redact(Talk(), [r"sw\w+", r"secret|\[gone\]"], "[gone]")
    assert opening(env)[0]["content"] == "The [gone] is [gone]."


def test_the_replacement_is_taken_word_for_word() -> None:
    assert opening(Redact(Talk(), "swordfish", r"\1\g<0>"))[0]["content"] == r"The secret is \1\g<0>."


def test_a_function_may_do_it() -> None:
    assert opening(Redact(Talk(), lambda text: text.replace("sword", "cat")))[0]["content"] == "The secret is catfish."


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"word":  "cod"}', '{"word":  "cod"}'),
        (r'{"word": "sword\u0066ish"}', '{"word": "#"}'),
        ('{"words": [{"swordfish": ["a swordfish", 1, null]}]}', '{"words": [{"#": ["a #", 1, null]}]}'),
        ('{"word": "swordfish", "word": "cod"}', '{"word": "#", "word": "cod"}'),
        ('{"word": swordfish', '{"word": #'),
        ("", ""),
        ('{"pin": 4711, "other": 12}', '{"pin": "#", "other": 12}'),
        ("[" * 100_000 + "swordfish", "[" * 100_000 + "#"),
    ],
    ids=lambda text: text[:40],
)
def test_arguments_of_calls_stay_json_where_they_are(arguments: str, shown: str) -> None:
    assistant = opening(Redact(Talk(), ["swordfish", "4711"], "#"), arguments=arguments)[2]
    assert assistant["tool_calls"][0]["function"]["arguments"] == shown


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(' is no regular expression: .*; re.escape makes one of a text"):
        Redact(Talk(), ["ok", "("])


def test_a_function_that_gives_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="the function that redacts must return text, not None"):
        opening(Redact(Talk(), lambda text: None))
