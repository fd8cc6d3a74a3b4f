"""Registering and making environments: Gymnasium's registry, with string entry points, JSON options, and errors that name the way out."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import inspect
import json
import re
import traceback
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from art_gym.env import ToolEnv
from art_gym.errors import UsageError

BUNDLED = "art_gym_envs"
"""The package whose import registers the environments of the namespace `art_gym`. Imported by name: the framework doesn't depend on it."""

_ID = re.compile(r"[\w-]+/[\w.-]+-v(?:0|[1-9][0-9]*)")
"""Gymnasium takes more: ids without a namespace or version, and with ":", by which nothing can be made, as a module stands before it."""

_registered: set[str] = set()


def register(id: str, entry_point: str, **kwargs: Any) -> None:
    """Register an environment with Gymnasium. Registering the same again does nothing.

    >>> register("example/GuessSmall-v0", "art_gym_envs.guess_number:GuessNumber", high=4)
    >>> make("example/GuessSmall-v0").spec.kwargs
    {'high': 4}

    Args:
        id: "namespace/Name-v0".
        entry_point: "package.module:Class"; imported when the environment is first made.
        **kwargs: Options for the environment's constructor, JSON-serialisable.

    Raises:
        UsageError: The id, entry point or options can't be used, or the id is registered as something else.
    """
    spec = _make_spec(id, entry_point, kwargs)
    existing = gymnasium.registry.get(spec.id)
    if existing is None:
        gymnasium.register(spec.id, entry_point=entry_point, kwargs=spec.kwargs)
    elif (existing.entry_point, existing.kwargs) != (spec.entry_point, spec.kwargs):
        raise UsageError(
            f"{id} is registered already, as {existing.entry_point!r} with {existing.kwargs}, and can't become {entry_point!r} with {kwargs}: "
            "choose another name or version"
        )
    _registered.add(spec.id)


def make(env_id: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Make an environment by its id, without Gymnasium's checking wrappers: what its class returns, or with the wrappers of its registration.

    >>> str(make("art_gym/GuessNumber-v0", high=8))
    '<GuessNumber<art_gym/GuessNumber-v0>>'

    Args:
        env_id: An id of the bundled environments, or "package:namespace/Name-v0", which imports the package first.
        **kwargs: Options for the environment's constructor.

    Raises:
        UsageError: There is no such environment, it has no such options, or its constructor raised something.
    """
    spec = _find(env_id)
    creator = _creator(spec)
    options = {**spec.kwargs, **kwargs}
    _check_options(spec.id, creator, options)
    spec = copy.copy(spec)
    spec.order_enforce = False
    try:
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        problem = str(error).split(" was raised from the environment creator")[0]
        raise UsageError(_line(f"{spec.id} can't be made with {options}: {problem or type(error).__name__}")) from error
    except Exception as error:  # the environment's constructor may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            _line(
                f"{spec.id} can't be made with {options}: its constructor raised {_told(error)} at {place.filename}:{place.lineno}; "
                "change the options, or mend what it needs"
            )
        ) from error


def env_ids() -> list[str]:
    """List the ids of the registered environments of this kind: those registered here, and any others whose entry point is a `ToolEnv`."""
    _import_bundled()
    return sorted(id_ for id_, spec in gymnasium.registry.items() if id_ in _registered or _makes_tool_env(spec))


def _make_spec(id: str, entry_point: str, kwargs: dict[str, Any]) -> EnvSpec:
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise UsageError(f"an environment's id has the form namespace/Name-v0, not {id!r}")
    if not isinstance(entry_point, str) or entry_point.count(":") != 1:
        raise UsageError(f"{id}: the entry point has the form 'package.module:Class', not {entry_point!r}")
    try:
        options = json.loads(json.dumps(kwargs))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{id}: the options must be JSON-serialisable: {error}") from None
    if options != kwargs:
        raise UsageError(f"{id}: the options must stay the same through JSON (lists, not tuples; string keys): {kwargs}")
    return EnvSpec(id, entry_point=entry_point, kwargs=options)


def _find(env_id: str) -> EnvSpec:
    if not isinstance(env_id, str):
        raise UsageError(f"an environment is made by its id, such as 'art_gym/GuessNumber-v0', not by {env_id!r:.60}")
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        elif name not in gymnasium.registry:
            _import_bundled()
        return gymnasium.spec(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"can't import {module or BUNDLED!r} for {env_id!r} ({error}): is it installed?") from error
    except gymnasium.error.Error as error:
        close = difflib.get_close_matches(name, gymnasium.registry, n=1, cutoff=0.5)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else "`art-gym envs` lists those there are; for another package's, write package:namespace/Name-v0"
        )
        raise UsageError(f"unknown environment {env_id!r}; {hint}") from error
    except UsageError:
        raise
    except Exception as error:  # a module that is imported may raise anything
        name_rule = "" if _is_module_name(module or BUNDLED) else "; write package:namespace/Name-v0, with the package's full name"
        raise UsageError(_line(f"can't import {module or BUNDLED!r} for {env_id!r}: {_told(error)}{name_rule}")) from error


def _creator(spec: EnvSpec) -> Any:
    if spec.entry_point is None:
        raise UsageError(f"{spec.id} can only be made as a vector environment")
    if callable(spec.entry_point):
        return spec.entry_point
    try:
        return load_env_creator(spec.entry_point)
    except UsageError:
        raise
    except (ImportError, AttributeError) as error:
        raise UsageError(_line(f"{spec.id}: its entry point {spec.entry_point!r} can't be loaded: {error}")) from error
    except Exception as error:  # a module that is imported may raise anything
        raise UsageError(_line(f"{spec.id}: its entry point {spec.entry_point!r} can't be loaded: {_told(error)}")) from error


def _check_options(id: str, creator: Any, options: dict[str, Any]) -> None:
    _check_render_mode(id, creator, options)
    try:
        parameters = inspect.signature(creator).parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [name for name in parameters if name != "render_mode"]
    for name in options.keys() - parameters.keys():
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UsageError(f"{id} has no option {name!r}; {hint}its options are: {', '.join(known) or 'none'}")


def _check_render_mode(id: str, creator: Any, options: dict[str, Any]) -> None:
    """Refuse a render mode that the environment doesn't have, as Gymnasium does no more than warn."""
    mode = options.get("render_mode")
    metadata = getattr(creator, "metadata", None)
    known = metadata.get("render_modes") if isinstance(metadata, dict) else None
    if mode is None or not known or mode in known:
        return
    # Gymnasium makes these from others, by wrappers.
    made = {f"{name}_list" for name in known} | ({"human"} if {"rgb_array", "rgb_array_list"} & set(known) else set())
    if mode not in made:
        raise UsageError(f"{id} can't be made with {options}: render_mode must be one of {', '.join(known)}, not {mode!r}")


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _line(text: str) -> str:
    return " ".join(text.split())


def _makes_tool_env(spec: EnvSpec) -> bool:
    entry_point: Any = spec.entry_point
    if isinstance(entry_point, str):
        # Gymnasium's own environments aren't ours, and some of them import heavy packages.
        if entry_point.startswith(("gymnasium.", "shimmy.")):
            return False
        try:
            entry_point = load_env_creator(entry_point)
        except Exception:  # noqa: BLE001  another package's module may raise anything; then it isn't ours
            return False
    return inspect.isclass(entry_point) and issubclass(entry_point, ToolEnv)


def _import_bundled() -> None:
    if importlib.util.find_spec(BUNDLED) is not None:
        importlib.import_module(BUNDLED)
