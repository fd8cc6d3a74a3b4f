"""A group in play: which of its episodes have ended, and when that is enough."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from art_gym.episodes import Episode, EpisodeGroup
from art_gym.rollout._play import branch_path
from art_gym.scenarios import Scenario


@dataclass(slots=True)
class Group:
    """A group in play.

    Attributes:
        index: Its place among the rollout's groups.
        ticket: Its place among all groups that its gate lets through.
        scenario: Where its episodes start.
        size: How many of them are to finish.
        missing: How many haven't ended, or been started.
        ended: Those that have.
        tasks: Of those in play.
        branches: How many branched off others.
        finished: How many have finished, branches apart.
        cut: Whether that was enough, and the others are cut.
        opened: How many it was opened with.
        whole: Set when all have ended.
    """

    index: int
    ticket: int
    scenario: Scenario
    size: int
    missing: int
    ended: list[Episode] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    branches: int = 0
    finished: int = 0
    cut: bool = False
    opened: int = field(init=False)
    whole: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.opened = self.missing

    def put(self, episode: Episode) -> None:
        """Take an episode that has ended, and is recorded."""
        self.ended.append(episode)
        self.skip(1)

    def skip(self, count: int) -> None:
        """Do without so many that weren't started."""
        self.missing -= count
        if not self.missing and not self.whole.done():
            self.whole.set_result(None)

    def grow(self, count: int) -> None:
        """Wait for so many more, which branched off."""
        self.branches += count
        self.missing += count

    def close(self) -> None:
        """Cut what is in play: enough have finished."""
        self.cut = True
        for task in self.tasks:
            task.cancel()

    @property
    def held(self) -> int:
        """How many episodes it may hold in memory."""
        return self.opened + self.branches

    def result(self) -> EpisodeGroup:
        """The group as it is handed out."""
        return EpisodeGroup(self.scenario, sorted(self.ended, key=lambda episode: (episode.member, branch_path(episode))))
