"""Random text of the formats that pydantic writes into a schema, within the limits of `art_gym._limits`."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from art_gym._draws import Rng, between, word

_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_TICK = timedelta(microseconds=1)

_USUAL = {
    "date": (datetime(2000, 1, 1), datetime(2039, 12, 31)),
    "date-time": (datetime(2000, 1, 1), datetime(2039, 12, 31)),
    "time": (datetime(2000, 1, 1), datetime(2000, 1, 1, 23, 59, 59)),
}
_SAFELY = {"past": (datetime(1980, 1, 1), datetime(2019, 12, 31)), "future": (datetime(2100, 1, 1), datetime(2139, 12, 31))}
"""What stays in the past or in the future for as long as this is used: samples depend on no clock."""

_ZONES = ("UTC", "Europe/Paris", "America/New_York", "Asia/Tokyo")
_COLOURS = ("red", "blue", "#00ff00")

Made = Callable[[Mapping[str, Any], Rng], str]


def random_text(schema: Mapping[str, Any], rng: Rng) -> str | None:
    """Draw a text of the schema's format; None where it has none that is known."""
    made = _FORMATS.get(schema.get("format", ""))
    return None if made is None else made(schema, rng)


def _date(schema: Mapping[str, Any], rng: Rng) -> str:
    def read(text: str) -> datetime:
        return datetime.combine(date.fromisoformat(text), time())

    low, high = _window(schema, read, _DAY, _USUAL["date"])
    day: datetime = low + between(rng, 0, (high - low) // _DAY) * _DAY
    return day.date().isoformat()


def _moment(schema: Mapping[str, Any], rng: Rng) -> str:
    limits = [datetime.fromisoformat(text) for key, text in schema.items() if key in _LOW or key in _HIGH]
    # A limit without a time zone is compared with what a value says, whatever its zone.
    zoned = schema["format"] == "date-time" and all(limit.tzinfo for limit in limits)

    def read(text: str) -> datetime:
        limit = datetime.fromisoformat(text)
        return limit if limit.tzinfo is None else limit.astimezone(UTC).replace(tzinfo=None)

    drawn = _drawn(*_window(schema, read, _TICK, _USUAL["date-time"]), rng)
    return f"{drawn.isoformat()}{'Z' if zoned else ''}"


def _time(schema: Mapping[str, Any], rng: Rng) -> str:
    def read(text: str) -> datetime:
        return datetime.combine(_USUAL["time"][0], time.fromisoformat(text).replace(tzinfo=None))

    low, high = _window(schema, read, _TICK, _USUAL["time"])
    drawn: datetime = _drawn(low, min(high, _USUAL["time"][0] + _DAY - _TICK), rng)
    return drawn.time().isoformat()


def _duration(schema: Mapping[str, Any], rng: Rng) -> str:
    low, high = _window(schema, TypeAdapter(timedelta).validate_python, _TICK, (timedelta(), _DAY - _SECOND))
    drawn = _drawn(low, high, rng)
    # Plain seconds are the easiest to read, and to write.
    return f"PT{drawn // _SECOND}S" if drawn >= timedelta() and not drawn % _SECOND else str(to_jsonable_python(drawn))


_LOW = {"formatMinimum": 0, "formatExclusiveMinimum": 1}
_HIGH = {"formatMaximum": 0, "formatExclusiveMaximum": 1}


def _window(schema: Mapping[str, Any], read: Callable[[str], Any], step: timedelta, usual: tuple[Any, Any]) -> tuple[Any, Any]:
    """The least and the greatest value to draw: the usual ones as far as the limits allow them, or as many next to a limit."""
    low: Any = max((read(schema[key]) + steps * step for key, steps in _LOW.items() if key in schema), default=None)
    high: Any = min((read(schema[key]) - steps * step for key, steps in _HIGH.items() if key in schema), default=None)
    first, last = _SAFELY.get(schema.get("formatNow", ""), usual)
    least, most = first if low is None else max(low, first), last if high is None else min(high, last)
    enough = timedelta() if "formatNow" in schema or last - first < 2 * _DAY else (last - first) // 2
    if most - least >= enough:
        return least, most
    span = timedelta() if "formatNow" in schema else last - first
    if low is None:
        low = high - span if high - type(high).min > span else type(high).min
    if high is None:
        high = low + span if type(low).max - low > span else type(low).max
    return low, high


def _drawn(low: Any, high: Any, rng: Rng) -> Any:
    """Draw a value in whole seconds, if there is one between the two."""
    rest = _TICK * (low.microsecond if isinstance(low, datetime) else low.microseconds)
    start = low + (_SECOND - rest if rest else timedelta())
    if start <= high:
        return start + between(rng, 0, (high - start) // _SECOND) * _SECOND
    return low + between(rng, 0, (high - low) // _TICK) * _TICK


def _uuid(schema: Mapping[str, Any], rng: Rng, version: int = 4) -> str:
    bits = int.from_bytes(rng.bytes(16), "big")
    bits = bits & ~(0xF << 76) & ~(0x3 << 62) | version << 76 | 0x2 << 62  # RFC 9562, section 4
    return str(uuid.UUID(int=bits))


def _uri(schema: Mapping[str, Any], rng: Rng) -> str:
    schemes = schema.get("uriSchemes") or ["https"]
    scheme = schemes[int(rng.integers(len(schemes)))]
    return f"{scheme}://{'' if scheme == 'file' else 'example.com'}/{word(rng, 3, 8)}"


def _encoded(schema: Mapping[str, Any], rng: Rng) -> str:
    return base64.b64encode(word(rng, 1, 6).encode()).decode()


def _address(schema: Mapping[str, Any], rng: Rng) -> str:
    return ".".join(str(int(part)) for part in rng.integers(1, 255, size=4))


def _address6(schema: Mapping[str, Any], rng: Rng) -> str:
    return ":".join(f"{int(part):x}" for part in rng.integers(1, 2**16, size=8))


_FORMATS: dict[str, Made] = {
    "date": _date,
    "date-time": _moment,
    "date-time-local": _moment,
    "time": _time,
    "duration": _duration,
    "uuid": _uuid,
    **{f"uuid{version}": partial(_uuid, version=version) for version in range(1, 9)},
    "email": lambda schema, rng: f"{word(rng, 3, 8)}@example.com",
    "name-email": lambda schema, rng: f"{word(rng, 3, 8)} <{word(rng, 3, 8)}@example.com>",
    "uri": _uri,
    "multi-host-uri": _uri,
    "ipv4": _address,
    "ipv6": _address6,
    "ipvanyaddress": _address,
    "ipv4network": lambda schema, rng: f"{_address(schema, rng)}/32",
    "ipv6network": lambda schema, rng: f"{_address6(schema, rng)}/128",
    "ipvanynetwork": lambda schema, rng: f"{_address(schema, rng)}/32",
    "ipv4interface": lambda schema, rng: f"{_address(schema, rng)}/24",
    "ipv6interface": lambda schema, rng: f"{_address6(schema, rng)}/64",
    "ipvanyinterface": lambda schema, rng: f"{_address(schema, rng)}/24",
    "json-string": lambda schema, rng: str(int(rng.integers(100))),
    "regex": lambda schema, rng: word(rng, 1, 6),
    "base64": _encoded,
    "base64url": _encoded,
    "zoneinfo": lambda schema, rng: _ZONES[int(rng.integers(len(_ZONES)))],
    "color": lambda schema, rng: _COLOURS[int(rng.integers(len(_COLOURS)))],
}
