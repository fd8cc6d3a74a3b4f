"""The registered environments, as the command line lists them."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass
from typing import Any

import gymnasium
import typer
from gymnasium.envs.registration import load_env_creator
from rich.console import Console
from rich.table import Table

from art_gym.registration import env_ids


@dataclass(frozen=True, slots=True)
class Listing:
    """What is said about one environment."""

    id: str
    summary: str
    kwargs: dict[str, Any]


def listings() -> list[Listing]:
    """Describe every registered environment, by id."""
    return [_listing(env_id) for env_id in env_ids()]


def show(*, as_json: bool) -> None:
    """Print the environments, as a table or as JSON."""
    found = listings()
    if as_json:
        typer.echo(json.dumps([asdict(listing) for listing in found], indent=2, default=repr))
        return
    table = Table("id", "what it is", "arguments", box=None, padding=(0, 2, 0, 0))
    for listing in found:
        table.add_row(listing.id, listing.summary, " ".join(f"{name}={value!r}" for name, value in listing.kwargs.items()))
    Console().print(table)


def _listing(env_id: str) -> Listing:
    spec = gymnasium.spec(env_id)
    creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    summary = (inspect.getdoc(creator) or "").split("\n", 1)[0]
    # What every Gymnasium environment takes says nothing about this one.
    parameters = [parameter for name, parameter in inspect.signature(creator).parameters.items() if name != "render_mode"]
    kwargs = {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
    return Listing(env_id, summary, {**kwargs, **spec.kwargs})
