"""The conformance suite: what every registered environment keeps, as checks by name.

A check takes an environment's id, plays the environment, and raises AssertionError with one readable text where it breaks the contract. It
looks at the environment from outside only, so that it holds for those of other packages and for wrapped ones too. The transitions themselves
are `art_gym.testing.check_transitions`' part; here they are one check of several.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import gymnasium

from art_gym.errors import UsageError
from art_gym.registration import env_ids, make
from art_gym.spaces import ToolCallSpace
from art_gym.testing import _checks
from art_gym.testing._arguments import checked_examples, checked_seed, checked_skip

Check = Callable[[str], str]
"""Takes an environment's id; returns a note on what was done, "" for none; raises AssertionError."""

CHECKS: dict[str, Check] = {
    "gymnasium": _checks.check_gymnasium,
    "spec": _checks.check_spec,
    "pickling": _checks.check_pickling,
    "vector": _checks.check_vector,
    "wrappers": _checks.check_wrappers,
    "scenarios": _checks.check_scenarios,
    "transitions": _checks.check_transitions,
    "replay": _checks.check_replay,
}
"""Every check, by the name under which reports and tests show it."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How one check went.

    Attributes:
        check: Its name, a key of `CHECKS`.
        problem: What it found, readable; "" if it found nothing.
        script: A Python program that reproduces the problem, where there is one.
        note: What was done, or left out.
        seconds: How long it took.
        skipped: Whether it was left out, as the caller wished.
    """

    check: str
    problem: str = ""
    script: str = ""
    note: str = ""
    seconds: float = 0.0
    skipped: bool = False

    @property
    def passed(self) -> bool:
        """Whether it ran and found nothing."""
        return not self.problem and not self.skipped


def check(env_id: str, *, examples: int = 100, seed: int | None = None, skip: Collection[str] = ()) -> list[CheckResult]:
    """Run every check on one environment.

    Args:
        env_id: "package:namespace/Name-v0", or an id that is registered already.
        examples: Lists of actions that `check_transitions` plays.
        seed: Makes it play the same ones every time; None draws new ones.
        skip: Names of checks to leave out, as "pickling" for an environment that holds what can't be pickled.

    Raises:
        UsageError: There is no such environment, it can't be made, or it is none of chat messages and tool calls; there can't be that many
            examples; or `skip` is no list of names of checks.
    """
    return list(run_checks(env_id, examples=examples, seed=seed, skip=skip))


def run_checks(env_id: str, *, examples: int = 100, seed: int | None = None, skip: Collection[str] = ()) -> Iterator[CheckResult]:
    """Run every check on one environment and yield each result as it comes; otherwise like `check`."""
    run = checks(examples=examples, seed=seed)
    left_out = checked_skip(skip, run)
    _refuse_other_kinds(env_id)
    for name, function in run.items():
        if name in left_out:
            yield CheckResult(name, skipped=True)
            continue
        began = perf_counter()
        note = problem = script = ""
        try:
            note = function(env_id)
        except AssertionError as error:
            problem, script = str(error), str(getattr(error, "script", ""))
        yield CheckResult(name, problem, script, note, perf_counter() - began)


def checks(*, examples: int = 100, seed: int | None = None) -> dict[str, Check]:
    """Return the checks by name, as `CHECKS`, the one of the transitions with that many examples and that seed.

    Raises:
        UsageError: There can't be that many examples, or no such seed.
    """
    examples = checked_examples(examples)
    seed = None if seed is None else checked_seed(seed)
    return {**CHECKS, "transitions": functools.partial(_checks.check_transitions, examples=examples, seed=seed)}


def registered_by(package: str) -> list[str]:
    """Import a package and list the ids of its environments, each as "package:namespace/Name-v0", sorted.

    An environment is the package's if importing it registers it, if its entry point lies in it, or if the package's name is its namespace. Of
    those registered with Gymnasium directly only `ToolEnv` classes count.

    >>> registered_by("art_gym_envs")
    ['art_gym_envs:art_gym/GuessNumber-v0', 'art_gym_envs:art_gym/Lookup-v0']

    Raises:
        UsageError: The package can't be imported, or has no such environment.
    """
    before = set(gymnasium.registry)
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"can't import {package!r} ({error}): is it installed?") from error
    except Exception as error:  # a module that is imported may raise anything
        raise UsageError(" ".join(f"can't import {package!r}: {_checks.told(error)}".split())) from error
    registered = set(gymnasium.registry) - before
    found = [id_ for id_ in env_ids() if _belongs(id_, package, new=id_ in registered)]
    if not found:
        raise UsageError(f"importing {package!r} registers no environment; register one there: art_gym.register('{package}/Name-v0', …)")
    return [f"{package}:{id_}" for id_ in found]


def conformance_tests(package: str, *, examples: int = 100, seed: int | None = None, skip: Collection[str] = ()) -> Callable[..., None]:
    """Make a pytest test that runs every check on every environment of a package.

    One line in a test module does it: `test_conformance = conformance_tests("my_package")`.

    Args:
        package: The package whose import registers the environments.
        examples: Lists of actions that `check_transitions` plays.
        seed: Makes it play the same ones every time; None draws new ones in every run, under CI too.
        skip: Names of checks to leave out.

    Raises:
        UsageError: pytest isn't installed, the package can't be imported or has no environments, there can't be that many examples or such a
            seed, or `skip` is no list of names of checks.
    """
    pytest = _pytest()
    left_out = checked_skip(skip, CHECKS)
    by_name = {name: function for name, function in checks(examples=examples, seed=seed).items() if name not in left_out}
    cases = [
        pytest.param(env_id, function, id=f"{env_id.partition(':')[2]}-{name}")
        for env_id in registered_by(package)
        for name, function in by_name.items()
    ]

    def test_conformance(env_id: str, function: Check) -> None:
        try:
            function(env_id)
        except AssertionError as error:
            # The text says it all; the traceback would lead through the suite.
            pytest.fail(str(error), pytrace=False)

    decorated: Callable[..., None] = pytest.mark.parametrize(("env_id", "function"), cases)(test_conformance)
    return decorated


def _pytest() -> Any:
    try:
        return importlib.import_module("pytest")
    except ModuleNotFoundError:
        raise UsageError("conformance_tests needs the package 'pytest', which isn't installed: pip install pytest") from None


def _belongs(env_id: str, package: str, *, new: bool) -> bool:
    namespace = env_id.partition("/")[0]
    entry_point = gymnasium.spec(env_id).entry_point
    module = entry_point.partition(":")[0] if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    if namespace == package or f"{module}.".startswith(f"{package}."):
        return True
    # A package that builds on the bundled tasks registers them too.
    return new and namespace != "art_gym"


def _refuse_other_kinds(env_id: str) -> None:
    try:
        made = make(env_id)
    except gymnasium.error.Error as error:  # such as a package that another's environment needs
        raise UsageError(f"{env_id} can't be made: {error}") from error
    with closing(made) as env:
        if not isinstance(env.action_space, ToolCallSpace):
            raise UsageError(
                f"{env_id} is no environment of chat messages and tool calls: its action space is {env.action_space} and no ToolCallSpace; "
                "`art-gym envs` lists those there are"
            )
