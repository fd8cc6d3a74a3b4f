"""Property tests of environments: every transition is played, and what must hold of it checked.

Names are imported when they are first used: the pytest plugin lies in this package, and pytest loads it at every start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_gym.testing.conformance import CheckResult, check, conformance_tests
    from art_gym.testing.machine import ToolEnvMachine
    from art_gym.testing.strategies import actions, broken_actions, json_values, scenarios
    from art_gym.testing.transitions import (
        Invariant,
        Make,
        Target,
        Transition,
        TransitionReport,
        TransitionViolation,
        check_actions,
        check_transitions,
    )

__all__ = [
    "CheckResult",
    "Invariant",
    "Make",
    "Target",
    "ToolEnvMachine",
    "Transition",
    "TransitionReport",
    "TransitionViolation",
    "actions",
    "broken_actions",
    "check",
    "check_actions",
    "check_transitions",
    "conformance_tests",
    "json_values",
    "scenarios",
]

_MODULES = {
    "conformance": ("CheckResult", "check", "conformance_tests"),
    "machine": ("ToolEnvMachine",),
    "strategies": ("actions", "broken_actions", "json_values", "scenarios"),
    "transitions": (
        "Invariant",
        "Make",
        "Target",
        "Transition",
        "TransitionReport",
        "TransitionViolation",
        "check_actions",
        "check_transitions",
    ),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
