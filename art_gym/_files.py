"""What is written stays written: files and names that survive the machine's end."""

from __future__ import annotations

import os
from pathlib import Path


def sync_all(folder: Path) -> None:
    """Wait until the disk has a folder and all that is in it."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
