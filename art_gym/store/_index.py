"""The index: a label's episodes by id, found in one pass and loaded one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from art_gym.episodes import Episode
from art_gym.errors import FailureKind
from art_gym.store._columns import Head
from art_gym.store._parts import ROWS, Parts


class EpisodeIndex(Mapping[str, Episode]):
    """A label's episodes by id, as they were when the index was made: `index[id]` reads that one from the disk.

    Where an id was appended again (a failed episode that was played again), the last one stands. What the index holds of each is its id, its
    place and its outcome, whatever the episodes' length. It stays right while the journal grows, and when it is compacted. Not for several
    threads at once.

    >>> import tempfile
    >>> from art_gym import EpisodeStore, Scenario
    >>> with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder) as store:
    ...     journal = store.journal("train-0001")
    ...     journal.append(Episode(id="train-0001/0/0", env_id="art_gym/GuessNumber-v0", scenario=Scenario("s", seed=7)))
    ...     with journal.index() as index:
    ...         "train-0001/0/0" in index, index.failure("train-0001/0/0"), index["train-0001/0/0"].scenario.seed
    (True, None, 7)

    Args:
        parts: What is read, which the index closes.

    Raises:
        ValueError: Something in the files is damaged, or is no episode that this version reads.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._found: dict[str, tuple[int, Head]] = {}
        try:
            for place, head in self._parts.heads():
                # Last in order, too, which is the order on disk.
                self._found.pop(head.id, None)
                self._found[head.id] = place, head
        except BaseException:
            self._parts.close()
            raise

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Index one file by itself, such as an exported one: a Parquet file if its name says so, or else lines of JSON.

        Raises:
            MissingExtra: It is a Parquet file, and pyarrow isn't installed.
            ValueError: Something in it is damaged, or is no episode that this version reads.
        """
        return cls(Parts(None, path) if path.suffix == ROWS else Parts(path, None))

    def failure(self, id: str) -> FailureKind | None:
        """Return the kind of the episode's failure, None if it didn't fail, without reading the episode.

        Raises:
            KeyError: There is no such episode.
        """
        return self._found[id][1].failure

    def heads(self) -> Iterator[Head]:
        """Yield the outcome of each episode, without reading the episodes."""
        return (head for _, head in self._found.values())

    def episodes(self) -> Iterator[Episode]:
        """Yield all of them in the order in which they ended, one at a time; faster than asking for one after the other."""
        for place, episode in self._parts.read():
            # What was appended since the index was made isn't in it.
            if episode.id in self._found and self._found[episode.id][0] == place:
                yield episode

    def close(self) -> None:
        """Close the files; nothing can be loaded any more."""
        self._parts.close()

    def __getitem__(self, id: str) -> Episode:
        return self._parts.load(self._found[id][0])

    def __contains__(self, id: object) -> bool:
        return id in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<EpisodeIndex of {len(self)} episodes of {self._parts.paths[-1]}>"
