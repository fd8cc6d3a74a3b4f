"""Journals: what is on disk when, and what is played again when a rollout is resumed."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from art_gym.errors import PolicyError, UsageError
from art_gym.rollout import Runner
from art_gym.scenarios import Scenario


async def test_episodes_are_on_disk_before_their_group_is_yielded(steps, an_agent, scenarios, open_store):
    store = open_store()
    async for group in Runner(steps, an_agent(), group_size=3, concurrency=2).run(scenarios(4), journal=store.journal("train-0001")):
        on_disk = open_store().journal("train-0001").latest()
        assert [on_disk[episode.id] for episode in group.episodes] == group.episodes
    assert store.journal("train-0001").latest().keys() == {f"train-0001/{index}/{member}" for index in range(4) for member in range(3)}


async def test_an_episode_is_on_disk_as_soon_as_it_ends(steps, an_agent, scenarios, open_store):
    journal = open_store().journal("a")
    agent = an_agent(odd=lambda state: 30.0 if state.scenario.id == "s0" else None)
    async with aclosing(Runner(steps, agent, concurrency=2).run(scenarios(), journal=journal)) as groups:
        waiting = asyncio.ensure_future(anext(groups))
        await asyncio.sleep(0.3)
        assert "a/1/0" in journal.latest()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_what_json_cannot_hold_is_a_recorded_failure(steps, an_agent, play, mixed, open_store):
    journal = open_store().journal("a")
    groups = await play(Runner(steps, an_agent()), mixed(3, {1}, step="unwritable"), journal=journal)
    assert [bool(group.failed) for group in groups] == [False, True, False]
    assert groups[1].episodes[0].failure.kind == "environment"
    assert [episode.failure is None for _, episode in sorted(journal.latest().items())] == [True, False, True]


async def test_a_rollout_is_never_mixed_into_another(steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    await play(Runner(steps, an_agent()), scenarios(1), journal=journal)
    with pytest.raises(UsageError, match="already holds episodes"):
        await play(Runner(steps, an_agent()), scenarios(1), journal=journal)
    with pytest.raises(UsageError, match="resume with the same scenarios"):
        await play(Runner(steps, an_agent()), [Scenario("other", seed=9)], journal=journal, resume=True)


async def test_resuming_plays_only_the_missing_and_the_failed(steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    first = an_agent(odd=lambda state: PolicyError("500") if state.scenario.id == "s1" else None)
    await play(Runner(steps, first, group_size=2), scenarios(3), journal=journal)
    second = an_agent()
    groups = await play(Runner(steps, second, group_size=2), scenarios(4), journal=journal, resume=True)
    assert {(scenario, member) for scenario, member, _ in second.asked} == {("s1", 0), ("s1", 1), ("s3", 0), ("s3", 1)}
    assert [len(group.finished) for group in groups] == [2, 2, 2, 2]
    assert all(episode.failure is None for episode in journal.latest().values())


async def test_a_journal_that_cannot_be_written_is_told_before_anything_is_played(steps, an_agent, play, scenarios, tmp_path, open_store):
    agent = an_agent()
    (tmp_path / "episodes").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="episodes can't be written to"):
        await play(Runner(steps, agent), scenarios(), journal=open_store().journal("a"))
    assert agent.asked == []


async def test_a_disk_that_refuses_stops_the_rollout(steps, an_agent, play, scenarios, tmp_path, open_store):
    agent = an_agent(odd=lambda state: (tmp_path / "episodes").write_text("in the way") and None)
    with pytest.raises(OSError, match="episodes"):
        await play(Runner(steps, agent, concurrency=1), scenarios(), journal=open_store().journal("a"))


async def test_what_ended_is_on_disk_even_if_the_rollout_is_left_meanwhile(instant_steps, an_agent, play, scenarios, open_store, monkeypatch):
    journal = open_store().journal("a")
    write = journal.write
    begun = threading.Event()

    def slow(lines):
        begun.set()
        time.sleep(0.3)
        write(lines)

    monkeypatch.setattr(journal, "write", slow)
    ended = []
    agent = an_agent(odd=lambda state: ended.append(f"a/{state.scenario.seed}/0") if state.turn else None)
    # The first one is being written when the others end.
    task = asyncio.create_task(play(Runner(instant_steps, agent, concurrency=4), scenarios(4), journal=journal))
    while not begun.is_set() or len(ended) < 4:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {episode.id: episode.failure for episode in journal.read()} == dict.fromkeys(["a/0/0", "a/1/0", "a/2/0", "a/3/0"])


async def test_a_scenario_that_json_cannot_hold_is_told_before_it_is_played(steps, an_agent, play, open_store):
    agent = an_agent()
    for options in ({"ids": {1}}, {"share": float("nan")}):
        with pytest.raises(UsageError, match=r"scenario 's' can't be recorded as JSON .*; give it JSON values only"):
            await play(Runner(steps, agent), [Scenario("s", 1, options)], journal=open_store().journal("a"))
    assert agent.asked == []


async def test_a_journal_of_another_environment_or_of_other_options_is_refused(steps, instant_steps, an_agent, play, scenarios, open_store):
    journal = open_store().journal("a")
    await play(Runner(steps, an_agent()), scenarios(2, turns=1), journal=journal)
    with pytest.raises(UsageError, match="was played in 'Steps', and this rollout plays 'InstantSteps'"):
        await play(Runner(instant_steps, an_agent()), scenarios(2, turns=1), journal=journal, resume=True)
    with pytest.raises(UsageError, match=r"\(another options\); resume with the same scenarios"):
        await play(Runner(steps, an_agent()), scenarios(2, turns=3), journal=journal, resume=True)
