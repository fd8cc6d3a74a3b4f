"""What a journal of a run holds, and the batch that a journal is part of: the groups that training took in, found again on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from art_gym.cli.config import GRPOSection
from art_gym.episodes import Episode, EpisodeGroup, Turn
from art_gym.errors import UsageError
from art_gym.store import EpisodeIndex, EpisodeStore, Journal
from art_gym_trainers.advantages import batch_advantages, tells_something
from art_gym_trainers.sampling import sample_batch

_TRAINING = re.compile(r"(train-\d{4,})(?:-from-\d{4,})?")
_PLACE = re.compile(r"(?:.*/)?(\d+)/\d+")
"""The id of an episode that the runner played: its scenario's place among the journal's, and its place in the group."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What an episode was worth to training.

    Attributes:
        advantages: Of each turn; None where there are none, or they can't be known.
        reason: Why there are none; empty otherwise.
    """

    advantages: list[float] | None
    reason: str = ""


def store_of(folder: Path) -> EpisodeStore:
    """The store of a run, by its folder or by the folder of its episodes.

    Raises:
        UsageError: No episodes are there.
    """
    inside = folder if folder.is_dir() and folder.resolve().name == "episodes" else folder / "episodes"
    if not inside.is_dir():
        raise UsageError(f"{folder} is not the folder of a run: it holds no folder episodes/")
    store = EpisodeStore(inside.parent if inside.name == "episodes" else inside.resolve().parent)
    if not labels_of(store):
        raise UsageError(f"{inside} holds no episodes")
    return store


def labels_of(store: EpisodeStore) -> list[str]:
    """The store's labels, without those of rounds that were only begun."""
    return [label for label in store.labels() if any(path.stat().st_size for path in store.journal(label).paths)]


def check_labels(store: EpisodeStore, folder: Path, labels: Iterable[str]) -> None:
    """Refuse labels that the store doesn't have; the folder is how it was named.

    Raises:
        UsageError: It has no episodes of one of them.
    """
    known = labels_of(store)
    if unknown := next((label for label in labels if label not in known), None):
        some = ", ".join(known[:5]) + ("…" if len(known) > 5 else "")
        raise UsageError(f"{folder} has no episodes of the label {unknown!r}; it has {some}")


def latest(file: Path) -> Iterator[Episode]:
    """The episodes of a label in order, by the path of its journal or Parquet file; of one that was played again, the last.

    Only one is in memory at a time: a journal may be larger than that. What is written meanwhile isn't taken in: a run may be going on.

    Raises:
        UsageError: There is no such file, or nothing in it.
    """
    try:
        with _index(file) as index:
            if not index:
                raise UsageError(f"{file} holds no whole episode; give a journal such as runs/first/episodes/train-0001.jsonl")
            yield from index.episodes()
    except ValueError as error:
        raise UsageError(f"{error}; give a journal of episodes, as a run writes them") from None


def bare(episode: Episode) -> Episode:
    """The episode without what was said and sampled: enough to compute advantages with."""
    turns = [Turn([], {"role": "assistant"}, reward=turn.reward) for turn in episode.turns]
    return replace(episode, turns=turns, tools=[], final_observation=[])


def worth(file: Path, chosen: Episode, episodes: list[Episode], settings: GRPOSection | None) -> Worth:
    """What an episode was worth among the groups that it was trained with.

    Args:
        file: The journal.
        chosen: One of its episodes.
        episodes: All of them, bare.
        settings: Those of the run that wrote it; None for a journal of no run, whose groups are compared among themselves by the defaults.
    """
    if chosen.failure is not None:
        return Worth(None, "it failed, and isn't trained on")
    training = _TRAINING.fullmatch(_journal(file).label)
    if settings is None or training is None:
        settings = settings or GRPOSection()
        groups, missing = list(_groups(episodes).values()), False
    else:
        batch = _Batch(file, training[1], episodes, settings)
        groups, missing = batch.groups, batch.missing
        if any(chosen.id == episode.id for group in batch.surplus for episode in group.episodes):
            return Worth(None, "its group is surplus, played after the batch was full, and isn't trained on")
    group = next((group for group in groups if any(episode.id == chosen.id for episode in group.episodes)), None)
    if group is None:
        more = "a journal of its batch is missing or not whole" if missing else "a round that was begun before the run was stopped"
        return Worth(None, f"it isn't among what its batch is trained on, as far as the journals tell: {more}")
    # With dynamic sampling the groups before it decide whether it is surplus.
    needs_batch = settings.advantage == "batch_std" or settings.dynamic_sampling
    if missing and (needs_batch or len(group.episodes) < settings.group_size):
        return Worth(None, f"it can't be known: the episodes of its {'batch' if needs_batch else 'group'} aren't all in the journals")
    if len(group.finished) < 2:
        return Worth(None, "there is no other finished episode of its group to compare it with")
    try:
        found = batch_advantages(groups, settings.advantage, credit=settings.credit, discount=settings.discount)
    except ValueError as error:
        return Worth(None, f"it can't be known: {error}")
    return Worth(next(advantages[chosen.id] for advantages in found if chosen.id in advantages))


class _Batch:
    """A batch sampled once more, from its journals: with dynamic sampling rounds lie in several, and the last may have surplus groups."""

    def __init__(self, file: Path, label: str, episodes: list[Episode], settings: GRPOSection) -> None:
        self._file, self._label, self._episodes, self._settings = _journal(file).path, label, episodes, settings
        self.missing = False
        sampled = sample_batch(
            self._round,
            settings.groups_per_batch,
            lambda group: tells_something(group, credit=settings.credit, discount=settings.discount),
            max_rounds=settings.max_sampling_rounds if settings.dynamic_sampling else 1,
        )
        self.groups, self.surplus = sampled.groups, sampled.surplus

    def _round(self, played: int, count: int) -> list[EpisodeGroup]:
        """The groups of a round, as far as they are there: a journal may hold more, of an attempt that was stopped."""
        path = self._file.with_name(f"{self._label}{f'-from-{played:04d}' if played else ''}.jsonl")
        groups = _groups(self._episodes if path == self._file else _bare_or_none(path))
        found = [groups[str(place)] for place in range(count) if str(place) in groups]
        if len(found) < count or any(len(group.episodes) < self._settings.group_size for group in found):
            self.missing = True
        return found


def _bare_or_none(file: Path) -> list[Episode]:
    """The episodes of another journal of the batch; none of one that isn't there, or holds nothing whole: the run was stopped then."""
    try:
        return [bare(episode) for episode in latest(file)]
    except UsageError:
        return []


def _groups(episodes: list[Episode]) -> dict[str, EpisodeGroup]:
    """Groups by their scenario's place in the journal, or by the scenario where ids tell no place; members in order."""
    groups: dict[str, EpisodeGroup] = {}
    for episode in sorted(episodes, key=lambda episode: episode.member):
        place = _PLACE.fullmatch(episode.id)
        key = place[1] if place else f"{episode.scenario.id}, seed {episode.scenario.seed}"
        groups.setdefault(key, EpisodeGroup(episode.scenario, [])).episodes.append(episode)
    return groups


def _index(file: Path) -> EpisodeIndex:
    if file.is_dir():
        places = [path for suffix in ("jsonl", "parquet") for path in [*file.glob(f"*.{suffix}"), *file.glob(f"episodes/*.{suffix}")]]
        found = sorted({path.stem: path.name for path in places}.values())
        hint = f"one of its journals: {', '.join(found[:5])}{'…' if len(found) > 5 else ''}" if found else "a journal, such as train-0001.jsonl"
        raise UsageError(f"{file} is a folder; give {hint}")
    journal = _journal(file)
    # A run's label is read whole, by whichever name; a file elsewhere, such as an exported one, by itself.
    of_run = file.absolute().parent.name == "episodes"
    paths = journal.paths if of_run else [file]
    if not paths or not all(path.is_file() for path in paths):
        raise UsageError(f"there is no file {file}; a run's journals are in its folder episodes/")
    return journal.index() if of_run else EpisodeIndex.of_file(file)


def _journal(file: Path) -> Journal:
    """The journal of the label that a file is of."""
    return Journal(file.with_suffix(".jsonl") if file.suffix == ".parquet" else file)
