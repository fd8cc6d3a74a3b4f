"""A tool's parameters: from a signature to a pydantic model. The JSON schema that a model is shown is `art_gym._json_schema`'s part."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from art_gym._json_schema import NO_FRACTION, JsonSchema
from art_gym._limits import with_limits_told

_REFUSED_VALIDATORS = {
    "fraction_validator": NO_FRACTION,  # before pydantic 2.11
    "import_string": "an ImportString would let a model import any module: take a Literal of names",
    **dict.fromkeys(
        ("PathType.validate_file", "PathType.validate_directory", "PathType.validate_new", "PathType.validate_socket"),
        "what is on the disk can't be told by a schema: take a Path, and raise ToolError in the tool if it doesn't fit",
    ),
}
"""Functions of pydantic's own that check what no schema can tell, and why they can't be used."""


def parameter_field(parameter: inspect.Parameter, annotation: Any, description: str) -> tuple[Any, Any]:
    """The type and default of one parameter, as `pydantic.create_model` takes them."""
    annotation = type(None) if annotation is None else annotation
    default: Any = ... if parameter.default is parameter.empty else parameter.default
    own = FieldInfo.from_annotation(annotation) if default is ... else FieldInfo.from_annotated_attribute(annotation, default)
    if default is ... and own.default_factory is not None:
        default = Field(default_factory=own.default_factory)
    elif default is ... and own.default is not PydanticUndefined:
        default = own.default
    # The alias carries the parameter's name, which as a field name could clash with pydantic's own attributes ("json", "copy", "_id").
    extra = Field(alias=parameter.name) if own.description or not description else Field(alias=parameter.name, description=description)
    return Annotated[annotation, extra], default


def is_strict(model: type[pydantic.BaseModel]) -> bool:
    """Whether a part of the model is strict, so that JSON's types must be read as JSON: a date is text there, and a tuple a list."""
    return any(part.get("strict") is True for part in _core_parts(model.__pydantic_core_schema__))


def describe(name: str, fields: dict[str, tuple[Any, Any]]) -> tuple[type[pydantic.BaseModel], dict[str, Any]]:
    """The model that validates a tool's arguments, and their JSON schema.

    Args:
        name: The tool's name.
        fields: What `parameter_field` returned, by field name.

    Raises:
        TypeError: A type can't be written in JSON.
    """
    try:
        return _describe(name, fields)
    except (pydantic.errors.PydanticUserError, TypeError) as error:
        raise TypeError(f"tool '{name}': {_culprit(name, fields)}{_reason(error)}") from error


def _describe(name: str, fields: dict[str, Any]) -> tuple[type[pydantic.BaseModel], dict[str, Any]]:
    for _, default in fields.values():
        if getattr(default, "default_factory_takes_validated_data", False):
            raise TypeError(
                "its default_factory takes the other arguments, whose names it can't know: take None, and find the value in the tool"
            )
    config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config, **fields)
    for part in _core_parts(model.__pydantic_core_schema__):
        _check_part(part)
    schema = with_limits_told(model.model_json_schema(schema_generator=JsonSchema))
    order = ("type", "properties", "required", "additionalProperties", "$defs")
    return model, {key: schema[key] for key in order if key in schema}


def _core_parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a pydantic core schema, and the configurations in it; not the values that it holds."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from _core_parts(part)
    elif isinstance(schema, dict):
        yield schema
        for key, part in schema.items():
            if key == "fields" and isinstance(part, dict):
                yield from _core_parts([*part.values()])
            elif key not in ("metadata", "default", "serialization", "expected", "members", "ref", "type"):
                yield from _core_parts(part)


def _check_part(part: dict[str, Any]) -> None:
    """Check a part of a core schema for what can't be told by a schema, or can't be left to a model.

    Raises:
        TypeError: It is such.
    """
    function = part.get("function")
    if callable(function) and getattr(function, "__module__", "").startswith("pydantic."):
        told = _REFUSED_VALIDATORS.get(getattr(function, "__qualname__", ""))
        if told:
            raise TypeError(told)


def _culprit(name: str, fields: dict[str, tuple[Any, Any]]) -> str:
    """Name the first parameter that can't be described even by itself."""
    for key, (annotation, default) in fields.items():
        try:
            _describe(name, {key: (annotation, default)})
        except (pydantic.errors.PydanticUserError, TypeError):
            return f"parameter '{annotation.__metadata__[-1].alias}': "
    return ""


def _reason(error: Exception) -> str:
    if not isinstance(error, pydantic.errors.PydanticUserError):
        return str(error)
    if error.code not in ("schema-for-unknown-type", "invalid-for-json-schema"):
        return error.message.partition("\n")[0]
    unknown = re.search(r"pydantic-core schema for (.*?)\. Set|core_schema\.(\w+?)Schema", error.message)
    what = (unknown[1] or unknown[2]) if unknown else "its type"
    return f"{what} has no JSON form: take what JSON can carry (text, numbers, lists, a model), and build it in the tool"
