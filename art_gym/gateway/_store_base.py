"""A SQLite file with one thread that writes it and a few that read it, and the tables of jobs, which need no more than that."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from art_gym.errors import UsageError
from art_gym.gateway._store_errors import StoreUnwritable, UnknownJob
from art_gym.gateway._store_tables import make_tables
from art_gym.gateway._store_writer import Writer, connect

logger = logging.getLogger("art_gym.gateway.store")

T = TypeVar("T")

FILE = "gateway.sqlite3"

_READERS = 2


class Database:
    """The file in a folder. It is made, used and closed within one event loop, by one process.

    Raises:
        UsageError: The folder's store is of another version, or another gateway uses it.
        OSError: The folder can't be made.
        sqlite3.Error: The file can't be opened.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / FILE
        # What is held in memory is true only as long as nobody else writes. The lock ends with the process, however that ends.
        self._lock = os.open(folder / "gateway.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UsageError(f"another gateway uses the folder {folder}: stop it, or give another folder") from None
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self) -> None:
        # SQLite gives its journals the rights of the file.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = connect(self._path)
        make_tables(connection, secrets.token_bytes(32))
        (self._secret,) = connection.execute("SELECT value FROM facts WHERE name = 'secret'").fetchone()
        self._load(connection)
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(connection)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="gateway-read")
        self._local = threading.local()
        self._reading: list[sqlite3.Connection] = []

    def _load(self, connection: sqlite3.Connection) -> None:
        """Read what is held in memory, before anything is written."""

    def key_for(self, id: str, idempotency: str) -> str:
        """A secret that follows from an episode's id, an idempotency key and what only this store knows.

        By it an answer with a key in it can be given again, although the key isn't stored.
        """
        return hmac.new(self._secret, f"{id} {idempotency}".encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()

    async def check(self) -> None:
        """Find out whether the store can be written.

        Raises:
            StoreUnwritable: It can't.
        """
        await self._write(lambda connection: connection.execute("UPDATE facts SET value = value WHERE name = 'secret'").rowcount)

    async def put_job(self, job: dict[str, Any]) -> None:
        """Store a job, JSON data with an "id", in the place of what was stored of it."""
        values = (job["id"], msgspec.json.encode(job))
        await self._write(
            lambda connection: (
                connection.execute(
                    "INSERT INTO jobs (id, data) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET data = excluded.data", values
                ).rowcount
            )
        )

    async def jobs(self) -> list[dict[str, Any]]:
        """All jobs, the oldest first."""
        rows = await self._read(lambda connection: connection.execute("SELECT data FROM jobs ORDER BY seq").fetchall())
        return [msgspec.json.decode(data) for (data,) in rows]

    async def append_event(self, job_id: str, event: dict[str, Any]) -> int:
        """Store a job's next event; returns its number, which is the event's "number" or else one more than the last.

        Raises:
            UnknownJob: There is no such job.
            sqlite3.IntegrityError: It has an event of that number.
        """

        def do(connection: sqlite3.Connection) -> int:
            if connection.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone() is None:
                raise UnknownJob(job_id)
            number = event.get("number")
            if number is None:
                (number,) = connection.execute("SELECT coalesce(max(number), 0) + 1 FROM events WHERE job = ?", (job_id,)).fetchone()
            data = msgspec.json.encode({**event, "number": number})
            connection.execute("INSERT INTO events VALUES (?, ?, ?)", (job_id, number, data))
            return int(number)

        return await self._write(do)

    async def events(self, job_id: str, after: int = 0) -> list[dict[str, Any]]:
        """A job's events with numbers over `after`, in order."""
        query = "SELECT data FROM events WHERE job = ? AND number > ? ORDER BY number"
        values = (job_id, min(after, 2**63 - 1))
        rows = await self._read(lambda connection: connection.execute(query, values).fetchall())
        return [msgspec.json.decode(data) for (data,) in rows]

    def _flush(self) -> None:
        """Hand what waits to the writer."""

    async def _change(self, do: Callable[[sqlite3.Connection], T], then: Callable[[T], None], failed: Callable[[], None] = lambda: None) -> T:
        """Write, after all calls that came before, and let memory follow; whoever stops waiting for it changes nothing."""
        self._flush()

        async def run() -> T:
            try:
                result = await self._write(do)
            except BaseException:
                failed()
                raise
            then(result)
            return result

        task = self._loop.create_task(run())
        # Its exception is retrieved although nobody waits any more.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _close_file(self) -> None:
        """Write all that waits, and close the file."""
        await asyncio.to_thread(self._writer.close)
        self._readers.shutdown()
        for connection in self._reading:
            connection.close()
        os.close(self._lock)

    async def _write(self, do: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._writer.write(do)
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            logger.error("the gateway's store can't be written: %s", error)
            raise StoreUnwritable(f"The gateway's store can't be written ({error}); nothing was changed.") from error

    async def _read(self, do: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            connection = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = connect(self._path)
                self._reading.append(connection)
            # One transaction, so that all it reads is of one moment.
            connection.execute("BEGIN")
            try:
                return do(connection)
            finally:
                connection.execute("COMMIT")

        return await self._loop.run_in_executor(self._readers, run)
