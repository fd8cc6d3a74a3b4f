"""`art-gym check`: the conformance suite on one environment, as a table and a text for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from art_gym._files import write_text
from art_gym.cli.run_folder import check_writable
from art_gym.errors import UsageError
from art_gym.testing.conformance import CHECKS, CheckResult, run_checks


def run(env_id: str, *, examples: int, seed: int | None, skip: list[str], script: Path | None) -> None:
    """Check the environment, print the results, and write the reproducing script, if there is one, to `script`.

    Raises:
        UsageError: The environment can't be made, there is no check of a name to skip, or the script can't be written there; nothing was
            checked.
        typer.Exit: With code 1: a check failed.
    """
    if script is not None:
        if script.is_dir():
            raise UsageError(f"{script} is a folder; give a file to --script")
        check_writable(script.parent, option="--script")
    console = Console()
    results: list[CheckResult] = []
    with console.status(f"checking {escape(env_id)} …") as status:
        for result in run_checks(env_id, examples=examples, seed=seed, skip=skip):
            results.append(result)
            status.update(f"checking {escape(env_id)}: {len(results)} of {len(CHECKS)} done …")
    failed = [result for result in results if result.problem]
    console.print(_table(results))
    for result in failed:
        typer.echo(f"\n{result.check}: {result.problem}")
    if script is not None and (found := next((result.script for result in failed if result.script), "")):
        script.parent.mkdir(parents=True, exist_ok=True)
        write_text(script, found)
        typer.echo(f"\nThe script that reproduces it is in {script}")
    if failed:
        typer.echo(f"\n{len(failed)} of {sum(not result.skipped for result in results)} checks failed")
        raise typer.Exit(1)


def _table(results: list[CheckResult]) -> Table:
    table = Table("check", "result", "seconds", "what was done", box=None, padding=(0, 2, 0, 0))
    for result in results:
        verdict = "[yellow]skipped[/yellow]" if result.skipped else "[green]passed[/green]" if result.passed else "[red]failed[/red]"
        table.add_row(result.check, verdict, "" if result.skipped else f"{result.seconds:.1f}", escape(result.note))
    return table
