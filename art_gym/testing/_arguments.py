"""What callers of the property tests give, checked: each refusal is one line that says what was expected."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import hypothesis

from art_gym.errors import UsageError


def checked_examples(examples: Any) -> int:
    """Return the number of examples.

    Raises:
        UsageError: It's no whole number, or less than 1.
    """
    number = _whole("examples", examples)
    if number < 1:
        raise UsageError(f"examples must be at least 1, not {number}")
    return number


def checked_seed(seed: Any, *, name: str = "seed") -> int:
    """Return the seed.

    Raises:
        UsageError: It's no whole number, or negative.
    """
    number = _whole(name, seed)
    if number < 0:
        raise UsageError(f"{name} must be at least 0, not {number}")
    return number


def checked_options(options: Any) -> dict[str, Any]:
    """Return a copy of the options of an episode.

    Raises:
        UsageError: They're no dictionary.
    """
    if options is not None and not isinstance(options, Mapping):
        raise UsageError(f"options must be a dictionary, not {options!r:.100}")
    return dict(options or {})


def checked_actions(actions: Any) -> list[Any]:
    """Return the list of actions.

    Raises:
        UsageError: It's no list: a single action, perhaps.
    """
    if isinstance(actions, str | bytes | Mapping) or not isinstance(actions, Iterable):
        raise UsageError(f"actions must be a list of actions, as [art_gym.say('hello')], not {actions!r:.100}")
    return list(actions)


def checked_invariants(invariants: Any) -> tuple[Callable[[Any], None], ...]:
    """Return the author's own invariants.

    Raises:
        UsageError: They're no list of functions.
    """
    if isinstance(invariants, str | bytes | Mapping) or not isinstance(invariants, Iterable):
        raise UsageError(f"invariants must be a list of functions of a Transition, as [my_rule], not {invariants!r:.100}")
    found = tuple(invariants)
    for invariant in found:
        if not callable(invariant):
            raise UsageError(f"an invariant must be a function of a Transition, not {invariant!r:.100}")
    return found


def checked_target(target: Any) -> Callable[[Any], float] | None:
    """Return the target.

    Raises:
        UsageError: It's no function.
    """
    if target is not None and not callable(target):
        raise UsageError(f"target must be a function of a Transition that returns a number, not {target!r:.100}")
    return target  # type: ignore[no-any-return]  # what it returns is checked by `checked_score`


def checked_score(target: Callable[[Any], float], transition: Any) -> float:
    """Return what a target makes of a transition.

    Raises:
        UsageError: It's no finite number.
    """
    score: Any = target(transition)
    if isinstance(score, numbers.Real) and math.isfinite(score):
        return float(score)
    name = getattr(target, "__name__", type(target).__name__)
    raise UsageError(f"the target {name} must return a finite number, not {score!r:.100}")


def checked_settings(settings: Any) -> hypothesis.settings | None:
    """Return Hypothesis's settings.

    Raises:
        UsageError: They're something else.
    """
    if settings is not None and not isinstance(settings, hypothesis.settings):
        raise UsageError(f"settings must be hypothesis.settings(…), not {settings!r:.100}")
    return settings


def checked_skip(skip: Any, names: Collection[str]) -> set[str]:
    """Return the names of the checks to leave out.

    Raises:
        UsageError: They're no list, or there is no check of such a name.
    """
    if isinstance(skip, str | bytes) or not isinstance(skip, Iterable):
        raise UsageError(f"skip must be a list of names, as [{_shown(skip)}], not {skip!r:.100}")
    if unknown := sorted(f"{name!r}" for name in skip if name not in list(names)):
        raise UsageError(f"there is no check {', '.join(unknown)} to skip; the checks are: {', '.join(names)}")
    return set(skip)


def _shown(skip: Any) -> str:
    return repr(skip) if isinstance(skip, str) else "'pickling'"


def _whole(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name} must be a whole number, not {value!r:.100}")
