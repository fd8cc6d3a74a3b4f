"""The journal: where episodes are appended, and from where they are compacted."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import BinaryIO

from art_gym._files import sync
from art_gym.episodes import Episode
from art_gym.errors import MissingExtra, UsageError
from art_gym.store._columns import Stored
from art_gym.store._index import EpisodeIndex
from art_gym.store._lines import encode, whole_lines
from art_gym.store._parquet import arrow, write_parquet
from art_gym.store._parts import LINES, Parts, digest_of, rows_path


class Busy(UsageError):
    """Somebody else appends to the journal."""


class Journal:
    """The episodes of one label, in the order in which they were appended.

    Appending is safe from several threads; one process at a time may append. A line that a kill cut short is skipped by readers, and removed
    when the journal is appended to again. What was compacted is read from the label's Parquet file, and what is appended after that goes into a
    new journal beside it: whoever reads, or resumes, sees one sequence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def label(self) -> str:
        return self.path.name.removesuffix(LINES)

    @property
    def closed(self) -> bool:
        """Whether this object holds no file open for appending."""
        return self._file is None

    @property
    def paths(self) -> list[Path]:
        """The files that there are: of what was compacted, and of what was appended since."""
        return [path for path in (rows_path(self.path), self.path) if path.exists()]

    def check(self) -> None:
        """See whether the disk takes what is appended, and leave nothing behind. Another process may be writing all the same.

        Raises:
            UsageError: It doesn't, such as a folder that is read-only or a file.
        """
        try:
            _try_out(self.path)
        except (OSError, ValueError) as error:  # ValueError: no file has that name
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UsageError(
                f"episodes can't be written to {str(self.path)!r}: {reason}; make that writable, or choose another folder"
            ) from error

    def append(self, *episodes: Episode) -> None:
        """Write the episodes, all or none; when this returns they are on disk.

        It waits for the disk, so that code in an event loop calls it in a thread.

        Raises:
            ValueError: An episode can't be written as JSON (NaN or infinity in it, or an object that JSON doesn't know).
            UsageError: Another process appends to this journal.
            OSError: The disk refused.
        """
        self.write(b"".join(encode(episode) for episode in episodes))

    def write(self, lines: bytes) -> None:
        """Append lines that `encode` or `encode_or_failed` made; otherwise like `append`."""
        with self._lock:
            file = self._file or self._open()
            try:
                with _naming(self.path):
                    view = memoryview(lines)
                    while view:
                        view = view[file.write(view) :]
                    os.fsync(file.fileno())
            except OSError:
                # Half a line must not stay in front of the next one.
                file.truncate(self._size)
                raise
            self._size += len(lines)

    def read(self) -> Iterator[Episode]:
        """Yield the episodes, one at a time; none if nothing was appended yet.

        Raises:
            MissingExtra: The label was compacted, and pyarrow isn't installed.
            ValueError: A file is damaged, or something in it is no episode that this version reads.
        """
        with self._parts() as parts:
            for _, episode in parts.read():
                yield episode

    def index(self) -> EpisodeIndex:
        """Find the episodes by id, to load them one at a time; close the index when done.

        Raises:
            MissingExtra, ValueError: As for `read`.
        """
        return EpisodeIndex(self._parts())

    def latest(self) -> dict[str, Episode]:
        """Episodes by id. Where an id was appended again (a failed episode that was played again), the last one stands.

        All of them are in memory; `index` is for more than that holds.
        """
        return {episode.id: episode for episode in self.read()}

    def compact(self) -> bool:
        """Move the episodes into the label's Parquet file: the journal is gone then, and everything reads as before.

        A kill at any moment leaves all of it readable; what it left undone, the next call does. Nothing may be appended meanwhile, and this
        object's file is closed.

        Returns:
            Whether there was something to move; False, too, without pyarrow.

        Raises:
            UsageError: Another process appends to this journal.
            ValueError: A file is damaged; everything stays as it is.
            OSError: The disk refused; everything stays as it is.
        """
        try:
            arrow("compacting episodes")
        except MissingExtra:
            return False
        with self._lock:
            if not self.path.exists():
                return False
            file = self._file or self._open()
            try:
                return self._compact(file)
            finally:
                self._file = None
                file.close()

    def close(self) -> None:
        """Close the file; it is opened again when something is appended."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _parts(self) -> Parts:
        return Parts(self.path, rows_path(self.path))

    def _compact(self, file: BinaryIO) -> bool:
        if not self._size:
            return False
        with self._parts() as parts:
            # Otherwise a compaction was killed before its last step.
            if parts.start < self._size:
                last = {head.id: place for place, head in parts.heads()}
                rows = (Stored(self.label, episode, superseded=last[episode.id] != place) for place, episode in parts.read())
                with _whole(rows_path(self.path)) as target:
                    write_parquet(target, rows, journal=(self._size, digest_of(file, self._size)))
        with _naming(self.path):
            self.path.unlink()
            sync(self.path.parent)
        return True

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = self.path.open("a+b", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(file, self.path):
                    # It was compacted between the opening and the lock.
                    file.close()
                    continue
                self._size = whole_lines(file)
                file.truncate(self._size)
                # The file's name, not only its content.
                sync(self.path.parent)
            except BlockingIOError:
                file.close()
                raise Busy(
                    f"{self.path} is being written by another process, or another store of this one; wait for it, or use another run folder"
                ) from None
            except BaseException:
                file.close()
                raise
            self._file = file
            return file

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r})"


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write, which then appears at the path whole and on disk. Who calls this holds the label's lock."""
    # Always the same name, so that what kills leave doesn't add up.
    temporary = path.with_name(f".{path.name}.part")
    with _naming(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say which file the disk refused: a failed write doesn't."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _try_out(path: Path) -> None:
    """Raise what appending to the file would raise, without making it."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        place = next((folder for folder in path.parents if os.path.lexists(folder)), Path())
        TemporaryFile(dir=place).close()
        return
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "it's no file")
    path.open("ab").close()
