"""Tools: functions that a model may call, described and checked from their signature and docstring.

`@tool` marks a method as a tool; nothing else of a class becomes one. A `Tool` is what is derived from it, through pydantic and from one
source: the JSON schema that the model is shown, and the validation of the arguments that it writes. Which tools an environment has is
`art_gym._toolbox`'s part, running a call `art_gym._calls`'.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar, overload

import docstring_parser
import pydantic

from art_gym._annotations import parameter_types
from art_gym._arguments import explain, read_arguments, refuse_beyond_floats
from art_gym._nulls import drop_nulls
from art_gym._parameters import describe, is_strict, parameter_field
from art_gym.errors import ToolError
from art_gym.messages import ToolSchema

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__art_gym_tool__"
PROPERTIES = (property, cached_property)
"""What is read like an attribute, and can't be called."""

_WIRE_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolMark:
    """What `@tool` leaves on a function: the options it was given."""

    name: str | None = None
    timeout: float | None = None


def mark_of(function: Any) -> ToolMark | None:
    """Return what `@tool` left on the function; None if it isn't marked."""
    mark = getattr(function, _MARK, None)
    return mark if isinstance(mark, ToolMark) else None


def getter_of(value: property | cached_property[Any]) -> Any:
    """Return the function behind a property."""
    return value.fget if isinstance(value, property) else value.func


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(*, name: str | None = None, timeout: float | None = None) -> Callable[[F], F]: ...


def tool(function: F | None = None, /, *, name: str | None = None, timeout: float | None = None) -> F | Callable[[F], F]:
    """Offer a method to the model as a tool.

    The method's signature gives the parameters, its docstring the descriptions (Google, NumPy and Sphinx style). It stays a plain method. A
    function handed over as `ToolEnv(tools=[…])` needs no mark; it may have one for its options.

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
    if name is not None:
        _check_name(name)
    _check_timeout(timeout)

    def mark(function: F) -> F:
        method = getattr(function, "__func__", function)  # of a static method or a class method
        if isinstance(method, PROPERTIES):
            kind = type(method).__name__
            raise TypeError(f"@tool marks a method, and {getter_of(method).__name__!r} is a {kind}: remove @{kind}")
        if not callable(method) or inspect.isclass(method):
            kind = "class" if inspect.isclass(method) else type(method).__name__
            raise TypeError(f"@tool marks a method, and not {getattr(method, '__name__', method)!r}, which is of type {kind!r}")
        setattr(method, _MARK, ToolMark(name, timeout))
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
        attribute: The environment's attribute that runs it; "" if the function itself does.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout: float | None
    attribute: str
    _model: type[pydantic.BaseModel] = field(repr=False)
    _strict: bool = field(repr=False)
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
        owner: type | None = None,
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
            function: Sync or async: a function, a method of an object, an object that can be called, or a `functools.partial`, whose bound
                parameters the model doesn't see.
            name: The name on the wire; the function's own by default.
            timeout: Seconds that one call may take.
            annotations: Annotations that replace those of the function, by parameter.
            owner: The class that defines the function, if one does. Annotations that are text are looked up among its names, and those of
                the functions and classes that it or the function is defined in, besides the function's module.
            skip_first: Leave out the first parameter: the `self` of a method.
            attribute: The environment's attribute that runs it; by default the function itself does.

        Raises:
            TypeError: A parameter can't be described in JSON schema, or can't be passed by name; it is no function; or the name or the
                timeout can't be one.
            NameError: An annotation names something that doesn't exist (yet).
        """
        recipe = {"name": name, "timeout": timeout, "annotations": annotations, "skip_first": skip_first, "attribute": attribute}
        subject = _subject(function)
        name = name or str(getattr(subject.described, "__name__", type(function).__name__))
        _check_name(name, ": give it one with @tool(name=...)")
        _check_timeout(timeout)
        parameters = _parameters(name, function, subject, skip_first=skip_first)
        hints = dict(annotations or {})
        unknown = hints.keys() - {parameter.name for parameter in parameters}
        if not all(parameter.name in hints for parameter in parameters):
            found, local = parameter_types(subject.called, owner)
            hints = {**found, **hints}
            if local:  # they can't be found once more, such as by a copy of the tool in another process
                recipe["annotations"] = {parameter.name: hints[parameter.name] for parameter in parameters if parameter.name in hints}
        if unknown:
            raise TypeError(f"tool '{name}' has no parameter {', '.join(map(repr, sorted(unknown)))}")
        doc = docstring_parser.parse(subject.doc)
        described = {item.arg_name: item.description or "" for item in doc.params}
        fields: dict[str, Any] = {}
        for index, parameter in enumerate(parameters):
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool '{name}': parameter {str(parameter)!r} can't be passed by name; a model names its arguments")
            fields[f"p{index}"] = parameter_field(parameter, hints.get(parameter.name, Any), described.get(parameter.name, ""))
        model, schema = describe(name, fields)
        names = {f"p{index}": parameter.name for index, parameter in enumerate(parameters)}
        description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
        return cls(name, description, schema, timeout, attribute, model, is_strict(model), names, hints, (function, recipe))

    @property
    def function(self) -> Callable[..., Any]:
        """The function that it was derived from."""
        return self._recipe[0]

    @property
    def schema(self) -> ToolSchema:
        """The tool in OpenAI wire form; a new object each time."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": json.loads(json.dumps(self.parameters))}
        return {"type": "function", "function": function}  # type: ignore[typeddict-item]  # a TypedDict can't be built by parts

    def parse(self, arguments: Any) -> dict[str, Any]:
        """Return the validated arguments, by parameter name, defaults filled in.

        Values are converted as pydantic does by default: "2" is taken for an integer parameter as 2. A null where none is admitted counts as
        not given, as `strict_schema` has a model write it: the default is taken, if there is one.

        Args:
            arguments: JSON text as a model writes it, or an object already read; "" and None mean no arguments.

        Raises:
            ToolError: They aren't valid; the text says what is wrong and what would be right.
        """
        values = read_arguments(arguments)
        validator = self._model.__pydantic_validator__
        while True:
            try:
                valid = validator.validate_json(json.dumps(values)) if self._strict else validator.validate_python(values)
            except pydantic.ValidationError as error:
                if not drop_nulls(error, values, self.parameters):
                    raise ToolError(explain(error, values, self._names.values())) from None
            else:
                fields = valid.__dict__
                result = {name: fields[key] for key, name in self._names.items()}
                refuse_beyond_floats(result, [self._names[key] for key in valid.__pydantic_fields_set__])
                return result

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
        named = _named(function)
        if isinstance(named, types.MethodType) and named.__func__ is function:
            # Of a class method: by its name there is the bound method only, which pickles.
            return partial(_from_class_method, **recipe), (named,)
        return partial(Tool.from_function, **recipe), (function,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool:
        # Immutable: environments that are copied or snapshot share it.
        return self


@dataclass(frozen=True, slots=True)
class _Subject:
    """What of a callable says something about it: which function runs, which one has the name, and the docstring."""

    called: Callable[..., Any]
    described: Any
    doc: str


def _subject(function: Any) -> _Subject:
    """Look through partials, and into objects that can be called.

    Raises:
        TypeError: A model can't call it.
    """
    described = function
    while isinstance(described, partial):
        described = described.func
    if inspect.isclass(described) or not callable(described):
        kind = "a class" if inspect.isclass(described) else f"of type {type(described).__name__!r}"
        raise TypeError(f"{getattr(described, '__name__', described)!r:.60} can't be a tool: it is {kind}, and no function")
    called = described if inspect.isroutine(described) else type(described).__call__
    # A function's own docstring may be inherited; `inspect` would find one for every __call__, that of `type`.
    doc = inspect.getdoc(described) if called is described else called.__doc__ or inspect.getdoc(described)
    if inspect.isasyncgenfunction(called):
        raise TypeError(f"{getattr(described, '__name__', described)!r:.60}: an async generator can't be a tool: return a list")
    return _Subject(called, described, inspect.cleandoc(doc or ""))


def _check_name(name: Any, way_out: str = "") -> None:
    if not isinstance(name, str) or not _WIRE_NAME.fullmatch(name):
        raise TypeError(f"a tool's name is 1 to 64 letters, digits, '_' or '-', not {name!r}{way_out}")


def _check_timeout(timeout: Any) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
        raise TypeError(f"a tool's timeout is a positive number of seconds, or None for no limit, not {timeout!r}")


def _from_class_method(method: types.MethodType, **recipe: Any) -> Tool:
    return Tool.from_function(method.__func__, **recipe)


def _named(function: Any) -> Any:
    """Return what the function's module has by its name, as pickle looks it up; None if there is nothing."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in getattr(function, "__qualname__", "<locals>").split("."):
        found = getattr(found, part, None)
    return found


def _parameters(name: str, function: Any, subject: _Subject, *, skip_first: bool) -> list[inspect.Parameter]:
    """Return the parameters that a model fills in.

    Raises:
        TypeError: The function doesn't tell, or is a method without its object.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise TypeError(f"tool '{name}': {error}: wrap it in a function of your own") from error
    if skip_first and inspect.isroutine(function):  # Python passes no self to an object that is called
        return parameters[1:]
    if parameters and parameters[0].name == "self" and "." in getattr(subject.called, "__qualname__", ""):
        raise TypeError(
            f"tool '{name}': its first parameter is 'self': give the method of an object, or mark it with @tool in the environment's class"
        )
    bound = function.keywords if isinstance(function, partial) else {}
    return [parameter for parameter in parameters if parameter.name not in bound]
