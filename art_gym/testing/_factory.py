"""What makes the environment under test: called here, named in a script, and sent to another interpreter."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

from art_gym import registration
from art_gym.errors import UsageError

Make = str | Callable[[], gymnasium.Env[Any, Any]]
"""An environment's id ("package:namespace/Name-v0", or one that is registered), or a class or function that makes one."""


class Unshippable(Exception):
    """The factory can't be sent to another interpreter; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """How a script makes the environment: lines that come first, what is called, and the call."""

    lines: list[str]
    make: str
    call: str
    imports: set[str] = field(default_factory=set)


class Factory:
    """Makes environments, from an id or by calling what the user gave."""

    def __init__(self, make: Make) -> None:
        """Take what makes the environment.

        Raises:
            UsageError: It can't make environments.
        """
        if isinstance(make, gymnasium.Env) or not (isinstance(make, str) or callable(make)):
            raise UsageError(
                f"make must be an environment's id, or a class or function that makes a new environment when it is called, not {make!r:.100}"
            )
        self.make = make

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """Make an environment.

        Raises:
            UsageError: What is called makes something else.
        """
        made: Any = registration.make(self.make) if isinstance(self.make, str) else self.make()
        if not isinstance(made, gymnasium.Env):
            raise UsageError(f"{self.name} must make a gymnasium.Env, not {type(made).__name__}")
        return made

    def probe(self) -> gymnasium.Env[Any, Any]:
        """Make the first environment, and check that the next is another.

        Raises:
            UsageError: It isn't, or is no environment.
        """
        first = self()
        with contextlib.ExitStack() as stack:
            stack.callback(first.close)
            second = self()
            if second is first:
                raise UsageError(f"{self.name} must make a new environment each time it is called, and made the same one twice")
            second.close()
            stack.pop_all()
        return first

    @property
    def name(self) -> str:
        if isinstance(self.make, str):
            return self.make
        target = self.make.func if isinstance(self.make, functools.partial) else self.make
        return str(getattr(target, "__qualname__", type(target).__name__))

    def shipped(self) -> dict[str, Any]:
        """Return what another interpreter needs to make the same environments, for `load`.

        Raises:
            Unshippable: It can't.
        """
        shipped: dict[str, Any] = {"modules": _file_modules(), "main": _main_file()}
        if isinstance(self.make, str):
            spec = gymnasium.registry.get(self.make.rpartition(":")[2])
            try:
                text = spec.to_json() if spec is not None else None
            except (TypeError, ValueError, AssertionError):  # an entry point that is no text
                text = None
            return {**shipped, "id": self.make, "spec": text}
        try:
            pickled = pickle.dumps(self.make)
        except Exception as error:  # pickling runs code of whatever the factory holds
            raise Unshippable(f"{self.name} can't be pickled: give a class or function of a module") from error
        if b"__main__" in pickled and shipped["main"] is None:
            raise Unshippable(f"{self.name} was defined interactively: put it into a module")
        return {**shipped, "pickled": pickled}

    def source(self) -> Source:
        """Return how a script makes the same environments."""
        if isinstance(self.make, str):
            return _source_of_id(self.make)
        return source_of(self.make, ("make()", "make the environment here"))


def load(shipped: dict[str, Any]) -> Factory:
    """Make a factory from what another interpreter shipped."""
    sys.meta_path.append(_FileFinder(shipped["modules"]))
    if "id" in shipped:
        id_ = shipped["id"]
        try:
            registration.make(id_).close()
        except UsageError:
            if shipped["spec"] is None:
                raise
            spec = gymnasium.envs.registration.EnvSpec.from_json(shipped["spec"])
            gymnasium.registry[spec.id] = spec
        return Factory(id_)
    if b"__main__" in shipped["pickled"]:
        _load_main(shipped["main"])
    return Factory(pickle.loads(shipped["pickled"]))


def _source_of_id(env_id: str) -> Source:
    """Return how a script makes the environment of that id, be it one that the caller registered."""
    package, _, name = env_id.rpartition(":")
    lines: list[str] = []
    imports = {"import art_gym"}
    spec = gymnasium.registry.get(name)
    entry_point: Any = spec.entry_point if spec is not None else None
    if package:
        lines, more = _findable(package)
        imports |= more
    elif spec is not None and spec.namespace != "art_gym" and not str(entry_point).startswith("gymnasium."):
        # What registered it may have been any import of the caller's, or a call.
        if isinstance(entry_point, str):
            module, _, attribute = entry_point.partition(":")
            main = _main_file() if module == "__main__" else None
            if main is not None:
                module = Path(main).stem
            lines, more = _findable(module) if main is None else _loaded(module, module, main)
            made = repr(f"{module}:{attribute}")
        else:
            source = source_of(entry_point, ("make(**options)", "make the environment here"))
            lines, more, made = source.lines, source.imports, source.make
        options = [f"{key}={value!r}" for key, value in (("kwargs", spec.kwargs), ("max_episode_steps", spec.max_episode_steps)) if value]
        lines = [*lines, f"gymnasium.register({', '.join([repr(name), f'entry_point={made}', *options])})"]
        imports |= more | {"import gymnasium"}
    return Source(lines, repr(env_id), f"art_gym.make({env_id!r})", imports)


def source_of(function: Any, stand_in: tuple[str, str]) -> Source:
    """Return how a script gets hold of a function or class; where it can't, a function stands in for it: its head, and what is to be done."""
    found = _source_of(function)
    if found is not None:
        return found
    head, task = stand_in
    lines = ["", "", f"def {head}:", f"    raise NotImplementedError({f'{task}, as {_place(function)} does'!r})", "", ""]
    return Source(lines, head.partition("(")[0], head)


def _source_of(make: Any) -> Source | None:
    if isinstance(make, functools.partial):
        inner = _source_of(make.func)
        arguments = [repr(value) for value in make.args] + [f"{name}={value!r}" for name, value in make.keywords.items()]
        if inner is None or not all(_is_literal(value) for value in [*make.args, *make.keywords.values()]):
            return None
        joined = ", ".join(arguments)
        return Source(
            inner.lines, f"functools.partial({inner.make}, {joined})", f"{inner.make}({joined})", inner.imports | {"import functools"}
        )
    if inspect.ismethod(make) and not inspect.isclass(make.__self__):  # the object that it belongs to has no name
        return None
    module, name = getattr(make, "__module__", None), getattr(make, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    if _root(module, file) is not None:
        lines, imports = _findable(module)
        return Source([*lines, f"from {module} import {name.partition('.')[0]}"], name, f"{name}()", imports)
    short = Path(file).stem if module == "__main__" else module.rpartition(".")[2]
    lines, imports = _loaded(short, short, file)
    return Source(lines, f"{short}.{name}", f"{short}.{name}()", imports)


def _findable(module: str) -> tuple[list[str], set[str]]:
    """Lines after which a script can import the module, with the imports that they need; none for what is installed."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return [], set()
    root = _root(module, file)
    if root is None:
        return _loaded(module, module.rpartition(".")[2], file)
    if any(Path(root).is_relative_to(prefix) for prefix in {sys.prefix, sys.base_prefix}):
        return [], set()
    return [f"sys.path.insert(0, {root!r})"], {"import sys"}


def _loaded(module: str, variable: str, file: str) -> tuple[list[str], set[str]]:
    """Lines that load a module from its file, for one that is found by no path."""
    lines = [
        f"spec = importlib.util.spec_from_file_location({module!r}, {file!r})",
        f"{variable} = importlib.util.module_from_spec(spec)",
        f"sys.modules[{module!r}] = {variable}",
        f"spec.loader.exec_module({variable})",
    ]
    return lines, {"import importlib.util", "import sys"}


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _place(make: Any) -> str:
    name = getattr(make, "__qualname__", type(make).__name__)
    try:
        return f"{name} of {inspect.getsourcefile(make)}:{inspect.getsourcelines(make)[1]}"
    except (TypeError, OSError):
        return str(name)


def _root(module: str, file: str) -> str | None:
    """The entry of `sys.path` by which the module is found; None if it was loaded from its file by other means."""
    relative = Path(*module.split("."))
    for entry in sys.path:
        base = Path(entry or ".").resolve()
        if Path(file).resolve() in (base / relative.with_suffix(".py"), base / relative / "__init__.py"):
            return str(base)
    return None


def _file_modules() -> dict[str, str]:
    """Modules that this interpreter has loaded from files without finding them by `sys.path`, as pytest does with test modules."""
    installed = tuple({sys.prefix, sys.base_prefix})
    return {
        name: file
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
        and file.endswith(".py")
        and not file.startswith(installed)
        and name != "__main__"
        and _root(name, file) is None
    }


def _main_file() -> str | None:
    file = getattr(sys.modules["__main__"], "__file__", None)
    return str(Path(file).resolve()) if file and Path(file).is_file() else None


def _load_main(file: str) -> None:
    # As multiprocessing does it, so that a guard on __name__ keeps the script from running again.
    module = _module_from("__mp_main__", file)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _module_from(name: str, file: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"can't load {name!r} from {file!r}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class _FileFinder:
    """Finds modules by the files from which another interpreter loaded them, and the packages that they seem to lie in."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec
        from importlib.util import spec_from_file_location

        if name in self._files:
            file = self._files[name]
            inside = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
            return spec_from_file_location(name, file, submodule_search_locations=inside)
        if any(known.startswith(f"{name}.") for known in self._files):
            package = ModuleSpec(name, None, is_package=True)
            package.submodule_search_locations = []
            return package
        return None
