"""JSON as it comes over the wire: read only as far as is needed, and passed on as it was."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from art_gym.gateway._errors import ApiError

Fields = dict[str, msgspec.Raw]
"""A JSON object whose values are the bytes that were sent."""

NULL = msgspec.Raw(b"null")
TRUE = msgspec.Raw(b"true")

_FIELDS: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_LIST: msgspec.json.Decoder[list[Fields]] = msgspec.json.Decoder(list[Fields])
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
encode = msgspec.json.Encoder().encode


def read_fields(data: bytes) -> Fields:
    """Read the body of a request.

    Raises:
        ApiError: It is no JSON object.
    """
    try:
        return _FIELDS.decode(data)
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # vLLM also takes what isn't JSON to the letter: NaN, halves of surrogate pairs.
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is no JSON: {str(error)[:200]}.", kind="Bad Request") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {type(value).__name__}.", kind="Bad Request")
    return {key: msgspec.Raw(json.dumps(part).encode()) for key, part in value.items()}


def fields(data: bytes | msgspec.Raw) -> Fields:
    """Read an object that the model server sent.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return _FIELDS.decode(data)


def field_lists(data: bytes | msgspec.Raw) -> list[Fields]:
    """Read a list of objects that the model server sent.

    Raises:
        msgspec.DecodeError: It is none.
    """
    return _LIST.decode(data)


def value(body: Fields, key: str, default: Any = None) -> Any:
    """A field as data; null counts as missing."""
    raw = body.get(key)
    if raw is None:
        return default
    try:
        found = _ANY.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        try:
            found = _writable(json.loads(bytes(raw)))
        except (ValueError, RecursionError):
            return default
    return default if found is None else found


def _writable(data: Any) -> Any:
    """Data without halves of surrogate pairs, which UTF-8 can't hold."""
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, list):
        return [_writable(part) for part in data]
    return {_writable(key): _writable(part) for key, part in data.items()} if isinstance(data, dict) else data


def raw(data: Any) -> msgspec.Raw:
    """Data as the value of a field."""
    return msgspec.Raw(encode(data))


def put(body: Fields, key: str, data: msgspec.Raw) -> None:
    """Set a field that is there; one that isn't stays away."""
    if key in body:
        body[key] = data
