"""`art-gym episodes export`: the episodes of a run in one file, exactly, or as conversations to fine-tune on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import typer

from art_gym._files import replacing
from art_gym.cli._episodes_sft import Conversations, NoConversation
from art_gym.cli._journals import check_labels, labels_of, store_of
from art_gym.errors import UsageError
from art_gym.store import EpisodeIndex, EpisodeStore, Stored, encode, write_parquet

_SUFFIXES = {"episodes": (".parquet", ".jsonl"), "sft": (".jsonl",)}


@dataclass(frozen=True, slots=True)
class Request:
    """What to export.

    Attributes:
        run: The folder of a run or of an evaluation.
        to: The file to write.
        labels: Which labels; empty for all.
        successful: Leave out the episodes that didn't succeed.
        form: Episodes as they are, or conversations.
        force: Write over a file.
    """

    run: Path
    to: Path
    labels: tuple[str, ...] = ()
    successful: bool = False
    form: Literal["episodes", "sft"] = "episodes"
    force: bool = False


def run(request: Request) -> None:
    """Write the file, which appears whole or not at all.

    Raises:
        UsageError: It can't be done as asked, or no episode is left to write; nothing was written.
        OSError: The disk refused.
    """
    store = store_of(request.run)
    _check(request, store)
    selection = _Selection(store, request)
    try:
        with replacing(request.to) as temporary, temporary.open("wb") as file:
            written = selection.write(file)
            if not written:
                raise UsageError(f"there is nothing to export: {selection.others()}")
            file.flush()
            os.fsync(file.fileno())
    except ValueError as error:
        raise UsageError(f"{error}; nothing was exported") from None
    except OSError as error:
        # A failed write doesn't say which file it was.
        error.filename = error.filename or str(request.to)
        raise
    typer.echo(f"{written} episodes in {request.to}" + (f"; of the others {selection.others()}" if selection.left_out else ""))


class _Selection:
    """The episodes that are exported, and how many were left out why."""

    def __init__(self, store: EpisodeStore, request: Request) -> None:
        self._store, self._request = store, request
        # One that is named twice isn't wanted twice.
        self._labels = tuple(dict.fromkeys(request.labels)) or labels_of(store)
        self.left_out: Counter[str] = Counter()

    def write(self, file: BinaryIO) -> int:
        """Write them, one at a time, and return how many there are."""
        if self._request.to.suffix == ".parquet":
            return write_parquet(file, (stored for index, label in self._indices() for stored in self._chosen(index, label)))
        count = 0
        for index, label in self._indices():
            conversations = Conversations(index.heads()) if self._request.form == "sft" else None
            for stored in self._chosen(index, label):
                try:
                    file.write(conversations.line(stored.episode) if conversations else encode(stored.episode))
                except NoConversation as reason:
                    self.left_out[str(reason)] += 1
                else:
                    count += 1
        return count

    def others(self) -> str:
        """Say why episodes were left out."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())

    def _indices(self) -> Iterator[tuple[EpisodeIndex, str]]:
        for label in self._labels:
            with self._store.journal(label).index() as index:
                yield index, label

    def _chosen(self, index: EpisodeIndex, label: str) -> Iterator[Stored]:
        for episode in index.episodes():
            if self._request.successful and not episode.success:
                self.left_out["aren't a success"] += 1
            else:
                yield Stored(label, episode)


def _check(request: Request, store: EpisodeStore) -> None:
    """Refuse what can't be done, before anything is read."""
    check_labels(store, request.run, request.labels)
    to, suffixes = request.to, _SUFFIXES[request.form]
    if to.is_dir():
        raise UsageError(f"--to {to} is a folder; give a file, such as {to / f'episodes{suffixes[0]}'}")
    if to.suffix not in suffixes:
        raise UsageError(f"--to {to}: --format {request.form} is written to a file that ends with {' or '.join(suffixes)}")
    if not to.parent.is_dir():
        raise UsageError(f"--to {to}: there is no folder {to.parent}")
    if to.parent.resolve() == store.folder.resolve():
        raise UsageError(f"--to {to}: the run's own episodes are in that folder; give a file elsewhere")
    if to.exists() and not request.force:
        raise UsageError(f"--to {to} is there already; --force writes over it")
