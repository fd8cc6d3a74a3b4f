"""What this machine computes on, and what it computes fast in. Looks, and loads nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

Precision = Literal["float32", "bfloat16"]

_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of processors that multiply matrices in bfloat16: x86's two, and Arm's."""


def has_nvidia_gpu() -> bool:
    """Whether there is a GPU that this process may see."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def fast_precision() -> Precision:
    """bfloat16 on a GPU and on a processor with instructions for it, else float32.

    Without them PyTorch multiplies matrices in bfloat16 fifty times more slowly than in float32.
    """
    return "bfloat16" if has_nvidia_gpu() or processor_flags() & _BFLOAT16 else "float32"


def processor_flags(file: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor can do, as Linux names it; nothing where that isn't told."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}
