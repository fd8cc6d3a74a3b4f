"""Lines: an episode as one line of JSON, and files that are made of such lines."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from art_gym.episodes import Episode, Failure

_NUMBERS = ("prompt_ids", "completion_ids", "logprobs")
_JSON, _ASCII = (json.JSONEncoder(ensure_ascii=ascii, allow_nan=False, separators=(",", ":")) for ascii in (False, True))


def encode(episode: Episode) -> bytes:
    """Return the episode as one line of JSON.

    Raises:
        ValueError: It can't be written: NaN or infinity in it, or an object that JSON doesn't know.
    """
    data = episode.to_dict()
    try:
        try:
            return _line(data, _JSON)
        except UnicodeEncodeError:
            # A lone surrogate, which a model can write as a JSON escape, has no UTF-8 form.
            return _line(data, _ASCII)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"episode {episode.id!r} can't be written as JSON: {error}") from error


def _line(data: Mapping[str, Any], json_encoder: json.JSONEncoder) -> bytes:
    turns = b",".join(_turn(turn, json_encoder) for turn in data["turns"])
    rest = json_encoder.encode({name: value for name, value in data.items() if name != "turns"}).encode()
    return b'%b,"turns":[%b]}\n' % (rest[:-1], turns)


def _turn(turn: Mapping[str, Any], json_encoder: json.JSONEncoder) -> bytes:
    """Encode a turn; the long lists of numbers, most of an episode, in a tenth of the time that json takes."""
    numbers = {name: turn[name] for name in _NUMBERS}
    try:
        # msgspec would write NaN and infinity as null.
        if not all(value is None or _is_finite(value) for value in numbers.values()):
            raise ValueError("a token id or a log-probability isn't finite")
        encoded = msgspec.json.encode(numbers)
    except (TypeError, OverflowError):  # not numbers, or such as only json knows
        return json_encoder.encode(turn).encode()
    rest = json_encoder.encode({name: value for name, value in turn.items() if name not in _NUMBERS}).encode()
    return b"%b,%b" % (rest[:-1], encoded[1:])


def _is_finite(values: list[float]) -> bool:
    # The sum is quick, and of large figures infinite.
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))


def encode_or_failed(episode: Episode) -> bytes:
    """Return the episode as one line of JSON; one that can't be written becomes a failed one, without its turns."""
    try:
        return encode(episode)
    except ValueError as error:
        episode.failure = Failure("environment", str(error))
        return encode(replace(episode, tools=[], turns=[], final_observation=[], metrics={}))


def read_lines(file: BinaryIO, path: Path, start: int = 0) -> Iterator[tuple[int, Episode]]:
    """Yield the offset and the episode of each line from the offset `start` on.

    A last line that was cut short is left out: it has no end, or its bytes never reached the disk.

    Raises:
        ValueError: A line before the last is damaged, or one is no episode that this version reads.
    """
    file.seek(0)
    end = 0
    torn: tuple[int, ValueError] | None = None
    for number, line in enumerate(file, start=1):
        offset, end = end, end + len(line)
        if offset < start:
            continue
        if not line.endswith(b"\n"):
            return
        if torn is not None:
            raise ValueError(f"{path}, line {torn[0]} is damaged: {torn[1]}") from torn[1]
        try:
            data = json.loads(line)
        except ValueError as error:
            torn = number, error
            continue
        try:
            episode = Episode.from_dict(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is no episode that this version of art_gym reads: {error}") from error
        yield offset, episode


def read_line(file: BinaryIO, offset: int) -> Episode:
    """Read the episode whose line begins at an offset that `read_lines` gave."""
    file.seek(offset)
    return Episode.from_dict(json.loads(file.readline()))


def whole_lines(file: BinaryIO) -> int:
    """Measure the file without a last line that was cut short."""
    size = _line_start(file, file.seek(0, os.SEEK_END))
    start = _line_start(file, max(size - 1, 0))
    file.seek(start)
    try:
        json.loads(file.read(size - start) or b"{}")
    except ValueError:
        return start
    return size


def _line_start(file: BinaryIO, end: int, block: int = 1 << 16) -> int:
    """Find the offset just after the last line feed before `end`; 0 if there is none."""
    while end > 0:
        start = max(end - block, 0)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
