"""Whether a model fits into memory, asked before minutes are spent on finding out."""

from __future__ import annotations

import json
from pathlib import Path

from art_gym.engine.config import EngineConfig
from art_gym.errors import UsageError

GIB = 2**30

_RUNTIME_BYTES = 2 * GIB
"""What a server of three processes takes beside weights and cache; measured with vLLM 0.32 on the CPU."""

_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_memory(config: EngineConfig) -> None:
    """Refuse a launch on the CPU that this machine's free memory can't hold.

    Raises:
        UsageError: Too little memory; the text says how much is needed, how much there is, and what to lower.
    """
    if config.resolved_device() != "cpu":
        return
    available = available_bytes()
    needed = needed_bytes(config)
    if available is not None and needed > available:
        raise UsageError(
            f"the engine needs about {needed / GIB:.1f} GiB of memory ({weight_bytes(config) / GIB:.1f} weights, "
            f"{config.kv_cache_gib:g} key-value cache, {_RUNTIME_BYTES / GIB:.1f} runtime) and {available / GIB:.1f} GiB are available; "
            "end other programs, lower kv_cache_gib, or take a smaller model"
        )


def needed_bytes(config: EngineConfig) -> int:
    """Add up weights, key-value cache and runtime, in bytes."""
    return weight_bytes(config) + int(config.kv_cache_gib * GIB) + _RUNTIME_BYTES


def weight_bytes(config: EngineConfig) -> int:
    """Say what the weights take once loaded in the type asked for, in bytes; 0 for a model that isn't a local folder."""
    folder = Path(config.model)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if config.precision == "auto" or not stored:
        return stored
    try:
        own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        own = {}
    own_type = own.get("dtype") or own.get("torch_dtype")
    return stored * _WIDTHS[config.precision] // _WIDTHS.get(own_type, _WIDTHS[config.precision])


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Say how much memory can be had without swapping, in bytes: the machine's, or less where a container sets a limit. None if unknown."""
    found = [amount for amount in (_machine(proc), _container(cgroup)) if amount is not None]
    return min(found, default=None)


def _machine(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _container(cgroup: Path) -> int | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        # File pages are given back under pressure, so they count as free.
        cached = next(
            (int(line.split()[1]) for line in (cgroup / "memory.stat").read_text().splitlines() if line.startswith("inactive_file ")), 0
        )
        return max(int(limit) - used + cached, 0)
    except (OSError, ValueError):
        return None
