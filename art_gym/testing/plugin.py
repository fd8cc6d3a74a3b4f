"""The pytest plugin: `pytest --art-gym-envs my_package` checks every environment of a package.

pytest loads it in every session; beyond `art_gym` itself it imports nothing before it is asked for something. What is checked belongs to
`art_gym.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("art_gym", "conformance of environments")
    group.addoption(
        "--art-gym-envs",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="Check every environment that importing PACKAGE registers; repeatable.",
    )
    group.addoption(
        "--art-gym-examples",
        type=int,
        default=100,
        metavar="N",
        help="Lists of actions that the check of the transitions plays on each environment (default: 100).",
    )
    group.addoption(
        "--art-gym-seed",
        type=int,
        metavar="N",
        help="Play the same lists of actions in every run; without it, new ones.",
    )
    group.addoption(
        "--art-gym-skip",
        action="append",
        default=[],
        metavar="CHECK",
        help="Leave out a check, such as pickling for environments that hold what can't be pickled; repeatable.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Find the packages' environments, before anything else is collected.

    Raises:
        pytest.UsageError: A package can't be imported or has no environments, the number of examples isn't positive, the seed is negative,
            or there is no check of a name to skip.
    """
    packages: list[str] = session.config.getoption("--art-gym-envs")
    if not packages:
        return
    examples: int = session.config.getoption("--art-gym-examples")
    if examples < 1:
        raise pytest.UsageError(f"--art-gym-examples is {examples}; it must be at least 1")
    seed: int | None = session.config.getoption("--art-gym-seed")
    if seed is not None and seed < 0:
        raise pytest.UsageError(f"--art-gym-seed is {seed}; it must be at least 0")
    from art_gym.errors import UsageError
    from art_gym.testing import conformance
    from art_gym.testing._arguments import checked_skip

    checks = conformance.checks(examples=examples, seed=seed)
    try:
        skip = checked_skip(session.config.getoption("--art-gym-skip"), checks)
    except UsageError as error:
        raise pytest.UsageError(f"--art-gym-skip: {error}") from None
    try:
        found = {package: conformance.registered_by(package) for package in packages}
    except UsageError as error:
        raise pytest.UsageError(f"--art-gym-envs: {error}") from None
    session.stash[_FOUND] = _Found(found, checks, skip)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Put the packages beside the files of the session."""
    report = yield
    found = collector.stash.get(_FOUND, None) if isinstance(collector, pytest.Session) else None
    if found is not None:
        packages = [Package.from_parent(collector, name=name, nodeid=name, found=found) for name in found.env_ids]
        report.result = [*(report.result or ()), *packages]
    return report


class _Found(NamedTuple):
    """What is checked: the ids by package, the checks by name, and which of them are left out."""

    env_ids: dict[str, list[str]]
    checks: dict[str, Callable[[str], str]]
    skip: set[str]


class Package(pytest.Collector):
    """A package with environments."""

    def __init__(self, *, found: _Found, **options: Any) -> None:
        super().__init__(**options)
        self.found = found

    def collect(self) -> Iterator[Environment]:
        for env_id in self.found.env_ids[self.name]:
            yield Environment.from_parent(self, name=env_id.partition(":")[2], env_id=env_id, found=self.found)


class Environment(pytest.Collector):
    """An environment, with its checks."""

    def __init__(self, *, env_id: str, found: _Found, **options: Any) -> None:
        super().__init__(**options)
        self.env_id = env_id
        self.found = found

    def collect(self) -> Iterator[Conformance]:
        for name, check in self.found.checks.items():
            yield Conformance.from_parent(self, name=name, env_id=self.env_id, check=check, skip=name in self.found.skip)


class Conformance(pytest.Item):
    """One check of one environment."""

    def __init__(self, *, env_id: str, check: Callable[[str], str], skip: bool, **options: Any) -> None:
        super().__init__(**options)
        self.env_id = env_id
        self.check = check
        self.skip = skip

    def runtest(self) -> None:
        if self.skip:
            pytest.skip("--art-gym-skip")
        self.check(self.env_id)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        # The text says it all; the traceback would lead through the suite.
        return str(excinfo.value) if isinstance(excinfo.value, AssertionError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid


_FOUND = pytest.StashKey[_Found]()
