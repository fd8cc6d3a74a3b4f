"""Progress of a rollout: a bar on a terminal, plain lines with a heartbeat elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import Protocol, TextIO

from art_gym.episodes import Episode

HEARTBEAT_SECONDS = 15.0


class Progress(Protocol):
    """Is told of each episode as it ends; what it raises stops the rollout."""

    def on_episode(self, episode: Episode) -> None: ...


class Tally:
    """What a progress display counts."""

    def __init__(self) -> None:
        self.episodes = 0
        self.turns = 0
        self.successes = 0
        self.reward = 0.0
        self.failures: Counter[str] = Counter()

    def on_episode(self, episode: Episode) -> None:
        self.episodes += 1
        self.turns += len(episode.turns)
        if episode.failure is not None:
            self.failures[episode.failure.kind] += 1
        else:
            self.successes += episode.success
            self.reward += episode.reward

    def __str__(self) -> str:
        finished = self.episodes - self.failures.total()
        parts = [f"success {self.successes / finished:.2f}", f"reward {self.reward / finished:.2f}"] if finished else []
        parts += [f"{count} failed ({kind})" for kind, count in sorted(self.failures.items())]
        return ", ".join(parts)


@contextmanager
def show_progress(description: str, total: int | None = None, *, stream: TextIO | None = None) -> Generator[Progress, None, None]:
    """Show how a rollout gets on, on standard error unless another stream is given.

    On a terminal it is a bar; elsewhere a line every 15 seconds, also when nothing ends meanwhile, and one at the end.

    Args:
        description: What is played, such as "eval-after".
        total: How many episodes there will be, if that is known.
        stream: Where to.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(description, total, stream) as bar:
            yield bar
    else:
        with _lines(description, total, stream) as lines:
            yield lines


@contextmanager
def _bar(description: str, total: int | None, stream: TextIO) -> Generator[Progress, None, None]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    tally = Tally()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tally]}"))
    with RichProgress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(file=stream)) as bar:
        task = bar.add_task(description, total=total, tally="")

        class Bar:
            def on_episode(self, episode: Episode) -> None:
                tally.on_episode(episode)
                bar.update(task, advance=1, tally=str(tally))

        yield Bar()


@contextmanager
def _lines(description: str, total: int | None, stream: TextIO) -> Generator[Progress, None, None]:
    tally = Tally()
    begin = monotonic()
    ended = Event()

    def line() -> None:
        count = f"{tally.episodes}" if total is None else f"{tally.episodes}/{total}"
        parts = [f"{description}: {count} episodes", str(tally), f"{tally.turns} turns", f"{monotonic() - begin:.0f} s"]
        stream.write(", ".join(filter(None, parts)) + "\n")
        stream.flush()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            line()

    heart = Thread(target=beat, name="art_gym heartbeat", daemon=True)
    heart.start()
    try:
        yield tally
    finally:
        ended.set()
        heart.join()
        line()
