"""The checkpoints that a gateway's jobs wrote: what there is, which one was put in front by hand, and how one goes.

What lies in one is `art_gym_trainers.checkpoints`'s business, and the trainer process's to read.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path
from typing import IO, Any

_PIN = "active.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def steps(folder: Path) -> list[int]:
    """The steps that there are checkpoints of, in order; `folder` is the gateway's."""
    # By name, since the framework imports none of the packages built on it.
    found: list[int] = import_module("art_gym_trainers.checkpoints").steps(folder / "checkpoints")
    return found


def path_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:04d}"


def manifest(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of itself; empty if it can't be read, which whoever loads it is told."""
    try:
        data = json.loads((path_of(folder, step) / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint; never half of it is left under its own name."""
    path = path_of(folder, step)
    doomed = path.with_name(f".{path.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def adapter(folder: Path, step: int) -> IO[bytes] | None:
    """Pack a checkpoint's adapter into a zip file without a name, which is gone when it is closed; None if it holds none."""
    path = path_of(folder, step)
    if not all((path / name).is_file() for name in _ADAPTER):
        return None
    # Beside the checkpoints: a folder for temporary files is often too small, or in memory.
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  the caller sends it, then closes it
    try:
        # Weights don't compress.
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for part in _ADAPTER:
                archive.write(path / part, part)
    except BaseException:
        file.close()
        raise
    return file


def pin(folder: Path, step: int) -> None:
    """Note that a version was put in front by hand; a gateway that starts again begins with it, unless a newer one was made since."""
    newest = max(steps(folder), default=0)
    temporary = folder / f".{_PIN}.part"
    temporary.write_text(json.dumps({"step": step, "newest": newest}) + "\n", encoding="utf-8")
    os.replace(temporary, folder / _PIN)


def first(folder: Path) -> int:
    """The step that a gateway begins with: the newest, or what was put in front of it by hand; 0 if there is none."""
    there = steps(folder)
    newest = max(there, default=0)
    try:
        noted = json.loads((folder / _PIN).read_text(encoding="utf-8"))
        step = int(noted["step"])
        if int(noted["newest"]) == newest and (step == 0 or step in there):
            return step
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return newest
