"""The clocks of an interpreter, which another one may set to another time, in another time zone.

What Python offers goes with them: the functions of `time`, and `now`, `utcnow` and `today` of `datetime`. The class `datetime` stays the
one it is, so that its instances pickle, compare and validate as ever, whoever made them and however a module has imported it. Only code that
asks the operating system itself, as libraries written in other languages may, sees the true time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

_SHIFT = timedelta(days=400, hours=1, minutes=1, seconds=1)
"""Another year, month, hour, minute and second; up to six days are added, so that a day of the week is a day off."""

_ZONE_SHIFT = timedelta(hours=13, minutes=17)
"""More than half a day, so that in one direction it is another day there."""

_RUNNING = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
"""Functions of `time` that return seconds; each has a twin that returns nanoseconds."""

_SATURDAY = 5


def other_zone(now: datetime) -> str:
    """A time zone, as the variable TZ takes it, in which the hour is another one and the day is, too.

    >>> other_zone(datetime.fromisoformat("2026-05-01T15:00:00+02:00"))
    'XXX-15:17'
    """
    offset = _other_offset(now)
    minutes = round(abs(offset).total_seconds() / 60)
    # East of Greenwich is negative there.
    return f"XXX{'-' if offset >= timedelta() else '+'}{minutes // 60}:{minutes % 60:02d}"


def other_time(now: datetime) -> timedelta:
    """How far the clock is set ahead: to another year, month, hour, minute and second, and from a working day to a day off or back.

    The day is that of the time zone in which the clock is read, there `other_zone`; where it can be, that of UTC changes as well.

    >>> other_time(datetime.fromisoformat("2026-05-01T15:00:00+00:00"))  # a Friday
    datetime.timedelta(days=400, seconds=3661)
    """
    zone = timezone(_other_offset(now))

    def changes(days: int) -> tuple[bool, bool]:
        there = now + _SHIFT + timedelta(days=days)
        return _is_off(now) != _is_off(there.astimezone(zone)), _is_off(now.astimezone(UTC)) != _is_off(there.astimezone(UTC))

    return _SHIFT + timedelta(days=max(range(7), key=lambda days: (changes(days), -days)))


def _other_offset(now: datetime) -> timedelta:
    offset = now.utcoffset() or timedelta()
    shifted = offset + (_ZONE_SHIFT if now.hour >= 11 else -_ZONE_SHIFT)
    # The C library takes less than a day.
    return shifted if abs(shifted) < timedelta(hours=24) else offset - (shifted - offset)


class Clock:
    """The clocks and the time zone of this process."""

    def __init__(self) -> None:
        self._shift = timedelta()
        self._zone = os.environ.get("TZ")

    def install(self) -> None:
        """Stand in for the clocks, before the modules that may take them are imported."""
        for name in _RUNNING:
            self._stand_in(name, lambda real: lambda *which: real(*which) + self._shift.total_seconds())
            self._stand_in(f"{name}_ns", lambda real: lambda *which: real(*which) + int(self._shift.total_seconds()) * 10**9)
        for name in ("gmtime", "localtime", "ctime"):
            self._stand_in(name, lambda real: lambda seconds=None: real(time.time() if seconds is None else seconds))
        self._stand_in("strftime", lambda real: lambda how, *moment: real(how, *(moment or (time.localtime(),))))
        self._stand_in("asctime", lambda real: lambda *moment: real(*(moment or (time.localtime(),))))
        # `datetime.today` and `date.today` ask `time.time`.
        now, utcnow, from_timestamp = (vars(datetime)[name] for name in ("now", "utcnow", "fromtimestamp"))

        def other_now(cls: type[datetime], tz: Any = None) -> Any:
            return from_timestamp.__get__(None, cls)(time.time(), tz) if self._shift else now.__get__(None, cls)(tz)

        def other_utcnow(cls: type[datetime]) -> Any:
            return utcnow.__get__(None, cls)() + self._shift

        _put(datetime, "now", classmethod(other_now))
        _put(datetime, "utcnow", classmethod(other_utcnow))

    @contextlib.contextmanager
    def shifted(self) -> Iterator[None]:
        """Have another time, in another time zone."""
        now = datetime.now().astimezone()
        self._set(other_time(now), other_zone(now))
        try:
            yield
        finally:
            self._set(timedelta(), self._zone)

    def _set(self, shift: timedelta, zone: str | None) -> None:
        self._shift = shift
        if zone is None:
            os.environ.pop("TZ", None)
        else:
            os.environ["TZ"] = zone
        if hasattr(time, "tzset"):
            time.tzset()

    def _stand_in(self, name: str, made: Callable[[Any], Callable[..., Any]]) -> None:
        if hasattr(time, name):  # not every system has every clock
            setattr(time, name, _StandIn(name, made(getattr(time, name))))


class _StandIn:
    """What is called instead of a function of `time`: no method where a class holds it, and pickled by its name, as the function is."""

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = "time"
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> str:
        return self.__name__


def _put(cls: type, name: str, value: Any) -> None:
    """Set an attribute of a class, be it one of those written in C, which refuse it."""
    try:
        setattr(cls, name, value)
    except TypeError:
        # Behind the view of its attributes lies a dictionary like any other. A class of its own in the place of this one would be told from it
        # by pickle, and by what takes its instances from C, as pydantic does.
        (attributes,) = gc.get_referents(vars(cls))
        attributes[name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))


def _is_off(day: datetime) -> bool:
    return day.weekday() >= _SATURDAY


CLOCK = Clock()
"""This process has one."""
