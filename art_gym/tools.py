"""Tools: functions that a model may call, described and checked from their signature and docstring.

`@tool` marks a method as a tool; nothing else becomes one. A `Tool` is what is derived from it, through pydantic and from one source: the JSON
schema that the model is shown, and the validation of the arguments that it writes. Running a call is the environment's part.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import docstring_parser
import pydantic
from pydantic_core import PydanticSerializationError, to_jsonable_python

from art_gym._actions import printable
from art_gym._arguments import explain, read_arguments
from art_gym._parameters import parameter_field, parameter_model, parameter_schema
from art_gym.errors import ToolError
from art_gym.messages import ToolSchema

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__art_gym_tool__"
_PROPERTIES = (property, cached_property)
_WIRE_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class _Mark:
    name: str | None = None
    timeout: float | None = None


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(*, name: str | None = None, timeout: float | None = None) -> Callable[[F], F]: ...


def tool(function: F | None = None, /, *, name: str | None = None, timeout: float | None = None) -> F | Callable[[F], F]:
    """Offer a method to the model as a tool.

    The method's signature gives the parameters, its docstring the descriptions (Google, NumPy and Sphinx style). It stays a plain method.

    Args:
        function: The method, sync or async.
        name: The name that the model sees; the method's own by default. Letters, digits, "_" and "-", at most 64.
        timeout: Seconds that one call may take; the episode fails with `ToolTimeout` after that. Each call of a sync tool then runs in a
            thread of its own, so what belongs to the thread that made it (an sqlite3 connection, unless opened with
            `check_same_thread=False`) can't be used there.

    Raises:
        TypeError: The name or the timeout can't be one, or what is marked is no method.
    """
    if isinstance(function, str):
        raise TypeError(f"@tool marks a method; to give it a name, write @tool(name={function!r})")
    if name is not None and not _WIRE_NAME.fullmatch(name):
        raise TypeError(f"a tool's name is 1 to 64 letters, digits, '_' or '-', not {name!r}")
    if timeout is not None and not timeout > 0:
        raise TypeError(f"a tool's timeout is a positive number of seconds, not {timeout!r}")

    def mark(function: F) -> F:
        method = getattr(function, "__func__", function)  # of a static method or a class method
        if isinstance(method, _PROPERTIES):
            kind = type(method).__name__
            raise TypeError(f"@tool marks a method, and {_getter(method).__name__!r} is a {kind}: remove @{kind}")
        if not callable(method) or inspect.isclass(method):
            kind = "class" if inspect.isclass(method) else type(method).__name__
            raise TypeError(f"@tool marks a method, and not {getattr(method, '__name__', method)!r}, which is of type {kind!r}")
        setattr(method, _MARK, _Mark(name, timeout))
        return function

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A tool as the model sees it, and the validation behind it.

    Attributes:
        name: The name on the wire.
        description: From the docstring.
        parameters: JSON schema of the arguments, an object. Not to be changed.
        timeout: Seconds that one call may take; None for no limit.
        attribute: The environment's attribute that runs it.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout: float | None
    attribute: str
    _model: type[pydantic.BaseModel] = field(repr=False)
    _names: Mapping[str, str] = field(repr=False)
    _hints: Mapping[str, Any] = field(repr=False)
    _recipe: tuple[Callable[..., Any], dict[str, Any]] = field(repr=False)

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout: float | None = None,
        annotations: Mapping[str, Any] | None = None,
        namespace: Mapping[str, Any] | None = None,
        skip_first: bool = False,
        attribute: str = "",
    ) -> Tool:
        """Derive a tool from a function's signature and docstring.

        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> adder = Tool.from_function(add)
        >>> adder.parameters["properties"]
        {'a': {'type': 'integer'}, 'b': {'default': 1, 'type': 'integer'}}
        >>> adder.parse('{"a": 2}')
        {'a': 2, 'b': 1}

        Args:
            function: Sync or async.
            name: The name on the wire; the function's own by default.
            timeout: Seconds that one call may take.
            annotations: Annotations that replace those of the function, by parameter.
            namespace: Local names in which string annotations are looked up, besides the function's module.
            skip_first: Leave out the first parameter: the `self` of a method.
            attribute: Where the environment keeps the function; its name by default.

        Raises:
            TypeError: A parameter can't be described in JSON schema, or can't be passed by name.
            NameError: An annotation names something that doesn't exist (yet).
        """
        recipe = {"name": name, "timeout": timeout, "annotations": annotations, "skip_first": skip_first, "attribute": attribute}
        name = name or str(getattr(function, "__name__", type(function).__name__))
        if not _WIRE_NAME.fullmatch(name):
            raise TypeError(f"a tool's name is 1 to 64 letters, digits, '_' or '-', not {name!r}: give it one with @tool(name=...)")
        target = function if inspect.isroutine(function) else type(function).__call__
        parameters = list(inspect.signature(target).parameters.values())[bool(skip_first or target is not function) :]
        hints = dict(annotations or {})
        unknown = hints.keys() - {parameter.name for parameter in parameters}
        if not all(parameter.name in hints for parameter in parameters):
            hints = {**typing.get_type_hints(target, localns=dict(namespace or {}), include_extras=True), **hints}
        if unknown:
            raise TypeError(f"tool '{name}' has no parameter {', '.join(map(repr, sorted(unknown)))}")
        doc = docstring_parser.parse(inspect.getdoc(function) or "")
        described = {item.arg_name: item.description or "" for item in doc.params}
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(parameters):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool '{name}': parameter {str(parameter)!r} can't be passed by name; a model names its arguments")
            fields[f"p{index}"] = parameter_field(parameter, hints.get(parameter.name, Any), described.get(parameter.name, ""))
        model = parameter_model(name, fields)
        names = {f"p{index}": parameter.name for index, parameter in enumerate(parameters)}
        description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
        return cls(name, description, parameter_schema(name, model), timeout, attribute or name, model, names, hints, (function, recipe))

    @property
    def schema(self) -> ToolSchema:
        """The tool in OpenAI wire form; a new object each time."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": json.loads(json.dumps(self.parameters))}
        return {"type": "function", "function": function}  # type: ignore[typeddict-item]  # a TypedDict can't be built by parts

    def parse(self, arguments: Any) -> dict[str, Any]:
        """Return the validated arguments, by parameter name, defaults filled in.

        Values are converted as pydantic does by default: "2" is taken for an integer parameter as 2.

        Args:
            arguments: JSON text as a model writes it, or an object already read; "" and None mean no arguments.

        Raises:
            ToolError: They aren't valid; the text says what is wrong and what would be right.
        """
        values = read_arguments(arguments)
        try:
            parsed = self._model.__pydantic_validator__.validate_python(values)
        except pydantic.ValidationError as error:
            raise ToolError(explain(error, values, self._names.values())) from None
        return {name: parsed.__dict__[key] for key, name in self._names.items()}

    def constrained(self, annotations: Mapping[str, Any]) -> Tool:
        """Derive the tool again, with other annotations for some of its parameters.

        Raises:
            TypeError: It has no such parameter.
        """
        function, recipe = self._recipe
        hints = {name: self._hints.get(name, Any) for name in self._names.values()}
        return Tool.from_function(function, **{**recipe, "annotations": {**hints, **annotations}})

    def __reduce__(self) -> tuple[Any, ...]:
        # Models made at run time don't pickle; the function does, and the model is made from it again.
        function, recipe = self._recipe
        return partial(Tool.from_function, **recipe), (function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool:
        # Immutable: environments that are copied or snapshot share it.
        return self


def derive_tools(cls: type, namespace: Mapping[str, Any] | None = None) -> dict[str, Tool]:
    """Derive the tools of a class, by their names on the wire.

    Args:
        cls: A class with methods marked by `@tool`.
        namespace: Local names in which string annotations are looked up, besides each method's module.

    Raises:
        TypeError: Two have one name, or one can't be described.
        NameError: An annotation names something that doesn't exist (yet).
    """
    tools: dict[str, Tool] = {}
    for attribute, marked in _marked(cls).items():
        tool = Tool.from_function(
            marked.function,
            name=marked.mark.name or attribute,
            timeout=marked.mark.timeout,
            namespace=namespace,
            skip_first=marked.takes_self,
            attribute=attribute,
        )
        if tool.name in tools:
            raise TypeError(f"{cls.__name__} has two tools named {tool.name!r}: {tools[tool.name].attribute} and {attribute}")
        tools[tool.name] = tool
    return tools


def refuse_hidden(cls: type, base: type, others: Collection[str]) -> None:
    """Refuse tools that would hide an attribute of the base class, or one of the others.

    Raises:
        TypeError: One would.
    """
    for attribute in _marked(cls):
        if hasattr(base, attribute) or attribute in others:
            raise TypeError(
                f"{cls.__name__}.{attribute}: a tool would hide the environment's own '{attribute}'; "
                f"give the method another name, and the model this one with @tool(name={json.dumps(attribute)})"
            )


def result_content(tool_name: str, result: Any) -> str | list[dict[str, Any]]:
    """Return what the model is told of a tool's result: text as it is, content parts as they are, anything else as JSON; None is "ok".

    >>> result_content("add", 5), result_content("look", {"exits": ["north"]})
    ('5', '{"exits": ["north"]}')

    Raises:
        TypeError: The result has no JSON form: a bug of the environment.
    """
    if isinstance(result, str):
        return printable(result)
    if result is None:
        return "ok"
    try:
        plain = to_jsonable_python(_ordered(result), inf_nan_mode="constants")
        if isinstance(result, list) and result and all(_is_content_part(part) for part in plain):
            return typing.cast("list[dict[str, Any]]", plain)
        return printable(json.dumps(plain, ensure_ascii=False))
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"tool '{tool_name}' returned {type(result).__name__}, which has no JSON form: {error}") from error


@dataclass(frozen=True, slots=True)
class _Marked:
    mark: _Mark
    function: Callable[..., Any]
    takes_self: bool


def _marked(cls: type) -> dict[str, _Marked]:
    """Find the methods of a class that are marked as tools, by attribute, in the order of their definition, base classes first.

    Raises:
        TypeError: One is overridden by something that isn't marked, so that it isn't clear whether it still is a tool; or one can't be called
            as a tool: it has no `self`, or is a property or an async generator.
    """
    found: dict[str, _Marked] = {}
    for owner in reversed(cls.__mro__):
        for attribute, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            mark = getattr(function, _MARK, None) if callable(function) else None
            if isinstance(value, _PROPERTIES) and hasattr(_getter(value), _MARK):
                kind = type(value).__name__
                raise TypeError(f"{owner.__name__}.{attribute}: a tool is called and a {kind} is read: remove @{kind}")
            if isinstance(mark, _Mark):
                _check_method(f"{owner.__name__}.{attribute}", value, function)
                found[attribute] = _Marked(mark, function, not isinstance(value, staticmethod))
            elif attribute in found:
                if value is not None:
                    raise TypeError(
                        f"{owner.__name__}.{attribute} overrides a tool without being one: "
                        f"decorate it with @tool, or set {attribute} = None to drop the tool"
                    )
                del found[attribute]
    return found


def _getter(value: property | cached_property[Any]) -> Any:
    return value.fget if isinstance(value, property) else value.func


def _check_method(where: str, value: Any, function: Callable[..., Any]) -> None:
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{where}: an async generator can't be a tool: collect what it yields in a list, and return that")
    if isinstance(value, staticmethod) or not inspect.isroutine(function):  # Python passes no self to an object that is called
        return
    parameters = list(inspect.signature(function).parameters.values())
    expected = "cls" if isinstance(value, classmethod) else "self"
    first = parameters[0] if parameters else None
    positional = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) and first.name.strip("_") == expected
    # "*args" takes it too, in a wrapper that doesn't say whose signature it has.
    if not positional and not (first is not None and first.kind is first.VAR_POSITIONAL):
        written = f"def {where.rpartition('.')[2]}({', '.join([expected, *(parameter.name for parameter in parameters)])})"
        raise TypeError(f"{where}: a tool's first parameter must be {expected!r}: write {written}, or put @staticmethod under @tool")


def _is_content_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "image_url", "input_audio", "file")


def _ordered(value: Any) -> Any:
    """Sort the sets in the value: their own order differs between processes."""
    if isinstance(value, set | frozenset):
        return sorted((_ordered(item) for item in value), key=lambda item: json.dumps(to_jsonable_python(item), sort_keys=True))
    if type(value) is dict:
        return {key: _ordered(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_ordered(item) for item in value]
    return value
