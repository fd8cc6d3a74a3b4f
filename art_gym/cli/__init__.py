"""The command line, `art-gym`.

The commands compose the framework with environments, agents and trainers by name, and import what is heavy only when it is needed: `--help`,
`envs` and errors answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 for success, 1 for a run that failed, 2 for a wrong request, 130 for Ctrl-C.

    Args:
        arguments: Without the program's name; those of the process if not given.
    """
    from art_gym.cli.app import run

    return run(arguments)
