"""Messages: plain OpenAI wire dictionaries, and the two helpers that build actions.

The types come from the `openai` package and are imported for type checkers only, so that `import art_gym` stays fast.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from openai.types import chat

    AssistantMessage: TypeAlias = chat.ChatCompletionAssistantMessageParam
    Message: TypeAlias = chat.ChatCompletionMessageParam
    ToolSchema: TypeAlias = chat.ChatCompletionFunctionToolParam
else:
    AssistantMessage = Message = ToolSchema = dict[str, Any]

Observation: TypeAlias = tuple[Message, ...]
"""What `reset` and `step` return: the messages that are new since the last action."""


def call(name: str, /, **arguments: Any) -> AssistantMessage:
    """Build the action that calls one tool.

    >>> call("guess", number=3)["tool_calls"][0]["function"]
    {'name': 'guess', 'arguments': '{"number": 3}'}
    """
    return calls((name, arguments))


def calls(*named_arguments: tuple[str, dict[str, Any]], text: str | None = None) -> AssistantMessage:
    """Build the action that calls several tools, in order, with optional text beside them.

    >>> [c["id"] for c in calls(("look", {}), ("go", {"to": "north"}))["tool_calls"]]
    ['call_0', 'call_1']
    """
    return {
        "role": "assistant",
        "content": text,
        "tool_calls": [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}}
            for index, (name, arguments) in enumerate(named_arguments)
        ],
    }


def say(text: str) -> AssistantMessage:
    """Build the action that says something and calls no tool.

    >>> say("I don't know.")
    {'role': 'assistant', 'content': "I don't know."}
    """
    return {"role": "assistant", "content": text}
