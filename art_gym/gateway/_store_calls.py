"""Calls on their way to the disk: gathered for a moment, so that many are written in one go, and in the order of arrival."""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from art_gym.gateway._store_writer import Writer

logger = logging.getLogger("art_gym.gateway.store")

_FLUSH_SECONDS = 0.02
_MOST_WAITING_BYTES = 64 * 2**20

Row = tuple[str, int, bytes]
"""An episode's id, how many tokens were sampled, and the call."""


class CallBuffer:
    """What was captured and isn't written yet. It belongs to one event loop."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._loop = writer, asyncio.get_running_loop()
        self._rows: list[Row] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def full(self) -> bool:
        """Whether so much waits that whoever adds more should wait too."""
        return self._waiting_bytes > _MOST_WAITING_BYTES

    def add(self, row: Row) -> None:
        """Take a call in; it is handed on within a moment."""
        self._rows.append(row)
        self._waiting_bytes += len(row[2])
        if self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Hand what was taken in to the writer, before anything that it is asked for later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._rows:
            return
        rows, self._rows = self._rows, []

        def do(connection: sqlite3.Connection) -> None:
            # Of an episode that was deleted meanwhile nothing is kept.
            query = "INSERT INTO calls (episode, tokens, data) SELECT id, ?2, ?3 FROM episodes WHERE id = ?1"
            connection.executemany(query, rows)

        def done(error: BaseException | None) -> None:
            self._loop.call_soon_threadsafe(self._flushed, rows, error)

        self._writer.write_soon(do, done)

    def _flushed(self, rows: list[Row], error: BaseException | None) -> None:
        self._waiting_bytes -= sum(len(data) for _, _, data in rows)
        if error is not None:
            # Their episodes have fewer calls than were counted, which the store finds when they are finished.
            logger.error("%d calls could not be written: %s", len(rows), error)
