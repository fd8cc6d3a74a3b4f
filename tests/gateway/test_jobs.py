"""Jobs: one at a time, always with an end, and either a new version or no change; with a trainer that plays a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from art_gym.gateway._errors import ApiError
from art_gym.gateway._trainer import Cancelled, TrainerFailed
from art_gym.gateway.jobs import Jobs
from art_gym.gateway.policy import PolicyState
from art_gym.gateway.store import SessionStore
from art_gym.gateway.train_schemas import TrainRequest

STEP = {
    "event": "step",
    "optimiser_step": 1,
    "optimiser_steps": 1,
    "loss": float("nan"),
    "gradient_norm": 1.0,
    "entropy": 0.5,
    "kl_sampler": 0.0,
    "kl_reference": None,
    "clip_fraction": 0.0,
    "logprob_difference": 0.001,
    "learning_rate": 1e-4,
    "tokens": 6,
    "seconds": 0.1,
}


class ScriptedTrainer:
    """Does jobs as the trainer process does: it writes a checkpoint's folder and tells what it does.

    Attributes:
        hold: Training goes on only when it's set.
        fail_at: Where a job fails: "train", "publish"; a list of them is used up.
        tasks: What it was told to do.
        heard: What it was told meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hold = asyncio.Event()
        self.hold.set()
        self.fail_at: list[str] = []
        self.tasks: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self.stopped = 0
        self.running = 0
        self._gone = asyncio.Event()
        self.nothing = False

    async def work(self, task: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.tasks.append(task)
        self.heard.clear()
        self._gone.clear()
        self.running += 1
        assert self.running == 1, "one job at a time"
        try:
            if task["do"] == "train":
                assert Path(task["file"]).exists()
                if self.nothing:
                    yield {"event": "nothing", "reason": "there is nothing to learn", "advice": "play others", "figures": {}}
                    return
                await self._until(self.hold.is_set)
                self._maybe_fail("train")
                yield STEP
                yield {"event": "trained"}
                await self._told("commit")
                written = self.folder / "checkpoints" / f"step-{task['step']:04d}"
                written.mkdir(parents=True)
                details = {"job": task["job"], "metrics": {"optimiser_steps": 1}}
                (written / "manifest.json").write_text(json.dumps({"details": details, "time": 1.0}))
                yield {"event": "kept", "optimiser_steps": 1, "warnings": [], "figures": {"loss": 0.1}}
                step = task["step"]
            else:
                step = task["from"]
            yield {"event": "ready_to_publish", "step": step}
            await self._told("go")
            self._maybe_fail("publish")
            yield {"event": "published", "step": step, "model": "mock", "version": f"mock@{step}", "difference": 0.001, "seconds": 0.2}
        finally:
            self.running -= 1

    def _maybe_fail(self, where: str) -> None:
        if where in self.fail_at:
            self.fail_at.remove(where)
            raise TrainerFailed(f"it failed in {where}", "try again")

    async def _told(self, word: str) -> None:
        await self._until(lambda: any(message["do"] == word for message in self.heard))

    async def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._gone.is_set():
                raise TrainerFailed("the trainer process is gone", gone=True)
            if any(message["do"] == "cancel" for message in self.heard):
                raise Cancelled
            await asyncio.sleep(0.005)

    async def tell(self, message: dict[str, Any]) -> None:
        self.heard.append(message)

    async def stop(self) -> None:
        self.stopped += 1
        self._gone.set()


class Stand:
    """A store, a policy, a scripted trainer and jobs in one folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.policy = PolicyState("mock", "mock", drain_seconds=5.0)
        self.trainer = ScriptedTrainer(folder)
        self.broken: list[str] = []
        options = {"in_place": True, "heartbeat_seconds": 0.05, "cancel_seconds": 0.3, "grace_seconds": 0.3} | options
        self.jobs = Jobs(self.policy, self.trainer, folder, on_broken=self.broken.append, **options)
        self.store = SessionStore(folder)

    async def open(self) -> Stand:
        await self.jobs.open(self.store)
        return self

    async def close(self) -> None:
        await self.jobs.close()
        await self.store.close()

    async def submit(self, **options: Any) -> str:
        record, _ = await self.jobs.submit(TrainRequest.model_validate({"groups": GROUPS} | options))
        assert isinstance(record, dict)
        return str(record["id"])

    async def events(self, id: str, after: int = 0) -> list[dict[str, Any]]:
        return [event async for event in self.jobs.events(id, after) if event is not None]

    async def kinds(self, id: str) -> list[str]:
        return [event["type"] for event in await asyncio.wait_for(self.events(id), 10)]


def inline(reward: float, **changes: Any) -> dict[str, Any]:
    turn = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "logprobs": [-0.5, -1.0, -0.1], "policy": "mock@0"}
    return {"turns": [turn | changes], "reward": reward}


GROUPS: list[list[Any]] = [[inline(0.0), inline(1.0)]]


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Stand]]]:
    made: list[Stand] = []

    async def make(**options: Any) -> Stand:
        made.append(await Stand(tmp_path, **options).open())
        return made[-1]

    yield make
    for one in made:
        one.trainer.hold.set()
        await one.close()


Make = Callable[..., Awaitable[Stand]]


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not done():
            await asyncio.sleep(0.005)


async def test_a_job_tells_each_stage_and_its_version_answers(stand: Make, tmp_path: Path) -> None:
    ours = await stand()
    id = await ours.submit()
    events = await ours.events(id)
    assert [event["type"] for event in events] == ["queued", "started", "step", "published", "finished"]
    assert [event["number"] for event in events] == [1, 2, 3, 4, 5]
    # What isn't finite is no JSON.
    assert events[2]["loss"] is None
    assert events[1]["batch"]["sampled_tokens"] == 6
    assert ours.policy.current.version == "mock@1"
    record = ours.jobs.get(id)
    assert (record["state"], record["step"], record["version"], record["last_event"]) == ("finished", 1, "mock@1", 5)
    assert list((tmp_path / "jobs").iterdir()) == []
    # Resumed after the third event, only the later ones come.
    assert [event["number"] for event in await ours.events(id, 3)] == [4, 5]


async def test_jobs_run_one_at_a_time_in_order(stand: Make) -> None:
    ours = await stand()
    ours.trainer.hold.clear()
    ids = [await ours.submit() for _ in range(3)]
    await until(lambda: ours.jobs.get(ids[0])["state"] == "running")
    assert [ours.jobs.get(id)["state"] for id in ids] == ["running", "queued", "queued"]
    assert [(await ours.store.events(id))[0]["ahead"] for id in ids] == [0, 1, 2]
    ours.trainer.hold.set()
    for id in ids:
        assert (await ours.kinds(id))[-1] == "finished"
    assert [task["job"] for task in ours.trainer.tasks] == ids
    assert [(task["from"], task["step"]) for task in ours.trainer.tasks] == [(0, 1), (1, 2), (2, 3)]


async def test_nothing_to_learn_is_a_finished_job_that_says_so(stand: Make) -> None:
    ours = await stand()
    ours.trainer.nothing = True
    id = await ours.submit()
    last = (await ours.events(id))[-1]
    assert (last["type"], last["step"], last["optimiser_steps"], last["version"]) == ("finished", None, 0, "mock@0")
    assert last["reason"] == "there is nothing to learn"
    assert ours.jobs.get(id)["version"] is None


async def test_a_failure_in_training_leaves_the_version_and_gives_the_next_job_its_turn(stand: Make) -> None:
    ours = await stand()
    ours.trainer.fail_at = ["train"]
    first, second = await ours.submit(), await ours.submit()
    last = (await ours.events(first))[-1]
    assert (last["type"], last["reason"], last["advice"]) == ("failed", "it failed in train", "try again")
    assert (await ours.kinds(second))[-1] == "finished"
    assert ours.policy.current.step == 1


async def test_a_publish_that_fails_is_undone_and_calls_meet_the_version_before(stand: Make, tmp_path: Path) -> None:
    ours = await stand()
    ours.trainer.fail_at = ["publish"]
    assert (await ours.kinds(await ours.submit()))[-1] == "failed"
    await until(lambda: len(ours.trainer.tasks) == 2 and not ours.trainer.running)
    assert ours.trainer.tasks[1] == {"do": "publish", "from": 0}
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    async with asyncio.timeout(5), ours.policy.call(None) as resolved:
        assert resolved.version == "mock@0"
    assert ours.broken == []


async def test_an_engine_that_cannot_be_brought_back_is_told(stand: Make) -> None:
    ours = await stand()
    ours.trainer.fail_at = ["publish", "publish"]
    await ours.kinds(await ours.submit())
    await until(lambda: ours.broken)
    assert "can't be brought back to mock@0" in ours.broken[0]


async def test_calls_under_way_end_with_their_version_before_it_is_written_over(stand: Make) -> None:
    ours = await stand()
    async with ours.policy.call(None) as resolved:
        id = await ours.submit()
        await until(lambda: ours.trainer.tasks and any(path.name == "step-0001" for path in (ours.folder / "checkpoints").glob("*")))
        await asyncio.sleep(0.05)
        assert ours.policy.current.version == resolved.version == "mock@0"
        assert not any(message["do"] == "go" for message in ours.trainer.heard)
    events = await ours.events(id)
    assert events[-2]["drained_seconds"] > 0.03


async def test_queued_and_running_jobs_can_be_cancelled_and_finished_ones_cannot(stand: Make) -> None:
    ours = await stand()
    ours.trainer.hold.clear()
    running, queued = await ours.submit(), await ours.submit()
    await until(lambda: ours.jobs.get(running)["state"] == "running")
    assert (await ours.jobs.cancel(queued))["state"] == "cancelled"
    await ours.jobs.cancel(running)
    assert (await ours.kinds(running))[-1] == "cancelled"
    assert await ours.kinds(queued) == ["queued", "cancelled"]
    # Again is no error; what is over otherwise is.
    assert (await ours.jobs.cancel(running))["state"] == "cancelled"
    ours.trainer.hold.set()
    third = await ours.submit()
    assert (await ours.kinds(third))[-1] == "finished"
    with pytest.raises(ApiError) as caught:
        await ours.jobs.cancel(third)
    assert caught.value.status == 409
    # The third one has a number that no cancelled job was to have.
    assert ours.policy.current.step == 1


async def test_a_trainer_that_does_not_cancel_is_killed(stand: Make) -> None:
    ours = await stand()
    ours.trainer.hold.clear()

    async def deaf(message: dict[str, Any]) -> None:
        if message["do"] != "cancel":
            ours.trainer.heard.append(message)

    ours.trainer.tell = deaf  # type: ignore[method-assign]
    id = await ours.submit()
    await until(lambda: ours.jobs.get(id)["state"] == "running")
    await ours.jobs.cancel(id)
    assert (await ours.kinds(id))[-1] == "cancelled"


async def test_a_stream_says_that_it_is_alive(stand: Make) -> None:
    ours = await stand()
    ours.trainer.hold.clear()
    id = await ours.submit()
    seen: list[Any] = []
    async for event in ours.jobs.events(id):
        seen.append(event)
        if seen.count(None) == 2:
            ours.trainer.hold.set()
    assert seen[-1]["type"] == "finished"
    assert seen.count(None) >= 2


async def test_a_killed_gateway_fails_what_ran_and_goes_on_with_what_was_queued(tmp_path: Path) -> None:
    before = await Stand(tmp_path).open()
    before.trainer.hold.clear()
    running, queued = await before.submit(), await before.submit()
    await until(lambda: before.jobs.get(running)["state"] == "running")
    # A kill: nothing is closed in order, and what is in memory is gone.
    assert before.jobs._runner is not None
    before.jobs._runner.cancel()
    await asyncio.gather(before.jobs._runner, return_exceptions=True)
    await before.store.close()
    (tmp_path / "jobs" / f"{queued}.jsonl").touch()
    after = await Stand(tmp_path).open()
    kinds = await after.kinds(running)
    assert kinds[-1] == "failed"
    assert "restarted" in after.jobs.get(running)["reason"]
    assert (await after.kinds(queued))[-1] == "finished"
    await after.close()


async def test_a_kill_after_the_checkpoint_was_whole_finishes_the_job_at_the_restart(tmp_path: Path) -> None:
    before = await Stand(tmp_path).open()
    before.trainer.hold.clear()
    id = await before.submit()
    await until(lambda: before.jobs.get(id)["state"] == "running")
    assert before.jobs._runner is not None
    before.jobs._runner.cancel()
    await asyncio.gather(before.jobs._runner, return_exceptions=True)
    await before.store.close()
    written = tmp_path / "checkpoints" / "step-0001"
    written.mkdir(parents=True)
    (written / "manifest.json").write_text(json.dumps({"details": {"job": id, "metrics": {"optimiser_steps": 2}}}))
    after = Stand(tmp_path)
    after.policy.replace(1, "mock")  # as `art-gym serve` published it
    await after.open()
    last = (await after.events(id))[-1]
    assert (last["type"], last["step"], last["optimiser_steps"]) == ("finished", 1, 2)
    await after.close()


async def test_a_shutdown_ends_what_runs_within_its_grace_and_ends_the_streams(tmp_path: Path) -> None:
    ours = await Stand(tmp_path).open()
    ours.trainer.hold.clear()
    running, queued = await ours.submit(), await ours.submit()
    await until(lambda: ours.jobs.get(running)["state"] == "running")
    streams = [asyncio.create_task(ours.kinds(id)) for id in (running, queued)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await ours.jobs.close()
        kinds = [await stream for stream in streams]
    assert kinds[0][-1] == "failed"
    assert "shut down" in ours.jobs.get(running)["reason"]
    # Queued, it goes on after the restart, and its stream ends without a last word.
    assert kinds[1] == ["queued"]
    with pytest.raises(ApiError) as caught:
        await ours.submit()
    assert caught.value.status == 503
    await ours.store.close()


async def test_the_same_key_gives_the_same_job(stand: Make) -> None:
    ours = await stand()
    request = TrainRequest.model_validate({"groups": GROUPS})
    results = await asyncio.gather(*(ours.jobs.submit(request, "k1") for _ in range(3)))
    assert len({record["id"] for record, _ in results if isinstance(record, dict)}) == 1
    assert sorted(new for _, new in results) == [False, False, True]
    with pytest.raises(ApiError, match="another request"):
        await ours.jobs.submit(TrainRequest.model_validate({"groups": GROUPS, "config": {"learning_rate": 0.1}}), "k1")


async def test_a_full_queue_refuses_more(stand: Make) -> None:
    ours = await stand(queue=1)
    ours.trainer.hold.clear()
    first = await ours.submit()
    await until(lambda: ours.jobs.get(first)["state"] == "running")
    await ours.submit()
    with pytest.raises(ApiError, match="waiting already"):
        await ours.submit()


async def test_versions_are_put_in_front_and_deleted_by_hand(stand: Make, tmp_path: Path) -> None:
    ours = await stand()
    for _ in range(2):
        await ours.kinds(await ours.submit())
    await ours.jobs.versions.activate(1)
    assert ours.policy.current.version == "mock@1"
    for step, problem in ((1, "is the one that answers"), (7, "There is no checkpoint 7; there are: 0, 1, 2"), (0, "stays")):
        with pytest.raises(ApiError, match=problem):
            await ours.jobs.versions.delete(step)
    await ours.jobs.versions.delete(2)
    # A number is never used twice, since episodes are recorded with it; training goes on from the version that answers.
    await ours.kinds(await ours.submit())
    assert [(task["from"], task["step"]) for task in ours.trainer.tasks if task["do"] == "train"] == [(0, 1), (1, 2), (1, 3)]
