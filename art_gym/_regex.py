"""Patterns of schemas: compiled as pydantic and JSON schema read them, and random strings that match them.

Strings are drawn from the parse tree of Python's own regular-expression parser. Assertions that look around are left to chance: a string is
drawn without them, and tried again until the whole pattern matches.
"""

from __future__ import annotations

import math
import re
import string
import sys
import unicodedata
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import groupby
from re import _parser  # type: ignore[attr-defined]  # no public parser exists; hypothesis reads the same one
from typing import Any

import numpy as np

_TRIES = 500
_REPEATS = 6
_FILLING = string.ascii_lowercase + string.digits
_PRINTABLE = string.ascii_letters + string.digits + " _-.,:;!?@#/+*()"
_CLASSES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_DIGIT": lambda character: not character.isdecimal(),
    "CATEGORY_NOT_WORD": lambda character: not (character.isalnum() or character == "_"),
    "CATEGORY_NOT_SPACE": lambda character: not character.isspace(),
}


@lru_cache(maxsize=256)
def pattern(text: str) -> re.Pattern[str]:
    r"""Compile a pattern of a schema. Where Python's syntax is another than that of pydantic (Rust) and JSON schema (ECMA), theirs counts.

    >>> bool(pattern(r"^\p{Lu}+$").search("ÄB")), bool(pattern("a$").search("a\n"))
    (True, False)

    Raises:
        ValueError: Python can't read it.
    """
    try:
        return re.compile(_in_python(text))
    except re.error as error:
        raise ValueError(f"the pattern {text!r} can't be read: {error}") from None


def random_match(text: str, rng: np.random.Generator, low: int = 0, high: float = math.inf) -> str:
    r"""Draw a random string in which the pattern is found, of `low` to `high` characters.

    >>> len(random_match(r"^[A-Z]\d{2}$", np.random.default_rng(0)))
    3
    >>> len(random_match(r"^[a-f]+$", np.random.default_rng(0), low=40, high=40))
    40

    Raises:
        ValueError: None was found in a bounded number of tries, or Python can't read the pattern.
    """
    compiled = pattern(text)
    tree = _parser.parse(compiled.pattern)
    for _ in range(_TRIES):
        drawn = _draw(tree, rng, {}, low)
        filling = "".join(_FILLING[int(index)] for index in rng.integers(len(_FILLING), size=max(low - len(drawn), 0)))
        # A pattern that isn't anchored leaves room beside the match.
        for candidate in (drawn + filling, filling + drawn):
            if low <= len(candidate) <= high and compiled.search(candidate):
                return candidate
    length = f" and has {low} to {high} characters" if low or high < math.inf else ""
    raise ValueError(f"no string found that matches the pattern {text!r}{length}")


_TOKEN = re.compile(r"\\[pP](?:\{(\^?)(\w+)\}|(\w))|\\.|\(\?<(?=\w)|[\[\]$]", re.DOTALL)


def _in_python(text: str) -> str:
    r"""Write a pattern as Python reads it: `$` and `\z` are the text's very end, `\p{…}` a class by Unicode category, `(?<name>…)` a group."""
    multiline = re.search(r"\(\?[a-z]*m", text) is not None
    inside = False

    def translate(match: re.Match[str]) -> str:
        nonlocal inside
        token = match[0]
        if token[:2] in ("\\p", "\\P"):
            characters = _category(match[2] or match[3], (token[1] == "P") != bool(match[1]))
            return characters if inside else f"[{characters}]"
        if token in ("[", "]"):
            inside = token == "["
        elif token == "(?<" and not inside:
            return "(?P<"
        elif token == "\\z" or (token == "$" and not inside and not multiline):
            return r"\Z"
        return token

    return _TOKEN.sub(translate, text)


@lru_cache(maxsize=32)
def _category(name: str, negated: bool) -> str:
    """The characters of a general category such as "L" or "Nd", as the ranges of a character class.

    Raises:
        re.error: There is no such category.
    """
    chosen = [run for run in _runs() if run[0].startswith(name) != negated]
    if not chosen or len(chosen) == len(_runs()):
        raise re.error(f"unknown category {name!r}")
    ranges: list[list[int]] = []
    for _, first, last in chosen:
        if ranges and ranges[-1][1] == first - 1:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


@cache
def _runs() -> tuple[tuple[str, int, int], ...]:
    """The runs of characters of one general category: the category, and the first and the last of the codes."""
    runs = []
    first = 0
    for category, codes in groupby(map(unicodedata.category, map(chr, range(sys.maxunicode + 1)))):
        after = first + sum(1 for _ in codes)
        if category != "Cs":  # surrogates are no characters
            runs.append((category, first, after - 1))
        first = after
    return tuple(runs)


def _draw(tree: Any, rng: np.random.Generator, groups: dict[int, str], wanted: int) -> str:
    return "".join(_draw_one(str(operation), argument, rng, groups, wanted) for operation, argument in tree)


def _draw_one(operation: str, argument: Any, rng: np.random.Generator, groups: dict[int, str], wanted: int) -> str:
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
            return _draw(branches[int(rng.integers(len(branches)))], rng, groups, wanted)
        case "SUBPATTERN":
            number, _, _, inner = argument
            text = _draw(inner, rng, groups, wanted)
            if number is not None:
                groups[number] = text
            return text
        case "ATOMIC_GROUP":
            return _draw(argument, rng, groups, wanted)
        case "GROUPREF":
            return groups.get(argument, "")
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, inner = argument
            most = min(int(most), least + max(_REPEATS, wanted))
            # Half of them as many as the whole string has to be long: most often there is one repeat, and it has to fill the string.
            count = min(max(wanted, least), most) if wanted > _REPEATS and rng.random() < 0.5 else int(rng.integers(least, most + 1))
            return "".join(_draw(inner, rng, groups, wanted // max(count, 1)) for _ in range(count))
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
