"""Lookup: the mailbox, what a search shows, the rewards."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import pytest

from art_gym import call, calls, say
from art_gym_envs import Lookup
from art_gym_envs.lookup import NAMES, TOPICS, Mail

MAILS = [
    Mail("Ana", "flight gate", "B12"),
    Mail("Ben", "door code", "C34"),
    Mail("Ben", "flight gate", "D56"),
    Mail("Ana", "door code", "E78"),
    Mail("Cy", "flight gate", "F90"),
    Mail("Cy", "door code", "G11"),
]


def started(seed: int = 0, **options: Any) -> Lookup:
    """An environment with the mailbox above; the answer is E78, in Ana's second mail."""
    env = Lookup(**options)
    env.reset(seed=seed)
    env.mails, env.target = list(MAILS), MAILS[3]
    return env


def said(env: Lookup, word: str) -> Any:
    return env.step(call("search", word=word))[0][0]["content"]


def test_the_lists_hold_what_the_task_needs() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 24
    words = [word for topic in TOPICS for word in topic.split()]
    assert len(TOPICS) >= 12
    assert len(set(words)) == len(words) == 2 * len(TOPICS)
    assert not {name.lower() for name in NAMES} & set(words)


def test_every_person_has_one_mail_on_every_topic() -> None:
    env = Lookup(people=5, topics=2)
    observation, _ = env.reset(seed=3)
    assert len(env.mails) == len({(mail.person, mail.topic) for mail in env.mails}) == 10
    assert len({mail.person for mail in env.mails}) == 5
    assert len({mail.value for mail in env.mails}) == 10
    assert all(re.fullmatch(r"[A-Z][1-9]\d", mail.value) for mail in env.mails)
    assert observation[1]["content"] == f"What is {env.target.person}'s {env.target.topic}?"
    assert env.target in env.mails


def test_the_largest_mailbox() -> None:
    env = Lookup(people=len(NAMES), topics=len(TOPICS))
    env.reset(seed=0)
    assert len({mail.value for mail in env.mails}) == len(NAMES) * len(TOPICS)


def test_seeds_differ_and_repeat() -> None:
    def mailbox(seed: int) -> list[str]:
        env = Lookup()
        env.reset(seed=seed)
        return [mail.text for mail in env.mails]

    assert mailbox(1) == mailbox(1) != mailbox(2)


def test_questions_differ_between_scenarios() -> None:
    env = Lookup()
    questions = [env.reset(seed=scenario.seed)[0][1]["content"] for scenario in islice(env.scenarios("test"), 50)]
    assert len(set(questions)) > 25


def test_a_search_shows_the_mails_with_the_word_in_mailbox_order() -> None:
    assert said(started(), "Ana") == "From Ana: the flight gate is B12.\nFrom Ana: the door code is E78."


@pytest.mark.parametrize("word", ["ana", "ANA", "Ana's", "Ana’s", " Ana! ", "e78", "E78."])
def test_words_match_whatever_their_case_and_punctuation(word: str) -> None:
    assert "E78" in said(started(), word)


@pytest.mark.parametrize("word", ["An", "gat", "", "?!", "Dora", "é"])
def test_parts_of_words_and_other_words_do_not_match(word: str) -> None:
    assert said(started(), word) == "No mail has that word."


def test_a_long_list_is_cut() -> None:
    assert said(started(max_results=2), "gate") == "From Ana: the flight gate is B12.\nFrom Ben: the flight gate is D56.\n(+1 more)"


def test_several_words_are_refused_without_penalty() -> None:
    observation, reward, *_, info = started().step(call("search", word="Ana door"))
    assert observation[0]["content"] == "Search for one word."
    assert (reward, info["invalid_calls"], info["tool_errors"]) == (0.0, 0, 1)


def test_the_right_mail_is_rewarded_when_it_is_first_shown() -> None:
    env = started(max_results=1, max_turns=9)
    rewards = [env.step(call("search", word=word))[1] for word in ("flight", "door", "code", "E78", "Ana", "E78")]
    assert rewards == [0.0, 0.0, 0.0, 0.2, 0.0, 0.0]
    assert env.step(call("search", word="Ana"))[4]["metrics"] == {"found": 1.0, "success": 0.0}


@pytest.mark.parametrize(
    ("value", "reward", "success", "text"),
    [
        ("E78", 1.0, 1.0, "Right."),
        (" e78. ", 1.0, 1.0, "Right."),
        ("E7", 0.0, 0.0, "Wrong."),
        ("", 0.0, 0.0, "Wrong."),
        ("B12 E78", 0.0, 0.0, "Wrong."),
    ],
)
def test_an_answer_ends_the_episode(value: str, reward: float, success: float, text: str) -> None:
    observation, got, terminated, truncated, info = started().step(call("answer", value=value))
    assert (observation[0]["content"], got, terminated, truncated) == (text, reward, True, False)
    assert info["metrics"]["success"] == success
    assert info["rewards"] == {"outcome": reward}


def test_only_the_first_answer_counts() -> None:
    observation, reward, terminated, *_ = started().step(calls(("answer", {"value": "B12"}), ("answer", {"value": "E78"})))
    assert (observation[1]["content"], reward, terminated) == ("not executed: the episode has ended", 0.0, True)


def test_invalid_calls_and_plain_text_cost() -> None:
    env = started()
    _, reward, *_, info = env.step(calls(("find", {}), ("search", {}), ("search", {"word": "x"})))
    assert reward == pytest.approx(-0.2)
    assert info["rewards"] == {"invalid": pytest.approx(-0.2)}
    observation, reward, terminated, truncated, info = env.step(say("It is E78."))
    assert (observation, reward, terminated, truncated) == ((), -0.1, True, False)
    assert info["metrics"]["success"] == 0.0


def test_an_episode_without_an_answer_is_truncated_without_success() -> None:
    env = started(max_turns=1)
    _, reward, terminated, truncated, info = env.step(call("search", word="Ana"))
    assert (reward, terminated, truncated, info["metrics"]["success"]) == (0.2, False, True, 0.0)


@pytest.mark.parametrize("name", ["people", "topics", "max_turns", "max_results"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_options_that_make_no_task_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer"):
        Lookup(**{name: value})


@pytest.mark.parametrize(("name", "most"), [("people", len(NAMES)), ("topics", len(TOPICS))])
def test_more_than_the_lists_hold_is_refused(name: str, most: int) -> None:
    with pytest.raises(ValueError, match=f"from 1 to {most}"):
        Lookup(**{name: most + 1})  # type: ignore[arg-type]
