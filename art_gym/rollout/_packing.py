"""Calls of an environment in another process, and what comes of them, as bytes.

What travels is the function that makes environments, the functions that are called on them, their arguments and results, pickled by cloudpickle
so that closures, lambdas and what a script or notebook defines travel too; never an environment. Errors keep their type where it can be had on
the other side, and always their text and traceback.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]  # it has no types
import gymnasium
from gymnasium.envs.registration import EnvCreator, EnvSpec, load_env_creator

from art_gym.errors import ToolTimeout, UsageError
from art_gym.rollout._hosts import Make
from art_gym.rollout._kernel import lift_memory_limit
from art_gym.rollout._threads import outcome_of


class RemoteTraceback(Exception):
    """Where an error was raised in another process: the cause of the one that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_make(make: Make) -> bytes:
    """Pack what makes environments, with what is registered here, since the other process may not have imported what registered it.

    Raises:
        UsageError: It can't be pickled.
    """
    try:
        return _dumps((_specs(), make))
    except Exception as error:
        raise UsageError(
            f"the environment can't be made in another process, since {make!r:.100} doesn't pickle ({error}): use the environment's id or a "
            "function that refers to nothing but data, or isolation='thread'"
        ) from error


def unpack_make(packed: bytes) -> Make:
    specs, make = pickle.loads(packed)
    for spec in specs:
        gymnasium.registry.setdefault(spec.id, spec)
    return make  # type: ignore[no-any-return]  # as it was packed


def pack_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    return _dumps((function, args))


def unpack_call(packed: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return pickle.loads(packed)  # type: ignore[no-any-return]  # as it was packed


def pack_outcome(function: Callable[[], Any], memory: int | None) -> bytes:
    """Pack what the function returns or raises; `memory` is the limit that stands behind a MemoryError, if there is one."""
    try:
        return _pack_value(outcome_of(function).unwrap())
    except MemoryError as error:
        if memory is None:
            return _pack_error(error)
        lift_memory_limit()
        return _pack_error(_named(error, memory))
    except Exception as error:  # noqa: BLE001  # whatever it is, it belongs to the caller, in another process
        return _pack_error(error)


def unpack_outcome(packed: bytes) -> Any:
    """Return what the function returned, or raise what it raised."""
    try:
        value, raised = pickle.loads(packed)
    except Exception as error:
        raise TypeError(f"what the environment returned can't be read outside its process: {error}") from error
    if raised is not None:
        raise raised.error() from RemoteTraceback(raised.traceback)
    return value


def too_much_memory(limit: int) -> str:
    return f"the environment's process took more than {limit / 2**20:.0f} MiB beyond what it started with"


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error as it travels: itself, if it pickles, and in any case what it says."""

    pickled: bytes | None
    base: type[Exception]
    name: str
    text: str
    traceback: str

    def error(self) -> Exception:
        """Return the error, or the nearest thing to it that is known here."""
        with suppress(Exception):
            error = pickle.loads(self.pickled or b"")
            if str(error) != self.text:
                # Its constructor made the text out of other arguments than the error keeps.
                error.args = (self.text,)
            if isinstance(error, Exception) and str(error) == self.text:
                return error
        return self.base(self.text if self.base is not RuntimeError else f"{self.name}: {self.text}")


def _pack_value(value: Any) -> bytes:
    try:
        return _dumps((value, None))
    except MemoryError:
        raise
    except Exception as error:  # objects decide themselves what their pickling raises
        raise TypeError(f"what the environment returned can't be sent from its process: {error}") from error


def _pack_error(error: Exception) -> bytes:
    pickled: bytes | None = None
    text = _text(error)
    with suppress(Exception):
        pickled = _dumps(error)
    # What the runner must still be able to tell from other errors.
    base = next((kind for kind in (UsageError, ToolTimeout) if isinstance(error, kind)), RuntimeError)
    return _dumps((None, _Raised(pickled, base, type(error).__name__, text, "".join(traceback.format_exception(error)))))


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # errors may be written badly too
        return "<its text can't be read>"


def _named(error: MemoryError, limit: int) -> MemoryError:
    named = MemoryError(": ".join(filter(None, (too_much_memory(limit), _text(error)))))
    named.__cause__ = error
    return named


def _specs() -> list[EnvSpec]:
    """Return the registered environments that aren't Gymnasium's own, so far as they pickle."""
    return [spec for spec in map(_importable, gymnasium.registry.values()) if spec is not None]


def _importable(spec: EnvSpec) -> EnvSpec | None:
    entry_point = spec.entry_point
    if isinstance(entry_point, str):
        if entry_point.startswith(("gymnasium.", "shimmy.")):
            return None
        if entry_point.startswith("__main__:"):  # this program isn't the other process's
            spec = replace(spec, entry_point=cast("EnvCreator", load_env_creator(entry_point)))
    try:
        _dumps(spec)
    except Exception:  # noqa: BLE001  # then this one can only be made here
        return None
    return spec


def _dumps(value: Any) -> bytes:
    return cloudpickle.dumps(value)  # type: ignore[no-any-return]  # it has no types
