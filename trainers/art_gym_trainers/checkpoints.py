"""Checkpoints: a step's weights, optimiser and random states in one folder, with a manifest that says where the run stands and what it holds.

A folder under its final name is whole: it is written under another name and renamed, and renamed again before it is removed. Anything else is
left over from a kill and is ignored. What lies in a folder is checked against its manifest before it is read.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from art_gym._files import sync, sync_all
from art_gym.errors import UsageError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_PREFIX = "step-"
_NAME = re.compile(r"step-\d{4,}")
_WRITING, _REMOVING = ".part", ".old"

GRPO_STATE: tuple[tuple[str, ...], ...] = (
    ("adapter_model*.safetensors", "model*.safetensors", "pytorch_model_fsdp*", "global_step*"),
    ("optimizer*", "global_step*"),
    ("scheduler.pt",),
    ("rng_state*.pth",),
    ("trainer_state.json",),
)
"""What going on with GRPO takes, one or another name of each: weights, optimiser, scheduler, random states, trainer's state. transformers
passes over what isn't there, and would go on from other states without a word."""


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


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: each that one of the rules keeps, and the newest always.

    Attributes:
        last: So many of the newest.
        best: So many with the best scores, whatever their age.
        goal: Whether high or low scores are good.
        every: Each whose step is a multiple of this, for good; 0 for none.
        max_age_hours: Those that are only among the newest are dropped after so many hours.
    """

    last: int = 2
    best: int = 0
    goal: Literal["max", "min"] = "max"
    every: int = 0
    max_age_hours: float | None = None


@contextmanager
def writing(parent: Path, step: int, details: Mapping[str, Any], *, needs: Sequence[Sequence[str]] = ()) -> Iterator[Path]:
    """Give a scratch folder to write the checkpoint of `step` into; it gets its manifest and its name when the block ends without an error.

    Args:
        parent: Where the checkpoints lie.
        step: Batches trained.
        details: Noted in the manifest.
        needs: Patterns of file names; one of each group must have been written.

    Raises:
        RuntimeError: A file is missing.
    """
    final = parent / f"{_PREFIX}{step:04d}"
    scratch = _hidden(final, _WRITING)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        files = {path.relative_to(scratch).as_posix(): _fingerprint(path) for path in sorted(scratch.rglob("*")) if path.is_file()}
        for patterns in needs:
            if not any(fnmatch.fnmatch(name, pattern) for name in files for pattern in patterns):
                raise RuntimeError(f"the checkpoint of step {step} lacks {' or '.join(patterns)}; the trainer did not write it")
        manifest = {"format": FORMAT_VERSION, "step": step, "time": time.time(), "details": dict(details), "files": files}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        sync_all(scratch)
        if final.exists():
            _remove(final)
        os.replace(scratch, final)
        sync(parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def steps(parent: Path) -> list[int]:
    """The steps that there are checkpoints of, in order."""
    return [_step(folder) for folder in _folders(parent)]


def latest(parent: Path) -> Checkpoint | None:
    """The checkpoint with the highest step, verified; None if there is none.

    Raises:
        UsageError: As `read`.
    """
    numbers = steps(parent)
    return read(parent, numbers[-1]) if numbers else None


def best(parent: Path, scores: Mapping[int, float | None], goal: Literal["max", "min"] = "max") -> int | None:
    """The step with the best score among those that there are checkpoints of; of equals the latest, and None where none has a score."""
    ranked = _ranked(steps(parent), scores, goal)
    return ranked[0] if ranked else None


def read(parent: Path, step: int) -> Checkpoint:
    """The checkpoint of a step, its files verified by size and SHA-256.

    Raises:
        UsageError: There is none; its manifest is of another format, or contradicts its name; or a file isn't as it was written.
    """
    folder = parent / f"{_PREFIX}{step:04d}"
    if not folder.is_dir():
        raise UsageError(f"{parent} has no checkpoint of step {step}; there are: {', '.join(map(str, steps(parent))) or 'none'}")
    way_out = "remove the folder to go on from the checkpoint before it"
    try:
        manifest = _manifest(folder)
        version, noted = manifest["format"], manifest["step"]
        if version == FORMAT_VERSION and noted == step:
            details, files = dict(manifest["details"]), {str(name): dict(facts) for name, facts in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} has no readable {MANIFEST} ({type(error).__name__}: {error}); {way_out}") from None
    if version != FORMAT_VERSION or noted != step:
        raise UsageError(
            f"{folder / MANIFEST} says format {version}, step {noted}; "
            f"expected format {FORMAT_VERSION} and the step in the folder's name; {way_out}"
        )
    for name, facts in files.items():
        if problem := _difference(folder / name, facts):
            raise UsageError(f"{folder / name} {problem}; {way_out}")
    return Checkpoint(folder, step, details)


def prune(parent: Path, retention: Retention, scores: Mapping[int, float | None] | None = None) -> None:
    """Remove the checkpoints that no rule keeps, and what a kill left of others.

    Args:
        parent: Where the checkpoints lie.
        retention: The rules.
        scores: By step, as far as known.
    """
    for pattern in (f".{_PREFIX}*{_WRITING}", f".{_PREFIX}*{_REMOVING}"):
        for leftover in parent.glob(pattern):
            shutil.rmtree(leftover)
    folders = _folders(parent)
    kept = set(_ranked([_step(folder) for folder in folders], scores or {}, retention.goal)[: retention.best])
    kept |= {_step(folder) for folder in folders[-retention.last :] if not _is_older(folder, retention.max_age_hours)}
    kept |= {_step(folder) for folder in folders if retention.every and _step(folder) % retention.every == 0}
    for folder in folders[:-1]:
        if _step(folder) not in kept:
            _remove(folder)


def _remove(folder: Path) -> None:
    doomed = _hidden(folder, _REMOVING)
    if doomed.exists():  # of a kill, and not pruned yet
        shutil.rmtree(doomed)
    # Never half of it under its own name.
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _folders(parent: Path) -> list[Path]:
    """The checkpoint folders in the order of their steps; what else lies there, a copy of one say, is none of ours."""
    return sorted((path for path in parent.glob(f"{_PREFIX}*") if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name[len(_PREFIX) :])


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _ranked(numbers: Sequence[int], scores: Mapping[int, float | None], goal: Literal["max", "min"]) -> list[int]:
    """The steps that have a score, the best first."""
    known = {step: score for step in numbers if (score := scores.get(step)) is not None and math.isfinite(score)}
    sign = 1 if goal == "max" else -1
    return sorted(known, key=lambda step: (sign * known[step], step), reverse=True)


def _is_older(folder: Path, hours: float | None) -> bool:
    if hours is None:
        return False
    try:
        return time.time() - float(_manifest(folder)["time"]) > hours * 3600
    except (OSError, ValueError, KeyError, TypeError):
        return False  # Whoever reads it is told what is wrong with it.


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _difference(path: Path, facts: Mapping[str, Any]) -> str:
    """Say how a file differs from what was written; empty if it doesn't."""
    if not path.is_file():
        return "is missing"
    found = _fingerprint(path)
    if found["size"] != facts.get("size"):
        return f"has {found['size']:,} bytes and not the {facts.get('size'):,} that were written"
    return "" if found["sha256"] == facts.get("sha256") else "has another checksum than when it was written"
