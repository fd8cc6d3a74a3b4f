"""The session store: what it keeps, what it refuses, and what survives."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from art_gym.errors import UsageError
from art_gym.gateway.calls import Call
from art_gym.gateway.settings import Limits
from art_gym.gateway.store import (
    EpisodeOver,
    IdempotencyConflict,
    LimitExceeded,
    SessionStore,
    StoreUnwritable,
    UnknownEpisode,
)

END: dict[str, Any] = {"reward": 1.0, "rewards": {}, "metrics": {}, "failure": None, "idempotency": None}


def a_call(number: int = 0, text: str = "hello", **values: Any) -> Call:
    made: dict[str, Any] = {
        "id": f"call-{number:032x}",
        "kind": "chat",
        "messages": [{"role": "user", "content": text}],
        "tools": [],
        "action": {"role": "assistant", "content": f"answer {number}"},
        "finish_reason": "stop",
        "policy": "mock@0",
        "prompt_ids": [1, 2, 3],
        "completion_ids": [4, 5],
        "logprobs": [-0.1, -0.2],
        "temperature": 1.0,
        "began": 100.0 + number,
        "seconds": 0.5,
    }
    return Call(**{**made, **values})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[SessionStore]:
    made = SessionStore(tmp_path, clock=clock)
    yield made
    await made.close()


async def created(store: SessionStore, **values: Any) -> str:
    record = await store.create(**{"group": None, "scenario": None, "metadata": {}, "key_hash": "", "idempotency": None, **values})
    return record.id


async def test_ids_have_128_random_bits(store: SessionStore) -> None:
    ids = {await created(store) for _ in range(50)}

    assert len(ids) == 50
    assert all(one.startswith("ep-") and len(one) == 3 + 22 for one in ids)  # 22 letters of 6 bits hold 128


async def test_an_episode_keeps_its_calls_in_order_and_its_end(store: SessionStore) -> None:
    id = await created(store, group="q17", scenario={"question": "why"}, metadata={"agent": 2})
    calls = [a_call(number) for number in range(5)]
    for call in calls:
        await store.add_call(id, call)

    record = await store.finish(id, reward=None, rewards={"a": 0.5, "b": 0.25}, metrics={"success": 1}, failure=None, idempotency=None)

    assert (record.state, record.reward, record.rewards, record.calls, record.tokens) == ("finished", 0.75, {"a": 0.5, "b": 0.25}, 5, 10)
    assert await store.get(id) == record
    assert await store.calls(id) == calls
    assert [one["id"] for one in json.loads(await store.calls_json(id))] == [call.id for call in calls]


async def test_an_episode_becomes_one_of_art_gym_with_the_reward_on_the_last_turn(store: SessionStore) -> None:
    id = await created(store, group="q17", scenario={"question": "why"})
    for number in range(2):
        await store.add_call(id, a_call(number))
    await store.finish(id, **{**END, "reward": 0.5, "metrics": {"success": 0}})

    episode = await store.episode(id)

    assert [turn.reward for turn in episode.turns] == [0.0, 0.5]
    assert (episode.scenario.id, episode.scenario.options, episode.metrics) == ("q17", {"question": "why"}, {"success": 0.0})


async def test_calls_of_an_open_episode_can_be_read_at_once(store: SessionStore) -> None:
    id = await created(store)
    await store.add_call(id, a_call())

    assert (await store.get(id)).calls == 1
    assert await store.calls(id) == [a_call()]
    assert (await store.episode(id)).turns[0].completion_ids == [4, 5]


@pytest.mark.parametrize("text", ["\ud800", "\x00", "é€😀"])
async def test_a_call_keeps_whatever_was_said(store: SessionStore, text: str) -> None:
    id = await created(store)
    await store.add_call(id, a_call(text=text))
    await store.finish(id, **END)

    assert (await store.calls(id))[0].messages[0]["content"] == text


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    finished, still_open = await created(store, group="a"), await created(store, group="b")
    for id in (finished, still_open):
        await store.add_call(id, a_call())
    await store.finish(finished, **END)
    await store.close()

    store = SessionStore(tmp_path)
    try:
        assert (await store.get(finished)).state == "finished"
        assert (await store.get(still_open)).calls == 1
        await store.add_call(still_open, a_call(1))
        assert (await store.finish(still_open, **END)).calls == 2
        assert store.states() == {"open": 0, "finished": 2, "failed": 0, "expired": 0}
    finally:
        await store.close()


async def test_what_is_committed_is_there_although_the_store_was_never_closed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    id = await created(store)
    await store.add_call(id, a_call())
    await store.finish(id, **END)

    with sqlite3.connect(tmp_path / "gateway.sqlite3") as other:
        assert other.execute("SELECT state FROM episodes").fetchall() == [("finished",)]
        assert other.execute("SELECT count(*) FROM calls").fetchone() == (1,)
    await store.close()


async def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "gateway.sqlite3") as other:
        other.execute("PRAGMA user_version=99")

    with pytest.raises(UsageError, match=r"format 99.*another folder"):
        SessionStore(tmp_path)


async def test_a_folder_that_another_gateway_uses_is_refused(store: SessionStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another gateway uses the folder"):
        SessionStore(tmp_path)


async def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "new")
    await created(store)

    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}
    await store.close()


async def test_an_end_given_twice_counts_once_and_another_one_is_refused(store: SessionStore) -> None:
    id = await created(store)
    first = await store.finish(id, **END)

    assert await store.finish(id, **END) == first
    with pytest.raises(EpisodeOver, match=r"finished already.*/rewards"):
        await store.finish(id, **{**END, "reward": 2.0})
    with pytest.raises(EpisodeOver, match="finished: it takes no more calls"):
        await store.add_call(id, a_call())


async def test_ends_that_come_at_once_count_once(store: SessionStore) -> None:
    id = await created(store)

    records = await asyncio.gather(*(store.finish(id, **END) for _ in range(8)))

    assert {record.reward for record in records} == {1.0}
    assert store.states()["finished"] == 1


async def test_rewards_add_up_before_and_after_the_end(store: SessionStore) -> None:
    id = await created(store)
    await store.append_reward(id, reward=0.25, rewards={"a": 0.25}, metrics={"steps": 1}, idempotency=None)
    await store.add_call(id, a_call())
    await store.finish(id, **{**END, "reward": 1.0, "rewards": {"a": 0.5}})

    record = await store.append_reward(id, reward=None, rewards={"late": -0.5}, metrics={"steps": 2}, idempotency=None)

    assert (record.reward, record.rewards, record.metrics, record.state) == (0.75, {"a": 0.75, "late": -0.5}, {"steps": 2}, "finished")
    assert await store.get(id) == record


@pytest.mark.parametrize("state", ["failed", "expired"])
async def test_an_episode_that_did_not_come_to_its_end_takes_no_reward(store: SessionStore, clock: Clock, state: str) -> None:
    id = await created(store)
    if state == "failed":
        await store.finish(id, **{**END, "failure": "crashed"})
    else:
        clock.now += 10**6
        await store.expire(clock.now)

    with pytest.raises(EpisodeOver, match=state):
        await store.append_reward(id, reward=1.0, rewards={}, metrics={}, idempotency=None)


async def test_an_idempotency_key_brings_the_same_answer(store: SessionStore) -> None:
    id = await created(store, group="a", idempotency="k")

    assert await created(store, group="a", idempotency="k") == id
    for _ in range(3):
        record = await store.append_reward(id, reward=0.5, rewards={}, metrics={}, idempotency="first")
    await store.append_reward(id, reward=0.5, rewards={}, metrics={}, idempotency="second")
    again = await store.append_reward(id, reward=0.5, rewards={}, metrics={}, idempotency="first")
    assert (record.reward, again.reward, (await store.get(id)).reward) == (0.5, 0.5, 1.0)
    finished = await store.finish(id, **{**END, "idempotency": "end"})
    assert finished.reward == 2.0
    await store.append_reward(id, reward=5.0, rewards={}, metrics={}, idempotency=None)
    assert await store.finish(id, **{**END, "idempotency": "end"}) == finished


async def test_an_idempotency_key_of_another_request_is_refused(store: SessionStore) -> None:
    id = await created(store, group="a", idempotency="k")
    await store.append_reward(id, reward=0.5, rewards={}, metrics={}, idempotency="r")

    with pytest.raises(IdempotencyConflict):
        await created(store, group="b", idempotency="k")
    with pytest.raises(IdempotencyConflict):
        await store.append_reward(id, reward=0.6, rewards={}, metrics={}, idempotency="r")
    assert (await store.get(id)).reward == 0.5


async def test_idempotency_keys_survive_a_restart_and_are_forgotten_after_a_day(tmp_path: Path, clock: Clock) -> None:
    store = SessionStore(tmp_path, clock=clock)
    id = await created(store, idempotency="k")
    key = store.key_for(id, "k")
    await store.close()

    store = SessionStore(tmp_path, clock=clock)
    assert (await created(store, idempotency="k"), store.key_for(id, "k")) == (id, key)
    await store.expire(clock.now + 24 * 3600 + 1)
    assert await created(store, idempotency="k") != id
    await store.close()


async def test_neither_keys_nor_idempotency_keys_are_on_disk(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    id = await created(store, idempotency="an-idempotency-key")
    key = store.key_for(id, "an-idempotency-key")
    await store.close()

    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"an-idempotency-key" not in written
    assert key.encode() not in written


async def test_too_many_calls_are_refused(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, limits=Limits(calls_per_episode=2))
    id = await created(store)
    for number in range(2):
        await store.add_call(id, a_call(number))

    with pytest.raises(LimitExceeded, match=r"has 2 calls, and may have no more \(2\)"):
        await store.add_call(id, a_call(2))
    assert (await store.finish(id, **END)).calls == 2
    await store.close()


async def test_too_large_calls_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    limits = Limits(episode_bytes=3000)
    store = SessionStore(tmp_path, limits=limits)
    id = await created(store)
    await store.add_call(id, a_call(text="x" * 2000))
    await store.close()

    store = SessionStore(tmp_path, limits=limits)
    with pytest.raises(LimitExceeded, match="may have 3000"):
        await store.add_call(id, a_call(1, text="x" * 1000))
    assert (await store.get(id)).calls == 1
    await store.close()


async def test_too_many_open_episodes_are_refused_even_at_once(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, limits=Limits(open_episodes=3))

    made = await asyncio.gather(*(created(store) for _ in range(10)), return_exceptions=True)

    ids = [one for one in made if isinstance(one, str)]
    assert len(ids) == 3
    refusals = [one for one in made if isinstance(one, LimitExceeded)]
    assert [one.status for one in refusals] == [429] * 7
    assert "3 episodes are open" in refusals[0].message
    await store.finish(ids[0], **END)
    await created(store)
    await store.close()


async def test_episodes_expire_by_themselves(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, limits=Limits(episode_age_seconds=0.2))
    id = await created(store)
    await store.add_call(id, a_call())
    async with asyncio.timeout(5):
        while (await store.get(id)).state == "open":
            await asyncio.sleep(0.02)

    assert (await store.get(id)).state == "expired"
    assert (await store.get(id)).calls == 1
    assert store.states() == {"open": 0, "finished": 0, "failed": 0, "expired": 1}
    await store.close()


async def test_an_episode_that_is_too_old_takes_no_calls_although_it_has_not_expired_yet(store: SessionStore, clock: Clock) -> None:
    id = await created(store)
    clock.now += 24 * 3600 + 1

    with pytest.raises(EpisodeOver, match="older than 86400 seconds"):
        await store.add_call(id, a_call())


async def test_pages_follow_each_other_and_filter(store: SessionStore) -> None:
    ids = [await created(store, group="even" if number % 2 == 0 else "odd") for number in range(7)]
    await store.finish(ids[2], **END)

    first = await store.list(limit=3)
    second = await store.list(limit=3, after=first.next)
    third = await store.list(limit=3, after=second.next)

    assert [[one.id for one in page.episodes] for page in (first, second, third)] == [ids[:3], ids[3:6], ids[6:]]
    assert third.next is None
    assert [one.id for one in (await store.list(group="odd")).episodes] == ids[1::2]
    assert [one.id for one in (await store.list(group="even", state="finished")).episodes] == [ids[2]]
    assert (await store.list(limit=7)).next is None


async def test_a_deleted_episode_is_gone_with_all_of_it(store: SessionStore, tmp_path: Path) -> None:
    id = await created(store, idempotency="k")
    await store.add_call(id, a_call())
    await store.delete(id)

    for asked in (store.get(id), store.calls(id), store.delete(id), store.finish(id, **END), store.episode(id), store.add_call(id, a_call())):
        with pytest.raises(UnknownEpisode):
            await asked
    with sqlite3.connect(tmp_path / "gateway.sqlite3") as other:
        counts = [other.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("episodes", "calls", "answers")]
    assert counts == [0, 0, 0]
    assert sum(store.states().values()) == 0


async def test_a_client_that_leaves_while_its_episode_is_written_changes_nothing(store: SessionStore) -> None:
    task = asyncio.create_task(created(store, group="left"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.flush()
    await asyncio.sleep(0.01)

    (record,) = (await store.list(group="left")).episodes
    await store.add_call(record.id, a_call())
    assert (await store.finish(record.id, **END)).calls == 1


async def test_a_full_disk_is_an_error_and_nothing_is_half_done(store: SessionStore, tmp_path: Path) -> None:
    id = await created(store)
    await store.flush()
    await store._writer.write(lambda connection: connection.execute(_at_most(connection, 0)).fetchone())
    await store.add_call(id, a_call(text="x" * 100_000))
    await asyncio.sleep(0.1)

    with pytest.raises(StoreUnwritable, match=r"can't be written.*nothing was changed|could not be written"):
        await store.finish(id, **END)
    assert (await store.get(id)).state == "open"

    await store._writer.write(lambda connection: connection.execute(_at_most(connection, 10**6)).fetchone())
    await store.check()
    with pytest.raises(StoreUnwritable, match="finish it with a failure"):
        await store.finish(id, **END)
    assert (await store.finish(id, **{**END, "failure": "calls lost"})).calls == 0


def _at_most(connection: sqlite3.Connection, more: int) -> str:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    return f"PRAGMA max_page_count={pages + more}"


async def test_the_loop_is_not_held_up_by_a_large_read(store: SessionStore) -> None:
    id = await created(store)
    for number in range(200):
        await store.add_call(id, a_call(number, prompt_ids=list(range(2000))))
    await store.finish(id, **END)
    reading = asyncio.create_task(store.calls_json(id))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns > 1
    assert len(json.loads(await reading)) == 200


async def test_many_writers_at_once_lose_nothing(store: SessionStore) -> None:
    async def play(number: int) -> str:
        id = await created(store, group=str(number % 4))
        for index in range(10):
            await store.add_call(id, a_call(index))
            await asyncio.sleep(0)
        await store.finish(id, **{**END, "reward": float(number)})
        return id

    ids = await asyncio.gather(*(play(number) for number in range(100)))

    for number, id in enumerate(ids):
        record = await store.get(id)
        assert (record.reward, record.calls, [one.id for one in await store.calls(id)]) == (
            number,
            10,
            [a_call(index).id for index in range(10)],
        )
