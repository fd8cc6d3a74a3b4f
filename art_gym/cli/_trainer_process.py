"""The trainer process of `art-gym serve`: it keeps the policy in memory, trains on what it is given, keeps and publishes each version.

It speaks JSON, a line each. Through the standard input come `load` (settings) and tasks: `prepare` (the weights that the engine reads),
`train`, `publish`; while one is being done also `cancel`, `commit` (keep what was trained) and `go` (no call is under way). What becomes of
a task goes out through the standard output, up to `idle`, `failed` or `cancelled`. The end of the standard input ends the process at once, so
that it never outlives the gateway; what it writes, it writes under another name and renames. A step is `art_gym_trainers`' business.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from art_gym.errors import ArtGymError, MissingExtra, UsageError

if TYPE_CHECKING:
    from art_gym.cli._trainer_work import Worker

Message = dict[str, Any]
_TASKS = ("prepare", "train", "publish")


class Stop(ArtGymError):
    """The task ends without a result: it was cancelled."""


class Failed(ArtGymError):
    """The task can't be done.

    Args:
        reason: What happened.
        advice: What to do about it.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


class Wire:
    """Both directions of the conversation with the gateway.

    Args:
        source: Lines from it.
        sink: Lines to it.
        on_end: Called when there are no more lines.
    """

    def __init__(self, source: IO[str], sink: IO[str], on_end: Callable[[], None]) -> None:
        self._source, self._sink, self._on_end = source, sink, on_end
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._cancelled = threading.Event()
        threading.Thread(target=self._read, daemon=True, name="wire").start()

    def tell(self, event: str, **fields: Any) -> None:
        """Send a line."""
        self._sink.write(json.dumps({"event": event, **fields}) + "\n")
        self._sink.flush()

    def next(self) -> Message:
        """Wait for the next line."""
        return self._inbox.get()

    def wait_for(self, word: str) -> Message:
        """Wait until the gateway says the word.

        Raises:
            Stop: It cancels instead.
        """
        while True:
            message = self._inbox.get()
            if message["do"] == word:
                return message
            if message["do"] == "cancel":
                raise Stop

    def check(self) -> None:
        """Return unless the task was cancelled.

        Raises:
            Stop: It was.
        """
        if self._cancelled.is_set():
            raise Stop

    def _read(self) -> None:
        for line in self._source:
            message = json.loads(line)
            # Here, since a task may be cancelled before it is begun.
            if message["do"] in _TASKS:
                self._cancelled.clear()
            elif message["do"] == "cancel":
                self._cancelled.set()
            self._inbox.put(message)
        self._on_end()


def serve(wire: Wire) -> None:
    """Do tasks until the process ends."""
    worker: Worker | None = None
    settings: Message = {}
    while True:
        message = wire.next()
        if message["do"] == "load":
            settings = message["settings"]
            if worker is not None:
                worker.engine_settings = settings.get("engine")
        elif message["do"] in _TASKS:
            try:
                if worker is None:
                    # Not before the wire is listened to: it takes ten seconds, in which the gateway may end.
                    from art_gym.cli._trainer_work import Worker

                    worker = Worker(settings, wire)
                getattr(worker, message["do"])(message)
                wire.tell("idle")
            except Stop:
                wire.tell("cancelled")
            except Failed as error:
                wire.tell("failed", reason=error.reason, advice=error.advice)
            except Exception as error:  # noqa: BLE001  whatever it was, the gateway waits for a last word
                traceback.print_exc()
                wire.tell("failed", reason=_reason(error), advice=_advice(error))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ArtGymError) else f"{type(error).__name__}: {error}"


def _advice(error: Exception) -> str:
    if "out of memory" in str(error).lower() or isinstance(error, MemoryError):
        return "lower token_budget, or give the trainer more memory: a smaller engine.gpu_memory_utilization, or shorter episodes"
    if isinstance(error, MissingExtra):
        return "install it and start the gateway again"
    if isinstance(error, UsageError):
        return "correct what the reason names, and send the request again"
    if isinstance(error, ArtGymError):
        return "look into engine.log and trainer.log in the gateway's folder"
    return "trainer.log in the gateway's folder has the traceback"


def main() -> None:
    """Speak with the gateway through the standard input and output."""
    # What libraries print belongs into the log, which the standard error is.
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # Nothing is asked before the end: a thread may be in the middle of a pass.
    serve(Wire(sys.stdin, sink, on_end=lambda: os._exit(0)))


if __name__ == "__main__":
    main()
