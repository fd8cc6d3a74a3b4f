"""`art-gym episodes export`: the episodes of a run in one file, exactly, or as conversations to fine-tune on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

import typer

from art_gym.cli._journals import labels_of, store_of
from art_gym.cli.files import replacing
from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.store import EpisodeStore, Stored, encode, write_parquet

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
                raise UsageError(f"none of the {selection.seen} episodes is {selection.wanted}, so that there is nothing to export")
            file.flush()
            os.fsync(file.fileno())
    except ValueError as error:
        raise UsageError(f"{error}; nothing was exported") from None
    except OSError as error:
        # A failed write doesn't say which file it was.
        error.filename = error.filename or str(request.to)
        raise
    left_out = f"; {selection.seen - written} others aren't {selection.wanted}" if written < selection.seen else ""
    typer.echo(f"{written} episodes in {request.to}{left_out}")


class _Selection:
    """The episodes that are exported, counted on the way."""

    def __init__(self, store: EpisodeStore, request: Request) -> None:
        self._store, self._request = store, request
        self._labels = request.labels or labels_of(store)
        self.wanted = "a success" if request.successful else "finished"
        self.seen = 0

    def write(self, file: BinaryIO) -> int:
        """Write them, one at a time, and return how many there are."""
        if self._request.to.suffix == ".parquet":
            return write_parquet(file, self._chosen())
        count = 0
        for count, stored in enumerate(self._chosen(), start=1):  # noqa: B007  counted
            file.write(encode(stored.episode) if self._request.form == "episodes" else _conversation(stored.episode))
        return count

    def _chosen(self) -> Iterator[Stored]:
        for label in self._labels:
            for episode in self._store.read([label]):
                self.seen += 1
                if self._takes(episode):
                    yield Stored(label, episode)

    def _takes(self, episode: Episode) -> bool:
        if self._request.successful and not episode.success:
            return False
        # A failed episode's conversation breaks off where nobody meant it to.
        return self._request.form == "episodes" or (episode.failure is None and bool(episode.turns))


def _conversation(episode: Episode) -> bytes:
    """The episode as a line that TRL's SFTTrainer takes: it ends with the last action, after which there is nothing to learn.

    The tools are a JSON text, which TRL reads, since a data set would make one table of all their parameters.
    """
    messages = replace(episode, final_observation=[]).messages
    line = json.dumps({"messages": messages, "tools": json.dumps(episode.tools, ensure_ascii=False)}, ensure_ascii=False)
    # A lone surrogate is no text to learn, and readers of JSON refuse it.
    return line.encode("utf-8", "replace") + b"\n"


def _check(request: Request, store: EpisodeStore) -> None:
    """Refuse what can't be done, before anything is read."""
    known = labels_of(store)
    if unknown := [label for label in request.labels if label not in known]:
        some = ", ".join(known[:5]) + ("…" if len(known) > 5 else "")
        raise UsageError(f"{request.run} has no episodes of the label {unknown[0]!r}; it has {some}")
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
