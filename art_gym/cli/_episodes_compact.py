"""`art-gym episodes compact`: the journals of a run made into tables, those to which nobody appends."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import typer

from art_gym.cli._journals import check_labels, labels_of, store_of
from art_gym.errors import MissingExtra, UsageError
from art_gym.store import Busy


def run(folder: Path, labels: Sequence[str] = ()) -> None:
    """Compact the labels, all if none is given, and print what became of each that had a journal.

    Raises:
        MissingExtra: pyarrow isn't installed.
        UsageError: There is no such run or label; or a file is damaged, and then what could be compacted is.
        OSError: The disk refused.
    """
    store = store_of(folder)
    check_labels(store, folder, labels)
    if find_spec("pyarrow") is None:
        raise MissingExtra("compacting episodes", extra="data", package="pyarrow")
    damaged = []
    done = left = 0
    for label in dict.fromkeys(labels) or labels_of(store):
        journal = store.journal(label)
        before = sum(path.stat().st_size for path in journal.paths)
        try:
            if store.compact(label):
                done += 1
                typer.echo(f"{label}: {before:,} bytes are now {sum(path.stat().st_size for path in journal.paths):,}")
        except Busy:
            left += 1
            typer.echo(f"{label}: left as it is, since it is being written")
        except ValueError as error:
            damaged.append(str(error))
    if not (done or left or damaged):
        typer.echo("nothing to compact")
    if damaged:
        raise UsageError("; ".join(damaged))
