"""Training jobs and their events in the session store."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from art_gym.gateway.store import SessionStore, UnknownJob


async def test_jobs_and_their_events_are_kept_in_order(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    for id in ("job-b", "job-a"):
        await store.put_job({"id": id, "state": "queued"})
    await store.put_job({"id": "job-b", "state": "running"})
    numbers = [await store.append_event("job-b", {"type": "step", "loss": 0.5}) for _ in range(3)]
    await store.append_event("job-b", {"type": "finished", "number": 9})
    await store.close()

    store = SessionStore(tmp_path)
    assert numbers == [1, 2, 3]
    assert [(job["id"], job["state"]) for job in await store.jobs()] == [("job-b", "running"), ("job-a", "queued")]
    assert [event["number"] for event in await store.events("job-b", 1)] == [2, 3, 9]
    assert await store.events("job-b", 10**30) == []
    with pytest.raises(UnknownJob):
        await store.append_event("job-c", {})
    with pytest.raises(sqlite3.IntegrityError):
        await store.append_event("job-b", {"number": 9})
    await store.close()
