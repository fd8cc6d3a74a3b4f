"""The annotations of a function, evaluated: also those that are text and name what is local to a function or a class."""

from __future__ import annotations

import builtins
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_WAITING = "_definitions_around"


def parameter_types(function: Callable[..., Any], owner: type | None) -> tuple[dict[str, Any], bool]:
    """Evaluate the annotations of a function's parameters.

    That of the result isn't needed, and often names what only type checkers import.

    Args:
        function: The function.
        owner: The class that defines it, if one does.

    Returns:
        The types by parameter, and whether they hold what is local to a function or a class, and so can't always be found again.

    Raises:
        NameError: An annotation names something that doesn't exist (yet).
    """
    annotations = {name: hint for name, hint in getattr(function, "__annotations__", {}).items() if name != "return"}
    holder = types.SimpleNamespace(__annotations__=annotations, __wrapped__=function)  # names are looked up where the wrapped one is
    found = typing.get_type_hints(holder, localns=_local_names(function, owner), include_extras=True)
    try:
        return found, typing.get_type_hints(holder, localns={}, include_extras=True) != found
    except (NameError, AttributeError, TypeError):
        return found, True


def wait_for_names(cls: type) -> None:
    """Keep for a class what is local where it is defined, since names that its annotations need are perhaps defined further down there."""
    setattr(cls, _WAITING, _Frames([*_frames_around(cls)]))


def stop_waiting(cls: type) -> None:
    """Forget what `wait_for_names` kept."""
    if _WAITING in vars(cls):
        delattr(cls, _WAITING)


class _Frames(list[types.FrameType]):
    """Frames that a class holds; a class that is pickled by value goes without them."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Frames, ()


def _local_names(function: Any, owner: type | None) -> dict[str, Any]:
    """The names local to the functions and classes around a function.

    Those of a function hide global names, those of a class don't: it may well have a tool named `list`.
    """
    definition = function if owner is None else owner
    waiting: Sequence[types.FrameType] = vars(definition).get(_WAITING, ()) if owner is not None else ()
    frames = [*_frames_around(definition), *waiting]
    of_functions: dict[str, Any] = {}
    of_classes: dict[str, Any] = {}
    for frame in reversed(frames):  # the innermost counts
        (of_functions if frame.f_code.co_flags & inspect.CO_OPTIMIZED else of_classes).update(frame.f_locals)
    if owner is not None:
        of_classes.update(vars(owner))
    known = getattr(inspect.unwrap(function), "__globals__", {})
    return {name: value for name, value in of_classes.items() if name not in known and not hasattr(builtins, name)} | of_functions


def _frames_around(definition: Any) -> Iterator[types.FrameType]:
    """Yield the frames of the functions and classes that a function or class is defined in, as far as they are running; the innermost first."""
    module, parts = getattr(definition, "__module__", None), getattr(definition, "__qualname__", "").split(".")
    around = {".".join(parts[:end]) for end in range(1, len(parts)) if parts[end - 1] != "<locals>"}
    frame: types.FrameType | None = sys._getframe(1)
    while around and frame is not None:
        if frame.f_code.co_qualname in around and frame.f_globals.get("__name__") == module:
            around.remove(frame.f_code.co_qualname)
            yield frame
        frame = frame.f_back
