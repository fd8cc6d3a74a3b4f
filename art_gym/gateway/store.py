"""The session store: episodes with their calls, and training jobs with their events, in one SQLite file.

Episodes that are open are in memory too, so that a captured call costs no read; calls are written in the background and in order. Whatever ends
an episode is committed, with every call before it, before the answer is given: an end that a client was told of survives `kill -9`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_gym.episodes import Episode
from art_gym.gateway._store_base import Database
from art_gym.gateway._store_calls import CallBuffer
from art_gym.gateway._store_errors import EpisodeOver, IdempotencyConflict, LimitExceeded, StoreUnwritable, UnknownEpisode, UnknownJob
from art_gym.gateway._store_tables import (
    STATES,
    EpisodeRecord,
    EpisodeState,
    Live,
    Page,
    add,
    answered,
    call_bytes,
    call_data,
    call_of,
    count_calls,
    decode,
    digest,
    encode,
    find,
    found,
    new_id,
    open_episodes,
    remember,
    update,
)
from art_gym.gateway.calls import Call, episode_of
from art_gym.gateway.settings import Limits

__all__ = [
    "EpisodeOver",
    "EpisodeRecord",
    "EpisodeState",
    "IdempotencyConflict",
    "LimitExceeded",
    "Page",
    "SessionStore",
    "StoreUnwritable",
    "UnknownEpisode",
    "UnknownJob",
]

logger = logging.getLogger(__name__)

ANSWERS_KEPT_SECONDS = 24 * 3600.0
"""How long an idempotency key is remembered."""

_EXPIRY_SECONDS = 30.0


class SessionStore(Database):
    """The store in a folder. It is made, used and closed within one event loop, by one process.

    Args:
        folder: Made if it isn't there; nobody else may look into it.
        limits: How many episodes may be open, and how large, long and old one may become.
        clock: Seconds since 1970.

    Raises:
        UsageError: The folder's store is of another version, or another gateway uses it.
        OSError: The folder can't be made.
        sqlite3.Error: The file can't be opened.
    """

    def __init__(self, folder: Path, *, limits: Limits | None = None, clock: Callable[[], float] = time.time) -> None:
        self._limits, self._clock = limits or Limits(), clock
        super().__init__(folder)
        self._buffer = CallBuffer(self._writer)
        self._expiry = self._loop.create_task(self._expire_again_and_again())
        self._closed = False
        self.captured_calls = 0
        """Calls that came in since the start."""
        self.captured_tokens = 0
        """Tokens that were sampled in them."""

    def _load(self, connection: sqlite3.Connection) -> None:
        self._live = {live.record.id: live for live in open_episodes(connection)}
        self._states: Counter[str] = Counter(dict(connection.execute("SELECT state, count(*) FROM episodes GROUP BY state").fetchall()))

    async def create(
        self,
        *,
        group: str | None,
        scenario: dict[str, Any] | None,
        metadata: dict[str, Any],
        key_hash: str,
        idempotency: str | None,
        id: str | None = None,
    ) -> EpisodeRecord:
        """Begin an episode; with an idempotency key that was used before, the one that it began.

        Raises:
            LimitExceeded: Too many are open (429).
            IdempotencyConflict: The key was used for another request.
        """
        record = EpisodeRecord(id or new_id(), group, scenario, metadata, key_hash, self._clock())
        request = digest({"group": group, "scenario": scenario, "metadata": metadata})
        most = self._limits.open_episodes

        def do(connection: sqlite3.Connection) -> EpisodeRecord:
            if (answer := answered(connection, "create", idempotency, request)) is not None:
                return answer
            # Counted where all creations come one after the other.
            (count,) = connection.execute("SELECT count(*) FROM (SELECT 1 FROM episodes WHERE state = 'open' LIMIT ?)", (most,)).fetchone()
            if count >= most:
                raise LimitExceeded(f"{most} episodes are open, and no more may be: finish or delete some.", 429)
            connection.execute(
                'INSERT INTO episodes (id, state, "group", created, data) VALUES (?, ?, ?, ?, ?)',
                (record.id, record.state, group, record.created, encode(record)),
            )
            remember(connection, "create", idempotency, request, record, self._clock())
            return record

        def then(made: EpisodeRecord) -> None:
            if made is record:
                self._live[record.id] = Live(record)
                self._states["open"] += 1

        return await self._change(do, then)

    async def get(self, id: str) -> EpisodeRecord:
        """An episode's record. Its counts go on while it is open; the rest of it is never changed.

        Raises:
            UnknownEpisode: There is none.
        """
        if (live := self._live.get(id)) is not None:
            return live.record
        found = await self._read(lambda connection: find(connection, id))
        if found is None:
            raise UnknownEpisode(id)
        return found[0]

    async def add_call(self, id: str, call: Call) -> None:
        """Take a call in; it is written in the background, after all that were taken in before.

        Raises:
            UnknownEpisode: There is no such episode.
            EpisodeOver: It takes no more calls.
            LimitExceeded: It has too many calls, or they are too large.
        """
        live = self._live.get(id)
        if live is None or live.ending:
            state = "being finished" if live is not None else (await self.get(id)).state
            raise EpisodeOver(f"Episode {id} is {state}: it takes no more calls. Create another one.")
        limits, record = self._limits, live.record
        if self._clock() - record.created > limits.episode_age_seconds:
            raise EpisodeOver(f"Episode {id} is older than {limits.episode_age_seconds:g} seconds, and expires. Create another one.")
        if record.calls >= limits.calls_per_episode:
            raise LimitExceeded(f"Episode {id} has {record.calls} calls, and may have no more ({limits.calls_per_episode}). Finish it.")
        data = call_bytes(call)
        if live.bytes + len(data) > limits.episode_bytes:
            raise LimitExceeded(
                f"Episode {id} would have {live.bytes + len(data)} bytes of calls, and may have {limits.episode_bytes}. Finish it."
            )
        tokens = len(call.completion_ids or ())
        live.bytes += len(data)
        record.calls += 1
        record.tokens += tokens
        self.captured_calls += 1
        self.captured_tokens += tokens
        self._buffer.add((id, tokens, data))
        if self._buffer.full:
            await self.flush()

    async def calls(self, id: str) -> list[Call]:
        """An episode's calls, in the order of arrival.

        Raises:
            UnknownEpisode: There is no such episode.
        """
        await self._settled(id)
        return await self._read(lambda connection: [call_of(data) for data in call_data(connection, id)])

    async def calls_json(self, id: str) -> bytes:
        """The same as a JSON list, as it is stored.

        Raises:
            UnknownEpisode: There is no such episode.
        """
        await self._settled(id)
        return await self._read(lambda connection: b"[" + b",".join(call_data(connection, id)) + b"]")

    async def finish(
        self,
        id: str,
        *,
        reward: float | None,
        rewards: dict[str, float],
        metrics: dict[str, float],
        failure: str | None,
        idempotency: str | None,
    ) -> EpisodeRecord:
        """End an episode; when this returns, it and all its calls are on disk.

        What was given here adds to rewards that were given before. The same end given twice counts once.

        Args:
            id: The episode's.
            reward: None: the sum of `rewards`, if there are any.
            rewards: Named parts of it.
            metrics: Figures that aren't reward.
            failure: Why the episode failed; None if it didn't.
            idempotency: The request's key.

        Raises:
            UnknownEpisode: There is no such episode.
            EpisodeOver: It is over already, with another end.
            IdempotencyConflict: The key was used for another request.
            StoreUnwritable: A call of it could not be written, so that it can't be finished but as failed.
        """
        request = digest({"reward": reward, "rewards": rewards, "metrics": metrics, "failure": failure})
        live, now = self._live.get(id), self._clock()
        captured = 0 if live is None else live.record.calls

        def do(connection: sqlite3.Connection) -> EpisodeRecord:
            record, ending = found(connection, id)
            if (answer := answered(connection, f"finish {id}", idempotency, request)) is not None:
                return answer
            if record.state != "open":
                if ending != request:
                    raise EpisodeOver(f"Episode {id} is {record.state} already. Rewards that come later go to /episodes/{id}/rewards.")
                return record
            add(record, reward, rewards, metrics)
            record.state = "finished" if failure is None else "failed"
            record.failure, record.finished = failure, now
            count_calls(connection, record)
            if failure is None and record.calls < captured:
                raise StoreUnwritable(f"Calls of episode {id} could not be written: finish it with a failure, or delete it.")
            update(connection, record, request)
            remember(connection, f"finish {id}", idempotency, request, record, self._clock())
            return record

        return await self._end(id, do)

    async def append_reward(
        self, id: str, *, reward: float | None, rewards: dict[str, float], metrics: dict[str, float], idempotency: str | None
    ) -> EpisodeRecord:
        """Add to an episode's reward, open or finished; metrics take the place of those of the same name.

        Raises:
            UnknownEpisode: There is no such episode.
            EpisodeOver: It failed or has expired.
            IdempotencyConflict: The key was used for another request.
        """
        request = digest({"reward": reward, "rewards": rewards, "metrics": metrics})

        def do(connection: sqlite3.Connection) -> tuple[EpisodeRecord, bool]:
            record, ending = found(connection, id)
            if (answer := answered(connection, f"reward {id}", idempotency, request)) is not None:
                return answer, False
            if record.state not in ("open", "finished"):
                raise EpisodeOver(f"Episode {id} is {record.state}: it takes no reward.")
            add(record, reward, rewards, metrics)
            if record.state == "open":
                count_calls(connection, record)
            update(connection, record, ending)
            remember(connection, f"reward {id}", idempotency, request, record, self._clock())
            return record, True

        def then(written: tuple[EpisodeRecord, bool]) -> None:
            record, is_new = written
            live = self._live.get(id)
            if live is not None and is_new and record.state == "open":
                # More calls may have come in than were written then.
                live.record = replace(record, calls=live.record.calls, tokens=live.record.tokens)

        record, _ = await self._change(do, then)
        return record

    async def delete(self, id: str) -> None:
        """Forget an episode and all of it.

        Raises:
            UnknownEpisode: There is no such episode.
        """

        def do(connection: sqlite3.Connection) -> EpisodeState:
            record, _ = found(connection, id)
            connection.execute("DELETE FROM episodes WHERE id = ?", (id,))
            return record.state

        def then(state: EpisodeState) -> None:
            self._live.pop(id, None)
            self._states[state] -= 1

        await self._change(do, then)

    async def expire(self, now: float) -> int:
        """End open episodes that are older than episodes may be, and forget old idempotency keys; returns how many expired."""
        oldest = now - self._limits.episode_age_seconds
        ids = [id for id, live in self._live.items() if live.record.created < oldest and not live.ending]
        for id in ids:

            def do(connection: sqlite3.Connection, id: str = id) -> EpisodeRecord:
                record, ending = found(connection, id)
                if record.state == "open":
                    record.state, record.finished = "expired", now
                    count_calls(connection, record)
                    update(connection, record, ending)
                return record

            with suppress(UnknownEpisode):
                await self._end(id, do)
        await self._write(lambda connection: connection.execute("DELETE FROM answers WHERE made < ?", (now - ANSWERS_KEPT_SECONDS,)).rowcount)
        return len(ids)

    async def episode(self, id: str) -> Episode:
        """The episode as training and evaluation know it.

        Raises:
            UnknownEpisode: There is no such episode.
        """
        await self._settled(id)

        def do(connection: sqlite3.Connection) -> Episode:
            record, _ = found(connection, id)
            return episode_of(record, [call_of(data) for data in call_data(connection, id)])

        return await self._read(do)

    def states(self) -> dict[str, int]:
        """How many episodes there are in each state."""
        return {state: self._states[state] for state in STATES}

    async def flush(self) -> None:
        """Wait until every call that was taken in is on disk.

        Raises:
            StoreUnwritable: The store can't be written.
        """
        self._flush()
        await self._write(lambda connection: None)

    async def close(self) -> None:
        """Write all that waits, and close the file; twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self._expiry.cancel()
        with suppress(asyncio.CancelledError):
            await self._expiry
        self._flush()
        await self._close_file()

    async def _end(self, id: str, do: Callable[[sqlite3.Connection], EpisodeRecord]) -> EpisodeRecord:
        """Write an episode's end after all of its calls."""
        live = self._live.get(id)
        first = live is not None and not live.ending
        if live is not None:
            live.ending = True

        def then(record: EpisodeRecord) -> None:
            if self._live.pop(id, None) is not None:
                self._states["open"] -= 1
                self._states[record.state] += 1

        def failed() -> None:
            if live is not None and first:
                live.ending = False

        return await self._change(do, then, failed)

    def _flush(self) -> None:
        self._buffer.flush()

    async def _settled(self, id: str) -> None:
        """Wait until what was taken in of an episode can be read."""
        if id in self._live:
            await self.flush()
        else:
            await self.get(id)

    async def _expire_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(min(_EXPIRY_SECONDS, max(0.05, self._limits.episode_age_seconds / 4)))
            try:
                await self.expire(self._clock())
            except StoreUnwritable:
                continue  # told of in the log

    async def list(self, *, group: str | None = None, state: str | None = None, after: int | None = None, limit: int = 100) -> Page:
        """Episodes in the order of their creation.

        Args:
            group: Of this group only.
            state: In this state only.
            after: The `next` of the page before.
            limit: How many at most.
        """

        def do(connection: sqlite3.Connection) -> Sequence[tuple[int, bytes]]:
            wheres, values = ["seq > ?"], [after or 0]
            for column, value in (('"group"', group), ("state", state)):
                if value is not None:
                    wheres.append(f"{column} = ?")
                    values.append(value)  # type: ignore[arg-type]  # a text beside a number
            query = f"SELECT seq, data FROM episodes WHERE {' AND '.join(wheres)} ORDER BY seq LIMIT ?"
            rows: Sequence[tuple[int, bytes]] = connection.execute(query, (*values, limit + 1)).fetchall()
            return rows

        rows = await self._read(do)
        records = [decode(data) for _, data in rows[:limit]]
        shown = [live.record if (live := self._live.get(one.id)) is not None and one.state == "open" else one for one in records]
        return Page(shown, rows[limit - 1][0] if len(rows) > limit else None)
