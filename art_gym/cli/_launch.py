"""`art-gym train`: from the options to a validated configuration, a claimed folder, the run, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from art_gym.cli import preflight, run_folder
from art_gym.cli.config import RunConfig, recipe
from art_gym.cli.live import LiveTable
from art_gym.cli.report import before_after_table, verdict
from art_gym.cli.values import merge, parse_assignments, read_yaml
from art_gym.errors import UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for, as the command line gave it; None and empty where nothing was said."""

    env_id: str | None = None
    model: str | None = None
    config: Path | None = None
    run_dir: Path | None = None
    seed: int | None = None
    env: Sequence[str] = ()
    assignments: Sequence[str] = ()


def configure(request: Request, *, resume: bool = False) -> tuple[RunConfig, Path]:
    """Work out the whole configuration and the run's folder.

    What is laid over what, each over the one before: the defaults; the file of `--config`, or the run's own configuration when it is resumed,
    or the bundled recipe of the environment; the options.

    Raises:
        UsageError: Something is missing, unknown or not valid.
    """
    options = merge(_options(request), parse_assignments(request.assignments))
    folder = request.run_dir
    if request.config:
        base = read_yaml(request.config)
    elif resume:
        folder = folder or _default_folder(_env_id(options), options.get("seed", 0))
        base = run_folder.saved_config(folder).model_dump(mode="json")
    else:
        base = recipe(_env_id(options))
    source = str(request.config) if request.config and not options else "configuration"
    config = RunConfig.from_values(merge(base, options), source)
    return config, run_folder.named(folder or _default_folder(config.env.id, config.seed))


def run(request: Request, *, resume: bool, fresh: bool, show_config: bool) -> None:
    """Check everything, train, and report.

    Raises:
        UsageError: It can't be done; nothing was started and nothing is left.
        EngineError: The engine could not be started, or died.
    """
    config, folder = configure(request, resume=resume)
    if show_config:
        typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
        return
    run_folder.check(folder, config, resume=resume, fresh=fresh)
    model_folder = preflight.check_training(config, progress=lambda line: typer.echo(line, err=True))
    with run_folder.claim(folder, config, resume=resume, fresh=fresh), LiveTable(f"{config.model.name} on {config.env.id}, {folder}") as live:
        live.phase("loading", "torch and TRL")
        _quieten()
        from art_gym.cli._train import run_training

        evaluations = run_training(config, folder, model_folder=model_folder, live=live)
    console = Console()
    console.print(before_after_table(evaluations))
    console.print(verdict(evaluations), highlight=False)
    console.print(f"report: {folder / 'report.md'}", highlight=False, soft_wrap=True)


def _quieten() -> None:
    """Keep the libraries' own bars and warnings off the screen, which shows the run."""
    import warnings

    # TRL warns of every vLLM outside its own range when it is imported; nothing here reaches vLLM through TRL.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions", category=UserWarning)
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def _options(request: Request) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if request.env_id is not None:
        given = merge(given, {"env": {"id": request.env_id}})
    if request.env:
        given = merge(given, {"env": {"kwargs": parse_assignments(request.env, "--env")}})
    if request.model is not None:
        given = merge(given, {"model": {"name": request.model}})
    if request.seed is not None:
        given = merge(given, {"seed": request.seed})
    return given


def _env_id(options: dict[str, Any]) -> str:
    section = options.get("env")
    env_id = section.get("id") if isinstance(section, dict) else None
    if not isinstance(env_id, str):
        raise UsageError("which environment? give its id, such as art_gym/Lookup-v0 (`art-gym envs` lists them), or a --config that names it")
    return env_id


def _default_folder(env_id: str, seed: Any) -> Path:
    return Path("runs") / f"{env_id.rsplit('/', maxsplit=1)[-1].rsplit(':', maxsplit=1)[-1]}-seed{seed}"
