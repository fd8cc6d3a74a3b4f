"""The recorder: puts finished episodes into a journal without making the event loop wait for the disk."""

from __future__ import annotations

import asyncio
import json

from art_gym.episodes import Episode
from art_gym.errors import UsageError
from art_gym.rollout._threads import DaemonThread, Outcome
from art_gym.scenarios import Scenario
from art_gym.store import Journal, encode_or_failed


class Recorder:
    """Writes episodes from one thread; those that end while the disk is busy go into the next write together.

    Args:
        journal: Where to; None records nothing.
    """

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._thread = DaemonThread("art_gym recorder")
        self._checked: Scenario | None = None
        self._waiting: list[tuple[Episode, asyncio.Future[Outcome[None]]]] = []
        self._writing: asyncio.Future[Outcome[None]] | None = None

    def episode_id(self, index: int, member: int) -> str:
        """Name an episode by its place: label, index of its group, member. It is the same when the rollout is resumed."""
        place = f"{index}/{member}"
        return place if self._journal is None else f"{self._journal.label}/{place}"

    def check(self, scenario: Scenario) -> None:
        """See whether episodes of the scenario can be recorded, before any is played.

        Raises:
            UsageError: They can't.
        """
        if self._journal is None or scenario is self._checked:
            return
        if self._checked is None:
            self._journal.check()
        self._checked = scenario
        try:
            json.dumps(scenario.to_dict(), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"scenario {scenario.id!r:.100} can't be recorded as JSON ({error}); give it JSON values only") from error

    async def record(self, episode: Episode) -> None:
        """Return when the episode is on disk.

        An episode that can't be written as JSON is recorded as failed, without its turns.

        Raises:
            OSError, UsageError: The journal can't be written.
        """
        if self._journal is None:
            return
        future: asyncio.Future[Outcome[None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((episode, future))
        if self._writing is None:
            self._write_waiting()
        (await future).unwrap()

    async def close(self) -> None:
        """Wait until everything is on disk, also what nobody waits for any more."""
        try:
            while self._writing is not None:
                await asyncio.wait((self._writing,))
        finally:
            self._thread.stop(join=1.0)

    def _write_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        self._writing = written = self._thread.submit(self._write, [episode for episode, _ in batch])

        def done(result: asyncio.Future[Outcome[None]]) -> None:
            for _, future in batch:
                if not future.done() and not result.cancelled():
                    future.set_result(result.result())
            self._writing = None
            if self._waiting:
                self._write_waiting()

        written.add_done_callback(done)

    def _write(self, episodes: list[Episode]) -> None:
        assert self._journal is not None
        self._journal.write(b"".join(map(encode_or_failed, episodes)))
