"""The process between art_gym and the server: it ends the server, with every process the server started, when art_gym ends in any way.

Run as a script, with the standard library alone, so that it starts at once and stays small:

    python _supervisor.py LIFELINE_FD PARENT_PID GRACE_SECONDS SCRATCH_FOLDER COMMAND…

The parent holds the write end of the pipe LIFELINE_FD. When it writes there, closes it, or dies, the server gets SIGTERM, and after the grace
everything left is killed and the scratch folder removed. The first line on standard output is the server's process id; the server's own output
goes to standard error. The supervisor exits with the server's status (128 + the signal's number if a signal ended it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    lifeline, parent, grace, scratch, command = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5:]
    # Processes whose own parent dies become children of this one, and so are still found when everything has to end.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    stop_requests: list[int] = []
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop_requests.append(number))
    # A signal is a byte in this pipe, so that waiting for the parent's word also ends when a child has.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signals, wakeup = os.pipe()
    for end in (signals, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    supervisor = os.getpid()
    try:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,
            preexec_fn=lambda: _die_with(supervisor),  # noqa: PLW1509 - this process has one thread
        )
    except OSError as error:
        print(f"could not start {command[0]}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 127
    print(server.pid, flush=True)  # noqa: T201 - the protocol with the parent
    sys.stdout.close()
    try:
        while server.poll() is None and not stop_requests and os.getppid() == parent:
            # The parent's id is looked at too: a process forked from it may hold the pipe open after its death.
            if _speaks(lifeline, signals, wait=0.5):
                break
            _reap(except_for=server.pid)
        if server.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(grace)
    finally:
        _kill_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
    status = server.wait()
    return status if status >= 0 else 128 - status


def _die_with(supervisor: int) -> None:
    """In the server, before it runs: be killed when the supervisor is."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # It died before the line above.
        os._exit(1)


def _speaks(lifeline: int, signals: int, *, wait: float) -> bool:
    """Whether the parent has written, or closed its end; waits up to `wait` seconds for it, or until a signal comes."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.register(signals, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(wait * 1000)]
    if signals in ready:
        os.read(signals, 4096)
    return lifeline in ready


def _reap(*, except_for: int) -> None:
    """Collect the exit status of adopted processes, so that they don't stay as zombies; that of the server is for who waits for it."""
    with contextlib.suppress(ChildProcessError):
        # Looked at and left first, since the ended child may be the server.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != except_for:
            os.waitpid(ended.si_pid, os.WNOHANG)


def _kill_descendants(patience: float = 10.0) -> None:
    """Kill until none is left: a process may start another between the look and the kill."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        descendants = list(_descendants(os.getpid()))
        if not descendants:
            return
        for process in descendants:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _descendants(root: int) -> Iterator[int]:
    children = _children()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child)
            yield child


def _children() -> dict[int, list[int]]:
    """Process ids by their parent's, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The command's name is in parentheses and may hold anything; the parent's id is the second field after it.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    return children


if __name__ == "__main__":
    sys.exit(main())
