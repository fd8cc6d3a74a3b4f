"""The store: finished episodes on disk, one journal a label.

This module owns the files `episodes/<label>.jsonl` of a run: one line of JSON an episode, on disk before `append` returns, and readable after a
kill at any moment. What an episode is belongs to `art_gym.episodes`; which label an episode goes under is the caller's choice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from types import TracebackType
from typing import BinaryIO, Self

from art_gym._files import sync
from art_gym.episodes import Episode, Failure
from art_gym.errors import UsageError

_SUFFIX = ".jsonl"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class EpisodeStore:
    """The episodes of one run, in journals under `<folder>/episodes`.

    Nothing is created on disk before the first episode is appended.

    >>> import tempfile
    >>> from art_gym.scenarios import Scenario
    >>> with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder) as store:
    ...     store.journal("train-0001").append(Episode(id="train-0001/0/0", env_id="art_gym/GuessNumber-v0", scenario=Scenario("s", seed=7)))
    ...     store.labels(), [episode.scenario.seed for episode in store.journal("train-0001").read()]
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
            self._journals[label] = Journal(self.folder / f"{label}{_SUFFIX}")
        return self._journals[label]

    def labels(self) -> list[str]:
        """List the labels that have a file, sorted."""
        return sorted(path.name.removesuffix(_SUFFIX) for path in self.folder.glob(f"*{_SUFFIX}"))

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


class Journal:
    """The episodes of one label, in the order in which they were appended.

    Appending is safe from several threads; one process at a time may append. A line that a kill cut short is skipped by readers, and removed
    when the journal is appended to again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def label(self) -> str:
        return self.path.name.removesuffix(_SUFFIX)

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
            ValueError: A line in the middle of the file is damaged, or is no episode that this version reads.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            torn: tuple[int, ValueError] | None = None
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                if torn is not None:
                    raise ValueError(f"{self.path}, line {torn[0]} is damaged: {torn[1]}") from torn[1]
                try:
                    data = json.loads(line)
                except ValueError as error:
                    torn = number, error
                    continue
                try:
                    episode = Episode.from_dict(data)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{self.path}, line {number} is no episode that this version of art_gym reads: {error}") from error
                yield episode

    def latest(self) -> dict[str, Episode]:
        """Episodes by id. Where an id was appended again (a failed episode that was played again), the last one stands."""
        return {episode.id: episode for episode in self.read()}

    def close(self) -> None:
        """Close the file; it is opened again when something is appended."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = _whole_lines(file)
            file.truncate(self._size)
            # The file's name, not only its content.
            sync(self.path.parent)
        except BlockingIOError:
            file.close()
            raise UsageError(
                f"{self.path} is being written by another process, or another store of this one; wait for it, or use another run folder"
            ) from None
        except BaseException:
            file.close()
            raise
        self._file = file
        return file

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r})"


def encode(episode: Episode) -> bytes:
    """Return the episode as one line of JSON.

    Raises:
        ValueError: It can't be written: NaN or infinity in it, or an object that JSON doesn't know.
    """
    try:
        text = json.dumps(episode.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        # A lone surrogate, which a model can write as a JSON escape, has no UTF-8 form.
        return json.dumps(episode.to_dict(), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"episode {episode.id!r} can't be written as JSON: {error}") from error


def encode_or_failed(episode: Episode) -> bytes:
    """Return the episode as one line of JSON; one that can't be written becomes a failed one, without its turns."""
    try:
        return encode(episode)
    except ValueError as error:
        episode.failure = Failure("environment", str(error))
        return encode(replace(episode, tools=[], turns=[], final_observation=[], metrics={}))


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


def _whole_lines(file: BinaryIO) -> int:
    """Measure the file without a last line that was cut short.

    Such a line has no end, or its bytes never reached the disk.
    """
    size = _line_start(file, file.seek(0, os.SEEK_END))
    start = _line_start(file, max(size - 1, 0))
    file.seek(start)
    try:
        json.loads(file.read(size - start) or b"{}")
    except ValueError:
        return start
    return size


def _line_start(file: BinaryIO, end: int, block: int = 1 << 16) -> int:
    """Find the offset just after the last line feed before `end`; 0 if there is none."""
    while end > 0:
        start = max(end - block, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
