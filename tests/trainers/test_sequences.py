"""Recorded tokens laid end to end: extension, forks, and what can't be trained on. Expected values are written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gym.episodes import Episode, Turn
from art_gym.errors import MissingTokens
from art_gym.scenarios import Scenario
from art_gym_trainers.sequences import episode_sequences, require_tokens


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


def test_a_prompt_that_respells_sampled_tokens_forks_with_that_cause() -> None:
    first, second = episode_sequences(episode(turn([1, 2], [3, 4]), turn([1, 2, 9, 5], [6])))
    assert first.token_ids == [1, 2, 3, 4]
    assert (second.token_ids, second.sampled, second.fork) == ([1, 2, 9, 5, 6], [False] * 4 + [True], "sampled_tokens")


def test_a_prompt_that_changes_the_context_forks_with_that_cause() -> None:
    _, second = episode_sequences(episode(turn([1, 2], [3]), turn([1, 8, 3, 5], [6])))
    assert second.fork == "context"


def test_a_prompt_that_stops_short_of_the_sampled_tokens_is_a_fork() -> None:
    _, second = episode_sequences(episode(turn([1, 2], [3, 4]), turn([1, 2, 3], [6])))
    assert second.fork == "sampled_tokens"


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
    assert trained == [(index, token) for index, (_, completion) in enumerate(turns) for token in completion]
    assert sum(sequence.fork is None for sequence in sequences) == 1
