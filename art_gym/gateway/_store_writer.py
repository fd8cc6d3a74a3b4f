"""The one thread that writes a SQLite file: what arrives while it writes is committed together, so that a commit is paid once for many."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_MOST_AT_ONCE = 2000


@dataclass(slots=True)
class _Work:
    """One thing to write, in a savepoint of its own.

    Attributes:
        do: Writes, within the transaction; what it raises undoes only what it wrote.
        done: Told of the result, once it is committed.
    """

    do: Callable[[sqlite3.Connection], Any]
    done: Callable[[Any, BaseException | None], object]


def connect(path: Path) -> sqlite3.Connection:
    """Open a file for use by one thread, without Python's implicit transactions.

    In WAL mode readers never wait for the writer. synchronous=NORMAL keeps every commit when the process is killed at any moment; a machine
    that loses its power may lose the last commits, and never the file.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


class Writer:
    """Writes in a thread of its own, in the order in which it was asked to.

    Args:
        connection: Used by this thread alone from here on.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        """Why the last commit failed; None if it didn't."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gateway-store", daemon=True)
        self._thread.start()

    async def write(self, do: Callable[[sqlite3.Connection], T]) -> T:
        """Write, and wait until it is committed.

        Raises:
            sqlite3.Error: It can't be written, such as to a full disk.
            Exception: Whatever `do` raises.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._put(do, lambda result, error: loop.call_soon_threadsafe(settle, result, error))
        return await future

    def write_soon(self, do: Callable[[sqlite3.Connection], Any], done: Callable[[BaseException | None], None]) -> None:
        """Write in the background; `done` is called in the writer's thread with what went wrong, if anything did."""
        self._put(do, lambda _, error: done(error))

    def close(self) -> None:
        """Write all that was asked for, and end the thread. It blocks until then."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join()

    def _put(self, do: Callable[[sqlite3.Connection], Any], done: Callable[[Any, BaseException | None], object]) -> None:
        if self._closed:
            raise sqlite3.ProgrammingError("the store is closed")
        self._queue.put(_Work(do, done))

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._next_batch()
            if batch:
                self._commit(batch)
        self._connection.close()

    def _next_batch(self) -> tuple[list[_Work], bool]:
        batch: list[_Work] = []
        work = self._queue.get()
        while True:
            if work is None:
                return batch, True
            batch.append(work)
            if len(batch) == _MOST_AT_ONCE:
                return batch, False
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return batch, False

    def _commit(self, batch: list[_Work]) -> None:
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [self._do(work) for work in batch]
            self._connection.execute("COMMIT")
            self.failure = None
        except sqlite3.Error as error:
            self.failure = error
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            outcomes = [(None, error)] * len(batch)
        for work, (result, failure) in zip(batch, outcomes, strict=True):
            try:
                work.done(result, failure)
            except RuntimeError:
                # The event loop that waited for it is closed: nobody wants to know any more.
                continue

    def _do(self, work: _Work) -> tuple[Any, BaseException | None]:
        self._connection.execute("SAVEPOINT work")
        try:
            result = work.do(self._connection)
        except sqlite3.OperationalError:
            raise  # the disk is full or broken, for all of the batch
        except Exception as error:  # noqa: BLE001  whoever asked for it is told
            self._connection.execute("ROLLBACK TO work")
            self._connection.execute("RELEASE work")
            return None, error
        self._connection.execute("RELEASE work")
        return result, None
