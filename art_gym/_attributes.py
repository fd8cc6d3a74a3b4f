"""The attributes that `ToolEnv` keeps for itself, and what is told to an author who takes one of their names."""

from __future__ import annotations

from typing import Any

KEPT = {
    "turn": "the number of actions since the last reset",
    "options": "the options of the last reset",
    "tools": ("the schemas that a model is shown (tools are methods with @tool, or functions for super().__init__(tools=[…]))"),
    **dict.fromkeys(
        ("_phase", "_tools", "_offered", "_functions", "_metrics", "_rewards", "_transcript", "_underway"),
        "what it keeps its tools or its episode in",
    ),
}
"""Attributes that only the environment itself sets, and what they are."""

_MAY_BE_NONE = frozenset({"snapshot", "restore"})
"""Methods that an environment without them says so of."""

_MAY_BE_OVERRIDDEN = frozenset({"tools", "_class_tools"})


def check_class(cls: type, base: type) -> None:
    """Check that a class takes none of the names that its base class keeps, and has methods where the base class has them.

    Raises:
        TypeError: It does.
    """
    inherited = set(base.__mro__)
    for owner in cls.__mro__:
        if owner in inherited:
            continue
        for name, value in vars(owner).items():
            if name in _MAY_BE_OVERRIDDEN or (name.startswith("__") and name.endswith("__")) or value is vars(base).get(name):
                continue
            if name in KEPT:
                raise TypeError(_kept(cls, name))
            if name.startswith("_") and name in vars(base):
                raise TypeError(f"{cls.__name__}.{name} hides a part of the environment's own of that name: choose another name")
            if _hides_method(base, name, getattr(cls, name)):
                raise TypeError(_no_method(cls, name, value))


def check_assignment(cls: type, base: type, name: str, value: Any) -> None:
    """Check an attribute that is set on an instance.

    Raises:
        AttributeError: It is one that the base class keeps, or would hide a method of it.
    """
    if name in KEPT and getattr(cls, name, None) is getattr(base, name, None):
        raise AttributeError(_kept(cls, name), name=name)
    if _hides_method(base, name, value):
        raise AttributeError(_no_method(cls, name, value), name=name)


def _hides_method(base: type, name: str, value: Any) -> bool:
    return callable(getattr(base, name, None)) and not callable(value) and not (value is None and name in _MAY_BE_NONE)


def _kept(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name} is the environment's own, {KEPT[name]}: choose another name for yours"


def _no_method(cls: type, name: str, value: Any) -> str:
    return f"{cls.__name__}.{name} is a method of the environment, and can't be of type {type(value).__name__!r}: choose another name for yours"
