"""Parquet files of episodes: one row an episode, written and read a row group at a time, so that memory is bounded whatever a file's size."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from art_gym.episodes import Episode
from art_gym.errors import MissingExtra
from art_gym.store._columns import FORMAT, HEAD, Head, Stored, from_row, schema, to_row, with_record

T = TypeVar("T")

BATCH_BYTES = 1 << 20
"""Rows are kept as Python objects until they amount to about this much text and numbers."""

GROUP_BYTES = 16 << 20
"""About so much of a table is a row group: what is in memory at once, and what is read to load one episode."""

_SLICE = 32
"""So many rows are Python objects at once when a file is read from its beginning to its end."""

_GROUPS_HELD = 2
"""Episodes are asked for in about the order in which they were written, so that those at the edge of two row groups alternate."""

_FORMAT_KEY, _JOURNAL_KEY = b"art_gym.format", b"art_gym.journal"


def arrow(needs: str) -> tuple[Any, Any]:
    """Import pyarrow, and its Parquet module. It has no types, and is loaded only where it is needed.

    Raises:
        MissingExtra: It isn't installed.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra(needs, extra="data", package="pyarrow") from error


def write_parquet(file: BinaryIO, episodes: Iterable[Stored], *, journal: tuple[int, str] | None = None) -> int:
    """Write a Parquet file of episodes, and return how many there are.

    Args:
        file: Where to, empty.
        episodes: Taken one at a time.
        journal: Length and SHA-256 of the journal that the file takes in.

    Raises:
        MissingExtra: pyarrow isn't installed.
        ValueError: An episode can't be written as JSON.
        OSError: The disk refused.
    """
    pa, pq = arrow("writing Parquet files")
    columns = schema(pa)
    count = 0
    # Checksums, since what is compressed shows no damage by itself.
    with pq.ParquetWriter(file, columns, compression="zstd", write_page_checksum=True) as writer:
        metadata = {_FORMAT_KEY: str(FORMAT).encode()}
        if journal is not None:
            metadata[_JOURNAL_KEY] = json.dumps({"bytes": journal[0], "sha256": journal[1]}).encode()
        writer.add_key_value_metadata(metadata)
        group: list[Any] = []
        for batch in _batches(pa, columns, episodes):
            count += batch.num_rows
            group.append(batch)
            if sum(held.nbytes for held in group) >= GROUP_BYTES:
                _write_group(pa, writer, group)
                group = []
        if group:
            _write_group(pa, writer, group)
    return count


class ParquetEpisodes:
    """The episodes in a Parquet file.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: It isn't there.
        MissingExtra: pyarrow isn't installed.
        ValueError: It is damaged, or no file of episodes that this version reads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.stat()
        self._pa, pq = arrow(f"reading {path}")
        self._file = self._pa.OSFile(str(path))
        try:
            self._parquet = self._checked(lambda: pq.ParquetFile(self._file, page_checksum_verification=True))
            metadata = self._parquet.metadata
            keys: dict[bytes, bytes] = metadata.metadata or {}
            if (version := keys.get(_FORMAT_KEY, b"").decode()) != str(FORMAT):
                reason = f"it has format {version}, and this version of art_gym reads format {FORMAT}" if version else "it has no format"
                raise ValueError(f"{path} is no file of episodes that this version of art_gym reads: {reason}")
        except BaseException:
            self._file.close()
            raise
        self.journal = _journal(keys)
        self._starts = [0]
        for group in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(group).num_rows)
        self._held: OrderedDict[int, Any] = OrderedDict()

    def read(self) -> Iterator[Episode]:
        """Yield the episodes in order."""
        for row in self._rows():
            yield from_row(row)

    def heads(self) -> Iterator[Head]:
        """Yield the episodes' outcomes in order."""
        for row in self._rows(HEAD):
            yield Head.from_row(row)

    def load(self, number: int) -> Episode:
        """Read the episode in a row, counted from 0."""
        group = bisect_right(self._starts, number) - 1
        if group not in self._held:
            if len(self._held) >= _GROUPS_HELD:
                self._held.popitem(last=False)
            self._held[group] = self._group(group)
        self._held.move_to_end(group)
        place = number - self._starts[group]
        (row,) = self._held[group].slice(place, 1).to_pylist()
        return from_row(row)

    def close(self) -> None:
        self._held.clear()
        self._file.close()

    def __len__(self) -> int:
        return self._starts[-1]

    def _rows(self, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
        for number in range(len(self._starts) - 1):
            group = self._group(number, columns)
            for start in range(0, group.num_rows, _SLICE):
                yield from group.slice(start, _SLICE).to_pylist()

    def _group(self, number: int, columns: list[str] | None = None) -> Any:
        return self._checked(lambda: self._parquet.read_row_group(number, columns=columns, use_threads=False))

    def _checked(self, read: Callable[[], T]) -> T:
        """Call what reads, and name the file if it is damaged."""
        try:
            return read()
        except (self._pa.ArrowException, OSError, UnicodeDecodeError) as error:
            # Damage that Arrow finds may be an OSError, too, without a number.
            if isinstance(error, OSError) and error.errno:
                raise
            raise ValueError(f"{self.path} is damaged: {error}") from error


def _journal(keys: dict[bytes, bytes]) -> tuple[int, str] | None:
    if _JOURNAL_KEY not in keys:
        return None
    journal = json.loads(keys[_JOURNAL_KEY])
    return journal["bytes"], journal["sha256"]


def _batches(pa: Any, columns: Any, episodes: Iterable[Stored]) -> Iterator[Any]:
    """Make record batches of about `BATCH_BYTES`."""
    waiting: list[tuple[dict[str, Any], Episode]] = []
    weight = 0
    for stored in episodes:
        row = to_row(stored)
        waiting.append((row, stored.episode))
        weight += _weight(row)
        if weight >= BATCH_BYTES:
            yield _batch(pa, columns, waiting)
            waiting, weight = [], 0
    if waiting:
        yield _batch(pa, columns, waiting)


def _batch(pa: Any, columns: Any, rows: list[tuple[dict[str, Any], Episode]]) -> Any:
    try:
        return pa.RecordBatch.from_pylist([row for row, _ in rows], schema=columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        # Some row holds what a column can't: each is tried by itself.
        return pa.RecordBatch.from_pylist([_fitting(pa, columns, row, episode) for row, episode in rows], schema=columns)


def _fitting(pa: Any, columns: Any, row: dict[str, Any], episode: Episode) -> dict[str, Any]:
    """Return the row if the columns can hold it; otherwise as much of it as they can, and the whole in `record`."""
    fitting: dict[str, Any] = {}
    for column in columns:
        value = row[column.name]
        for form in (value, value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else None):
            try:
                pa.array([form], column.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                continue
            fitting[column.name] = form
            break
    return row if all(fitting[name] is row[name] for name in row) else with_record(fitting, episode)


def _write_group(pa: Any, writer: Any, batches: list[Any]) -> None:
    table = pa.Table.from_batches(batches)
    writer.write_table(table, row_group_size=table.num_rows)


def _weight(row: dict[str, Any]) -> int:
    """About how many bytes a row is."""
    texts = sum(len(value) for value in row.values() if isinstance(value, str))
    return texts + sum(
        len(turn["observation"]) + len(turn["action"]) + 4 * len(turn["prompt_ids"] or ()) + 12 * len(turn["completion_ids"] or ())
        for turn in row["turns"]
    )
