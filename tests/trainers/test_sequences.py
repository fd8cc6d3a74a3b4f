"""Recorded tokens laid end to end: extension, forks and their causes, realignment, and what can't be trained on.

Tokens and expected values are written out by hand; the last tests take SmolLM2's tokenizer, with real templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, Turn
from art_gym.errors import MissingTokens
from art_gym.scenarios import Scenario
from art_gym_trainers.forks import token_decoder
from art_gym_trainers.sequences import TokenSequence, episode_sequences, require_tokens


def turn(prompt: list[int] | None, completion: list[int] | None, logprobs: list[float] | None = None) -> Turn:
    if logprobs is None and completion is not None:
        logprobs = [-0.5] * len(completion)
    return Turn([], {"role": "assistant", "content": ""}, prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)


def episode(*turns: Turn) -> Episode:
    return Episode("e1", "test/Env-v0", Scenario("s", 0), turns=list(turns))


def test_turns_that_extend_each_other_make_one_sequence_with_the_context_masked_out() -> None:
    (sequence,) = episode_sequences(episode(turn([1, 2], [3, 4], [-0.1, -0.2]), turn([1, 2, 3, 4, 5, 6], [7], [-0.3])))
    assert sequence.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.sampled == [False, False, True, True, False, False, True]
    assert sequence.logprobs == [0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3]
    assert sequence.turns == [-1, -1, 0, 0, -1, -1, 1]
    assert (sequence.fork, sequence.prompt_length) == (None, 2)


def test_a_prompt_with_other_tokens_for_sampled_ones_forks_with_that_cause() -> None:
    first, second = episode_sequences(episode(turn([1, 2], [3, 4]), turn([1, 2, 9, 5], [6])))
    assert first.token_ids == [1, 2, 3, 4]
    assert (second.token_ids, second.sampled, second.fork) == ([1, 2, 9, 5, 6], [False] * 4 + [True], "sampled_tokens")


def test_a_prompt_that_changes_the_context_forks_with_that_cause() -> None:
    _, second = episode_sequences(episode(turn([1, 2], [3]), turn([1, 8, 3, 5], [6])))
    assert second.fork == "context"


def test_a_prompt_that_stops_short_of_the_sampled_tokens_is_a_fork() -> None:
    _, second = episode_sequences(episode(turn([1, 2], [3, 4]), turn([1, 2, 3], [6])))
    assert second.fork == "sampled_tokens"


def test_conversations_side_by_side_are_sequences_of_their_own() -> None:
    # A main conversation, a sub-agent's in the middle of it, the main one asked twice at its end, and gone on with from the first answer.
    played = episode(
        turn([1, 2], [3]),
        turn([8, 9], [7]),
        turn([1, 2, 3, 4], [5]),
        turn([8, 9, 7, 6], [6]),
        turn([1, 2, 3, 4], [50]),
        turn([1, 2, 3, 4, 5, 6], [9]),
    )
    assert [(one.token_ids, one.turns, one.fork) for one in episode_sequences(played)] == [
        ([1, 2, 3, 4, 5, 6, 9], [-1, -1, 0, -1, 2, -1, 5], None),
        ([8, 9, 7, 6, 6], [-1, -1, 1, -1, 3], "context"),
        ([1, 2, 3, 4, 50], [-1, -1, -1, -1, 4], "again"),
    ]


@st.composite
def conversations(draw: st.DrawFn) -> Episode:
    """A tree of calls: each goes on from an earlier call's end, from what it was asked, from some place in it, or from nothing."""
    tokens = st.lists(st.integers(1, 3), max_size=4)
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 12))):
        before: list[int] = []
        if turns:
            earlier = draw(st.sampled_from(turns))
            whole = [*(earlier.prompt_ids or []), *(earlier.completion_ids or [])]
            before = draw(st.sampled_from([whole, earlier.prompt_ids or [], whole[: draw(st.integers(0, len(whole)))], []]))
        completion = draw(tokens)
        turns.append(turn([*before, *draw(tokens)], completion, [draw(st.floats(-9, 0)) for _ in completion]))
    return episode(*turns)


@given(conversations())
def test_each_sampled_token_is_in_one_sequence_as_it_was_sampled(played: Episode) -> None:
    found: dict[int, tuple[list[int], list[int], list[float]]] = {}
    for sequence in episode_sequences(played):
        for place, sampling in enumerate(sequence.turns):
            assert (sampling >= 0) == sequence.sampled[place]
            if sampling >= 0 and (place == 0 or sequence.turns[place - 1] != sampling):
                assert sampling not in found
                end = next((at for at in range(place, len(sequence)) if sequence.turns[at] != sampling), len(sequence))
                found[sampling] = sequence.token_ids[:place], sequence.token_ids[place:end], sequence.logprobs[place:end]
    assert found == {index: (one.prompt_ids, one.completion_ids, one.logprobs) for index, one in enumerate(played.turns) if one.completion_ids}


def test_a_reply_cut_by_its_length_extends_like_any_other() -> None:
    cut = turn([1], [2, 3])
    cut.finish_reason = "length"
    (sequence,) = episode_sequences(episode(cut, turn([1, 2, 3, 99, 4], [5])))
    assert sequence.token_ids == [1, 2, 3, 99, 4, 5]


def test_an_empty_completion_is_a_legal_turn() -> None:
    (sequence,) = episode_sequences(episode(turn([1, 2], []), turn([1, 2, 3], [4])))
    assert (sequence.token_ids, sequence.sampled) == ([1, 2, 3, 4], [False, False, False, True])


def test_an_episode_without_turns_has_no_sequence() -> None:
    assert episode_sequences(episode()) == []


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (turn(None, None), "turn 1 of episode e1 .* has no token ids"),
        (Turn([], {"role": "assistant"}, prompt_ids=[1], completion_ids=[2]), "has no log-probabilities.*processed_logprobs"),
        (turn([1], [2, 3], [-0.1]), "2 sampled tokens but 1 log-probabilities"),
    ],
)
def test_a_turn_without_tokens_is_named_before_anything_is_spent(broken: Turn, text: str) -> None:
    with pytest.raises(MissingTokens, match=text):
        require_tokens([episode(turn([1], [2]), broken)])


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4)), min_size=1, max_size=5))
def test_every_sampled_token_is_trained_once_whatever_the_history_does(turns: list[tuple[list[int], list[int]]]) -> None:
    played = episode(*(turn(prompt, completion) for prompt, completion in turns))
    sequences = episode_sequences(played)
    trained = [
        (position, token)
        for sequence in sequences
        for position, token, sampled in zip(sequence.turns, sequence.token_ids, sequence.sampled, strict=True)
        if sampled
    ]
    # A later turn may go on from an earlier sequence.
    trained.sort(key=lambda found: found[0])
    assert trained == [(index, token) for index, (_, completion) in enumerate(turns) for token in completion]
    assert sum(sequence.fork is None for sequence in sequences) == 1


class Words:
    """A tokenizer by hand: every text that is encoded piece by piece gets an id of its own."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def ids(self, *pieces: str) -> list[int]:
        for piece in pieces:
            if piece not in self.pieces:
                self.pieces.append(piece)
        return [self.pieces.index(piece) for piece in pieces]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def sequences(self, *turns: tuple[list[str], list[str]], realign: bool = False, tools: Sequence[str] = ()) -> list[TokenSequence]:
        played = episode(*(turn(self.ids(*prompt), self.ids(*completion)) for prompt, completion in turns))
        played.tools = [{"type": "function", "function": {"name": name}} for name in tools]
        return episode_sequences(played, decode=self.decode, realign=realign)


@pytest.mark.parametrize(
    ("first", "reply", "second", "cause"),
    [
        # The same text, merged across two sampled tokens; across context and reply; across a reply's end and what comes after it.
        (["<user>", "Hi", "<bot>"], ["He", "llo", "<end>"], ["<user>", "Hi", "<bot>", "Hello", "<end>", "<user>"], "boundary"),
        (["<user>", "Hi", "\n"], ["\n", "Yes", "<end>"], ["<user>", "Hi", "\n\n", "Yes", "<end>", "<user>"], "boundary"),
        (["<bot>"], ["Yes", "\n"], ["<bot>", "Yes", "\n\n", "<user>"], "boundary"),
        # A context of other tokens and the same text.
        (["<us", "er>", "<bot>"], ["Yes", "<end>"], ["<user>", "<bot>", "Yes", "<end>", "<user>"], "boundary"),
        # Reasoning that the policy sampled, that the prompt had opened, and the empty kind that a template puts before a reply.
        (["<bot>"], ["<think>", "Hm", "</think>", "\n", "Yes", "<end>"], ["<bot>", "Yes", "<end>", "<user>"], "reasoning"),
        (["<bot>", "<think>"], ["Hm", "</think>", "Yes", "<end>"], ["<bot>", "Yes", "<end>", "<bot>", "<think>"], "reasoning"),
        (["<bot>", "<think>", "\n\n", "</think>", "\n\n"], ["Yes", "<end>"], ["<bot>", "Yes", "<end>", "<user>"], "reasoning"),
        (["<bot>"], ["[THINK]", "Hm", "[/THINK]", "Yes", "<end>"], ["<bot>", "Yes", "<end>", "<user>"], "reasoning"),
        # White space, a call's JSON, and the mark at the end.
        (["<bot>"], ["Yes", " ", "\n", "<end>"], ["<bot>", "Yes", "<end>", "<user>"], "respelled"),
        (["<bot>"], ['{"a":1, "b":2}', "<end>"], ["<bot>", '{"b": 2, "a": 1}', "<end>", "<user>"], "respelled"),
        (["<bot>"], ["Yes", "<eos>"], ["<bot>", "Yes", "<end>", "<user>"], "respelled"),
        # The agent: other words for a reply, for a question; the beginning left out, or the end.
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Hi", "<bot>", "No", "<end>", "<user>"], "history"),
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Hello", "<bot>", "Yes", "<end>", "<user>"], "history"),
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Bye", "<bot>"], "history"),
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Hi", "<bot>"], "again"),
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Hi"], "history"),
        (["<user>", "Hi", "<bot>"], ["Yes", "<end>"], ["<user>", "Hi", " ", "<bot>", "Yes", "<end>"], "history"),
    ],
)  # fmt: skip
def test_the_cause_of_a_fork_is_told_from_the_texts(first: list[str], reply: list[str], second: list[str], cause: str) -> None:
    before, after = Words().sequences((first, reply), (second, ["More"]))
    assert (before.fork, after.fork) == (None, cause)


@pytest.mark.parametrize(
    "changed", ["Tools:\nlook(at)\n", "Tools:\nlook(at)\ngo(to)\nswim()\n", "Tools:\nlook(at)\ngo(to, how)\n", ""], ids=repr
)
def test_tools_that_come_or_go_are_a_cause_of_their_own(changed: str) -> None:
    def prompt(listed: str) -> list[str]:
        return ["<system>", listed, "Be kind.", "<bot>"]

    words = Words()
    turns = (prompt("Tools:\nlook(at)\ngo(to)\n"), ["Yes"]), ([*prompt(changed), "Yes", "<user>"], ["No"])
    assert words.sequences(*turns, tools=["look", "go"])[1].fork == "tools"


def test_a_rewritten_opening_is_no_change_of_tools() -> None:
    words = Words()
    head = ["Tools:\nlook(at)\n", "To call one, write JSON.\n"]
    _, after = words.sequences(([*head, "Be kind."], ["Yes"]), ([*head, "Be rude.", "Yes", "<user>"], ["No"]), tools=["look"])
    assert after.fork == "history"


CONTEXT_DRIFT = (["<us", "er>", "<bot>"], ["Yes", "<end>"]), (["<user>", "<bot>", "Yes", "<end>", "<user>", "<bot>"], ["No", "<end>"])
"""The same text twice, whose first word is one token or two; the reply is the same."""


def test_context_in_other_tokens_is_a_fork_unless_it_is_realigned() -> None:
    words = Words()
    assert [sequence.realigned for sequence in words.sequences(*CONTEXT_DRIFT)] == [0, 0]
    (sequence,) = words.sequences(*CONTEXT_DRIFT, realign=True)
    # As recorded at first, and gone on with from there.
    assert [words.pieces[token] for token in sequence.token_ids] == ["<us", "er>", "<bot>", "Yes", "<end>", "<user>", "<bot>", "No", "<end>"]
    assert sequence.sampled == [False, False, False, True, True, False, False, True, True]
    assert sequence.turns == [-1, -1, -1, 0, 0, -1, -1, 1, 1]
    assert (sequence.fork, sequence.realigned) == (None, 1)


@pytest.mark.parametrize(
    ("first", "reply", "second"),
    [
        (["<bot>"], ["He", "llo"], ["<bot>", "Hello", "<user>"]),  # a sampled token
        (["<bot>", "\n"], ["\n", "Yes"], ["<bot>", "\n\n", "Yes", "<user>"]),  # merged with a sampled one
        (["Hi", "<bot>"], ["Yes"], ["Hello", "<bot>", "Yes"]),  # another text
        (["a", "b", "<bot>"], ["Yes"], ["ab<bot>Y", "es"]),  # no token ends where the context does
        (["\ufffd", "<bot>"], ["Yes"], ["\ufffd", "", "<bot>", "Yes"]),  # bytes that are no character may differ and look alike
    ],
)
def test_what_is_more_than_another_spelling_of_the_context_stays_a_fork(first: list[str], reply: list[str], second: list[str]) -> None:
    before, after = Words().sequences((first, reply), (second, ["More"]), realign=True)
    assert (before.realigned, after.realigned) == (0, 0)
    assert after.fork is not None


def test_realigning_needs_a_decoder() -> None:
    with pytest.raises(ValueError, match="give decode too"):
        episode_sequences(episode(turn([1], [2])), realign=True)


PIECES = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aa"]), max_size=4)


@given(st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=4), st.data())
def test_realigning_never_changes_a_sampled_token_nor_a_text(turns: list[tuple[list[str], list[str]]], data: st.DataObject) -> None:
    words = Words()
    history: list[tuple[bool, str]] = []
    played, texts = [], []
    for context, completion in turns:
        history.append((False, "".join(context)))
        # Each prompt spells the context anew, letter by letter or in pairs; what was sampled stays.
        prompt: list[str] = []
        for sampled, text in history:
            size = 1 if sampled or data.draw(st.booleans()) else 2
            prompt += [text] if sampled else [text[place : place + size] for place in range(0, len(text), size)]
        played.append((prompt, completion))
        texts.append("".join(text for _, text in history) + "".join(completion))
        history += [(True, piece) for piece in completion]
    (sequence,) = words.sequences(*played, realign=True)
    assert words.decode(sequence.token_ids) == texts[-1]
    assert [words.pieces[token] for token, sampled in zip(sequence.token_ids, sequence.sampled, strict=True) if sampled] == [
        piece for _, completion in turns for piece in completion
    ]


# ---------------------------------------------------------------- SmolLM2's tokenizer

STRIPS_REASONING = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and '</think>' in message.content -%}
{{ message.content.split('</think>')[-1] | trim }}
{%- else -%}
{{ message.content }}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
"""As Qwen3 and DeepSeek-R1 do it: what was thought is shown no more."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tiny_model)


def spoken(tokenizer: Any, *replies: str, sampled: Sequence[list[int]] | None = None, template: str | None = None, **options: Any) -> Episode:
    """An episode as an engine records it: each prompt rendered from all messages so far, replies tokenised as they were sampled."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}]
    turns = []
    for index, reply in enumerate(replies):
        prompt = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False, **options)
        completion = sampled[index] if sampled else tokenizer.encode(f"{reply}<|im_end|>", add_special_tokens=False)
        turns.append(turn(tokenizer.encode(prompt, add_special_tokens=False), completion))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Are you sure?"}]
    return episode(*turns)


@pytest.mark.train
def test_the_bundled_template_makes_one_sequence(tokenizer: Any) -> None:
    (sequence,) = episode_sequences(spoken(tokenizer, "7", "Yes, 7."), decode=token_decoder(tokenizer))
    assert tokenizer.decode([token for token, sampled in zip(sequence.token_ids, sequence.sampled, strict=True) if sampled]) == (
        "7<|im_end|>Yes, 7.<|im_end|>"
    )


@pytest.mark.train
def test_a_template_that_strips_reasoning_is_named_as_the_cause(tokenizer: Any) -> None:
    played = spoken(tokenizer, "<think>\n3 + 4\n</think>\n\n7", "<think>Yes.</think>Yes.", template=STRIPS_REASONING)
    assert [sequence.fork for sequence in episode_sequences(played, decode=token_decoder(tokenizer))] == [None, "reasoning"]
    assert [sequence.fork for sequence in episode_sequences(played)] == [None, "sampled_tokens"]


@pytest.mark.train
def test_a_reply_sampled_in_tokens_that_merge_is_named_as_the_cause(tokenizer: Any) -> None:
    hello, end = "Hello", tokenizer.encode("<|im_end|>", add_special_tokens=False)
    letters = [token for letter in hello for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(tokenizer.encode(hello, add_special_tokens=False)) < len(letters)
    played = spoken(tokenizer, hello, "Yes.", sampled=[letters + end, tokenizer.encode("Yes.", add_special_tokens=False) + end])
    first, second = episode_sequences(played, decode=token_decoder(tokenizer), realign=True)
    assert second.fork == "boundary"
    assert [token for token, sampled in zip(first.token_ids, first.sampled, strict=True) if sampled] == letters + end


@pytest.mark.train
def test_a_reply_that_the_template_trims_is_named_as_respelled(tokenizer: Any) -> None:
    trims = STRIPS_REASONING.replace("{{ message.content }}", "{{ message.content | trim }}")
    played = spoken(tokenizer, "7 \n", "Yes.", template=trims)
    assert [sequence.fork for sequence in episode_sequences(played, decode=token_decoder(tokenizer))] == [None, "respelled"]


@pytest.mark.train
def test_tools_that_change_between_turns_are_named_as_the_cause(tokenizer: Any) -> None:
    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": {"type": "object", "properties": {}}}}

    few, many = [tool("look")], [tool("look"), tool("go")]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    later = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Now go."}]
    reply = tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
    for tools, other in ((few, many), (many, few), (few, None)):
        prompts = [
            tokenizer.encode(tokenizer.apply_chat_template(said, tools=offered, add_generation_prompt=True, tokenize=False))
            for said, offered in ((messages, tools), (later, other))
        ]
        played = episode(*(turn(prompt, reply) for prompt in prompts))
        played.tools = tools
        assert episode_sequences(played, decode=token_decoder(tokenizer))[1].fork == "tools"


@pytest.mark.train
def test_real_context_in_other_tokens_is_realigned(tokenizer: Any) -> None:
    # An engine that tokenises message by message, and one that does it all at once.
    played = spoken(tokenizer, "7", "Yes.")
    text = tokenizer.decode(played.turns[0].prompt_ids)
    place = text.index("brief")
    played.turns[0].prompt_ids = [
        token for part in (text[: place + 2], text[place + 2 :]) for token in tokenizer.encode(part, add_special_tokens=False)
    ]
    assert tokenizer.decode(played.turns[0].prompt_ids) == text
    assert [sequence.fork for sequence in episode_sequences(played, decode=token_decoder(tokenizer))] == [None, "boundary"]
    (sequence,) = episode_sequences(played, decode=token_decoder(tokenizer), realign=True)
    assert sequence.realigned == 1
    assert sequence.token_ids[: len(played.turns[0].prompt_ids)] == played.turns[0].prompt_ids
    assert tokenizer.decode(sequence.token_ids) == tokenizer.decode(played.turns[1].prompt_ids + played.turns[1].completion_ids)


def test_what_a_branch_shares_with_its_parent_is_context() -> None:
    branch = episode(turn([1, 2], [3, 4], [-0.1, -0.2]), turn([1, 2, 3, 4, 5, 6], [7], [-0.3]))
    branch.parent, branch.shared_turns = "e0", 1
    (sequence,) = episode_sequences(branch)
    assert sequence.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert sequence.sampled == [False] * 6 + [True]
    assert sequence.logprobs == [0.0] * 6 + [-0.3]
    assert sequence.turns == [-1, -1, 0, 0, -1, -1, 1]


def test_a_fork_within_what_is_shared_is_computed_and_not_trained() -> None:
    branch = episode(turn([1, 2], [3, 4]), turn([1, 9, 5], [6]), turn([1, 9, 5, 6, 8], [7]))
    branch.parent, branch.shared_turns = "e0", 1
    first, second = episode_sequences(branch)
    assert not any(first.sampled)
    assert second.sampled == [False, False, False, True, False, True]
