"""What Linux is asked about processes, and told: memory, children, who dies with whom, the end."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """Have this process killed when the thread that started it ends, which must be one of the process `parent`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def die_alone() -> None:
    """Take `die_with` back."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent dies, so that it is still found."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; none if it is gone."""
    found: list[int] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from descendants(child)


def kill_tree(root: int) -> None:
    """Kill a child of this process that is stuck, and all that it has started.

    It is stopped first, so that it reaps nobody and no id can become another process's meanwhile.
    """
    with suppress(OSError):
        os.kill(root, signal.SIGSTOP)
    killed: set[int] = set()
    # What a process starts before it is dead passes to the one above it.
    while found := set(descendants(root)) - killed:
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    with suppress(OSError):
        os.kill(root, signal.SIGKILL)


def memory_taken(pid: int) -> int:
    """Return the bytes of memory that a process has and no file backs; 0 if it is gone."""
    return sum(_status(pid, "RssAnon", "RssShmem"))


def limit_memory(growth: int) -> None:
    """Let this process's private writable memory grow by so much; what asks for more is refused it."""
    (now,) = _status(os.getpid(), "VmData")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + growth
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def lift_memory_limit() -> None:
    """Take the limit away again, so that what went wrong can be told."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _status(pid: int, *names: str) -> list[int]:
    """Return figures of `/proc/PID/status`, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return [0] * len(names)
    figures = dict(line.split(":", 1) for line in lines)
    return [int(figures[name].split()[0]) * 1024 if name in figures else 0 for name in names]
