"""`art-gym episodes`: what a run recorded, label by label; the episodes of one; and one of them token by token, as training sees it."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from art_gym._render import lines_of
from art_gym.cli._journals import Worth, bare, labels_of, latest, store_of, worth
from art_gym.cli.config import RunConfig
from art_gym.episodes import Episode
from art_gym.errors import MissingExtra, MissingTokens, UsageError
from art_gym_trainers.forks import Decode, token_decoder
from art_gym_trainers.sequences import TokenSequence, episode_sequences

_EDGE = 3
"""So many tokens at either end of a long stretch of context are shown."""

_NAMES = ("id", "label", "scenario", "end", "failures")
"""Columns of a list that hold words."""

_COLUMNS = f"  {'place':>6}  {'kind':<7}  {'token':>7}  {'logprob':>9}  {'advantage':>9}"


def ls(path: Path, *, as_json: bool) -> None:
    """Print a line for each label of a run, or for each episode of one label.

    Args:
        path: The run's folder; or a label's journal or Parquet file.
        as_json: Print JSON instead of a table.

    Raises:
        UsageError: There is no such run or file, or nothing in it.
    """
    rows = list(_labels(path)) if path.is_dir() else [_row(episode) for episode in latest(path)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    cells = [list(rows[0]), *([_cell(name, value) for name, value in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        # Names on the left, figures on the right.
        padded = [text.ljust(width) if name in _NAMES else text.rjust(width) for name, text, width in zip(rows[0], line, widths, strict=True)]
        typer.echo("  ".join(padded).rstrip())


def show(file: Path, episode_id: str | None, *, tokenizer: str | None, everything: bool) -> None:
    """Print an episode, the first if none is named, turn by turn and token by token.

    Raises:
        UsageError: There is no such journal, episode or tokenizer.
    """
    chosen, episodes = _choose(file, episode_id)
    decode = _decoder(tokenizer) if tokenizer else None
    config, unknown = None, ""
    try:
        config = _config(file)
    except UsageError as error:
        unknown = f"it can't be known, since the run's settings can't be read: {error}"
    realign = config is not None and config.grpo.realign
    console = Console(highlight=False, soft_wrap=True)
    for line in _heading(chosen, len(episodes)):
        console.print(line)
    try:
        sequences = episode_sequences(chosen, decode=decode, realign=realign and decode is not None)
    except MissingTokens as error:
        console.print(_text(f"its tokens weren't recorded: {error}", "yellow"))
        sequences = []
    found = Worth(None, unknown) if unknown else worth(file, chosen, episodes, config.grpo if config else None)
    if config and realign and decode is None and sequences:
        console.print(_text(f"the run realigns context, which takes its tokenizer to show: give --tokenizer {config.model.name}", "yellow"))
    if found.reason:
        console.print(_text(f"no advantage: {found.reason}", "yellow"))
    view = _View(chosen, found.advantages, decode, everything)
    for line in view.tokens(sequences) if sequences else view.messages():
        console.print(line)


@dataclass(frozen=True, slots=True)
class _View:
    """How an episode's tokens are written."""

    episode: Episode
    advantages: list[float] | None
    decode: Decode | None
    everything: bool

    def tokens(self, sequences: Sequence[TokenSequence]) -> Iterator[Text]:
        last = -1
        for number, sequence in enumerate(sequences, start=1):
            why = f", a fork: {sequence.fork}" if sequence.fork else ""
            again = f", {sequence.realigned} turns realigned" if sequence.realigned else ""
            yield _text("")
            yield _text(f"sequence {number} of {len(sequences)}{why}{again}: {len(sequence)} tokens, {sum(sequence.sampled)} sampled", "bold")
            yield _text(_COLUMNS + ("  text" if self.decode else ""), "dim")
            place = 0
            while place < len(sequence):
                end = next((later for later in range(place, len(sequence)) if sequence.turns[later] != sequence.turns[place]), len(sequence))
                turn = sequence.turns[place]
                # The turns up to this one that sampled nothing have no token to stand before.
                for index in range(last + 1, turn + 1):
                    yield self._turn(index)
                last = max(last, turn)
                yield from self._stretch(sequence, place, end)
                place = end
        for index in range(last + 1, len(self.episode.turns)):
            yield self._turn(index)

    def messages(self) -> Iterator[Text]:
        for index, turn in enumerate(self.episode.turns):
            yield from self._said(turn.observation)
            yield self._turn(index)
            yield from self._said([turn.action])
        yield from self._said(self.episode.final_observation)

    def _said(self, messages: Iterable[Any]) -> Iterator[Text]:
        for role, text in lines_of(messages):
            yield _text(f"{role}: {text}")

    def _turn(self, index: int) -> Text:
        turn = self.episode.turns[index]
        parts = ", ".join(f"{name} {value:+g}" for name, value in turn.rewards.items())
        figures = [
            f"reward {turn.reward:+g}" + (f" ({parts})" if parts else ""),
            f"advantage {self._advantage(index).strip()}",
            turn.finish_reason,
        ]
        if turn.invalid_calls:
            figures.append(f"{turn.invalid_calls} invalid calls")
        if turn.completion_ids == []:
            figures.append("nothing sampled")
        return _text(f"turn {index}: {', '.join(figures)}", "bold cyan")

    def _stretch(self, sequence: TokenSequence, start: int, end: int) -> Iterator[Text]:
        """The lines of tokens that are all context, or of one turn."""
        folded = not self.everything and not sequence.sampled[start] and end - start > 2 * _EDGE + 1
        for place in range(start, end):
            if folded and start + _EDGE <= place < end - _EDGE:
                if place == start + _EDGE:
                    yield _text(f"       …  context  {end - start - 2 * _EDGE} more tokens", "dim")
                continue
            token = sequence.token_ids[place]
            text = f"  {self.decode([token])!r}" if self.decode else ""
            if sequence.sampled[place]:
                figures = f"{sequence.logprobs[place]:>9.4f}  {self._advantage(sequence.turns[place]):>9}"
                yield _text(f"  {place:>6}  sampled  {token:>7}  {figures}{text}", _colour(sequence.logprobs[place]))
            else:
                yield _text(f"  {place:>6}  context  {token:>7}  {'':>9}  {'':>9}{text}".rstrip(), "dim")

    def _advantage(self, turn: int) -> str:
        return "-" if self.advantages is None else f"{self.advantages[turn]:+.4f}"


def _heading(episode: Episode, count: int) -> Iterator[Text]:
    others = f" of {count}; the others with --episode" if count > 1 else ""
    yield _text(f"episode {episode.id}{others}", "bold")
    policies = ", ".join(dict.fromkeys(turn.policy for turn in episode.turns if turn.policy))
    facts = {
        "environment": episode.env_id,
        "scenario": f"{episode.scenario.id}, seed {episode.scenario.seed}",
        "policy": policies,
        "reward": f"{episode.reward:+g}",
        "end": _end(episode),
        "tools": ", ".join(str(schema["function"]["name"]) for schema in episode.tools),
    }
    for name, value in facts.items():
        if value:
            yield _text(f"{name:<12} {value}")
    if episode.failure is not None:
        yield _text(f"{'failure':<12} {episode.failure.message.splitlines()[0] if episode.failure.message else ''}", "red")


def _labels(folder: Path) -> Iterator[dict[str, Any]]:
    """What there is of each label, where one that was played again counts once.

    As in an evaluation: an episode that failed is no success, and has no reward.
    """
    store = store_of(folder)
    for label in labels_of(store):
        journal = store.journal(label)
        try:
            with journal.index() as index:
                # What was cut has no outcome.
                successes = [head.success for head in index.heads() if head.failure != "cancelled"]
                rewards = [head.reward for head in index.heads() if head.failure is None]
                failures = Counter(head.failure for head in index.heads() if head.failure is not None)
        except ValueError as error:
            raise UsageError(str(error)) from None
        yield {
            "label": label,
            "episodes": len(index),
            "success": fmean(successes) if successes else None,
            "reward": fmean(rewards) if rewards else None,
            "bytes": sum(path.stat().st_size for path in journal.paths),
            "failures": dict(sorted(failures.items())),
        }


def _row(episode: Episode) -> dict[str, Any]:
    try:
        sequences = episode_sequences(episode)
    except MissingTokens:
        sequences = []
    return {
        "id": episode.id,
        "scenario": episode.scenario.id,
        "reward": float(episode.reward),
        "turns": len(episode.turns),
        "tokens": sum(map(len, sequences)) if sequences else None,
        "sampled": sum(sum(sequence.sampled) for sequence in sequences) if sequences else None,
        "end": _end(episode),
    }


def _end(episode: Episode) -> str:
    if episode.failure is not None:
        return f"failed: {episode.failure.kind}"
    if episode.abandoned:
        return "abandoned"
    if episode.truncated:
        return f"truncated: {episode.truncation}"
    return "terminated" if episode.terminated else "unfinished"


def _choose(file: Path, episode_id: str | None) -> tuple[Episode, list[Episode]]:
    """The episode to show, and all of the journal without what was said and sampled."""
    chosen: Episode | None = None
    episodes = []
    for episode in latest(file):
        if episode.id == episode_id or (episode_id is None and chosen is None):
            chosen = episode
        episodes.append(bare(episode))
    if chosen is None:
        some = ", ".join(episode.id for episode in episodes[:3]) + ("…" if len(episodes) > 3 else "")
        raise UsageError(f"{file} holds no episode {episode_id!r}; it holds {some} (art-gym episodes ls {file})")
    return chosen, episodes


def _config(file: Path) -> RunConfig | None:
    """The configuration of the run that wrote the journal; None if it's none of a run.

    Raises:
        UsageError: It can't be read, as another version may have written it.
    """
    path = file.absolute().parent.parent / "config.yaml"
    return RunConfig.load(path) if path.is_file() else None


def _decoder(name: str) -> Decode:
    """The decoder of a model's tokenizer; only of an alias are the weights needed too."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("showing tokens as text", extra="train", package="transformers") from error
    from art_gym_trainers import models

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return token_decoder(AutoTokenizer.from_pretrained(models.tokenizer_source(name)))
    except UsageError as error:
        raise UsageError(f"--tokenizer {name}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        aliases = ", ".join(models.ALIASES)
        raise UsageError(f"--tokenizer {name}: no tokenizer there ({reason}); give {aliases}, a model's folder or a hub id") from None


def _text(line: str, style: str = "") -> Text:
    return Text(_visible(line), style=style)


def _visible(text: str) -> str:
    """Escape what isn't printable, line ends apart: a model may have written what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def _cell(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{count} {kind}" for kind, count in value.items())
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else _visible(str(value))


def _colour(logprob: float) -> str:
    """The less expected a token was, the warmer: over a half likely, over a twentieth, or less."""
    return "green" if logprob > -0.7 else "yellow" if logprob > -3.0 else "red"
