"""Forks: why a prompt doesn't extend the tokens so far, and whether it does after all, in another spelling of the context.

A cause tells a user what to change (a template, an agent); training doesn't depend on it. What is sampled is never changed here.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal

from art_gym.messages import ToolSchema
from art_gym_trainers.trees import common_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into their text, special tokens included: `token_decoder` makes one of a tokenizer."""

ForkCause = Literal["again", "reasoning", "boundary", "respelled", "tools", "history", "sampled_tokens", "context"]
"""Why a prompt leaves the sequence so far. By its tokens:

- `again`: it is one that was answered before, in the same sequence: asked again, several times at once, or from an earlier place.

By their texts:

- `reasoning`: the template takes earlier reasoning out;
- `boundary`: the text is the same and its tokens are others, since they merge differently when all of it is tokenised at once;
- `respelled`: the template writes a reply's words in another way: a call's JSON, white space, the mark at its end;
- `tools`: the tools that the prompt offers at its beginning changed;
- `history`: the agent rewrote what was said, or began another conversation.

Without a decoder only where the tokens part is known: among those that the policy sampled (`sampled_tokens`), or in what it was given
(`context`).
"""

_REASONING = re.compile(
    r"<(think|thinking|thought|reasoning|seed:think)>.*?(?:</\1>|\Z)|\[THINK\].*?(?:\[/THINK\]|\Z)"
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|><\|start\|>assistant|\Z)",
    re.DOTALL,
)
_WORD = re.compile(r"\w+")


def fork_cause(
    token_ids: Sequence[int],
    turns: Sequence[int],
    prompt_ids: Sequence[int],
    *,
    tools: Sequence[ToolSchema] = (),
    decode: Decode | None = None,
) -> ForkCause:
    """Say why a prompt doesn't extend a sequence.

    `tools` and `history` are told apart by what the texts look like where they part, since the tools of a single turn aren't recorded; and so
    are `respelled` and `history` by whether the reply's words are still there.

    Args:
        token_ids: The sequence.
        turns: Which turn sampled each of its tokens; -1 for context.
        prompt_ids: The prompt, which doesn't begin with the sequence.
        tools: What the episode's policy was offered.
        decode: Without it the cause is only where they part.
    """
    place = common_prefix(token_ids, prompt_ids)
    sampled = turns[place] >= 0
    if sampled and place == len(prompt_ids) and (place == 0 or turns[place - 1] != turns[place]):
        return "again"
    if decode is None:
        return "sampled_tokens" if sampled else "context"
    theirs = decode(prompt_ids)
    if theirs.startswith(decode(token_ids)):
        return "boundary"
    # A reply's last token is the engine's end mark, for which a template may write another one.
    ours = decode(token_ids[:-1] if turns[-1] >= 0 else token_ids)
    if _squeezed(theirs).startswith(_squeezed(ours)):
        return "respelled" if sampled else "history"
    if _squeezed(_REASONING.sub("", theirs)).startswith(_squeezed(_REASONING.sub("", ours))):
        return "reasoning"
    if sampled:
        return "respelled" if _same_words(token_ids, turns, prompt_ids, place, decode) else "history"
    opening = token_ids[: next((index for index, turn in enumerate(turns) if turn >= 0), len(turns))]
    return "tools" if place < len(opening) and _tools_part(decode(opening), theirs, tools) else "history"


def aligned_end(token_ids: Sequence[int], turns: Sequence[int], prompt_ids: Sequence[int], decode: Decode) -> int | None:
    """Where in a prompt a sequence ends that the prompt extends but for the spelling of its context; None if it doesn't.

    Every sampled token must stand in the prompt as it was sampled; each stretch of context must have the same text there, whatever its tokens.
    """
    place = start = 0
    for context, stretch in _stretches(turns):
        end = start + stretch
        tokens = list(token_ids[start:end])
        if list(prompt_ids[place : place + stretch]) == tokens:
            place += stretch
        elif not context:
            return None
        else:
            # Texts from the beginning on: a tokenizer may treat the first token of a text in its own way.
            text = decode(token_ids[:end])
            found = _end_of(text, prompt_ids, place, decode)
            if found is None:
                return None
            place = found
        start = end
    return place


def token_decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Make the decoder of a tokenizer, which leaves special tokens and spaces as they are."""

    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


def _stretches(turns: Sequence[int]) -> Iterator[tuple[bool, int]]:
    """Context or not, and how many tokens, in order."""
    for context, stretch in groupby(turns, key=lambda turn: turn < 0):
        yield context, sum(1 for _ in stretch)


def _end_of(text: str, prompt_ids: Sequence[int], start: int, decode: Decode) -> int | None:
    """Where the prompt's text up to there is `text`; None if no token ends there."""
    if "\ufffd" in text:
        # Bytes that are no character: different ones look alike.
        return None
    lengths = range(start, len(prompt_ids) + 1)
    found = bisect_left(lengths, len(text), key=lambda end: len(decode(prompt_ids[:end])))
    return lengths[found] if found < len(lengths) and decode(prompt_ids[: lengths[found]]) == text else None


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _same_words(token_ids: Sequence[int], turns: Sequence[int], prompt_ids: Sequence[int], place: int, decode: Decode) -> bool:
    """Whether the words of the reply in which the tokens part all stand where the prompt has it."""
    start = turns.index(turns[place])
    end = len(turns) - turns[::-1].index(turns[place])
    reply = _REASONING.sub("", decode(token_ids[start : end - 1] if end - start > 1 else token_ids[start:end]))
    there = decode(prompt_ids)[len(decode(prompt_ids[:start])) :][: 2 * len(reply) + 100]
    return set(_WORD.findall(reply)) <= set(_WORD.findall(there))


def _tools_part(opening: str, theirs: str, tools: Sequence[ToolSchema]) -> bool:
    """Whether what a prompt has otherwise than the opening is about tools: it names one, or is a schema, or stands right behind such a line."""
    names = [re.escape(str(schema["function"]["name"])) for schema in tools]
    listed = re.compile("|".join([r'"parameters"', *(rf"\b{name}\b" for name in names)]))
    place = len(commonprefix([opening, theirs]))  # noqa: RUF071  # character by character is what is wanted
    # The longest end of the opening that is still there; what lies before it went, and something else came.
    ends = range(place, len(opening) + 1)
    end = ends[bisect_left(ends, True, key=lambda start: opening[start:] in theirs[place:])]
    came = theirs.index(opening[end:], place)
    line = opening.rfind("\n", 0, place) + 1
    before = opening.rfind("\n", 0, max(line - 1, 0)) + 1
    return any(listed.search(text) for text in (opening[before:end], theirs[before:came]))
