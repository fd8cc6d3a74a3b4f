"""The folder of a run: who may write into it, and how a run starts, goes on or starts anew without mixing with another.

A run folder is one that holds `config.yaml`. One process at a time works in it. What the run writes there is the pipeline's business.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from art_gym.cli.config import RunConfig
from art_gym.errors import UsageError

CONFIG = "config.yaml"
_LOCK = ".lock"
_RESULTS = ("episodes", "checkpoints", "metrics.jsonl", "evaluations.json")
"""What a run can't make again for nothing; a log or a copy of the weights isn't worth keeping."""


def named(folder: Path) -> Path:
    """Give the folder a name of its own: "." has none that an old run could be moved to, and would follow the folder when it is moved."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def saved_config(folder: Path) -> RunConfig:
    """Read the configuration of the run in `folder`, to resume it.

    Raises:
        UsageError: There is no run to resume.
    """
    if not (folder / CONFIG).is_file():
        raise UsageError(f"there is no run to resume in {folder}: it holds no {CONFIG}; leave --resume out to start one there")
    return RunConfig.load(folder / CONFIG)


def check(folder: Path, config: RunConfig, *, resume: bool, fresh: bool) -> None:
    """Refuse what can't be done with the folder, before anything is changed.

    Raises:
        UsageError: The folder can't be written, holds another run or something else, or the run in it has another configuration.
    """
    if resume and fresh:
        raise UsageError("--resume goes on with a run and --fresh starts it anew; give one of them")
    check_writable(folder)
    if resume:
        if differing := saved_config(folder).differences(config):
            raise UsageError(
                f"the run in {folder} has other settings than you ask for: {', '.join(differing)}; "
                "resume it without changing them, or give another --run-dir"
            )
        return
    if _is_empty(folder):
        return
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} is not empty and not the folder of a run; give another --run-dir")
    if not fresh:
        raise UsageError(f"{folder} already holds a run; --resume goes on with it, --fresh moves it aside and starts anew")


def check_writable(folder: Path, option: str = "--run-dir") -> None:
    """Check that a folder can be made and written, without making it.

    Raises:
        UsageError: It can't.
    """
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"can't make the folder {folder}: {existing} is a file; give another {option}")
    try:
        # Tried, since permission bits say nothing about read-only file systems and the superuser.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UsageError(f"can't write the folder {folder}: {existing}: {error.strerror}; give another {option}") from None


@contextmanager
def claim(folder: Path, config: RunConfig, *, resume: bool, fresh: bool) -> Iterator[None]:
    """Hold the folder for this process, with the run's configuration in it.

    A run that `--fresh` replaces is renamed to NAME.old-1, NAME.old-2 and so on: nothing is lost. When the request turns out to be impossible
    (`UsageError`) before the run wrote anything, all of this is undone.

    Raises:
        UsageError: Another process works in the folder, or what `check` refuses.
    """
    folder = named(folder)
    check(folder, config, resume=resume, fresh=fresh)
    existed = folder.exists()
    old: Path | None = None
    if fresh and not _is_empty(folder):
        with _locked(folder):
            old = _unused_name(folder)
            folder.rename(old)
        existed = False
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        # Again, since another process may have come and gone between the look and the lock.
        check(folder, config, resume=resume, fresh=False)
        try:
            # A resumed run may have other settings where they change nothing of what it computes.
            if not resume or saved_config(folder) != config:
                config.save(folder / CONFIG)
            yield
        except UsageError:
            # While the lock is held: what lies in the folder is this process's own.
            if not resume and not _has_results(folder):
                _undo(folder, existed=existed, old=old)
            raise


def _undo(folder: Path, *, existed: bool, old: Path | None) -> None:
    # The lock's file goes last, so that nobody else begins in between.
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == _LOCK):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not existed:
        folder.rmdir()
    if old:
        old.rename(folder)


def _is_empty(folder: Path) -> bool:
    """Whether nothing is there; the lock of a process that was killed before it wrote anything is nothing."""
    return not folder.exists() or all(entry.name == _LOCK for entry in folder.iterdir())


def _has_results(folder: Path) -> bool:
    return any((folder / name).exists() for name in _RESULTS)


def _unused_name(folder: Path) -> Path:
    number = 1
    while (candidate := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return candidate


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    busy = UsageError(f"another process is working in {folder}; wait for it, or give another --run-dir")
    path = folder / _LOCK
    try:
        file = path.open("w")
    except FileNotFoundError:  # It moved the folder or undid its run a moment ago.
        raise busy from None
    # The kernel releases the lock when this process ends, however it ends.
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise busy
        yield
