"""How an evaluation reads: on the screen, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art_gym._version import __version__
from art_gym.cli._eval_settings import Settings
from art_gym.cli.files import replacing
from art_gym.comparison import Comparison, Contrast, Difference
from art_gym.evaluation import Evaluation, Spread
from art_gym.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIRST_WORDS = 300
"""So much of a failure's message is shown; all of it is in the journal."""


def summary(result: Comparison) -> str:
    """Write the outcome for the screen: a block for each agent, then how they differ."""
    blocks = ["\n".join(f"{name:<14} {value}" for name, value in _facts(evaluation)) for evaluation in result.evaluations]
    if result.differences:
        blocks.append("\n".join(sentence for difference in result.differences for sentence in _sentences(difference)))
    return "\n\n".join(blocks)


def _facts(result: Evaluation) -> Iterator[tuple[str, str]]:
    yield "environment", result.env_id
    yield "agent", result.agent
    yield "success", str(result)
    if result.k > 1:
        played = f"{len(result.scenarios)} scenarios, {result.k} episodes each"
        yield "over scenarios", f"95% interval {_percents(result.success_interval)}, the one to go by; {played}"
        yield "pass@k", ", ".join(f"{k}: {value:.1%}" for k, value in result.pass_at.items())
        yield "pass^k", ", ".join(f"{k}: {value:.1%}" for k, value in result.pass_hat.items())
    yield "mean reward", f"{result.mean_reward:.3f}" + (f" (95% interval {_numbers(result.reward_interval)})" if result.reward_interval else "")
    turns = result.turns
    yield "mean turns", f"{result.mean_turns:.1f}" + (f" (p50 {turns.p50:.3g}, p90 {turns.p90:.3g}, most {turns.max:.0f})" if turns else "")
    if result.tokens:
        yield "tokens", ", ".join(_tokens(result))
    for name, spread in _latencies(result):
        yield name, f"p50 {_seconds(spread.p50)}, p90 {_seconds(spread.p90)}, p99 {_seconds(spread.p99)}"
    yield "invalid calls", str(result.invalid_calls)
    yield "truncated", _counts(result.truncations)
    yield "failed", f"{_counts(result.failures)}; the first: {result.first_failure}" if result.failures else "0"
    yield "seconds", f"{result.seconds:.0f}"


def markdown(result: Comparison, settings: Settings) -> str:
    """Write the outcome as Markdown: the settings, and a table for each kind of figure."""
    evaluations = result.evaluations
    arguments = ", ".join(f"{key}={value!r}" for key, value in settings.env_kwargs.items())
    each = "once" if settings.k == 1 else f"{settings.k} times"
    several = settings.k > 1
    parts = [
        f"# {settings.env_id}",
        f"{settings.n} scenarios of the {settings.split} split{f' ({arguments})' if arguments else ''}, each played {each}; chat models with "
        f"temperature {settings.temperature:g} and at most {settings.max_tokens} tokens a reply. art_gym {__version__}.",
        "## Success",
        _table(
            ("agent", "success", "of", "95% interval (Wilson)", *(("95% interval (over scenarios)",) if several else ())),
            [
                [e.agent, f"{e.rate:.1%}", str(e.n), _percents(Interval(e.low, e.high)), *((_percents(e.success_interval),) if several else ())]
                for e in evaluations
            ],
        ),
        "Failed episodes count as not successful."
        + (
            " Wilson's interval takes episodes for independent, and those of one scenario aren't: go by the bootstrap over scenarios."
            if several
            else ""
        ),
    ]
    if several:
        ks = list(evaluations[0].pass_at)
        parts += [
            _table(
                ("agent", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks)),
                [[e.agent, *(f"{e.pass_at[k]:.1%}" for k in ks), *(f"{e.pass_hat[k]:.1%}" for k in ks)] for e in evaluations],
            ),
            "pass@k is the chance that at least one of k episodes of a scenario succeeds, pass^k that all of them do; both without bias.",
        ]
    if result.differences:
        parts += ["## Differences", *_differences(result.differences)]
    parts += [
        "## Rewards, turns and tokens",
        _table(
            ("agent", "mean reward", "95% interval", "mean turns", "p50", "p90", "most", "prompt tokens", "sampled tokens", "sampled/s"),
            [_figures(evaluation) for evaluation in evaluations],
        ),
        "Rewards, turns and tokens are those of an episode; rewards and turns leave failed ones out.",
        "## Latency",
        _table(
            ("agent", "what", "mean", "p50", "p90", "p99", "longest"),
            [
                [e.agent, name, *map(_seconds, (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))]
                for e in evaluations
                for name, spread in _latencies(e)
            ],
        ),
        "## How episodes ended",
        _table(
            ("agent", "failed", "truncated", "invalid calls", "seconds"),
            [[e.agent, _counts(e.failures), _counts(e.truncations), str(e.invalid_calls), f"{e.seconds:.0f}"] for e in evaluations],
        ),
        *(f"- {e.agent}, {kind}: {_line(message)}" for e in evaluations for kind, message in e.failure_messages.items()),
    ]
    return "\n\n".join(parts) + "\n"


def draw(result: Comparison, path: Path) -> str:
    """Draw success, pass@k and turns; the picture appears whole or not at all.

    Returns:
        Why there is no picture; empty if there is one.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no {path.name}: it needs the package 'matplotlib', which isn't installed: pip install 'art-gym[train]'"

    evaluations, several = result.evaluations, result.evaluations[0].k > 1
    # The figure's own canvas instead of pyplot: no global state, and no window system is asked for.
    figure = Figure(figsize=(8, 9 if several else 6.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    success, *passes, turns = figure.subplots(3 if several else 2, 1)
    _draw_success(success, evaluations)
    for axes in passes:
        _draw_passes(axes, evaluations)
    _draw_turns(turns, evaluations)
    figure.suptitle(f"{evaluations[0].env_id}, {len(evaluations[0].scenarios)} scenarios, {evaluations[0].k} episodes each")
    with replacing(path) as temporary:
        canvas.print_figure(temporary, format="png")
    return ""


def _draw_success(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    for place, evaluation in enumerate(evaluations):
        interval = Interval(evaluation.low, evaluation.high)
        # Where all scenarios went alike, the bootstrap's is a point.
        if evaluation.k > 1 and evaluation.success_interval and evaluation.success_interval.low < evaluation.success_interval.high:
            interval = evaluation.success_interval
        # A bootstrap's bounds may lie on the wrong side of the rate by a rounding error.
        error = [[max(evaluation.rate - interval.low, 0.0)], [max(interval.high - evaluation.rate, 0.0)]]
        axes.barh([place], [evaluation.rate], xerr=error, capsize=4, color=f"C{place}", alpha=0.7)
    axes.set_yticks(range(len(evaluations)), [evaluation.agent for evaluation in evaluations])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("success, with 95% interval")
    axes.grid(axis="x", alpha=0.3)


def _draw_passes(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    for place, evaluation in enumerate(evaluations):
        axes.plot(list(evaluation.pass_at), list(evaluation.pass_at.values()), "o-", color=f"C{place}", label=f"{evaluation.agent}: pass@k")
        axes.plot(list(evaluation.pass_hat), list(evaluation.pass_hat.values()), "o:", color=f"C{place}", label=f"{evaluation.agent}: pass^k")
    ks = list(evaluations[0].pass_at)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.set_ylim(0, 1)
    axes.set_xlabel("k")
    axes.set_ylabel("at least one of k, all of k")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_turns(axes: Axes, evaluations: Sequence[Evaluation]) -> None:
    width = 0.8 / len(evaluations)
    most = max((turns for evaluation in evaluations for turns in evaluation.turn_counts), default=0)
    for place, evaluation in enumerate(evaluations):
        total = sum(evaluation.turn_counts.values()) or 1
        shift = (place - (len(evaluations) - 1) / 2) * width
        at = [turns + shift for turns in evaluation.turn_counts]
        shares = [count / total for count in evaluation.turn_counts.values()]
        axes.bar(at, shares, width=width, color=f"C{place}", alpha=0.7, label=evaluation.agent)
    axes.set_xticks(sorted({turns for evaluation in evaluations for turns in evaluation.turn_counts})[:: 1 + most // 20])
    axes.set_xlabel("turns of an episode")
    axes.set_ylabel("share of the episodes")
    axes.legend(fontsize="small")
    axes.grid(axis="y", alpha=0.3)


def _sentences(difference: Difference) -> Iterator[str]:
    who = f"{difference.second} against {difference.first}"
    success = difference.success
    yield (
        f"{who}: success {100 * success.difference:+.1f} points (95% interval {100 * success.low:+.1f} to {100 * success.high:+.1f}), "
        f"{_p(success)}, {success.test}; {difference.scenarios} scenarios"
    )
    if reward := difference.reward:
        yield f"{who}: reward {reward.difference:+.3f} (95% interval {reward.low:+.3f} to {reward.high:+.3f}), {_p(reward)}, {reward.test}"


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    adjusted = len(differences) > 1
    rows = []
    for difference in differences:
        for name, contrast in (("success", difference.success), ("reward", difference.reward)):
            if contrast is not None:
                figures = (contrast.difference, contrast.low, contrast.high)
                low, high = (f"{100 * v:+.1f}" if name == "success" else f"{v:+.3f}" for v in figures[1:])
                shown = f"{100 * contrast.difference:+.1f} points" if name == "success" else f"{contrast.difference:+.3f}"
                p = [_p_value(contrast.p), *([_p_value(contrast.adjusted_p)] if adjusted else [])]
                rows.append([f"{difference.second} against {difference.first}", name, shown, f"{low} to {high}", *p, contrast.test])
    yield _table(("agents", "figure", "difference", "95% interval", "p", *(("p, Holm",) if adjusted else ()), "test"), rows)
    yield (
        "Paired by scenario; intervals by bootstrap over scenarios; p two-sided."
        + (" Of several pairs go by p corrected by Holm's method." if adjusted else "")
    )


def _p(contrast: Contrast) -> str:
    corrected = f" ({_p_value(contrast.adjusted_p)} after Holm's correction)" if contrast.adjusted_p != contrast.p else ""
    return f"p = {_p_value(contrast.p)}{corrected}"


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"


def _figures(result: Evaluation) -> list[str]:
    turns, tokens = result.turns, result.tokens
    rate = tokens.completion_per_second if tokens else None
    return [
        result.agent,
        f"{result.mean_reward:.3f}",
        _numbers(result.reward_interval),
        f"{result.mean_turns:.1f}",
        *((f"{turns.p50:.3g}", f"{turns.p90:.3g}", f"{turns.max:.0f}") if turns else ("–", "–", "–")),
        *((f"{tokens.prompt_mean:,.0f}", f"{tokens.completion_mean:,.0f}") if tokens else ("–", "–")),
        f"{rate:,.0f}" if rate is not None else "–",
    ]


def _tokens(result: Evaluation) -> Iterator[str]:
    if tokens := result.tokens:
        yield f"{tokens.prompt:,} of prompts, {tokens.completion:,} sampled"
        yield f"{tokens.prompt_mean:,.0f} and {tokens.completion_mean:,.0f} an episode"
        if tokens.completion_per_second is not None:
            yield f"{tokens.completion_per_second:,.0f} sampled a second"
        if tokens.unknown_turns:
            yield f"unknown of {tokens.unknown_turns:,} turns"


def _latencies(result: Evaluation) -> Iterator[tuple[str, Spread]]:
    for name, spread in (
        ("policy call", result.policy_seconds),
        ("tool step", result.environment_seconds),
        ("episode", result.episode_seconds),
    ):
        if spread is not None:
            yield name, spread


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({kind})" for kind, count in counts.items()) or "0"


def _percents(interval: Interval | None) -> str:
    return f"{interval.low:.1%} to {interval.high:.1%}" if interval else "–"


def _numbers(interval: Interval | None) -> str:
    return f"{interval.low:.3f} to {interval.high:.3f}" if interval else "–"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _FIRST_WORDS else line[:_FIRST_WORDS] + "…"
