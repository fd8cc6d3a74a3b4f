"""Checkpoints: a step's adapter, optimiser and random states in one folder, with a manifest that says where the run stands.

A folder under its final name is whole: it is written under another name and renamed. Anything else is left over from a kill and is ignored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_gym.errors import UsageError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_PREFIX = "step-"
_NAME = re.compile(r"step-\d{4,}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        folder: Holds the adapter (`adapter_model.safetensors`), and for a step of GRPO what the trainer needs to go on.
        step: Batches trained, which is also the policy's version.
        details: What the run noted beside it, as JSON data.
    """

    folder: Path
    step: int
    details: Mapping[str, Any]


@contextmanager
def writing(parent: Path, step: int, details: Mapping[str, Any]) -> Iterator[Path]:
    """Give a scratch folder to write the checkpoint of `step` into; it gets its manifest and its name when the block ends without an error."""
    final = parent / f"{_PREFIX}{step:04d}"
    scratch = parent / f".{final.name}.part"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        manifest = {"format": FORMAT_VERSION, "step": step, "details": dict(details)}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in scratch.rglob("*"):
            if path.is_file():
                _sync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        _sync(parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def latest(parent: Path) -> Checkpoint | None:
    """The checkpoint with the highest step; None if there is none.

    Raises:
        UsageError: Its manifest is of another format, or contradicts its name.
    """
    folders = _folders(parent)
    if not folders:
        return None
    folder = folders[-1]
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, step, details = manifest["format"], manifest["step"], manifest["details"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} has no readable {MANIFEST} ({error}); remove the folder to go on from the checkpoint before it") from None
    if version != FORMAT_VERSION or folder.name != f"{_PREFIX}{step:04d}":
        raise UsageError(
            f"{folder / MANIFEST} says format {version}, step {step}; expected format {FORMAT_VERSION} and the step in the folder's name; "
            "remove the folder to go on from the checkpoint before it"
        )
    return Checkpoint(folder, step, details)


def prune(parent: Path, keep: int) -> None:
    """Remove all but the `keep` latest checkpoints."""
    for folder in _folders(parent)[:-keep]:
        shutil.rmtree(folder)


def _folders(parent: Path) -> list[Path]:
    """The checkpoint folders in the order of their steps; what else lies there, a copy of one say, is none of ours."""
    return sorted((path for path in parent.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name)), key=lambda path: int(path.name[len(_PREFIX) :]))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
