"""The JSON schema of a tool's parameters: pydantic's, without what a model has no use for, and with what pydantic leaves out.

Types that can't be written in JSON, or can't be checked before the tool runs, are refused with a TypeError.
"""

from __future__ import annotations

import enum
from typing import Any, NoReturn

import pydantic
from pydantic.json_schema import GenerateJsonSchema, JsonRef
from pydantic_core import core_schema

from art_gym._limits import limit_digits, limit_schemes, limit_time

_INTEGER_TEXT = "^(0|-?[1-9][0-9]*)$"
_BYTES_TEXT = "^[0-9]{1,12}(\\.[0-9]{1,3})? ?(([kKMGTPE]i?)?B)?$"

NO_FRACTION = "a fraction can't be written in JSON: take two integers, its numerator and denominator, or a Decimal"
"""Of a text such as "1e999999999" Python would reckon out all digits."""


class JsonSchema(GenerateJsonSchema):
    """Without the titles that pydantic makes up from names: a model reads the names already, and each costs tokens at every turn."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  declared by the base class

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def str_schema(self, schema: Any) -> dict[str, Any]:
        if schema.get("pattern") == pydantic.ByteSize.byte_string_pattern:
            return {"type": "string", "pattern": _BYTES_TEXT}  # pydantic's own lets any word stand for the unit
        return super().str_schema(schema)

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        # Pydantic also describes the text form, by no more than "string"; a model had better write a number.
        limits: Any = {key: float(schema[key]) for key in ("multiple_of", "le", "ge", "lt", "gt") if key in schema}
        return limit_digits(self.float_schema(core_schema.float_schema(**limits)), schema.get("max_digits"), schema.get("decimal_places"))

    def fraction_schema(self, schema: Any) -> NoReturn:
        raise TypeError(NO_FRACTION)

    def date_schema(self, schema: Any) -> dict[str, Any]:
        return limit_time({"type": "string", "format": "date"}, schema)

    def datetime_schema(self, schema: Any) -> dict[str, Any]:
        # By JSON schema's rules a date-time has a time zone. Pydantic takes one without it too, if not told otherwise.
        naive = schema.get("tz_constraint") == "naive"
        return limit_time({"type": "string", "format": "date-time-local" if naive else "date-time"}, schema)

    def time_schema(self, schema: Any) -> dict[str, Any]:
        return limit_time({"type": "string", "format": "time"}, schema)

    def timedelta_schema(self, schema: Any) -> dict[str, Any]:
        return limit_time({"type": "string", "format": "duration"}, schema)

    def url_schema(self, schema: Any) -> dict[str, Any]:
        return limit_schemes(super().url_schema(schema), schema.get("allowed_schemes"))

    def multi_host_url_schema(self, schema: Any) -> dict[str, Any]:
        return limit_schemes(super().multi_host_url_schema(schema), schema.get("allowed_schemes"))

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
