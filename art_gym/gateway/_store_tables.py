"""The tables of the session store, and how records become rows and back."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import msgspec

from art_gym.errors import UsageError
from art_gym.gateway._store_errors import IdempotencyConflict, UnknownEpisode
from art_gym.gateway.calls import Call

EpisodeState = Literal["open", "finished", "failed", "expired"]
STATES: tuple[EpisodeState, ...] = get_args(EpisodeState)

FORMAT = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS episodes (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL,
    "group" TEXT,
    created REAL NOT NULL,
    ending TEXT,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS episodes_by_group ON episodes ("group", seq);
CREATE INDEX IF NOT EXISTS episodes_by_state ON episodes (state, seq);
CREATE TABLE IF NOT EXISTS calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    episode TEXT NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
    tokens INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS calls_by_episode ON calls (episode, seq);
CREATE TABLE IF NOT EXISTS answers (
    scope TEXT NOT NULL,
    key BLOB NOT NULL,
    request BLOB NOT NULL,
    answer BLOB NOT NULL,
    made REAL NOT NULL,
    episode TEXT NOT NULL REFERENCES episodes (id) ON DELETE CASCADE,
    PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (made);
CREATE INDEX IF NOT EXISTS answers_by_episode ON answers (episode);
CREATE TABLE IF NOT EXISTS jobs (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
"""


def new_id() -> str:
    """An episode id: 128 random bits, so that nobody guesses another one's."""
    return f"ep-{secrets.token_urlsafe(16)}"


@dataclass(slots=True)
class EpisodeRecord:
    """What is known of an episode beside its calls.

    Attributes:
        id: "ep-" and 128 random bits.
        group: Episodes of one group are compared with each other.
        scenario: What the episode is about, the user's own.
        metadata: Whatever the user wants to find again.
        state: "open" until it is finished, failed or has expired.
        reward: The sum of all rewards that were given; None if none was.
        rewards: Named parts of it, each summed up.
        metrics: Figures that aren't reward.
        failure: Why it failed.
        calls: How many calls were captured.
        tokens: How many tokens were sampled in them.
        created: Seconds since 1970.
        finished: Seconds since 1970; None while it is open.
        key_hash: SHA-256 of the episode's own key, in hexadecimal; empty if it has none.
    """

    id: str
    group: str | None
    scenario: dict[str, Any] | None
    metadata: dict[str, Any]
    key_hash: str
    created: float
    state: EpisodeState = "open"
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    calls: int = 0
    tokens: int = 0
    finished: float | None = None


@dataclass(slots=True)
class Live:
    """An episode that is open.

    Attributes:
        record: Shared with whoever asks; replaced, never changed, but for its counts.
        bytes: Of its calls.
        ending: Its end is being written: no call comes in any more.
    """

    record: EpisodeRecord
    bytes: int = 0
    ending: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """Episodes in the order of their creation.

    Attributes:
        episodes: At most as many as were asked for.
        next: What `after` must be for those that follow; None if there are none.
    """

    episodes: list[EpisodeRecord]
    next: int | None


_decoder = msgspec.json.Decoder(EpisodeRecord)


def encode(record: EpisodeRecord) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def decode(data: bytes) -> EpisodeRecord:
    """The record that was stored."""
    return _decoder.decode(data)


def make_tables(connection: sqlite3.Connection, secret: bytes) -> None:
    """Make what isn't there yet, and keep `secret` in a new file.

    Raises:
        UsageError: The file is of another version.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise UsageError(f"the gateway's store has format {version}, and this version of art_gym reads format {FORMAT}: give another folder")
    connection.executescript(_TABLES)
    connection.execute("INSERT OR IGNORE INTO facts VALUES ('secret', ?)", (secret,))
    connection.execute(f"PRAGMA user_version={FORMAT}")


def find(connection: sqlite3.Connection, id: str) -> tuple[EpisodeRecord, str | None] | None:
    """An episode's record, and the digest of the request that ended it; None if there is no such episode."""
    row = connection.execute("SELECT data, ending FROM episodes WHERE id = ?", (id,)).fetchone()
    return None if row is None else (decode(row[0]), row[1])


def update(connection: sqlite3.Connection, record: EpisodeRecord, ending: str | None) -> None:
    """Store what has changed of a record."""
    values = (record.state, encode(record), ending, record.id)
    connection.execute("UPDATE episodes SET state = ?, data = ?, ending = ? WHERE id = ?", values)


def count_calls(connection: sqlite3.Connection, record: EpisodeRecord) -> None:
    """Take the numbers of calls and tokens from the calls that are stored."""
    values = connection.execute("SELECT count(*), coalesce(sum(tokens), 0) FROM calls WHERE episode = ?", (record.id,)).fetchone()
    record.calls, record.tokens = values


def digest(request: Mapping[str, Any]) -> str:
    """Tells requests apart, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def answered(connection: sqlite3.Connection, scope: str, key: str | None, request: str) -> EpisodeRecord | None:
    """What was answered to a request with this key before.

    Raises:
        IdempotencyConflict: That was another request.
    """
    if key is None:
        return None
    row = connection.execute("SELECT request, answer FROM answers WHERE scope = ? AND key = ?", (scope, _hashed(key))).fetchone()
    if row is None:
        return None
    if row[0] != request:
        raise IdempotencyConflict
    return decode(row[1])


def remember(connection: sqlite3.Connection, scope: str, key: str | None, request: str, record: EpisodeRecord, now: float) -> None:
    """Keep an answer for the same request."""
    if key is not None:
        values = (scope, _hashed(key), request, encode(record), now, record.id)
        connection.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", values)


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def open_episodes(connection: sqlite3.Connection) -> list[Live]:
    """The episodes that are open, with the sizes of their calls."""
    rows = connection.execute(
        "SELECT data, (SELECT coalesce(sum(length(data)), 0) FROM calls WHERE episode = episodes.id) FROM episodes WHERE state = 'open'"
    ).fetchall()
    all_open = [Live(decode(data), size) for data, size in rows]
    for live in all_open:
        count_calls(connection, live.record)
    return all_open


def found(connection: sqlite3.Connection, id: str) -> tuple[EpisodeRecord, str | None]:
    """As `find`.

    Raises:
        UnknownEpisode: There is no such episode.
    """
    row = find(connection, id)
    if row is None:
        raise UnknownEpisode(id)
    return row


def add(record: EpisodeRecord, reward: float | None, rewards: dict[str, float], metrics: dict[str, float]) -> None:
    """Add rewards and set metrics; without a reward the sum of its parts is one."""
    if reward is None and rewards:
        reward = sum(rewards.values())
    if reward is not None:
        record.reward = (record.reward or 0.0) + reward
    for name, value in rewards.items():
        record.rewards[name] = record.rewards.get(name, 0.0) + value
    record.metrics.update(metrics)


def call_data(connection: sqlite3.Connection, id: str) -> list[bytes]:
    """An episode's calls as they are stored, in the order of arrival."""
    return [data for (data,) in connection.execute("SELECT data FROM calls WHERE episode = ? ORDER BY seq", (id,))]


def call_bytes(call: Call) -> bytes:
    """A call as it is stored."""
    try:
        return msgspec.json.encode(call)
    except (UnicodeEncodeError, OverflowError):
        # Half a surrogate pair, or a number of more than 64 bits: JSON can tell of both, and msgspec can't.
        return json.dumps({item.name: getattr(call, item.name) for item in fields(call)}).encode()


def call_of(data: bytes) -> Call:
    """The call that was stored."""
    try:
        return Call(**msgspec.json.decode(data))
    except msgspec.DecodeError:
        return Call(**json.loads(data))
