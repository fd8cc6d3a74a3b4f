"""The store of one run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.store._journal import Busy, Journal
from art_gym.store._parts import LINES, ROWS

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class EpisodeStore:
    """The episodes of one run, by label, under `<folder>/episodes`.

    Nothing is created on disk before the first episode is appended.

    >>> import tempfile
    >>> from art_gym.scenarios import Scenario
    >>> with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder) as store:
    ...     store.journal("train-0001").append(Episode(id="train-0001/0/0", env_id="art_gym/GuessNumber-v0", scenario=Scenario("s", seed=7)))
    ...     store.labels(), [episode.scenario.seed for episode in store.read()]
    (['train-0001'], [7])

    Args:
        folder: The run's folder, which needn't exist.

    Raises:
        TypeError: It is no path.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder must be the path of a folder, not {folder!r:.100}")
        self.folder = Path(folder) / "episodes"
        self._journals: dict[str, Journal] = {}

    def journal(self, label: str) -> Journal:
        """Return the journal of that label, the same object each time.

        Raises:
            UsageError: The label can't be a file name.
        """
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise UsageError(f"{label!r:.100} can't label episodes: use up to 100 letters, digits, '.', '_', '-', the first a letter or digit")
        if label not in self._journals:
            self._journals[label] = Journal(self.folder / f"{label}{LINES}")
        return self._journals[label]

    def labels(self) -> list[str]:
        """List the labels that have a file, sorted."""
        found = {path.name.removesuffix(suffix) for suffix in (LINES, ROWS) for path in self.folder.glob(f"*{suffix}")}
        return sorted(label for label in found if _LABEL.fullmatch(label))

    def read(self, labels: Iterable[str] | None = None) -> Iterator[Episode]:
        """Yield the episodes of these labels, of all if none are given, one at a time; of one that was played again, the last.

        Raises:
            MissingExtra: A label was compacted, and pyarrow isn't installed.
            ValueError: A file is damaged, or something in it is no episode that this version reads.
        """
        for label in self.labels() if labels is None else labels:
            with self.journal(label).index() as index:
                yield from index.episodes()

    def compact(self, *labels: str) -> list[str]:
        """Move journals into Parquet files, as `Journal.compact` does.

        Args:
            labels: Which; by default all to which nobody appends: those that this store has open stay, and those of other processes.

        Returns:
            The labels that were compacted, none without pyarrow.

        Raises:
            UsageError: Another process appends to a journal that was named.
            ValueError: A file is damaged.
            OSError: The disk refused.
        """
        if labels:
            return [label for label in labels if self.journal(label).compact()]
        done = []
        for label in self.labels():
            journal = self.journal(label)
            if journal.closed:
                with suppress(Busy):
                    done += [label] * journal.compact()
        return done

    def close(self) -> None:
        """Close the journals' files. They are opened again when something is appended."""
        for journal in self._journals.values():
            journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EpisodeStore({str(self.folder.parent)!r})"
