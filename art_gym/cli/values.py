"""Plain nested values and the models that validate them: reading, overriding, and saying in one line what is wrong.

Nothing here knows a setting by name, but for the examples in errors; `art_gym.cli.config` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ValidationError

from art_gym.errors import UsageError

_EXAMPLES = {"--set": "grpo.batches=12", "--env": "people=4"}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        UsageError: The file can't be read, isn't YAML, or holds something else.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"can't read {path}: it isn't UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path} isn't valid YAML{where}: {getattr(error, 'problem', None) or 'it can not be parsed'}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold sections such as 'env:' and 'grpo:', but holds a {type(values).__name__}")
    return values


def parse_assignments(assignments: Iterable[str], option: Literal["--set", "--env"] = "--set") -> dict[str, Any]:
    """Turn `a.b=value` texts into nested values; each value is read as YAML.

    >>> parse_assignments(["grpo.batches=12", "grpo.learning_rate=1e-4", "model.name=smollm2-135m"])
    {'grpo': {'batches': 12, 'learning_rate': '1e-4'}, 'model': {'name': 'smollm2-135m'}}

    Raises:
        UsageError: A text has no "=" or no key, its value isn't YAML, or two of them contradict each other.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        *parents, name = key.strip().split(".")
        if not equals or not name or not all(parents):
            raise UsageError(f"{option} {assignment!r}: expected KEY=VALUE, such as {option} {_EXAMPLES[option]}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UsageError(f"{option} {assignment!r}: the value isn't valid YAML") from None
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise UsageError(f"{option} {assignment!r}: {parent!r} was already given a value")
        section[name] = value
    return values


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `changes` over `base`, section by section; neither is modified.

    >>> merge({"env": {"id": "a"}, "seed": 1}, {"env": {"kwargs": {}}})
    {'env': {'id': 'a', 'kwargs': {}}, 'seed': 1}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name every leaf by its dotted path.

    >>> flatten({"env": {"id": "a"}, "seed": 1})
    {'env.id': 'a', 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Put a validation error of `model` into one line: each wrong key, what it holds, what is expected."""
    parts = []
    for item in error.errors(include_url=False):
        location = [str(part) for part in item["loc"]]
        key = ".".join(location)
        if item["type"] == "extra_forbidden":
            parts.append(_unknown_key(location, model))
        elif item["type"] == "missing":
            parts.append(f"missing key {key!r}")
        elif item["type"] == "value_error":
            message = item["msg"].removeprefix("Value error, ")
            parts.append(f"{key}: {message}" if key else message)
        elif item["type"] == "model_type":
            parts.append(f"{key} is {item['input']!r}; it must be a section with keys of its own")
        else:
            parts.append(f"{key} is {item['input']!r}; {item['msg'].replace('Input should be', 'it must be')}")
    return "; ".join(parts)


def _unknown_key(location: list[str], model: type[BaseModel]) -> str:
    *parents, name = location
    section = model
    for parent in parents:
        # Only a section refuses keys, so that every parent is one.
        section = _sections(section)[parent]
    prefix = ".".join(parents)
    known = list(section.model_fields)
    unknown = f"unknown key {'.'.join(location)!r}"
    if close := difflib.get_close_matches(name, known, n=1):
        return f"{unknown}; did you mean {'.'.join([*parents, close[0]])!r}?"
    # The key may be right and only stand in the wrong section.
    if elsewhere := [key for key in _keys(model) if key.split(".")[-1] == name]:
        return f"{unknown}; did you mean {' or '.join(map(repr, elsewhere))}?"
    return f"{unknown}; the keys {f'of {prefix!r}' if prefix else 'at the top'} are: {', '.join(known)}"


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    return {
        name: field.annotation
        for name, field in model.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    sections = _sections(model)
    keys = []
    for name in model.model_fields:
        keys += _keys(sections[name], f"{prefix}{name}.") if name in sections else [prefix + name]
    return keys
