"""Digests: by what the weights in a folder are known again when an evaluation is resumed or read later."""

from __future__ import annotations

import hashlib
from pathlib import Path

_MANIFEST = "manifest.json"

_BLOCK, _BLOCKS = 1 << 20, 64
"""Of larger files so many blocks, evenly spaced, count beside the size: all of a large model's weights would take minutes to read."""


def digest_of(folder: Path) -> str:
    """Digest a checkpoint by its manifest, which holds the SHA-256 of every file, and any other folder by its files' names and contents.

    Of files beyond 64 MiB it reads a sample, which tells weights that were trained further from those before.
    """
    manifest = folder / _MANIFEST
    files = [manifest] if manifest.is_file() else sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            # The first block and the last are always among them.
            for number in range(_BLOCKS):
                file.seek(number * _BLOCK if size <= _BLOCKS * _BLOCK else number * (size - _BLOCK) // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]
