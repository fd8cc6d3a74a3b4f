"""`art-gym new`: an installable package with one environment, its registration, its tests and a README.

The files' templates lie in `scaffold/`. The folder appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import keyword
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import typer

from art_gym.errors import UsageError

_FILES = {
    "README.md": "README.md.template",
    ".gitignore": "gitignore.template",
    "pyproject.toml": "pyproject.toml.template",
    "{name}/__init__.py": "package.py.template",
    "{name}/env.py": "env.py.template",
    "tests/test_{name}.py": "tests.py.template",
}
"""Path in the new project → template."""

_TAKEN_CLASSES = ("ToolEnv", "Literal")
"""Names that the environment's module imports."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?<!_)")


def run(name: str, *, folder: Path) -> None:
    """Write the project `folder/name` and say what to do next.

    Raises:
        UsageError: It can't be named so, is there already, or can't be written; nothing was left behind.
    """
    class_name = _class_name(name)
    _check_name(name, class_name)
    project = folder / name
    if os.path.lexists(project):
        raise UsageError(f"{project} exists already; choose another name, or another folder with --dir")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; make it first, or give another --dir")
    _check_free(name)
    try:
        with _appearing(project) as temporary:
            for path, template in _FILES.items():
                file = temporary / path.format(name=name)
                file.parent.mkdir(exist_ok=True)
                file.write_text(_filled(template, name, class_name), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write the folder {project}: {error.strerror or error}; give another --dir") from error
    steps = [
        f"cd {project}",
        "pip install -e '.[dev]'",
        "python -m pytest",
        f"art-gym check {name}:{name}/{class_name}-v0",
    ]
    typer.echo(f"{project} holds the environment {name}/{class_name}-v0, in {name}/env.py. What next:")
    for step in steps:
        typer.echo(f"  {step}")


@contextlib.contextmanager
def _appearing(project: Path) -> Iterator[Path]:
    """Give a folder beside the project's, which becomes the project's at the end; after an error nothing is left of it."""
    temporary = project.with_name(f".{project.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(project)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _filled(template: str, name: str, class_name: str) -> str:
    return _template(template).replace("{{name}}", name).replace("{{class_name}}", class_name)


def _template(template: str) -> str:
    return files("art_gym.cli").joinpath("scaffold", template).read_text(encoding="utf-8")


def _class_name(name: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _check_name(name: str, class_name: str) -> None:
    if not _NAME.fullmatch(name):
        close = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower()
        hint = f"; did you mean {close!r}?" if _NAME.fullmatch(close) else ""
        raise UsageError(f"{name!r} can't name a package: letters, digits and '_', the first a letter and the last no '_'{hint}")
    if keyword.iskeyword(name) or keyword.iskeyword(class_name) or class_name in _TAKEN_CLASSES:
        word = name if keyword.iskeyword(name) else class_name
        raise UsageError(f"{name!r} can't name a package: {word!r} has a meaning of its own in Python or art_gym; choose another name")
    if name.lower() == "tests":
        raise UsageError(f"{name!r} can't name a package: the folder of the project's tests has that name; choose another name")
    if _is_ignored(name):
        raise UsageError(
            f"{name!r} can't name a package: the project's .gitignore leaves folders of that name out, and so would its wheel; "
            "choose another name"
        )


def _is_ignored(name: str) -> bool:
    """Whether the project's own .gitignore would exclude the package; on some systems letter case makes no difference to it."""
    patterns = [line.strip().rstrip("/").lower() for line in _template("gitignore.template").splitlines()]
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns if pattern)


def _check_free(name: str) -> None:
    if name in sys.stdlib_module_names or _is_installed(name):
        what = "a module of Python's standard library" if name in sys.stdlib_module_names else "installed already"
        raise UsageError(f"{name!r} can't name a package: there is a module or package of that name, {what}; choose another name")


def _is_installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.distribution(name)
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was made at run time
        return True
