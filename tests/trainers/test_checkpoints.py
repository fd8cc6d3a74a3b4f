"""Checkpoint folders: whole or not there, the latest one counts, and a contradiction is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from art_gym.errors import UsageError
from art_gym_trainers import checkpoints


def write(parent: Path, step: int) -> None:
    with checkpoints.writing(parent, step, {"policy": f"m@{step}"}) as scratch:
        (scratch / "weights").write_text(str(step))


def test_the_latest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    for step in (9, 10, 2):
        write(tmp_path, step)
    (tmp_path / ".step-0011.part").mkdir()
    (tmp_path / "step-0012.bak").mkdir()
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert (found.step, found.folder.name, dict(found.details)) == (10, "step-0010", {"policy": "m@10"})
    assert (found.folder / "weights").read_text() == "10"


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with checkpoints.writing(tmp_path, 1, {}) as scratch:
            (scratch / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    checkpoints.prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0002", "step-0003"]


@pytest.mark.parametrize(
    "manifest", ["", "{}", json.dumps({"format": 1, "step": 7, "details": {}}), json.dumps({"format": 99, "step": 1, "details": {}})]
)
def test_a_manifest_that_contradicts_its_folder_is_an_error(tmp_path: Path, manifest: str) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-0001" / checkpoints.MANIFEST).write_text(manifest)
    with pytest.raises(UsageError, match="remove the folder to go on from the checkpoint before it"):
        checkpoints.latest(tmp_path)
