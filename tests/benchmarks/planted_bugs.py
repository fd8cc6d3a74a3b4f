"""How surely and how fast `check_transitions` finds bugs: every planted one, in many randomised runs.

    python tests/benchmarks/planted_bugs.py --runs 20 --examples 300

Prints a Markdown table. Each run draws its examples anew and starts in a process of its own that has imported everything, as a test in a suite
does. "Seconds" is the time of the call that finds the bug, shrinking and naming included; correct environments are timed as well.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from art_gym.testing import TransitionViolation, check_transitions

FOLDER = Path(__file__).parents[1] / "testing"
"""Where the package of planted bugs lies."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `check_transitions`; `invariant` is "" where nothing was found."""

    invariant: str
    actions: int
    seconds: float


def load() -> Any:
    sys.path.insert(0, str(FOLDER))
    return importlib.import_module("planted")


def run_once(name: str, examples: int) -> Run:
    cls = getattr(sys.modules["planted"], name)
    began = time.perf_counter()
    try:
        check_transitions(cls, examples=examples)
    except TransitionViolation as violation:
        return Run(violation.invariant, len(violation.actions), time.perf_counter() - began)
    return Run("", 0, time.perf_counter() - began)


def run_many(name: str, examples: int, runs: int) -> list[Run]:
    results = []
    for _ in range(runs):
        # What a class remembers would be found in the first run only.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            results.append(pool.apply(run_once, (name, examples)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs for each bug (default 20)")
    parser.add_argument("--examples", type=int, default=300, help="examples of a run (default 300)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this bug only; may be given several times")
    options = parser.parse_args()
    planted = load()
    names = [cls.__name__ for cls in planted.PLANTED if not options.only or cls.__name__ in options.only]
    if options.only and len(names) < len(set(options.only)):
        parser.error(f"unknown bug; there are: {', '.join(cls.__name__ for cls in planted.PLANTED)}")
    print("| bug | found | right name | median actions | max actions | median seconds | invariant |")
    print("|---|---|---|---|---|---|---|")
    everything: list[Run] = []
    for name in names:
        results = run_many(name, options.examples, options.runs)
        everything += results
        found = [run for run in results if run.invariant]
        right = sum(run.invariant in planted.PLANTED[getattr(planted, name)] for run in found)
        named = ", ".join(f"{invariant} ({count})" for invariant, count in Counter(run.invariant for run in found).most_common())
        sizes = [run.actions for run in found] or [0]
        seconds = median(run.seconds for run in results)
        print(
            f"| {name} | {len(found)}/{options.runs} | {right} | {median(sizes):g} | {max(sizes)} | {seconds:.2f} | {named} |",
            flush=True,
        )
    if everything:
        found_share = sum(bool(run.invariant) for run in everything)
        print(f"\nFound {found_share} of {len(everything)}; median {median(run.seconds for run in everything):.2f} s.")
    if not options.only:
        print("\n| correct environment | false alarms | median seconds |\n|---|---|---|")
        for cls in planted.CORRECT:
            results = run_many(cls.__name__, options.examples, options.runs)
            alarms = sum(bool(run.invariant) for run in results)
            print(f"| {cls.__name__} | {alarms}/{options.runs} | {median(run.seconds for run in results):.2f} |", flush=True)


if __name__ == "__main__":
    main()
