"""Every snippet of the README and of the documentation runs, and every command in them exists.

Python snippets of a page run in order in one namespace. `<!-- test: vllm -->` above a snippet (or `train`) says that it needs a real server (or
torch): it then runs in a test with that marker, after the page's unmarked snippets.
"""

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import gymnasium
import pytest
import typer

import art_gym
from art_gym.cli.app import app
from art_gym.testing.conformance import CHECKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKERS = ("", "train", "vllm")

SNIPPET = re.compile(r"(?:^<!-- test: (\w+) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^ *```(\w*)(.*)$", re.MULTILINE)


def snippets(page: Path) -> list[tuple[str, int, str]]:
    """Marker, first line's number, and code of each snippet."""
    text = page.read_text(encoding="utf-8")
    return [(match[1] or "", text.count("\n", 0, match.start(2)) + 1, match[2]) for match in SNIPPET.finditer(text)]


def commands(program: str) -> list[tuple[str, str]]:
    """Page and command line of each call of a program in a console block."""
    found = []
    for page in PAGES:
        for block in COMMANDS.finditer(page.read_text(encoding="utf-8")):
            found += [(page.name, line.removeprefix("$ ")) for line in block[1].splitlines() if line.startswith(f"$ {program} ")]
    return found


SLOW = {"docs/property-tests.md"}
"""Pages whose snippets take more than a few seconds."""


def run_of(page: Path, marker: str):
    name = str(page.relative_to(ROOT))
    if marker:
        return pytest.param(page, marker, id=f"{name}-{marker}", marks=getattr(pytest.mark, marker))
    return pytest.param(page, "", id=name, marks=[pytest.mark.slow] if name in SLOW else [])


RUNS = [run_of(page, marker) for page in PAGES for marker in MARKERS if any(marker == wanted for wanted, _, _ in snippets(page))]


@pytest.mark.parametrize(("page", "marker"), RUNS)
def test_snippets_run(page, marker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType(f"snippets_of_{page.stem.replace('-', '_').lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = set(gymnasium.registry)
    for wanted, line, code in snippets(page):
        if wanted in ("", marker):
            # Line numbers of the page, so that a traceback points into it.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), module.__dict__)
    for env_id in [id_ for id_ in gymnasium.registry if id_ not in before and id_.startswith("example/")]:
        check_registered(env_id, module, monkeypatch)


def check_registered(env_id, module, monkeypatch):
    """What a page registers can be made, if the class that the page defines lies where the page says."""
    place, _, name = gymnasium.spec(env_id).entry_point.partition(":")
    if hasattr(module, name):
        monkeypatch.setitem(sys.modules, place, module)
    try:
        with art_gym.make(env_id) as env:
            env.reset(seed=0)
    finally:
        del gymnasium.registry[env_id]


def test_every_snippet_is_found():
    # A fence that is indented, or has words behind its language, would silently not run.
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        opened = [match for match in FENCE.finditer(text) if match[1] == "python"]
        assert len(opened) == len(snippets(page)), page
        assert {marker for marker, _, _ in snippets(page)} <= set(MARKERS), page


@pytest.mark.parametrize(("page", "line"), commands("art-gym"))
def test_commands_exist_with_their_options(page, line):
    group = typer.main.get_command(app)
    with group.make_context("art-gym", shlex.split(line)[1:]) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        # Parses everything, and calls nothing.
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("page", "line"), commands("pytest"))
def test_options_of_pytest_exist(page, line, pytestconfig):
    # The plugin has added its own; an unknown one raises.
    parsed = pytestconfig._parser.parse(shlex.split(line)[1:])
    assert not set(parsed.art_gym_skip) - set(CHECKS)


@pytest.mark.parametrize(("page", "line"), commands("make"))
def test_make_targets_exist(page, line):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = shlex.split(line)[1:]
    assert [word for word in words if "=" not in word] != []
    assert all(word in targets for word in words if "=" not in word)
