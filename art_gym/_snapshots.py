"""Copying the state of an environment out of it and into one, through its wrappers, when parts of the state refer to the environment."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium

_NOT_STATE = frozenset({"env", "_action_space", "_observation_space", "_metadata", "_cached_spec", "_saved_kwargs"})
"""Attributes of any Gymnasium wrapper that belong to the instance and not to its episode."""


def snapshot(env: gymnasium.Env[Any, Any]) -> Any:
    """Return the state of an environment with whatever wrappers are around it; Gymnasium's own know nothing of snapshots.

    Raises:
        AttributeError: The environment has no snapshots.
    """
    if callable(take := getattr(env, "snapshot", None)):
        return take()
    if isinstance(env, gymnasium.Wrapper):
        own = {name: value for name, value in vars(env).items() if name not in _NOT_STATE}
        return {"env": snapshot(env.env), "wrapper": copy_out(own, layers(env))}
    raise AttributeError(f"{env} has no snapshots: it needs the methods snapshot() and restore(state), as art_gym.ToolEnv has them")


def restore(env: gymnasium.Env[Any, Any], state: Any) -> None:
    """Bring an environment into a state that `snapshot` returned, of this instance or of another one that was made and wrapped alike."""
    if callable(put := getattr(env, "restore", None)):
        put(state)
    elif isinstance(env, gymnasium.Wrapper):
        restore(env.env, state["env"])
        vars(env).update(copy_in(state["wrapper"], layers(env)))


def layers(env: gymnasium.Env[Any, Any]) -> list[gymnasium.Env[Any, Any]]:
    """Return a wrapper, what it wraps, and so on inwards: what a wrapper's state may refer to."""
    found = [env]
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        found.append(env)
    return found


def copy_out(state: Mapping[str, Any], owners: Sequence[object]) -> dict[str, Any]:
    """Copy the state; a reference to one of its owners, such as a bound method's, becomes one to the owner's place."""
    return copy.deepcopy(dict(state), {id(owner): _place(index) for index, owner in enumerate(owners)})


def copy_in(state: Mapping[str, Any], owners: Sequence[object]) -> dict[str, Any]:
    """Copy what `copy_out` returned; a reference to a place becomes one to the owner that is there now."""
    return copy.deepcopy(dict(state), {id(_place(index)): owner for index, owner in enumerate(owners)})


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Stands for an owner in a state that belongs to none; there is one object for each place, in copies and pickles too."""

    index: int

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _place, (self.index,)

    def __getattr__(self, name: str) -> _Attribute:
        # A bound method is pickled as its name, and looked up when it is loaded.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Attribute(self, name)


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A bound method of an owner, in a state that was pickled."""

    place: _Place
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self.name!r} is a method of an environment, and this is its snapshot: restore it first")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self.place))
        return self if owner is None else getattr(owner, self.name)


@cache
def _place(index: int) -> _Place:
    return _Place(index)
