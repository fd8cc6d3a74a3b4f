"""Checking the options of a task, with errors that name the option and what it may be."""

from __future__ import annotations


def check_integer(name: str, value: object, least: int | None = None, most: int | None = None) -> None:
    """Check that an option is an integer within limits, both inclusive.

    >>> check_integer("people", 0, 1, 32)
    Traceback (most recent call last):
    ...
    ValueError: people must be an integer from 1 to 32, got 0

    Raises:
        ValueError: It isn't.
    """
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least) and (most is None or value <= most):
        return
    limits = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    raise ValueError(f"{name} must be an integer{limits}, got {value!r}")
