"""Where a run stands: what it keeps after each batch of GRPO, what it finds there when it goes on, and whether it may.

A batch's checkpoint is what counts: its manifest holds the batch's row of `metrics.jsonl`, so that the two can't contradict each other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from art_gym._files import write_text
from art_gym._version import __version__
from art_gym.cli.config import RunConfig
from art_gym.cli.report import read_evaluations, read_metrics
from art_gym.errors import RunStopped, UsageError
from art_gym_trainers import alarms, checkpoints
from art_gym_trainers.checkpoints import Checkpoint, Retention

Row = dict[str, Any]

CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"

_PACKAGES = ("torch", "transformers", "peft", "trl")
"""What a checkpoint's next steps depend on."""


def found(config: RunConfig, folder: Path) -> Checkpoint | None:
    """The checkpoint that the run in `folder` goes on from, verified; None where it has none. `metrics.jsonl` is made to end where it does.

    Raises:
        UsageError: It is damaged, or another run's.
        RunStopped: An alarm stopped the run there, and would again.
    """
    saved = checkpoints.latest(folder / CHECKPOINTS)
    if saved is not None and saved.details.get("seed") != config.seed:
        raise UsageError(
            f"{saved.folder} is the checkpoint of a run with seed {saved.details.get('seed')}, and this one's is {config.seed}; "
            "move the folder to where it belongs, to go on from the checkpoint before it"
        )
    rows = _reconciled(folder, saved)
    if rows and "grpo" not in read_evaluations(folder):
        raise_for_alarms(rows[-1]["step"], raised(config, rows[-1], rows))
    return saved


def differing_versions(saved: Checkpoint) -> list[str]:
    """What was installed when the checkpoint was written and is another version now, such as "torch 2.12.0 → 2.13.0"."""
    then, now = saved.details.get("versions", {}), _versions()
    return [f"{name} {then[name]} → {now[name]}" for name in now if name in then and then[name] != now[name]]


def keep(config: RunConfig, folder: Path, row: Row, *, save: Callable[[Path], None], details: Mapping[str, Any]) -> list[alarms.Alarm]:
    """Keep a trained batch: its checkpoint, then its row in `metrics.jsonl`, then none of the checkpoints that no rule keeps.

    Args:
        config: The run's.
        folder: The run's.
        row: The batch's figures; gets its alarms, and null for what is no finite number.
        save: Writes what training needs to go on into a folder.
        details: Noted in the manifest.

    Returns:
        The alarms that the batch raised.
    """
    alarmed = raised(config, row, [*read_metrics(folder), row])
    row["alarms"] = [alarm.to_dict() for alarm in alarmed]
    row.update(_finite(row))
    noted = {**details, "seed": config.seed, "versions": _versions(), "metrics": row}
    with checkpoints.writing(folder / CHECKPOINTS, row["step"], noted, needs=checkpoints.GRPO_STATE) as scratch:
        save(scratch)
    _append_line(folder / METRICS, row)
    # A batch that stops the run may have spoilt the policy: then the checkpoints before it are what is left.
    if not any(alarm.stops for alarm in alarmed):
        settings = config.checkpoints
        retention = Retention(settings.keep_last, settings.keep_best, settings.goal, settings.keep_every, settings.max_age_hours)
        checkpoints.prune(folder / CHECKPOINTS, retention, scores(config, folder))
    return alarmed


def scores(config: RunConfig, folder: Path) -> dict[int, float | None]:
    """How well the policy of each checkpoint played, by step: the batch after it tells."""
    return {row["step"] - 1: row.get(config.checkpoints.metric) for row in read_metrics(folder)}


def raised(config: RunConfig, row: Row, rows: list[Row]) -> list[alarms.Alarm]:
    """The alarms of a batch of the run whose rows are given."""
    limits = {name: alarms.Limits(section.warn, section.stop) for name, section in config.alarms}
    first = next((other for other in rows if other.get("entropy") is not None), row)
    return alarms.check(row, first, limits)


def raise_for_alarms(batch: int, alarmed: list[alarms.Alarm]) -> None:
    """End the run if one of a batch's alarms says so.

    Raises:
        RunStopped: One does.
    """
    if stopping := [alarm for alarm in alarmed if alarm.stops]:
        ways = " ".join(f"--set alarms.{alarm.name}.stop=null" for alarm in stopping)
        told = "; ".join(alarm.message for alarm in stopping)
        raise RunStopped(f"stopped after batch {batch}: {told}; to go on all the same: --resume {ways}, or with another limit")


def _reconciled(folder: Path, saved: Checkpoint | None) -> list[Row]:
    """Make `metrics.jsonl` end where the checkpoint does: rows after it will be made again, a row lost by a kill is in its manifest."""
    rows = [row for row in read_metrics(folder) if saved and row["step"] <= saved.step]
    if saved and not any(row["step"] == saved.step for row in rows):
        rows.append(dict(saved.details["metrics"]))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if (folder / METRICS).exists() or text:
        write_text(folder / METRICS, text)
    return rows


def _versions() -> dict[str, str]:
    return {"art_gym": __version__, **{package: version(package) for package in _PACKAGES}}


def _finite(row: Mapping[str, Any]) -> Row:
    """The row as JSON can hold it: a NaN is no figure."""
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _finite(value)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _append_line(path: Path, row: Row) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
