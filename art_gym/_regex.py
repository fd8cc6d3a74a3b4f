"""Random strings that match a pattern, drawn from the parse tree of Python's own regular-expression parser.

Assertions that look around are left to chance: a string is drawn without them, and tried again until the whole pattern matches.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from re import _parser  # type: ignore[attr-defined]  # no public parser exists; hypothesis reads the same one
from typing import Any

import numpy as np

from art_gym._schema import pattern as compiled

_TRIES = 500
_REPEATS = 6
_PRINTABLE = string.ascii_letters + string.digits + " _-.,:;!?@#/+*()"
_CLASSES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_DIGIT": lambda character: not character.isdecimal(),
    "CATEGORY_NOT_WORD": lambda character: not (character.isalnum() or character == "_"),
    "CATEGORY_NOT_SPACE": lambda character: not character.isspace(),
}


def random_match(pattern: str, rng: np.random.Generator) -> str:
    r"""Draw a random string in which the pattern is found.

    >>> len(random_match(r"^[A-Z]\d{2}$", np.random.default_rng(0)))
    3

    Raises:
        ValueError: None was found in a bounded number of tries.
    """
    tree = _parser.parse(pattern)
    for _ in range(_TRIES):
        text = _draw(tree, rng, {})
        if compiled(pattern).search(text):
            return text
    raise ValueError(f"no string found that matches the pattern {pattern!r}")


def _draw(tree: Any, rng: np.random.Generator, groups: dict[int, str]) -> str:
    return "".join(_draw_one(str(operation), argument, rng, groups) for operation, argument in tree)


def _draw_one(operation: str, argument: Any, rng: np.random.Generator, groups: dict[int, str]) -> str:
    match operation:
        case "LITERAL":
            return chr(argument)
        case "NOT_LITERAL":
            return _choose(lambda character: ord(character) != argument, rng)
        case "ANY":
            return _choose(lambda character: True, rng)
        case "IN":
            return _draw_set(argument, rng)
        case "BRANCH":
            branches = argument[1]
            return _draw(branches[int(rng.integers(len(branches)))], rng, groups)
        case "SUBPATTERN":
            number, _, _, inner = argument
            text = _draw(inner, rng, groups)
            if number is not None:
                groups[number] = text
            return text
        case "ATOMIC_GROUP":
            return _draw(argument, rng, groups)
        case "GROUPREF":
            return groups.get(argument, "")
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, inner = argument
            most = min(int(most), least + _REPEATS)
            return "".join(_draw(inner, rng, groups) for _ in range(int(rng.integers(least, most + 1))))
        case _:  # anchors and assertions add no characters
            return ""


def _draw_set(items: list[tuple[Any, Any]], rng: np.random.Generator) -> str:
    if str(items[0][0]) == "NEGATE":
        return _choose(lambda character: not any(_in(character, item) for item in items[1:]), rng)
    operation, argument = items[int(rng.integers(len(items)))]
    match str(operation):
        case "LITERAL":
            return chr(argument)
        case "RANGE":
            return chr(int(rng.integers(argument[0], argument[1] + 1)))
        case _:
            return _choose(_CLASSES[str(argument)], rng)


def _in(character: str, item: tuple[Any, Any]) -> bool:
    operation, argument = item
    match str(operation):
        case "LITERAL":
            return ord(character) == int(argument)
        case "RANGE":
            return bool(argument[0] <= ord(character) <= argument[1])
        case _:
            return _CLASSES[str(argument)](character)


def _choose(allowed: Callable[[str], bool], rng: np.random.Generator) -> str:
    candidates = [character for character in _PRINTABLE if allowed(character)]
    return candidates[int(rng.integers(len(candidates)))] if candidates else ""
