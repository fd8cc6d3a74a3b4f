"""The clocks of the other interpreter. They are set in a process of their own: what stands in for them stays there."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest

from art_gym.testing._clock import other_time, other_zone

LOOKS = [
    "time.time()", "time.time_ns()", "time.monotonic()", "time.monotonic_ns()", "time.perf_counter()", "time.perf_counter_ns()",
    "time.process_time()", "time.process_time_ns()", "time.thread_time()", "time.thread_time_ns()",
    "time.clock_gettime(time.CLOCK_REALTIME)", "time.gmtime()", "time.gmtime(None)", "time.localtime()", "time.ctime()", "time.asctime()",
    "time.strftime('%Y-%m-%d')", "time.strftime('%H')", "gmtime()", "now()", "datetime.datetime.now()", "datetime.datetime.now(datetime.UTC)",
    "datetime.datetime.now(tz=datetime.UTC).hour", "datetime.datetime.utcnow()", "datetime.datetime.today()", "datetime.date.today()",
    "datetime.date.today().year", "datetime.date.today().month", "datetime.date.today().weekday() < 5", "clock.now().date()", "Own.now()",
    "Own.today()", "Day.today()", "email.utils.formatdate()", "Held.clock()", "Held().clock()",
]  # fmt: skip
"""Ways to look at a clock, at no more than its hour: the clock goes on."""

SAME = [
    "type(datetime.datetime.now()) is datetime.datetime", "type(Own.now()) is Own", "type(Own.utcnow()) is Own",
    "isinstance(datetime.datetime(2026, 5, 1), clock)", "pickle.loads(pickle.dumps(clock.now())).year == clock.now().year",
    "pickle.loads(pickle.dumps(clock)) is clock", "pickle.loads(pickle.dumps(time.time)) is time.time",
    "copy.deepcopy(time.gmtime) is time.gmtime", "adapter.validate_python(adapter.validate_json('\"2026-05-01T10:00:00Z\"')).hour == 10",
    "type(adapter.validate_json('\"2026-05-01T10:00:00Z\"')) is datetime.datetime", "time.gmtime(0).tm_year == 1970",
    "time.strftime('%Y', time.gmtime(0)) == '1970'", "abs(clock.now().timestamp() - time.time()) < 2",
    "abs(clock.now(datetime.UTC).timestamp() - time.time()) < 2", "threading.Event().wait(0.01) is False",
    "asyncio.run(asyncio.wait_for(asyncio.sleep(0.01, True), 5))",
]  # fmt: skip
"""What is as ever, at the other time too."""

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # utcnow
from art_gym.testing._clock import CLOCK
from datetime import datetime as clock  # before the clocks were set, as another module may
CLOCK.install()
import asyncio, copy, datetime, email.utils, pickle, threading, time
from time import gmtime
from pydantic import TypeAdapter
now = datetime.datetime.now
adapter = TypeAdapter(datetime.datetime)
class Own(datetime.datetime): pass
class Day(datetime.date): pass
class Held: clock = time.time
looks, same = json.loads(sys.argv[1])
def all_of(expressions): return [eval(expression) for expression in expressions]
before = all_of(looks)
right = [all_of(same)]
with CLOCK.shifted():
    there = all_of(looks)
    right.append(all_of(same))
after = all_of(looks)
def far(one, other):
    if isinstance(one, float):
        return abs(one - other) > 3600
    if isinstance(one, int) and max(one, other) > 10**6:  # nanoseconds
        return abs(one - other) > 3600 * 10**9
    if isinstance(one, datetime.datetime):
        return abs(one - other) > datetime.timedelta(hours=1)
    if isinstance(one, time.struct_time):
        return one[:4] != other[:4]
    return one != other
print(json.dumps([[far(*pair) for pair in zip(before, there)], [far(*pair) for pair in zip(before, after)], right]))
"""


@pytest.fixture(scope="module")
def seen() -> list:
    done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps([LOOKS, SAME])], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("look", LOOKS)
def test_every_clock_shows_another_time(seen, look):
    assert seen[0][LOOKS.index(look)]


def test_afterwards_clocks_are_right_again(seen):
    exact = {"time.ctime()", "time.asctime()", "email.utils.formatdate()"}  # to the second, which may have passed
    assert [look for look, far in zip(LOOKS, seen[1], strict=True) if far and look not in exact] == []


@pytest.mark.parametrize("what", SAME)
def test_what_has_to_do_with_time_works_as_ever(seen, what):
    assert [right[SAME.index(what)] for right in seen[2]] == [True, True]


@pytest.mark.parametrize(
    ("now", "zone"),
    [
        ("2026-05-01T15:00:00+00:00", "XXX-13:17"),  # 04:17 on the next day
        ("2026-05-01T09:00:00+00:00", "XXX+13:17"),  # 19:43 on the day before
        ("2026-05-01T15:00:00-05:00", "XXX-8:17"),
        ("2026-05-01T15:00:00+12:00", "XXX+1:17"),  # 25:17 east is too far: 12:00 − 13:17
    ],
)
def test_the_zone_is_more_than_half_a_day_away(now, zone):
    assert other_zone(datetime.fromisoformat(now)) == zone


@pytest.mark.parametrize("day", range(1, 32))
def test_the_other_time_is_in_another_year_month_hour_minute_and_second_and_not_as_working(day):
    now = datetime(2027, 12, day, 22, 30, 59)
    then = now + other_time(now)
    for field in ("year", "month", "hour", "minute", "second"):
        assert getattr(now, field) != getattr(then, field)
    assert (now.weekday() >= 5) != (then.weekday() >= 5)


@pytest.mark.parametrize("offset", [-11, -5, 0, 2, 10])
def test_a_working_day_becomes_a_day_off_and_back_at_any_hour_of_a_week(offset):
    zone = timezone(timedelta(hours=offset))
    for hour in range(7 * 24):
        now = datetime(2026, 11, 30, 0, 30, tzinfo=zone) + timedelta(hours=hour)
        hours, minutes = other_zone(now).removeprefix("XXX").split(":")
        # West of Greenwich is positive there.
        away = -int(hours) if hours[0] != "-" else int(hours[1:])
        there_zone = timezone(timedelta(hours=away, minutes=int(minutes) * (-1 if hours[0] != "-" else 1)))
        there = (now + other_time(now)).astimezone(there_zone)
        assert (there.weekday() >= 5) != (now.weekday() >= 5), now
        assert (there.year, there.hour, there.minute) != (now.year, now.hour, now.minute)
