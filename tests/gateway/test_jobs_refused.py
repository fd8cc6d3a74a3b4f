"""What can't be trained on is refused in one line before a job is made of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

sys.path.insert(0, str(Path(__file__).parent))

from test_jobs import Make, inline, stand

from art_gym.gateway._errors import ApiError
from art_gym.gateway._jobs_batch import Bounds
from art_gym.gateway.train_schemas import TrainRequest

__all__ = ["stand"]

BOUNDS = Bounds(vocabulary=100, longest=10)


@pytest.mark.parametrize(
    ("groups", "config", "problem"),
    [
        ([["ep-none", "ep-other"]], {}, "there is no episode ep-none"),
        ([[inline(1.0)]], {}, "a group of one episode"),
        ([[inline(1.0) | {"id": "a"}, inline(0.0) | {"id": "a"}]], {}, "in groups\\[0\\]\\[0\\] already"),
        ([[inline(1.0), inline(0.0, temperature=0.7)]], {}, "sampled at temperature 0.7 and episode .* at 1"),
        ([[inline(1.0), inline(0.0)]], {"temperature": 0.5}, "not at config.temperature=0.5"),
        ([[inline(1.0), inline(0.0, logprobs=None)]], {}, "lacks a log-probability for each sampled token"),
        ([[inline(1.0), inline(0.0, logprobs=[-1.0])]], {}, "lacks a log-probability for each sampled token"),
        ([[inline(1.0), inline(0.0, prompt_ids=None)]], {}, "lacks token ids"),
        ([[inline(1.0), inline(0.0, prompt_ids=[])]], {}, "empty prompt"),
        ([[inline(1.0), inline(0.0, prompt_ids=[100])]], {}, "has the token id 100, and the policy knows 100"),
        ([[inline(1.0), inline(0.0, prompt_ids=[1] * 8)]], {}, "has 11 tokens, and the policy takes at most 10"),
        ([[inline(1.0), {"turns": []}]], {}, "has no call of the policy"),
    ],
)
async def test_what_cannot_be_trained_on_is_refused_before_anything_starts(
    stand: Make, tmp_path: Path, groups: list[list[Any]], config: dict[str, Any], problem: str
) -> None:
    ours = await stand(bounds=BOUNDS)
    with pytest.raises(ApiError, match=problem) as caught:
        await ours.submit(groups=groups, config=config)
    assert caught.value.status == 422
    assert "\n" not in caught.value.message
    assert ours.jobs.list() == []
    assert ours.trainer.tasks == []
    assert not list((tmp_path / "jobs").glob("*")) or not list((tmp_path / "jobs").iterdir())


async def test_captured_episodes_are_checked_too(stand: Make) -> None:
    ours = await stand()

    async def create() -> str:
        return (await ours.store.create(group="g", scenario=None, metadata={}, key_hash="", idempotency=None)).id

    open_one, empty, unrewarded = await create(), await create(), await create()
    nothing: dict[str, Any] = {"rewards": {}, "metrics": {}, "failure": None, "idempotency": None}
    await ours.store.finish(empty, reward=1.0, **nothing)
    await ours.store.finish(unrewarded, reward=None, **nothing)
    for id, problem in ((open_one, "still open"), (empty, "no call of the policy"), (unrewarded, "has no reward yet")):
        with pytest.raises(ApiError, match=problem) as caught:
            await ours.submit(groups=[[id, inline(0.0)]])
        assert caught.value.param == "groups[0][0]"
    # Failed ones are counted, and stay out.
    failed = await create()
    await ours.store.finish(failed, reward=None, rewards={}, metrics={}, failure="it broke", idempotency=None)
    batch, _ = await ours.jobs.submit(TrainRequest.model_validate({"groups": [[failed, inline(0.0), inline(1.0)]], "dry_run": True}))
    assert not isinstance(batch, dict)
    assert (batch.episodes, batch.failed_episodes, batch.turns) == (3, 1, 2)
    assert ours.jobs.list() == []
