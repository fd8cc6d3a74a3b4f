"""A walk as a person reads it, and as a program that plays it again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from art_gym._actions import printable
from art_gym.messages import calls, say
from art_gym.testing._factory import Factory, source_of
from art_gym.testing._outcomes import Walk
from art_gym.testing._watch import Invariant

_LINE = 100
_STAND_IN = ("invariant(transition)", "check the transition here")
"""What the reader has to write where an invariant can't be imported."""


def action_source(action: Any, prefix: str = "art_gym.") -> str:
    """Write an action as Python: by the helper that builds it, or as it is.

    >>> from art_gym import call
    >>> action_source(call("guess", number=3))
    'art_gym.call("guess", number=3)'
    """
    for source, built in _built(action):
        if built == action and type(built) is type(action):
            return f"{prefix}{source}"
    return _value(action)


def actions_source(actions: Sequence[Any], name: str = "actions") -> list[str]:
    """Write a list of actions as lines of Python."""
    return [f"{name} = [", *(f"    {action_source(action)}," for action in actions), "]"] if actions else [f"{name} = []"]


def script(factory: Factory, walk: Walk, problem: str, beside: Walk | None = None, *, invariants: Sequence[Invariant] = ()) -> str:
    """Write the program that plays the walk, prints what comes back, and checks every invariant on it again.

    Args:
        factory: Makes the environment.
        walk: What to play.
        problem: What it shows.
        beside: Another walk, whose infos have entries of other types.
        invariants: Those of the author's own that are to be checked as well.
    """
    source = factory.source()
    own = [source_of(invariant, _STAND_IN) for invariant in invariants]
    setup = _joined([source.lines, *(each.lines for each in own)])
    arguments = _arguments(walk)
    lines = [
        f'"""{_first_line(problem)}"""',
        "",
        *sorted({"import art_gym", *source.imports.union(*(each.imports for each in own))}),
        "",
        *(["from art_gym.testing import check_actions", ""] if beside is None else []),
        *setup,
        *([""] if setup and setup[-1] else []),
        *actions_source(walk.actions),
        *(actions_source(beside.actions, "others") if beside is not None else []),
        "",
    ]
    if beside is None:
        # The check may play in a second interpreter, which loads this file when it defines the environment.
        lines += ['if __name__ == "__main__":', *_playing(source.call, walk)]
        checked = f", invariants=[{', '.join(each.make for each in own)}]" if own else ""
        lines.append(f"    check_actions({source.make}, actions, {arguments}{checked})")
    else:
        lines += _COMPARING.format(call=source.call, first=arguments, second=_arguments(beside)).split("\n")[:-1]
    return "\n".join(line.rstrip() for line in lines) + "\n"


_COMPARING = """
def types_of(info, path="info"):
    found = {{}}
    for key, value in info.items():
        found[f"{{path}}[{{key!r}}]"] = type(value).__name__
        if isinstance(value, dict):
            found.update(types_of(value, f"{{path}}[{{key!r}}]"))
    return found


def played(actions, **start):
    env = {call}
    observation, info = env.reset(**start)
    print(observation, info)
    found = types_of(info)
    for action in actions:
        print(action)
        observation, reward, terminated, truncated, info = env.step(action)
        print(observation, reward, terminated, truncated, info)
        found.update(types_of(info))
        if terminated or truncated:
            observation, info = env.reset(options=start.get("options"))
            print(observation, info)
            found.update(types_of(info))
    return found


if __name__ == "__main__":
    first, second = played(actions, {first}), played(others, {second})
    for path in first.keys() & second.keys():
        if first[path] != second[path]:
            raise AssertionError(f"{{path}} is of type {{first[path]}}, and in the other episode of type {{second[path]}}")
"""


def _joined(blocks: Sequence[Sequence[str]]) -> list[str]:
    """The lines of all blocks, what several import only once."""
    lines: list[str] = []
    for block in blocks:
        lines += [line for line in block if line not in lines or not line.strip()]
    return lines


def _playing(call: str, walk: Walk) -> list[str]:
    options = f"options={_value(dict(walk.options))}" if walk.options else ""
    arguments = _arguments(walk)
    return [
        f"    env = {call}",
        f"    print(env.reset({arguments}))",
        "    for action in actions:",
        "        print(action)",
        "        observation, reward, terminated, truncated, info = env.step(action)",
        "        print(observation, reward, terminated, truncated, info)",
        "        if terminated or truncated:",
        f"            print(env.reset({options}))",
    ]


def _arguments(walk: Walk) -> str:
    return f"seed={walk.seed}" + (f", options={_value(dict(walk.options))}" if walk.options else "")


def _built(action: Any) -> list[tuple[str, Any]]:
    """What the helpers would build of the same parts, with the source that does."""
    if not isinstance(action, Mapping):
        return []
    text, written = action.get("content"), action.get("tool_calls")
    if written is None:
        return [(f"say({_value(text)})", say(text))] if isinstance(text, str) else []
    try:
        named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in written]
        built = calls(*named, text=text)
    except (TypeError, KeyError, ValueError, RecursionError):
        return []
    if not all(isinstance(arguments, dict) for _, arguments in named):
        return []
    if len(named) == 1 and text is None and all(name.isidentifier() for name in named[0][1]):
        name, arguments = named[0]
        return [(f"call({', '.join([_value(name), *(f'{key}={_value(value)}' for key, value in arguments.items())])})", built)]
    parts = [f"({_value(name)}, {_value(arguments)})" for name, arguments in named] + ([f"text={_value(text)}"] if text is not None else [])
    return [(f"calls({', '.join(parts)})", built)]


def _value(value: Any) -> str:
    """Write a value as Python source, texts in double quotes where that needs no escapes."""
    if isinstance(value, str):
        plain = value.isprintable() and '"' not in value and "\\" not in value
        return f'"{value}"' if plain and printable(value) == value else ascii(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(key)}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)


def _first_line(text: str) -> str:
    line = printable(text.splitlines()[0] if text else "").replace("\\", "\\\\").replace('"', "'")
    return line if len(line) <= _LINE else f"{line[:_LINE].rstrip(chr(92))}…"
