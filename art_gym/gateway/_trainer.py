"""The trainer process as the gateway sees it: started, told what to do, listened to, and ended.

What the process does with it is `art_gym.cli._trainer_process`'s. Both speak JSON, a line each; what its libraries print goes to a log file,
whose tail is told when it dies. Closing its standard input ends it, so that none is left behind when this process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from art_gym.errors import ArtGymError

Message = dict[str, Any]

_LINE_BYTES = 64 * 2**20
_TAIL_BYTES = 8192
_TAIL_LINES = 15


class TrainerFailed(ArtGymError):
    """The trainer process couldn't do what it was told, or is gone.

    Args:
        reason: What happened.
        advice: What to do about it.
        gone: Whether the process has ended.
    """

    def __init__(self, reason: str, advice: str = "", *, gone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.gone = reason, gone
        self.advice = advice or "look into trainer.log in the gateway's folder; the policy is as it was before"


class Cancelled(ArtGymError):
    """The trainer process was cancelled before it had changed anything."""


class Trainer(Protocol):
    """What jobs need of a trainer process."""

    def work(self, task: Message) -> AsyncIterator[Message]:
        """Give it a task and yield what it tells of it, until it is done."""
        ...

    async def tell(self, message: Message) -> None:
        """Tell it something about its task."""
        ...

    async def stop(self) -> None:
        """End it; a later task starts another one."""
        ...


class TrainerProcess:
    """Supervises one trainer process, which is started with the first task and again after it died.

    Args:
        settings: What the process loads (`art_gym.cli._trainer_work.Worker`); sent through its standard input, so that keys in it are in no
            list of processes.
        log: File for what it prints.
        command: The command line; by default this interpreter's.
        environment: Laid over this process's.
        stop_seconds: How long it may take to end by itself.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        log: Path,
        *,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        stop_seconds: float = 10.0,
    ) -> None:
        self.settings = dict(settings)
        self._log = log
        self._command = list(command) if command is not None else [sys.executable, "-m", "art_gym.cli._trainer_process"]
        self._environment = environment or {}
        self._stop_seconds = stop_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._log_start = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """The process's id; None if there is none."""
        return self._process.pid if self._process is not None and self.running else None

    async def start(self) -> None:
        """Start the process, unless it runs; it loads what it needs with its first task.

        Raises:
            TrainerFailed: It can't be started.
        """
        async with self._starting:
            if self.running:
                return
            await self.stop()
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        # Ctrl-C is for the gateway, which lets jobs end in order.
                        start_new_session=True,
                        limit=_LINE_BYTES,
                        env={**os.environ, **self._environment},
                    )
                except OSError as error:
                    raise TrainerFailed(f"the trainer process can't be started: {error}", gone=True) from error
            await self.tell({"do": "load", "settings": self.settings})

    async def work(self, task: Message) -> AsyncIterator[Message]:
        """Give the process a task and yield what it tells of it, until it is done.

        Raises:
            TrainerFailed: It failed, or died; the text carries the log's tail then.
            Cancelled: It was told to cancel.
        """
        await self.start()
        process = self._process
        assert process is not None
        assert process.stdout is not None
        await self.tell(task)
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError as error:
                await self.stop()
                raise TrainerFailed(f"the trainer process wrote a line that is too long: {error}", gone=True) from error
            if not line:
                raise await self._death(process)
            try:
                message: Message = json.loads(line)
                event = message["event"]
            except (ValueError, KeyError, TypeError):
                await self.stop()
                raise TrainerFailed(f"the trainer process wrote what is no message: {line[:200]!r}", gone=True) from None
            if event == "idle":
                return
            if event in ("failed", "cancelled"):
                # What it has in memory may be neither the version before nor the one after.
                await self.stop()
                raise Cancelled if event == "cancelled" else TrainerFailed(str(message["reason"]), str(message.get("advice") or ""), gone=True)
            yield message

    async def change(self, **settings: Any) -> None:
        """Change what the process was told to load."""
        self.settings |= settings
        if self.running:
            await self.tell({"do": "load", "settings": self.settings})

    async def run(self, task: Message, on_message: Callable[[Message], None] = lambda message: None) -> list[Message]:
        """Give the process a task and collect what it tells of it."""
        told = []
        async for message in self.work(task):
            on_message(message)
            told.append(message)
        return told

    async def tell(self, message: Message) -> None:
        """Send a line; a process that is gone is told nothing, which whoever listens to it finds out."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()

    async def stop(self) -> None:
        """End the process: its standard input is closed, and what doesn't end by itself is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(self._stop_seconds):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _death(self, process: asyncio.subprocess.Process) -> TrainerFailed:
        """Say how the process ended."""
        try:
            async with asyncio.timeout(self._stop_seconds):
                code = await process.wait()
        except TimeoutError:
            await self.stop()
            code = None
        how = "closed its output" if code is None else f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = self.log_tail()
        out_of_memory = code == -9
        advice = "the machine may have run out of memory: lower token_budget, or give it more" if out_of_memory else ""
        return TrainerFailed(f"the trainer process {how}" + (f"; the end of its log:\n{tail}" if tail else ""), advice, gone=True)

    def log_tail(self) -> str:
        """The last lines that this process wrote into the log."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])
