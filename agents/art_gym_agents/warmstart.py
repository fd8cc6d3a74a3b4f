"""Scripts for the supervised warm start: they know how to call the tools, and nothing of how to win.

A script reads what a model would read (messages and tool schemas), so that what it plays can be taught. What reinforcement learning is meant to
find, such as which word to search for or how to halve a range, is left to chance on purpose.
"""

from __future__ import annotations

import re
from typing import Any

from art_gym.errors import UsageError
from art_gym.messages import AssistantMessage, call
from art_gym.rollout.agent import TurnState
from art_gym_agents.scripted import Script

_SEARCH_AGAIN = 0.1
"""How often the searcher searches once more although it has mails to answer from; searching twice should stay thinkable."""

_MAIL = re.compile(r"^From \S+: the .+ is (.+)\.$", re.MULTILINE)


def script_for(env_id: str) -> Script:
    """Find the script for an environment.

    >>> script_for("art_gym/GuessNumber-v0").__name__
    'random_guesser'

    Raises:
        UsageError: There is none.
    """
    name = env_id.rpartition(":")[2]
    if name not in SCRIPTS:
        raise UsageError(f"there is no warm-start script for {env_id}; those with one are: {', '.join(SCRIPTS)}. Train without a warm start")
    return SCRIPTS[name]


def random_guesser(state: TurnState) -> AssistantMessage:
    """Guess any number that the tool's schema allows, whatever the hints said."""
    number = _parameters(state, "guess")["number"]
    return call("guess", number=int(state.rng.integers(number["minimum"], number["maximum"] + 1)))


def random_searcher(state: TurnState) -> AssistantMessage:
    """Search for any word of the question; once mails were shown, mostly answer with what any of the last ones says."""
    results = [_MAIL.findall(str(message["content"])) for message in state.messages if message["role"] == "tool"]
    values: list[str] = next((found for found in reversed(results) if found), [])
    if values and state.rng.random() >= _SEARCH_AGAIN:
        return call("answer", value=_any(state, values))
    question = next(str(message["content"]) for message in state.messages if message["role"] == "user")
    words = re.findall(r"\w+", re.sub(r"['’]s\b", "", question))
    searched = state.memory.setdefault("searched", [])
    word = _any(state, [word for word in words if word not in searched] or words)
    searched.append(word)
    return call("search", word=word)


SCRIPTS: dict[str, Script] = {
    "art_gym/GuessNumber-v0": random_guesser,
    "art_gym/Lookup-v0": random_searcher,
}


def _parameters(state: TurnState, tool: str) -> dict[str, Any]:
    schema: Any = next(schema for schema in state.tools if schema["function"]["name"] == tool)
    properties: dict[str, Any] = schema["function"]["parameters"]["properties"]
    return properties


def _any(state: TurnState, choices: list[str]) -> str:
    return choices[int(state.rng.integers(len(choices)))]
