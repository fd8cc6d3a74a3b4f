"""What is played: lists of actions from the environment's scenarios, with arguments that come from what the environment itself has said."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import gymnasium
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from art_gym.messages import say
from art_gym.scenarios import Scenario
from art_gym.spaces import ToolCallSpace
from art_gym.testing._outcomes import RESET_FIELDS, Walk, frozen
from art_gym.testing.strategies import actions, broken_actions, scenarios, starting_split

_SHORT, _LONG = 8, 40
_WORDS = 60
_TELLING = 2
_DRAWS = 8
_KNOWN_SCENARIOS = 16
_WORD = re.compile(r"\w{1,40}(?:-\w{1,40})*")

Known = tuple[Scenario, tuple[str, ...]]
"""A start, and the words of what the environment said in episodes from it."""


def walks(env: gymnasium.Env[Any, Any], known: Sequence[Known]) -> SearchStrategy[Walk]:
    """Build the strategy for walks: of lists of actions from the environment's scenarios, and from starts that are known with their words."""
    space = env.action_space
    starts: SearchStrategy[Known] = scenarios(env, starting_split(env)).map(lambda scenario: (scenario, ()))
    if known:
        starts = st.one_of(st.sampled_from(known), st.sampled_from(known), st.sampled_from(known), starts)
    lists: dict[tuple[str, ...], SearchStrategy[list[Any]]] = {}

    @st.composite
    def drawn(draw: DrawFn) -> Walk:
        scenario, words = draw(starts)
        if words not in lists:
            lists[words] = _action_lists(space, words)
        return Walk(scenario.seed, dict(scenario.options), draw(lists[words]))

    return drawn()


def plain_actions(space: gymnasium.Space[Any]) -> list[Any]:
    """Return a call of each tool with arguments as short as some draws give them, and a text."""
    if not isinstance(space, ToolCallSpace):
        return []
    own: ToolCallSpace = copy.deepcopy(space)
    own.seed(0)
    found: list[Any] = []
    for name in own.tools:
        with contextlib.suppress(ValueError):  # a schema that is too hard to hit
            found.append(min((own.sample(mask={name: 1}) for _ in range(_DRAWS)), key=lambda action: len(str(action))))
    return [*found, say("")]


def known_starts(played: Iterable[tuple[Walk, list[str]]], space: gymnasium.Space[Any]) -> list[Known]:
    """Return where the walks started, with the words of what was said there, the most telling first."""
    starts: dict[str, Scenario] = {}
    words: dict[str, dict[str, None]] = {}
    for walk, texts in played:
        key = frozen([walk.seed, walk.options])
        if key in starts or len(starts) < _KNOWN_SCENARIOS:
            starts.setdefault(key, Scenario("known", walk.seed, walk.options))
            words.setdefault(key, {}).update(dict.fromkeys(_said(walk, texts, space)))
    # What is said in every episode tells little; what only this one says may be its answer.
    common = Counter(word for own in words.values() for word in own)
    return [(start, tuple(sorted(words[key], key=lambda word: common[word])[:_WORDS])) for key, start in starts.items()]


def _said(walk: Walk, texts: Sequence[str], space: gymnasium.Space[Any]) -> Iterator[str]:
    """The words of the walk's first episode."""
    if not all(text.startswith("[") for text in texts):  # what has no JSON form isn't made of messages
        return
    yield from _words(json.loads(texts[0])[0])
    for text, action in zip(texts[1:], walk.actions, strict=False):
        outcome = json.loads(text)
        if len(outcome) == len(RESET_FIELDS):
            return
        if space.contains(action):  # what is said of a broken call repeats it
            yield from _words(outcome[0])


def _words(messages: Any) -> Iterator[str]:
    if isinstance(messages, list):
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, str):
                yield from _WORD.findall(content)


def _action_lists(space: gymnasium.Space[Any], words: tuple[str, ...]) -> SearchStrategy[list[Any]]:
    """Lists of actions, three of four of them well-formed; of six lists one is long, and two begin with the first words, if known."""
    good, bad = actions(space, words=words), broken_actions(space, words=words)
    broken_one = 4 if isinstance(space, ToolCallSpace) else 0
    # An answer is most often asked for by the start's most telling words, and counts before anything else was done.
    telling = actions(space, words=words[:_TELLING]) if words else good

    @st.composite
    def action(draw: DrawFn) -> Any:
        return draw(bad if broken_one and draw(st.integers(1, broken_one)) == broken_one else good)

    short = st.lists(action(), max_size=_SHORT)
    long = st.lists(action(), min_size=_SHORT, max_size=_LONG)
    told = st.tuples(telling, short).map(lambda drawn: [drawn[0], *drawn[1]])
    kinds = [short, short, short, told, told, long] if words else [short, short, short, short, short, long]
    return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)
