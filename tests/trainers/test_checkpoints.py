"""Checkpoint folders: whole or not there, verified when they are read, and kept by rule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from art_gym.errors import UsageError
from art_gym_trainers import checkpoints
from art_gym_trainers.checkpoints import Retention

WAY_OUT = "remove the folder to go on from the checkpoint before it"


def write(parent: Path, *steps: int) -> None:
    for step in steps:
        with checkpoints.writing(parent, step, {"policy": f"m@{step}"}) as scratch:
            (scratch / "weights").write_text(str(step))
            (scratch / "more").mkdir()
            (scratch / "more" / "state").write_bytes(b"abc")


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def age(parent: Path, step: int, hours: float) -> None:
    path = parent / f"step-{step:04d}" / checkpoints.MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"time": manifest["time"] - hours * 3600}))


def test_the_latest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    write(tmp_path, 9, 10, 2)
    (tmp_path / ".step-0011.part").mkdir()
    (tmp_path / "step-0012.bak").mkdir()
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert (found.step, found.folder.name, dict(found.details)) == (10, "step-0010", {"policy": "m@10"})
    assert (found.folder / "weights").read_text() == "10"
    assert checkpoints.steps(tmp_path) == [2, 9, 10]
    assert checkpoints.read(tmp_path, 2).details == {"policy": "m@2"}


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no checkpoint of step 7; there are: none"):
        checkpoints.read(tmp_path, 7)
    write(tmp_path, 2, 9)
    with pytest.raises(UsageError, match=r"has no checkpoint of step 7; there are: 2, 9"):
        checkpoints.read(tmp_path, 7)


def test_the_manifest_names_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = json.loads((tmp_path / "step-0001" / checkpoints.MANIFEST).read_text())
    # Of "abc" from FIPS 180-2's own example.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["files"]["more/state"] == {"size": 3, "sha256": digest}
    assert set(manifest["files"]) == {"weights", "more/state"}


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with checkpoints.writing(tmp_path, 1, {}) as scratch:
            (scratch / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert names(tmp_path) == []


def test_a_checkpoint_that_training_could_not_go_on_from_is_not_written(tmp_path: Path) -> None:
    def write_without(left_out: str) -> None:
        with checkpoints.writing(tmp_path, 1, {}, needs=checkpoints.GRPO_STATE) as scratch:
            for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
                if name != left_out:
                    (scratch / name).touch()

    for name in ("optimizer.pt", "rng_state.pth", "adapter_model.safetensors"):
        with pytest.raises(RuntimeError, match=name.split(".")[0].split("_")[0]):
            write_without(name)
        assert names(tmp_path) == []
    write_without("")
    assert names(tmp_path) == ["step-0001"]


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "{}",
        "[]",
        json.dumps({"format": 2, "step": 1, "details": {}}),
        json.dumps({"format": 2, "step": 1, "details": {}, "files": [1]}),
        json.dumps({"format": 2, "step": 7, "details": {}, "files": {}}),
        json.dumps({"format": 99, "step": 1, "details": {}, "files": {}}),
    ],
)
def test_a_manifest_that_contradicts_its_folder_is_an_error(tmp_path: Path, manifest: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-0001" / checkpoints.MANIFEST).write_text(manifest)
    with pytest.raises(UsageError, match=WAY_OUT) as caught:
        checkpoints.latest(tmp_path)
    assert "\n" not in str(caught.value)


def flip(path: Path) -> None:
    path.write_bytes(b"abd")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "has another checksum than when it was written"),
        (lambda path: path.write_bytes(b"ab"), "has 2 bytes and not the 3 that were written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_named(tmp_path: Path, damage: Any, problem: str) -> None:
    write(tmp_path, 1, 2)
    damage(tmp_path / "step-0002" / "more" / "state")
    with pytest.raises(UsageError) as caught:
        checkpoints.latest(tmp_path)
    assert str(caught.value) == f"{tmp_path}/step-0002/more/state {problem}; {WAY_OUT}"
    # And the way out is one.
    shutil.rmtree(tmp_path / "step-0002")
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    checkpoints.prune(tmp_path, Retention(last=2))
    assert names(tmp_path) == ["step-0002", "step-0003"]


def test_the_best_are_kept_too(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4, 5)
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: None}
    assert checkpoints.best(tmp_path, scores) == 2
    assert checkpoints.best(tmp_path, scores, "min") == 3
    checkpoints.prune(tmp_path, Retention(last=1, best=2), scores)
    assert names(tmp_path) == ["step-0001", "step-0002", "step-0005"]
    checkpoints.prune(tmp_path, Retention(last=1, best=1, goal="min"), scores)
    assert names(tmp_path) == ["step-0001", "step-0005"]


def test_of_equals_the_latest_is_best_and_what_is_no_number_never(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    assert checkpoints.best(tmp_path, {1: 0.5, 2: 0.5, 3: float("nan")}) == 2
    assert checkpoints.best(tmp_path, {1: 0.5, 2: 0.5, 3: float("nan")}, "min") == 2
    assert checkpoints.best(tmp_path, {3: None, 9: 1.0}) is None


def test_every_so_many_steps_one_is_kept_for_good(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 9))
    age(tmp_path, 3, hours=1000)
    checkpoints.prune(tmp_path, Retention(last=1, every=3, max_age_hours=1))
    assert names(tmp_path) == ["step-0003", "step-0006", "step-0008"]


def test_old_ones_go_unless_they_are_among_the_best(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3, 4)
    for step in (1, 2):
        age(tmp_path, step, hours=5)
    checkpoints.prune(tmp_path, Retention(last=4, best=1, max_age_hours=6), {1: 1.0})
    assert names(tmp_path) == ["step-0001", "step-0002", "step-0003", "step-0004"]
    checkpoints.prune(tmp_path, Retention(last=4, best=1, max_age_hours=4), {1: 1.0})
    assert names(tmp_path) == ["step-0001", "step-0003", "step-0004"]


def test_the_latest_is_never_removed(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for step in (1, 2):
        age(tmp_path, step, hours=5)
    checkpoints.prune(tmp_path, Retention(last=1, max_age_hours=0.1))
    assert names(tmp_path) == ["step-0002"]


def test_a_damaged_manifest_of_an_old_one_does_not_stop_a_run(tmp_path: Path) -> None:
    write(tmp_path, 1, 2, 3)
    (tmp_path / "step-0002" / checkpoints.MANIFEST).write_text("{")
    checkpoints.prune(tmp_path, Retention(last=2, max_age_hours=1))
    assert names(tmp_path) == ["step-0002", "step-0003"]


def test_a_kill_while_one_is_removed_or_written_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1, 2)
    (tmp_path / ".step-0003.part").mkdir()
    (tmp_path / "warm-start").mkdir()
    removed = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if path.name.endswith(".part"):
            return removed(path, **options)
        (path / "weights").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.prune(tmp_path, Retention(last=1))
    monkeypatch.undo()
    assert checkpoints.steps(tmp_path) == [2]
    checkpoints.prune(tmp_path, Retention(last=1))
    assert names(tmp_path) == ["step-0002", "warm-start"]
