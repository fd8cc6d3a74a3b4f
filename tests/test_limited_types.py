"""Types whose limits JSON schema has no keyword for: the model is told them, and what a space draws is what a tool takes."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import uuid
import zoneinfo
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

import pydantic
import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import Field

from art_gym import Tool, ToolCallSpace, ToolError, strict_schema

UTC = datetime.UTC
moment = datetime.datetime


def make(annotation: Any) -> Tool:
    def use(x): ...  # type: ignore[no-untyped-def]

    return Tool.from_function(use, annotations={"x": annotation})


def shown(annotation: Any) -> dict[str, Any]:
    return make(annotation).parameters["properties"]["x"]  # type: ignore[no-any-return]


def samples(annotation: Any, count: int = 40) -> list[Any]:
    """What a tool receives of the calls that a space draws."""
    derived = make(annotation)
    space = ToolCallSpace({"use": derived.parameters}, seed=0)
    drawn: list[Any] = []
    for _ in range(count):
        action: Any = space.sample()
        assert action in space
        drawn.append(derived.parse(action["tool_calls"][0]["function"]["arguments"])["x"])
    return drawn


class Money(pydantic.BaseModel):
    amount: Annotated[Decimal, Field(max_digits=4, decimal_places=2, gt=0)]
    due: pydantic.FutureDate | None = None


TYPES: dict[str, tuple[Any, str]] = {
    # name: annotation, what the description says beside the parameter's own
    "date from": (Annotated[date, Ge(date(2050, 1, 1))], "Not before 2050-01-01."),
    "date after": (Annotated[date, Gt(date(1900, 1, 1))], "After 1900-01-01."),
    "date until": (Annotated[date, Le(date(1900, 1, 1))], "Not after 1900-01-01."),
    "date before": (Annotated[date, Lt(date(2000, 1, 2))], "Before 2000-01-02."),
    "date within": (Annotated[date, Interval(ge=date(2024, 2, 28), lt=date(2024, 3, 1))], "Not before 2024-02-28. Before 2024-03-01."),
    "one date": (Annotated[date, Interval(gt=date(2024, 1, 1), lt=date(2024, 1, 3))], "After 2024-01-01. Before 2024-01-03."),
    "last date": (Annotated[date, Ge(date(9999, 12, 30))], "Not before 9999-12-30."),
    "first date": (Annotated[date, Le(date(1, 1, 2))], "Not after 0001-01-02."),
    "datetime from": (Annotated[moment, Ge(moment(2050, 1, 1))], "Not before 2050-01-01T00:00:00."),
    "datetime within a second": (
        Annotated[moment, Interval(gt=moment(2024, 1, 1, 0, 0, 0, 100), lt=moment(2024, 1, 1, 0, 0, 0, 200))],
        "After 2024-01-01T00:00:00.000100. Before 2024-01-01T00:00:00.000200.",
    ),
    "datetime with a zone": (Annotated[moment, Interval(ge=moment(2024, 1, 1, tzinfo=UTC), lt=moment(2024, 1, 1, 1, tzinfo=UTC))], ""),
    "time within": (Annotated[time, Interval(ge=time(9), le=time(17, 30))], "Not before 09:00:00. Not after 17:30:00."),
    "one second late": (Annotated[time, Gt(time(23, 59, 58))], "After 23:59:58."),
    "timedelta from": (Annotated[timedelta, Gt(timedelta(days=2))], "More than P2D."),
    "timedelta until": (Annotated[timedelta, Le(timedelta(seconds=1.5))], "At most PT1.5S."),
    "timedelta below nothing": (Annotated[timedelta, Lt(timedelta())], "Less than PT0S."),
    "timedelta within": (Annotated[timedelta, Interval(ge=timedelta(hours=1), lt=timedelta(hours=2))], "At least PT1H. Less than PT2H."),
    "optional date": (Annotated[date, Ge(date(2050, 1, 1))] | None, "Not before 2050-01-01."),
    "list of dates": (list[Annotated[date, Ge(date(2050, 1, 1))]], "Not before 2050-01-01."),
    "past date": (pydantic.PastDate, "In the past."),
    "one past date": (Annotated[pydantic.PastDate, Ge(date(2022, 1, 1))], "In the past."),
    "future date": (pydantic.FutureDate, "In the future."),
    "past datetime": (pydantic.PastDatetime, "In the past."),
    "future datetime": (pydantic.FutureDatetime, "In the future."),
    "aware datetime": (pydantic.AwareDatetime, "With a time zone."),
    "naive datetime": (pydantic.NaiveDatetime, "Without a time zone."),
    "decimal of few digits": (Annotated[Decimal, Field(max_digits=3)], "At most 3 digits in all."),
    "decimal of one digit": (Annotated[Decimal, Field(max_digits=1)], "At most 1 digit in all."),
    "decimal of many digits": (Annotated[Decimal, Field(max_digits=30)], "At most 30 digits in all."),
    "decimal of few digits and places": (
        Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
        "At most 5 digits in all. At most 2 digits after the point.",
    ),
    "decimal of places only": (Annotated[Decimal, Field(max_digits=2, decimal_places=2)], "At most 2 digits in all. At most 2 digits after"),
    "decimal of places": (Annotated[Decimal, Field(decimal_places=1)], "At most 1 digit after the point."),
    "positive decimal of few digits": (Annotated[Decimal, Field(max_digits=3, gt=0, lt=1000)], "At most 3 digits in all."),
    "decimal of few digits within": (Annotated[Decimal, Field(max_digits=3, ge=10, le=20)], "At most 3 digits in all."),
    "decimal of few digits and a step": (Annotated[Decimal, Field(max_digits=3, multiple_of=5)], "At most 3 digits in all."),
    "whole decimal": (Annotated[Decimal, Field(decimal_places=0)], "At most 0 digits after the point."),
    "model": (Money, "At most 4 digits in all. At most 2 digits after the point."),
    "ftp": (pydantic.FtpUrl, "Starts with ftp://."),
    "file": (pydantic.FileUrl, "Starts with file://."),
    "websocket": (pydantic.WebsocketUrl, "Starts with ws:// or wss://."),
    "http": (pydantic.HttpUrl, "Starts with http:// or https://."),
    **{
        name: (getattr(pydantic, name), "Starts with ")
        for name in (
            *("AnyHttpUrl", "AnyWebsocketUrl", "PostgresDsn", "CockroachDsn", "AmqpDsn", "RedisDsn", "MongoDsn", "KafkaDsn", "NatsDsn"),
            *("MySQLDsn", "MariaDBDsn", "ClickHouseDsn", "SnowflakeDsn"),
        )
    },
    "url": (pydantic.AnyUrl, ""),
    **{f"UUID{version}": (getattr(pydantic, f"UUID{version}"), "") for version in (1, 3, 4, 5, 6, 7, 8)},
    "UUID": (uuid.UUID, ""),
    "zone": (zoneinfo.ZoneInfo, ""),
    "base64": (pydantic.Base64Str, ""),
    "base64url": (pydantic.Base64UrlStr, ""),
    "bytes": (pydantic.ByteSize, ""),
    "e-mail": (pydantic.EmailStr, ""),
    "e-mail with a name": (pydantic.NameEmail, ""),
    "path": (pathlib.Path, ""),
    **{name: (getattr(pydantic, name), "") for name in ("IPvAnyAddress", "IPvAnyInterface", "IPvAnyNetwork", "SecretStr", "Json")},
}

each = pytest.mark.parametrize("name", TYPES)


@each
def test_what_a_space_draws_is_what_the_tool_takes(name: str) -> None:
    drawn = samples(TYPES[name][0])
    if not name.startswith("one "):
        assert len({repr(value) for value in drawn}) > 1 or name == "SecretStr"


@each
def test_the_model_is_told_the_limits(name: str) -> None:
    annotation, told = TYPES[name]
    for plain in (make(annotation).schema, strict_schema(make(annotation).schema)) if name != "Json" else (make(annotation).schema,):
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        assert told in text
        assert "$told" not in text
        assert text.count(told) == 1 or not told


def test_the_words_follow_those_of_the_author() -> None:
    annotation = Annotated[date, Field(ge=date(2024, 1, 1), description="The day of arrival.")]
    assert shown(annotation) == {
        "type": "string",
        "format": "date",
        "formatMinimum": "2024-01-01",
        "description": "The day of arrival. Not before 2024-01-01.",
    }

    def use(day: Annotated[date, Ge(date(2024, 1, 1))] = date(2024, 5, 1)) -> None:
        """Use it.

        Args:
            day: The day.
        """

    assert Tool.from_function(use).parameters["properties"]["day"]["description"] == "The day. Not before 2024-01-01."


def test_a_property_may_have_any_name() -> None:
    Odd = pydantic.create_model("Odd", default=(date, ...), minimum=(date, ...), anyOf=(Annotated[date, Gt(date(2020, 1, 1))], ...))  # noqa: N806
    assert set(make(Odd).parameters["$defs"]["Odd"]["properties"]) == {"default", "minimum", "anyOf"}
    assert samples(Odd)


def test_samples_depend_on_no_clock() -> None:
    for value in samples(pydantic.FutureDate):
        assert value >= date(2100, 1, 1)
    for value in samples(pydantic.PastDate):
        assert value < date(2020, 1, 1)


def test_a_limit_that_is_not_met_is_told_with_what_was_written() -> None:
    with pytest.raises(ToolError) as caught:
        make(Annotated[timedelta, Ge(timedelta(days=1))]).parse('{"x": "PT1S"}')
    assert str(caught.value) == "invalid arguments: 'x' should be greater than or equal to 1 day, got 'PT1S'"


def test_each_bound_of_a_date_is_drawn() -> None:
    drawn = samples(Annotated[date, Interval(ge=date(2024, 2, 28), le=date(2024, 3, 1))])
    assert {*drawn} == {date(2024, 2, 28), date(2024, 2, 29), date(2024, 3, 1)}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Fraction, "a fraction can't be written in JSON: take two integers, its numerator and denominator, or a Decimal"),
        (pydantic.ImportString, "an ImportString would let a model import any module: take a Literal of names"),
        (list[pydantic.ImportString[Any]], "an ImportString would let a model import any module: take a Literal of names"),
        *(
            (kind, "what is on the disk can't be told by a schema: take a Path, and raise ToolError in the tool if it doesn't fit")
            for kind in (pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath, pydantic.SocketPath, pydantic.FilePath | None)
        ),
        (pydantic.Base64Bytes, "bytes can't be written in JSON: take a str, and decode it"),
    ],
    ids=str,
)
def test_what_can_not_be_drawn_is_refused(annotation: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        make(annotation)
    assert str(caught.value) == f"tool 'use': parameter 'x': {text}"


def test_no_module_is_imported_and_no_file_looked_at() -> None:
    class Hidden(pydantic.BaseModel):
        where: dict[str, pydantic.FilePath] = {}

    with pytest.raises(TypeError, match="what is on the disk"):
        make(Hidden)
    assert os.fspath(samples(pathlib.Path)[0])
