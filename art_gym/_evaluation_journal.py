"""An evaluation's journal: its episodes, and beside them a header that says who played what, so that one that is resumed goes on as the same.

The header lies in `_LABEL.json`; readers of a folder of tables pass over names that begin so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from art_gym._files import replacing, sync
from art_gym.episodes import Episode, Failure
from art_gym.errors import UsageError
from art_gym.store import EpisodeIndex, Journal

FORMAT_VERSION = 1

_INTERRUPTED = ("cancelled", "engine")
"""Failures that say nothing of the agent: the evaluation was left, or its server died."""


def as_json(value: Any) -> str:
    """Write a value as JSON, the same for equal values; what JSON doesn't know is written as the name of it or of its type."""
    return json.dumps(value, default=_named, sort_keys=True)


def _named(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True, slots=True)
class Header:
    """Who played what.

    Attributes:
        env_id: The environment's registered id.
        env_kwargs: Its arguments, as JSON data.
        split: Whose scenarios; None for scenarios of one's own.
        agent: The agent's name.
        played_by: What else is known of it, such as its model and step, as JSON data.
        concurrency: Episodes at once; several where a part was played under another number.
    """

    env_id: str
    env_kwargs: Mapping[str, Any]
    split: str | None
    agent: str
    played_by: Mapping[str, Any] = field(default_factory=dict)
    concurrency: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        agent: str,
        env_id: str,
        env_kwargs: Mapping[str, Any] | None,
        split: str | None,
        *,
        played_by: Mapping[str, Any] | None = None,
        concurrency: int,
    ) -> Header:
        """Make the header of what is played now; everything becomes JSON data, as it is read again."""
        arguments, facts = (json.loads(as_json(values or {})) for values in (env_kwargs, played_by))
        return cls(env_id, arguments, split, agent, facts, [concurrency])

    @classmethod
    def read(cls, journal: Journal) -> Header | None:
        """Read the header of a journal; None where it has none, as one that an earlier version wrote.

        Raises:
            UsageError: It is damaged, or of another format.
        """
        path = header_path(journal)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            version = data.pop("format")
            header = cls(**data)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{path} is damaged; it says who played the episodes beside it. Use another label or folder") from None
        if version != FORMAT_VERSION:
            raise UsageError(
                f"{path} has format {version!r}; this version of art_gym reads format {FORMAT_VERSION}. Use another label or folder"
            )
        return header

    def save(self, journal: Journal) -> None:
        """Write it beside the journal, whole or not at all."""
        path = header_path(journal)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"format": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n", encoding="utf-8")
            sync(temporary)

    def check(self, before: Header, journal: Journal) -> None:
        """See whether what was played before was the same. What isn't known now of the agent isn't compared, and neither is a split's name
        where one of the two was given scenarios of its own: these are compared one by one when they are played.

        Raises:
            UsageError: It wasn't.
        """
        for what in ("agent", "env_id", "env_kwargs", "split"):
            one, two = getattr(before, what), getattr(self, what)
            if what != "split" or None not in (one, two):
                _compare(what, one, two, journal)
        for what, value in self.played_by.items():
            _compare(what, before.played_by.get(what), value, journal)


def header_of(journal: Journal) -> Header | None:
    """Read who played what a journal holds; None where it holds nothing, or has no header.

    Raises:
        UsageError: The header is damaged, or of another format.
    """
    return Header.read(journal) if any(path.stat().st_size for path in journal.paths) else None


def header_path(journal: Journal) -> Path:
    """Where a journal's header lies."""
    return journal.path.with_name(f"_{journal.label}.json")


def _compare(what: str, before: Any, now: Any, journal: Journal) -> None:
    if before != now:
        raise UsageError(
            f"the episodes in {journal.path} were played with {what} {before!r:.200}, and now it is {now!r:.200}; "
            "resume with the same, or play anew in another folder"
        )


class EvaluationJournal(Journal):
    """A journal that gets its header before its first episode, and whose failed episodes may stand as they are.

    Args:
        journal: Where the episodes are.
        header: Who plays now.
        resume: Whether what it holds is gone on with.
        keep_failures: Whether failed episodes aren't played again; those of an evaluation that was interrupted are all the same.

    Attributes:
        header: Who played, as far as anything was played.
        ended: Ids of the episodes that needn't be played again.
        replaced: By id, the kinds of the failures that were or will be replaced by another attempt.

    Raises:
        UsageError: It holds episodes of somebody or something else.
    """

    def __init__(self, journal: Journal, header: Header, *, resume: bool, keep_failures: bool = False) -> None:
        super().__init__(journal.path)
        self._journal, self._begun = journal, False
        self._keep_failures, self._kept = keep_failures, dict[str, Failure]()
        self.header = self._next = header
        self.ended: set[str] = set()
        self.replaced: dict[str, list[str]] = {}
        if not resume:
            return
        self.ended, self.replaced = attempts(journal, keep_failures=keep_failures)
        before = Header.read(journal) if self.ended or self.replaced else None
        if before is not None:
            header.check(before, journal)
            self.header = before
            played_by, numbers = {**before.played_by, **header.played_by}, dict.fromkeys((*before.concurrency, *header.concurrency))
            self._next = replace(header, played_by=played_by, concurrency=[*numbers])

    def check(self) -> None:
        self._journal.check()

    def write(self, lines: bytes) -> None:
        if not self._begun:
            self._next.save(self._journal)
            self.header, self._begun = self._next, True
        self._journal.write(lines)

    def index(self) -> EpisodeIndex:
        if not self._keep_failures:
            return self._journal.index()
        index = _StandingIndex(self._parts())
        index.kept = self._kept
        return index

    def restore(self, *episodes: Episode) -> None:
        """Give failed episodes that stood for finished ones their failures again."""
        for episode in episodes:
            episode.failure = self._kept.get(episode.id, episode.failure)


class _StandingIndex(EpisodeIndex):
    """Shows failed episodes as finished ones, and keeps their failures aside in `kept`."""

    kept: dict[str, Failure]

    def __getitem__(self, id: str) -> Episode:
        episode = super().__getitem__(id)
        if episode.failure is not None and episode.failure.kind not in _INTERRUPTED:
            self.kept[id], episode.failure = episode.failure, None
        return episode


def attempts(journal: Journal, *, keep_failures: bool = False) -> tuple[set[str], dict[str, list[str]]]:
    """Read which episodes needn't be played again, and how the attempts failed that another one replaced or will replace."""
    last: dict[str, str | None] = {}
    failed: defaultdict[str, list[str]] = defaultdict(list)
    for episode in journal.read():
        kind = episode.failure.kind if episode.failure else None
        last[episode.id] = kind
        if kind is not None and kind != "cancelled":
            failed[episode.id].append(kind)
    ended = {id for id, kind in last.items() if kind is None}
    if keep_failures:
        for id, final in last.items():
            if final is not None and final not in _INTERRUPTED:
                ended.add(id)
                failed[id].pop()
    return ended, dict(failed)
