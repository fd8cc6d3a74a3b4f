"""What a run leaves for its reader: `report.md`, `curve.png`, and the before/after table on the screen.

Everything is derived from the files in the run's folder (`config.yaml`, `metrics.jsonl`, `evaluations.json`), so that a report can be written
again at any time, of an unfinished run too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from art_gym._files import replacing, write_text
from art_gym._version import __version__
from art_gym.cli.config import RunConfig
from art_gym.cli.live import COLUMNS, cell, clock
from art_gym.errors import MissingExtra, UsageError
from art_gym.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES: Mapping[str, str] = {"untrained": "untrained model", "warm_start": "after warm start", "grpo": "after GRPO"}
"""The evaluations of the before/after table: their keys in `evaluations.json`, and what they are called."""

SECONDS: Mapping[str, str] = {
    "seconds_rollout": "rollouts",
    "seconds_train": "training",
    "seconds_publish": "publishing",
}
"""Keys of a step's phases in `metrics.jsonl`, and what they are called."""


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of `metrics.jsonl` in order; empty if there is none. A last line that a kill tore is left out.

    Raises:
        UsageError: Another line is no JSON.
    """
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise UsageError(f"{folder / 'metrics.jsonl'} is damaged: line {number} isn't JSON; mend or remove it") from None
    return rows


def read_evaluations(folder: Path) -> dict[str, Evaluation]:
    """Read `evaluations.json`; empty if there is none.

    Raises:
        UsageError: It holds something else.
    """
    path = folder / "evaluations.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: Evaluation.from_dict(value) for key, value in data.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, KeyError, TypeError):
        raise UsageError(f"{path} is damaged; remove it, and the run measures anew what its journals don't hold") from None


def before_after_table(evaluations: Mapping[str, Evaluation]) -> Table:
    """Build the table that a run ends with; it fits a screen of 80 columns."""
    counts = " or ".join(sorted({str(result.n) for result in evaluations.values()}))
    table = Table(title=f"Success on {counts} held-out scenarios", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("policy", "success", "95% interval", "reward", "turns", "invalid", "failed"):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for policy, success, interval, _, *rest in _before_after_rows(evaluations):
        table.add_row(policy, success, interval, *rest)
    return table


def write_report(folder: Path) -> Path:
    """Write `report.md` and `curve.png` into a run's folder, each atomically.

    Returns:
        The path of `report.md`.

    Raises:
        MissingExtra: matplotlib isn't installed.
        UsageError: `config.yaml` is missing or not valid.
    """
    config = RunConfig.load(folder / "config.yaml")
    steps = [row for row in read_metrics(folder) if row.get("phase", "grpo") == "grpo"]
    evaluations = read_evaluations(folder)
    parts = [
        f"# {folder.name}",
        f"{config.model.name} on {config.env.id}{_kwargs(config)}, seed {config.seed}, art_gym {__version__}.",
        "## Success on held-out scenarios",
        f"{config.evaluation.n} scenarios of the {config.evaluation.split} split, the same for every row; none of them was trained on.",
        evaluation_table(evaluations),
        verdict(evaluations),
    ]
    if steps:
        _draw(folder / "curve.png", steps, evaluations)
        parts += [
            "## Learning curve",
            "![success, entropy and logprob difference by batch](curve.png)",
            _markdown_table(
                [column.heading for column in COLUMNS if any(column.key in row for row in steps)],
                [[cell(row, column) for column in COLUMNS if any(column.key in other for other in steps)] for row in steps],
            ),
            *_alarms(steps),
            *_sampler_against_trainer(steps, config),
            *_where_the_time_went(steps, evaluations),
        ]
    parts += ["## Configuration", f"```yaml\n{(folder / 'config.yaml').read_text(encoding='utf-8').strip()}\n```"]
    path = folder / "report.md"
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def evaluation_table(evaluations: Mapping[str, Evaluation]) -> str:
    """Build the same table in Markdown."""
    headings = ("policy", "success", "95% interval", "of", "reward", "turns", "invalid calls", "failed")
    return _markdown_table(headings, _before_after_rows(evaluations))


def verdict(evaluations: Mapping[str, Evaluation]) -> str:
    """Say in one sentence whether GRPO's interval lies above the warm start's; empty if one of them is missing."""
    before, after = evaluations.get("warm_start") or evaluations.get("untrained"), evaluations.get("grpo")
    if not before or not after:
        return ""
    name = STAGES["warm_start" if "warm_start" in evaluations else "untrained"]
    if after.low > before.high:
        return f"GRPO's whole interval lies above that of the policy it began with ({name}): {after.low:.1%} > {before.high:.1%}."
    return f"GRPO's interval does not lie above that of the policy it began with ({name}): {after.low:.1%} ≤ {before.high:.1%}."


def _before_after_rows(evaluations: Mapping[str, Evaluation]) -> list[list[str]]:
    # The three stages first and in their order; evaluations in between, such as "grpo@8", keep the run's order.
    order = [key for key in STAGES if key in evaluations and key != "grpo"]
    order += [key for key in evaluations if key not in STAGES]
    order += ["grpo"] if "grpo" in evaluations else []
    rows = []
    for key in order:
        result = evaluations[key]
        failed = sum(result.failures.values())
        rows.append(
            [
                STAGES.get(key, key),
                f"{result.rate:.1%}",
                f"{result.low:.1%} to {result.high:.1%}",
                str(result.n),
                f"{result.mean_reward:.3f}",
                f"{result.mean_turns:.1f}",
                str(result.invalid_calls),
                str(failed),
            ]
        )
    return rows


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "None yet."
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _kwargs(config: RunConfig) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in config.env.kwargs.items())
    return f" ({values})" if values else ""


def _alarms(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the alarms said, each once with its latest figure; empty for a run of before there were any."""
    if not any("alarms" in row for row in steps):
        return []
    raised: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for row in steps:
        for alarm in row.get("alarms") or []:
            raised.setdefault(alarm["name"], []).append((row["step"], alarm))
    lines = []
    for alarms in raised.values():
        batches = ", ".join(str(step) for step, _ in alarms)
        stopped = f"; it stopped the run after batch {alarms[-1][0]}" if alarms[-1][1]["stops"] else ""
        lines.append(f"- Batch{'es' if len(alarms) > 1 else ''} {batches}{stopped}. {alarms[-1][1]['message']}")
    return ["## Alarms", "\n".join(lines) or "None."]


def _sampler_against_trainer(steps: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    measured = [(row["step"], row["logprob_difference"]) for row in steps if row.get("logprob_difference") is not None]
    if not measured:
        return []
    largest = max(measured, key=lambda pair: pair[1])
    return [
        "## Sampler against trainer",
        "The mean absolute difference between the log-probability of a sampled token in vLLM and in the trainer, before the batch's first "
        f"optimiser step: {measured[0][1]:.4f} at step {measured[0][0]}, {measured[-1][1]:.4f} at step {measured[-1][0]}, "
        f"largest {largest[1]:.4f} at step {largest[0]}.",
        "The two compute the same model with different code. The difference grows as the adapter does where the engine's precision rounds "
        "merged updates away; with engine.dtype auto a CPU engine serves float32 for that reason. "
        f"In this run engine.dtype is {config.engine.dtype} and model.dtype, the trainer's base, {config.model.dtype}.",
    ]


def _where_the_time_went(steps: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Evaluation]) -> list[str]:
    totals = {name: sum(row.get(key) or 0.0 for row in steps) for key, name in SECONDS.items()}
    totals["evaluation"] = sum(result.seconds for result in evaluations.values())
    rows = [[name, clock(seconds)] for name, seconds in totals.items() if seconds]
    return ["## Where the time went", _markdown_table(("phase", "min:s"), rows)] if rows else []


def _draw(path: Path, steps: Sequence[Mapping[str, Any]], evaluations: Mapping[str, Evaluation]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("the learning curve", extra="train", package="matplotlib") from None

    # The figure's own canvas instead of pyplot: no global state, and no window system is asked for.
    figure = Figure(figsize=(8, 8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    success, entropy, difference = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 1])

    _line(success, steps, "success_rate", "success in training batches", marker="o")
    _line(success, steps, "reward", "mean reward in training batches", linestyle=":")
    last = max(row["step"] for row in steps)
    for key, at, colour in (("untrained", 0, "tab:gray"), ("warm_start", 0, "tab:orange"), ("grpo", last, "tab:green")):
        if result := evaluations.get(key):
            label = f"{STAGES[key]}, held out: {result.rate:.1%}"
            error = [[result.rate - result.low], [result.high - result.rate]]
            success.errorbar([at], [result.rate], yerr=error, fmt="s", color=colour, capsize=4, label=label)
    success.set_ylabel("success, reward")
    success.legend(fontsize="small")

    _line(entropy, steps, "entropy", "entropy")
    entropy.set_ylabel("entropy (nats)")
    _line(difference, steps, "logprob_difference", "mean |Δ logprob|")
    difference.set_ylabel("|Δ logprob|")
    difference.set_ylim(bottom=0)
    difference.set_xlabel("batch")
    for axes in (success, entropy, difference):
        axes.grid(alpha=0.3)

    with replacing(path) as temporary:
        canvas.print_figure(temporary, format="png")


def _line(axes: Axes, steps: Sequence[Mapping[str, Any]], key: str, label: str, **style: Any) -> None:
    points = [(row["step"], row[key]) for row in steps if row.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
