"""Lookup: find one fact in a small mailbox by searching it, then answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from art_gym import ToolEnv, ToolError, tool
from art_gym_envs._options import check_integer

NAMES = (
    "Ana", "Ben", "Carla", "Dan", "Emma", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul",
    "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Yara", "Zoe", "Adam", "Bella", "Carl", "Dora", "Erik", "Fiona", "Gus", "Helen",
)  # fmt: skip
TOPICS = (
    "flight gate", "door code", "locker number", "meeting room", "parking spot", "train platform", "desk label", "seat row",
    "ticket class", "bike rack", "storage shelf", "camp site", "ferry deck", "bus stop",
)  # fmt: skip
"""Two words each, and no word in two of them."""


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail: who says what about which topic."""

    person: str
    topic: str
    value: str

    @property
    def text(self) -> str:
        return f"From {self.person}: the {self.topic} is {self.value}."


class Lookup(ToolEnv):
    """Find one fact in a small mailbox by searching it, then answer.

    Every person has written one mail about every topic, so a topic's word finds as many mails as there are people, and a person's name as many
    as there are topics; a search shows only the first few. Reward components: "outcome" 1 for the right answer, "found" 0.2 once, when a search
    first shows the right mail, "invalid" −0.1 for each call that can't be executed. A message without a call ends the episode without success,
    and counts as invalid: the question is answered by the tool or not at all.

    Args:
        people: How many people have written.
        topics: How many topics each has written about.
        max_turns: Messages after which the episode is truncated.
        max_results: How many mails a search shows at most.
    """

    instructions = "Search the mailbox for the fact, then answer."
    instant = True

    def __init__(self, people: int = 8, topics: int = 3, max_turns: int = 4, max_results: int = 3, render_mode: str | None = None) -> None:
        check_integer("people", people, 1, len(NAMES))
        check_integer("topics", topics, 1, len(TOPICS))
        check_integer("max_turns", max_turns, 1)
        check_integer("max_results", max_results, 1)
        super().__init__(render_mode=render_mode)
        self.people, self.topics, self.max_turns, self.max_results = people, topics, max_turns, max_results

    def start(self) -> str:
        names = [NAMES[index] for index in self.np_random.permutation(len(NAMES))[: self.people]]
        topics = [TOPICS[index] for index in self.np_random.permutation(len(TOPICS))[: self.topics]]
        pairs = [(name, topic) for name in names for topic in topics]
        # A letter and two digits, all different within the mailbox.
        codes = self.np_random.permutation(26 * 90)[: len(pairs)]
        mails = [
            Mail(name, topic, f"{chr(65 + code // 90)}{10 + code % 90}") for (name, topic), code in zip(pairs, map(int, codes), strict=True)
        ]
        self.mails = [mails[index] for index in self.np_random.permutation(len(mails))]
        self.target = self.mails[int(self.np_random.integers(len(self.mails)))]
        self.found = False
        self.metric("found", 0.0)
        self.metric("success", 0.0)
        return f"What is {self.target.person}'s {self.target.topic}?"

    @tool
    def search(self, word: str) -> str:
        """Find mails with a word.

        Args:
            word: One word.
        """
        wanted = _words(word)
        if len(wanted) > 1:
            raise ToolError("Search for one word.")
        hits = [mail for mail in self.mails if wanted and wanted[0] in _words(mail.text)]
        if not hits:
            return "No mail has that word."
        shown = hits[: self.max_results]
        if not self.found and self.target in shown:
            self.found = True
            self.reward("found", 0.2)
            self.metric("found", 1.0)
        more = [f"(+{len(hits) - len(shown)} more)"] if len(hits) > len(shown) else []
        return "\n".join([mail.text for mail in shown] + more)

    @tool
    def answer(self, value: str) -> str:
        """Answer the question.

        Args:
            value: The fact.
        """
        right = _words(value) == _words(self.target.value)
        self.finish(reward=1.0 if right else 0.0, success=right)
        return "Right." if right else "Wrong."

    def on_text(self, text: str) -> None:
        self.reward("invalid", -0.1)
        self.finish(success=False)

    def on_invalid(self, problem: str) -> None:
        self.reward("invalid", -0.1)


def _words(text: str) -> list[str]:
    """Split a text into its words in lower case, without punctuation and possessive endings."""
    return re.findall(r"[a-z0-9]+", re.sub(r"['’]s\b", "", text.lower()))
