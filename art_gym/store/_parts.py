"""Parts: the files of one label as they are at one moment, opened together and read as one sequence.

A label has a Parquet file of what was compacted, a journal of what was appended since, or both. After a compaction that was killed before its
last step the journal is there too, although the Parquet file has taken it in; more may have been appended to it after that. So a Parquet file
remembers the journal that it took in by length and hash, and a journal that begins with just these bytes is read from there on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from art_gym.episodes import Episode
from art_gym.store._columns import Head
from art_gym.store._lines import read_line, read_lines
from art_gym.store._parquet import ParquetEpisodes

LINES, ROWS = ".jsonl", ".parquet"
"""Suffixes of a label's journal and of its Parquet file."""


class Parts:
    """A label's rows, and after them the lines of its journal.

    A **place** numbers the episodes: the rows from 0, then each line by its offset in the journal plus the number of rows. Places stay what
    they are while the journal grows, and even when it is compacted meanwhile, as the files are held open.

    Args:
        lines: The journal's path; None to leave it out.
        rows: The Parquet file's. Neither needs to be there.

    Raises:
        MissingExtra: There is a Parquet file, and no pyarrow.
        ValueError: The Parquet file is damaged, or is none of episodes.
    """

    def __init__(self, lines: Path | None, rows: Path | None) -> None:
        self.paths = [path for path in (rows, lines) if path]
        self._lines: BinaryIO | None = None
        self._rows: ParquetEpisodes | None = None
        # The journal first: a compaction between the two then shows both, which are told apart; the other way round it might show neither.
        with suppress(FileNotFoundError, NotADirectoryError):
            self._lines = lines.open("rb") if lines else None
        try:
            with suppress(FileNotFoundError, NotADirectoryError):
                self._rows = ParquetEpisodes(rows) if rows else None
            self._count = len(self._rows) if self._rows else 0
            self.start = self._taken()
        except BaseException:
            self.close()
            raise

    def read(self) -> Iterator[tuple[int, Episode]]:
        """Yield place and episode of everything, in the order in which it was appended.

        Raises:
            ValueError: Something in it is damaged, or is no episode that this version reads.
        """
        if self._rows:
            yield from enumerate(self._rows.read())
        if self._lines:
            for offset, episode in read_lines(self._lines, self.paths[-1], self.start):
                yield self._count + offset, episode

    def heads(self) -> Iterator[tuple[int, Head]]:
        """Yield place and outcome of everything; like `read`, but of a Parquet file only a few columns are read."""
        if self._rows:
            yield from enumerate(self._rows.heads())
        if self._lines:
            for offset, episode in read_lines(self._lines, self.paths[-1], self.start):
                yield self._count + offset, Head.of(episode)

    def load(self, place: int) -> Episode:
        """Read one episode."""
        if place < self._count:
            assert self._rows is not None
            return self._rows.load(place)
        assert self._lines is not None
        return read_line(self._lines, place - self._count)

    def close(self) -> None:
        if self._lines:
            self._lines.close()
        if self._rows:
            self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _taken(self) -> int:
        """So many of the journal's first bytes are in the Parquet file."""
        if self._lines is None or self._rows is None or self._rows.journal is None:
            return 0
        size, digest = self._rows.journal
        if os.fstat(self._lines.fileno()).st_size < size or digest_of(self._lines, size) != digest:
            return 0
        return size


def rows_path(path: Path) -> Path:
    """The path of the Parquet file that belongs to a journal."""
    return path.with_name(path.name.removesuffix(LINES) + ROWS)


def digest_of(file: BinaryIO, size: int) -> str:
    """The SHA-256 of the file's first bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()
