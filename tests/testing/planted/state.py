"""State that isn't the instance's own, or outlives the episode: of classes, defaults and options."""

from __future__ import annotations

from typing import ClassVar

from art_gym import tool

from .bugs import bug
from .correct import Counter, Units


@bug("shared state", "determinism")
class SharedList(Counter):
    """A list of the class, shared by all instances."""

    seen: ClassVar[list[str]] = []

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        self.seen.append(word)
        return f"{len(self.seen)} remembered."


@bug("shared state")
class SharedGoal(Counter):
    """The episode's secret is an attribute of the class: another instance's reset changes it."""

    def start(self) -> str:
        text = super().start()
        type(self).shared_goal = self.goal
        return text

    @tool
    def stop(self) -> str:
        """Stop counting."""
        self.finish(reward=0.0)
        return f"The goal was {type(self).shared_goal}."


@bug("shared state", "determinism")
class SharedOnce(Counter):
    """What the class remembers changes once in the life of the process, so that nothing shows it a second time."""

    opened: ClassVar[set[str]] = set()

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        new = not self.opened
        self.opened.add("opened")
        return "The book is opened." if new else "The book is open already."


@bug("shared state", "determinism", "reset")
class MutableDefault(Counter):
    """A mutable default argument outlives the call."""

    def note(self, word: str, notes: list[str] = []) -> int:  # noqa: B006  the bug
        notes.append(word)
        return len(notes)

    @tool
    def remember(self, word: str) -> str:
        """Remember a word."""
        return f"{self.note(word)} remembered."


@bug("shared state", "reset", "determinism")
class OptionsLeak(Units):
    """An episode's options go into the defaults of the class, and are those of the episodes that follow."""

    defaults: ClassVar[dict[str, str]] = {"unit": "points"}

    def chosen(self) -> dict[str, str]:
        self.defaults.update(self.options)
        return self.defaults


@bug("shared state", "reset", "determinism")
class FirstOptionsStay(Units):
    """The first options that the process sees become the defaults for good."""

    kept: ClassVar[dict[str, str]] = {}

    def chosen(self) -> dict[str, str]:
        for name, value in self.options.items():
            self.kept.setdefault(name, value)
        return {**self.defaults, **self.kept, **self.options}


@bug("reset")
class OptionsStay(Units):
    """An instance keeps the options of earlier episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.all_options: dict[str, str] = {}

    def chosen(self) -> dict[str, str]:
        self.all_options.update(self.options)
        return {**self.defaults, **self.all_options}
