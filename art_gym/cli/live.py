"""What a run shows while it goes on: a live table on a terminal, plain lines with a heartbeat anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text


class Column(NamedTuple):
    """One figure of a step: its key in `metrics.jsonl`, its heading, and how it is written."""

    key: str
    heading: str
    format: str


COLUMNS: tuple[Column, ...] = (
    Column("step", "step", "d"),
    Column("reward", "reward", ".3f"),
    Column("success_rate", "success", ".1%"),
    Column("entropy", "entropy", ".3f"),
    Column("kl_sampler", "KL", ".4f"),
    Column("clip_fraction", "clipped", ".1%"),
    Column("logprob_difference", "Δ logprob", ".4f"),
    Column("forks", "forks", "d"),
    Column("invalid_calls", "invalid", "d"),
    Column("tokens", "tokens", ",d"),
    Column("seconds_rollout", "rollout s", ".0f"),
    Column("seconds_train", "train s", ".0f"),
    Column("seconds_publish", "publish s", ".1f"),
)
"""The figures of a training step, in the order in which they are shown."""


_LEFT_OUT_FIRST = ("seconds_publish", "tokens", "forks", "clip_fraction", "kl_sampler", "invalid_calls", "seconds_rollout", "seconds_train")
"""On a narrow terminal."""


def cell(metrics: Mapping[str, Any], column: Column) -> str:
    """Write one figure, or a dash where the step has none.

    >>> cell({"success_rate": 0.3125}, COLUMNS[2]), cell({}, COLUMNS[2])
    ('31.2%', '–')
    """
    value = metrics.get(column.key)
    if value is None:
        return "–"
    # A count that went through a mean or through JSON may be a float.
    return format(round(value) if column.format.endswith("d") else value, column.format)


class LiveTable:
    """Shows the steps of a run and what it is doing now. Use it as a context manager.

    On a terminal the last `rows` steps stand in a table that is drawn anew, with a line below for the current phase. Elsewhere (a file, a pipe,
    `nohup`) each phase and step is one line, and every `heartbeat` seconds a line says what is going on, so that a stall is seen.

    Args:
        title: What the run is, above the table.
        console: Where to; standard error if not given, so that results on standard output stay clean.
        rows: How many steps stay on the screen.
        heartbeat: Seconds of silence before a plain line says what is going on.
    """

    def __init__(self, title: str, *, console: Console | None = None, rows: int = 20, heartbeat: float = 15.0) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._rows = rows
        self._heartbeat = heartbeat
        self._shown: list[Mapping[str, Any]] = []
        self._phase = ""
        self._detail = ""
        self._started = self._phase_started = self._last_line = time.monotonic()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        else:
            self._line(self._title)
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._phase = ""
        if self._live:
            self._live.stop()
            self._live = None
        self._stop.set()
        if self._thread:
            self._thread.join()
            self._thread = None

    def phase(self, name: str, detail: str = "") -> None:
        """Say what is going on now, such as `phase("rollout", "12 of 64 episodes")`; call it again to update the detail."""
        new = name != self._phase
        if new:
            self._phase_started = time.monotonic()
        self._phase, self._detail = name, detail
        if new and not self._live:
            self._line(self._status())

    def row(self, metrics: Mapping[str, Any]) -> None:
        """Show a finished step; `COLUMNS` tells which of its figures."""
        self._shown = [*self._shown, dict(metrics)][-self._rows :]
        if not self._live:
            self._line(", ".join(f"{column.heading} {cell(metrics, column)}" for column in COLUMNS if column.key in metrics))

    def note(self, text: str) -> None:
        """Show a line that stays, such as the result of an evaluation."""
        if self._live:
            self._console.print(Text(text))
        else:
            self._line(text)

    def _status(self) -> str:
        seconds = time.monotonic() - self._phase_started
        detail = f": {self._detail}" if self._detail else ""
        return f"{self._phase}{detail}" + (f" ({seconds:.0f} s)" if seconds >= 1 else "")

    def _line(self, text: str) -> None:
        with self._lock:
            self._last_line = time.monotonic()
            self._console.print(Text(f"[{clock(self._last_line - self._started)}] {text}"), soft_wrap=True)

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat / 10):
            if self._phase and time.monotonic() - self._last_line >= self._heartbeat:
                self._line(self._status())

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._shown:
            columns = _fitting(self._shown, self._console.width)
            table = Table(title=self._title, title_justify="left", padding=(0, 1, 0, 0), box=None)
            for column in columns:
                table.add_column(column.heading, justify="right", no_wrap=True)
            for metrics in self._shown:
                table.add_row(*(cell(metrics, column) for column in columns))
            parts.append(table)
        if self._phase:
            self._spinner.text = Text(f"{clock(time.monotonic() - self._started)}  {self._status()}")
            parts.append(self._spinner)
        return Group(*parts)


def _fitting(rows: Sequence[Mapping[str, Any]], width: int) -> list[Column]:
    """Choose the columns that the rows have and a terminal of that width can hold; the others are in `metrics.jsonl` all the same."""
    columns = [column for column in COLUMNS if any(column.key in metrics for metrics in rows)]
    widths = {column: max(len(text) for text in (column.heading, *(cell(metrics, column) for metrics in rows))) + 1 for column in columns}
    for key in _LEFT_OUT_FIRST:
        if sum(widths[column] for column in columns) <= width:
            break
        columns = [column for column in columns if column.key != key]
    return columns


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds, with hours where there are any.

    >>> clock(75.4), clock(3671)
    ('1:15', '1:01:11')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
