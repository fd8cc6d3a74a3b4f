"""The pytest plugin: `pytest --art-gym-envs my_package` checks every environment of a package.

pytest loads it in every session; beyond `art_gym` itself it imports nothing before it is asked for something. What is checked belongs to
`art_gym.testing.conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Find the packages' environments, before anything else is collected.

    Raises:
        pytest.UsageError: A package can't be imported or has no environments, or the number of examples isn't positive.
    """
    packages: list[str] = session.config.getoption("--art-gym-envs")
    if not packages:
        return
    examples: int = session.config.getoption("--art-gym-examples")
    if examples < 1:
        raise pytest.UsageError(f"--art-gym-examples is {examples}; it must be at least 1")
    from art_gym.errors import UsageError
    from art_gym.testing import conformance

    try:
        found = {package: conformance.registered_by(package) for package in packages}
    except UsageError as error:
        raise pytest.UsageError(f"--art-gym-envs: {error}") from None
    session.stash[_FOUND] = {package: (env_ids, conformance.checks(examples=examples)) for package, env_ids in found.items()}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Put the packages beside the files of the session."""
    report = yield
    if isinstance(collector, pytest.Session):
        report.result = [
            *(report.result or ()),
            *(
                Package.from_parent(collector, name=name, nodeid=name, env_ids=env_ids, checks=checks)
                for name, (env_ids, checks) in collector.stash.get(_FOUND, {}).items()
            ),
        ]
    return report


class Package(pytest.Collector):
    """A package with environments."""

    def __init__(self, *, env_ids: list[str], checks: dict[str, Callable[[str], str]], **options: Any) -> None:
        super().__init__(**options)
        self.env_ids = env_ids
        self.checks = checks

    def collect(self) -> Iterator[Environment]:
        return (Environment.from_parent(self, name=env_id.partition(":")[2], env_id=env_id, checks=self.checks) for env_id in self.env_ids)


class Environment(pytest.Collector):
    """An environment, with its checks."""

    def __init__(self, *, env_id: str, checks: dict[str, Callable[[str], str]], **options: Any) -> None:
        super().__init__(**options)
        self.env_id = env_id
        self.checks = checks

    def collect(self) -> Iterator[Conformance]:
        return (Conformance.from_parent(self, name=name, env_id=self.env_id, check=check) for name, check in self.checks.items())


class Conformance(pytest.Item):
    """One check of one environment."""

    def __init__(self, *, env_id: str, check: Callable[[str], str], **options: Any) -> None:
        super().__init__(**options)
        self.env_id = env_id
        self.check = check

    def runtest(self) -> None:
        self.check(self.env_id)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        # The text says it all; the traceback would lead through the suite.
        return str(excinfo.value) if isinstance(excinfo.value, AssertionError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.nodeid


_FOUND = pytest.StashKey[dict[str, tuple[list[str], dict[str, Callable[[str], str]]]]]()
