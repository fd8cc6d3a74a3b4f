"""A tool's parameters: from a signature to a pydantic model, and from there to the JSON schema that a model is shown."""

from __future__ import annotations

import enum
import inspect
import re
from typing import Annotated, Any, NoReturn

import pydantic
from pydantic import ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonRef
from pydantic_core import core_schema

_INTEGER_TEXT = "^(0|-?[1-9][0-9]*)$"


def parameter_field(parameter: inspect.Parameter, annotation: Any, description: str) -> tuple[Any, Any]:
    """The type and default of one parameter, as `pydantic.create_model` takes them."""
    annotation = type(None) if annotation is None else annotation
    default = ... if parameter.default is parameter.empty else parameter.default
    own = FieldInfo.from_annotation(annotation) if default is ... else FieldInfo.from_annotated_attribute(annotation, default)
    # The alias carries the parameter's name, which as a field name could clash with pydantic's own attributes ("json", "copy", "_id").
    extra = Field(alias=parameter.name) if own.description or not description else Field(alias=parameter.name, description=description)
    return Annotated[annotation, extra], default


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
    config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())
    model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config, **fields)
    schema = model.model_json_schema(schema_generator=_JsonSchema)
    order = ("type", "properties", "required", "additionalProperties", "$defs")
    return model, {key: schema[key] for key in order if key in schema}


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


class _JsonSchema(GenerateJsonSchema):
    """Without the titles that pydantic makes up from names: a model reads the names already, and each costs tokens at every turn."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  declared by the base class

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        # Pydantic also describes the text form, by no more than "string"; a model had better write a number.
        limits: Any = {key: float(schema[key]) for key in ("multiple_of", "le", "ge", "lt", "gt") if key in schema}
        number = self.float_schema(core_schema.float_schema(**limits))
        if "decimal_places" in schema:
            number.setdefault("multipleOf", 10.0 ** -schema["decimal_places"])
        return number

    def complex_schema(self, schema: Any) -> NoReturn:
        raise TypeError("a complex number can't be written in JSON: take two floats, its real and imaginary part")

    def is_subclass_schema(self, schema: Any) -> NoReturn:
        raise TypeError("a class can't be written in JSON: take a Literal of names")

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        for member in schema["expected"]:
            if isinstance(member, enum.Enum) and not isinstance(member, str | int):
                raise TypeError(
                    f"a Literal of {member} can't be read back from JSON, as its enum isn't one of str or int: "
                    "take the enum itself, or a Literal of its values"
                )
        return super().literal_schema(schema)

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return self._with_names(super().dict_schema(schema), schema)

    def frozendict_schema(self, schema: Any) -> dict[str, Any]:
        return self._with_names(super().frozendict_schema(schema), schema)

    def ordered_dict_schema(self, schema: Any) -> dict[str, Any]:
        return self._with_names(super().ordered_dict_schema(schema), schema)

    def counter_schema(self, schema: Any) -> dict[str, Any]:
        return self._with_names(super().counter_schema(schema), schema)

    def _with_names(self, described: dict[str, Any], schema: Any) -> dict[str, Any]:
        # Pydantic leaves the keys out where they aren't plain text; then a model writes, and a space samples, what validation refuses.
        if "patternProperties" in described:
            described["additionalProperties"] = False
        elif "keys_schema" in schema:
            names = self._names(self.generate_inner(schema["keys_schema"]))
            if names:
                described["propertyNames"] = names
        return described

    def _names(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Turn the schema of a mapping's keys into one of their text.

        Raises:
            TypeError: They can't be told apart as text, or carry limits that a schema can't put on text.
        """
        keys = {key: value for key, value in keys.items() if key not in ("title", "description", "default")}
        if "$ref" in keys:
            return self._names(self.get_schema_from_definitions(JsonRef(keys["$ref"])) or {})
        for choice in ("anyOf", "oneOf"):
            if choice in keys:
                return {"anyOf": [self._names(part) for part in keys[choice]]}
        if keys == {"type": "integer"}:
            return {"pattern": _INTEGER_TEXT}
        options = keys["enum"] if "enum" in keys else [keys["const"]] if "const" in keys else []
        if all(isinstance(option, str) for option in options) and (options or keys.get("type", "string") == "string"):
            return {key: value for key, value in keys.items() if key != "type"}
        raise TypeError(
            "a mapping's keys are text in JSON, and only str, int without limits, and enums and Literals of text can be read back "
            "from it: take dict[str, …], or a list of pairs"
        )

    def generator_schema(self, schema: Any) -> NoReturn:
        # Pydantic checks its items only while the tool reads them, when it is too late to tell the model.
        raise TypeError("an Iterable can't be checked before the tool runs: take a list or a Sequence")

    def bytes_schema(self, schema: Any) -> NoReturn:
        raise TypeError("bytes can't be written in JSON: take a str, and decode it")
