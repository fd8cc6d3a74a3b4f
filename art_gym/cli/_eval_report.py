"""How an evaluation reads: on the screen, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from art_gym._files import replacing
from art_gym._version import __version__
from art_gym.cli._eval_settings import Settings
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
    if result.unfinished:
        blocks.append("\n".join(_unfinished(result)))
    return "\n\n".join(blocks)


def _facts(result: Evaluation) -> Iterator[tuple[str, str]]:
    yield "environment", result.env_id
    yield "agent", result.agent
    if played_by := _played_by(result):
        yield "played by", played_by
    yield "success", str(result)
    if result.k > 1:
        yield "scenarios", f"{len(result.scenarios)}, {result.k} episodes each, which say as much as {result.effective_n:.0f} independent ones"
        yield "pass@k", ", ".join(f"{k}: {_passes(result.pass_at, result.pass_at_interval, k)}" for k in result.pass_at)
        yield "pass^k", ", ".join(f"{k}: {_passes(result.pass_hat, result.pass_hat_interval, k)}" for k in result.pass_hat)
    yield "mean reward", f"{result.mean_reward:.3f}" + (f" (95% interval {_numbers(result.reward_interval)})" if result.reward_interval else "")
    turns = result.turns
    yield "mean turns", f"{result.mean_turns:.1f}" + (f" (p50 {turns.p50:.3g}, p90 {turns.p90:.3g}, most {turns.max:.0f})" if turns else "")
    if result.tokens:
        yield "tokens", ", ".join(_tokens(result))
    for name, spread, cut_off in _latencies(result):
        yield name, ", ".join([*(f"{figure} {_latency(spread, figure)}" for figure in ("p50", "p90", "p99") if spread), *_cut_off(cut_off)])
    yield "invalid calls", str(result.invalid_calls)
    yield "truncated", _counts(result.truncations)
    yield "failed", f"{_counts(result.failures)}; the first: {result.first_failure}" if result.failures else "0"
    if result.replayed:
        yield "attempts", f"{result.attempts} at {result.n} episodes; played again after they had failed: {_counts(result.replayed)}"
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
        *([_table(("agent", "played by"), [[e.agent, _played_by(e)] for e in evaluations])] if any(map(_played_by, evaluations)) else []),
        *_unfinished(result),
        "## Success",
        _table(
            ("agent", "success", "of", "95% interval", *(("effective episodes",) if several else ())),
            [[e.agent, f"{e.rate:.1%}", str(e.n), _percents(e.interval), *((f"{e.effective_n:.0f}",) if several else ())] for e in evaluations],
        ),
        "A success is what the environment's metric `success` says, else a positive return; failed episodes count as not successful. The "
        "interval is Wilson's"
        + (", with the number of independent episodes that say as much, since those of one scenario resemble one another." if several else "."),
    ]
    if several:
        ks = list(evaluations[0].pass_at)
        parts += [
            _table(
                ("agent", *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks)),
                [
                    [
                        e.agent,
                        *(_passes(e.pass_at, e.pass_at_interval, k) for k in ks),
                        *(_passes(e.pass_hat, e.pass_hat_interval, k) for k in ks),
                    ]
                    for e in evaluations
                ],
            ),
            "pass@k is the chance that at least one of k episodes of a scenario succeeds, pass^k that all of them do; both without bias. In "
            "brackets the 95% interval, by bootstrap over scenarios.",
        ]
    if result.differences:
        parts += ["## Differences", *_differences(result.differences)]
    parts += [
        "## Rewards, turns and tokens",
        _table(
            ("agent", "mean reward", "95% interval", "mean turns", "p50", "p90", "most", "prompt tokens", "sampled tokens", "sampled/s"),
            [_figures(evaluation) for evaluation in evaluations],
        ),
        "Rewards, turns and tokens are those of an episode; rewards and turns leave failed ones out. The interval is Student's over scenarios.",
        "## Latency",
        _table(
            ("agent", "what", "mean", "p50", "p90", "p99", "longest", "cut off"),
            [
                [e.agent, name, *(_latency(spread, figure) for figure in ("mean", "p50", "p90", "p99", "max")), str(cut_off)]
                for e in evaluations
                for name, spread, cut_off in _latencies(e)
            ],
        ),
        "What failed or timed out was cut off, and counts as long as the longest that was measured: figures with ≥ are at least so much.",
        "## How episodes ended",
        _table(
            ("agent", "failed", "attempts", "failed before", "truncated", "invalid calls", "seconds"),
            [
                [
                    e.agent,
                    _counts(e.failures),
                    str(e.attempts),
                    _counts(e.replayed),
                    _counts(e.truncations),
                    str(e.invalid_calls),
                    f"{e.seconds:.0f}",
                ]
                for e in evaluations
            ],
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
        interval = evaluation.interval
        # A bound may lie on the wrong side of the rate by a rounding error.
        error = [[max(evaluation.rate - interval.low, 0.0)], [max(interval.high - evaluation.rate, 0.0)]]
        axes.barh([place], [evaluation.rate], xerr=error, capsize=4, color=f"C{place}", alpha=0.7)
    axes.set_yticks(range(len(evaluations)), [evaluation.agent for evaluation in evaluations])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("success, with 95% interval")
    axes.grid(axis="x", alpha=0.3)


def _passes(rates: Mapping[int, float], intervals: Mapping[int, Interval], k: int) -> str:
    return f"{rates[k]:.1%}" + (f" ({_percents(intervals[k])})" if k in intervals else "")


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
    for name, contrast in _contrasts(difference):
        left_out = f"; {_left_out(difference)}" if name == "reward" and any(difference.left_out) else ""
        tested = f"{_p(contrast)}, {contrast.test}" if contrast.p is not None else contrast.test
        yield (f"{who}: {name} {_difference(name, contrast)} ({_bounds(name, contrast)}), {tested}; {contrast.scenarios} scenarios{left_out}")


def _differences(differences: Sequence[Difference]) -> Iterator[str]:
    adjusted = len(differences) > 1
    rows = []
    for difference in differences:
        for name, contrast in _contrasts(difference):
            p = [_p_value(contrast.p), *([_p_value(contrast.adjusted_p)] if adjusted else [])]
            who = f"{difference.second} against {difference.first}"
            interval = _bounds(name, contrast).removeprefix("95% interval ")
            rows.append([who, name, _difference(name, contrast), interval, *p, str(contrast.scenarios), contrast.test])
    yield _table(("agents", "figure", "difference", "95% interval", "p", *(("p, Holm",) if adjusted else ()), "scenarios", "test"), rows)
    yield (
        "Paired by scenario; p two-sided. No interval says more than the test beside it."
        + (" Of several pairs go by p corrected by Holm's method." if adjusted else "")
    )
    for difference in differences:
        if any(difference.left_out):
            yield f"- {difference.second} against {difference.first}: {_left_out(difference)}"


def _contrasts(difference: Difference) -> Iterator[tuple[str, Contrast]]:
    yield "success", difference.success
    if difference.reward is not None:
        yield "reward", difference.reward


def _difference(name: str, contrast: Contrast) -> str:
    return f"{100 * contrast.difference:+.1f} points" if name == "success" else f"{contrast.difference:+.3f}"


def _bounds(name: str, contrast: Contrast) -> str:
    if contrast.low is None or contrast.high is None:
        return "no interval"
    low, high = (f"{100 * bound:+.1f}" if name == "success" else f"{bound:+.3f}" for bound in (contrast.low, contrast.high))
    return f"95% interval {low} to {high}"


def _left_out(difference: Difference) -> str:
    counts = " and ".join(f"{left} of {played}" for left, played in zip(difference.left_out, difference.episodes, strict=True))
    return f"without reward, failed or unpaired: {counts} episodes"


def _unfinished(result: Comparison) -> list[str]:
    return [f"{_cell(name)} came to no end: {_line(why)}" for name, why in result.unfinished.items()]


def _played_by(result: Evaluation) -> str:
    """What is known of an agent that isn't its name already."""
    facts = [(key, value) for key, value in result.played_by.items() if value is not None and (key, value) != ("spec", result.agent)]
    facts.sort(key=lambda fact: fact[0] != "spec")
    return ", ".join(str(value) if key == "spec" else f"{key} {value}" for key, value in facts)


def _p(contrast: Contrast) -> str:
    corrected = f" ({_p_value(contrast.adjusted_p)} after Holm's correction)" if contrast.adjusted_p != contrast.p else ""
    return f"p = {_p_value(contrast.p)}{corrected}"


def _p_value(p: float | None) -> str:
    if p is None:
        return "–"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}" if p else "<1e-300"


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


def _latencies(result: Evaluation) -> Iterator[tuple[str, Spread | None, int]]:
    """What took how long, and how many of it were cut off."""
    for name, spread, cut_off in (
        ("policy call", result.policy_seconds, result.cut_calls),
        ("tool step", result.environment_seconds, result.cut_steps),
        ("episode", result.episode_seconds, result.failed),
    ):
        if spread is not None or cut_off:
            yield name, spread, cut_off


def _latency(spread: Spread | None, figure: str) -> str:
    if spread is None:
        return "–"
    return ("≥ " if spread.is_bound(figure) else "") + _seconds(getattr(spread, figure))


def _cut_off(count: int) -> Iterator[str]:
    if count:
        yield f"{count} cut off"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


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
