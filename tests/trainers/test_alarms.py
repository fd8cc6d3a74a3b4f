"""Alarms on rows made by hand: what raises one, what doesn't, and that each says what to do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from art_gym.cli.config import AlarmsSection, RunConfig
from art_gym_trainers import alarms
from art_gym_trainers.alarms import Limits, check

HEALTHY: dict[str, Any] = {
    "logprob_difference": 0.003,
    "kl_sampler": 0.004,
    "entropy": 0.08,
    "invalid_call_rate": 0.01,
    "fork_rate": 0.0,
    "not_finite": 0,
}
FIRST = HEALTHY | {"entropy": 0.1}


def defaults() -> dict[str, Limits]:
    return {name: Limits(limits.warn, limits.stop) for name, limits in AlarmsSection()}


def raised(**figures: Any) -> list[str]:
    return [alarm.name for alarm in check(HEALTHY | figures, FIRST, defaults())]


def test_the_configuration_has_each_alarm_and_no_other() -> None:
    assert tuple(AlarmsSection.model_fields) == alarms.ALARMS


def test_a_healthy_batch_raises_none() -> None:
    assert raised() == []
    # The extremes of three runs that learned.
    assert raised(entropy=0.02, kl_sampler=0.0148, logprob_difference=0.0046, invalid_call_rate=7 / 141, fork_rate=4 / 68) == []


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"logprob_difference": 0.021}, "logprob_difference"),
        ({"kl_sampler": 0.06}, "kl_sampler"),
        ({"kl_sampler": math.inf}, "kl_sampler"),
        ({"invalid_call_rate": 0.21}, "invalid_call_rate"),
        ({"fork_rate": 0.26}, "fork_rate"),
        ({"entropy": 0.009}, "entropy_share"),
        ({"not_finite": 1}, "not_finite"),
    ],
)
def test_a_figure_beyond_its_default_raises_its_alarm_and_no_other(figures: dict[str, Any], name: str) -> None:
    assert raised(**figures) == [name]


def test_a_collapsed_entropy_raises_both_of_its_alarms() -> None:
    assert raised(entropy=0.004) == ["entropy", "entropy_share"]
    # 0.004 is under the floor, and 80% of what a run began with that was as low.
    assert [alarm.name for alarm in check({"entropy": 0.004}, {"entropy": 0.005}, defaults())] == ["entropy"]


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_a_figure_that_is_not_known_raises_none(unknown: Any) -> None:
    assert check(dict.fromkeys(HEALTHY, unknown), FIRST, defaults()) == []
    assert check({}, {}, defaults()) == []
    assert check({"entropy": 0.02}, {"entropy": unknown}, defaults()) == []
    assert check({"entropy": 0.02}, {"entropy": 0.0}, defaults()) == []


def test_a_figure_at_its_limit_raises_none() -> None:
    assert check({"fork_rate": 0.25, "entropy": 0.005}, {}, defaults()) == []


def test_the_limit_that_stops_comes_before_the_one_that_warns() -> None:
    limits = {"kl_sampler": Limits(warn=0.1, stop=0.5), "entropy": Limits(warn=0.05, stop=0.01)}
    warned = check({"kl_sampler": 0.3, "entropy": 0.03}, {}, limits)
    assert [(alarm.limit, alarm.stops) for alarm in warned] == [(0.1, False), (0.05, False)]
    stopped = check({"kl_sampler": 0.6, "entropy": 0.001}, {}, limits)
    assert [(alarm.limit, alarm.stops) for alarm in stopped] == [(0.5, True), (0.01, True)]
    # One that only stops.
    assert [alarm.stops for alarm in check({"kl_sampler": 0.6}, {}, {"kl_sampler": Limits(None, 0.5)})] == [True]
    assert check({"kl_sampler": 0.6}, {}, {"kl_sampler": Limits(None, None)}) == []


def test_a_message_says_the_figure_the_limit_and_the_way_out_in_one_line() -> None:
    row = {"logprob_difference": 0.5, "kl_sampler": 9, "entropy": 0.0001, "invalid_call_rate": 1.0, "fork_rate": 0.75, "not_finite": 3}
    found = check(row, FIRST, defaults())
    assert [alarm.name for alarm in found] == list(alarms.ALARMS)
    for alarm in found:
        assert alarm.message.startswith(f"{alarm.name}: ")
        assert "(limit " in alarm.message
        assert "\n" not in alarm.message
    texts = {alarm.name: alarm.message for alarm in found}
    assert "differ by 0.5 nats a token on average (limit 0.02)" in texts["logprob_difference"]
    assert "100.0% of the tool calls were refused (limit 20.0%)" in texts["invalid_call_rate"]
    assert "fell to 0.1% of the first batch's (limit 10.0%)" in texts["entropy_share"]
    assert "3 of the batch's optimiser steps" in texts["not_finite"]


def test_the_settings_that_messages_name_exist() -> None:
    import re

    config = RunConfig.from_values({"env": {"id": "a"}}).model_dump()
    row = {"logprob_difference": 0.5, "kl_sampler": 9, "entropy": 0.0001, "invalid_call_rate": 1.0, "fork_rate": 0.75, "not_finite": 3}
    for alarm in check(row, FIRST, defaults()):
        for section, key in re.findall(r"\b(engine|model|grpo|rollout|warm_start|evaluation)\.(\w+)", alarm.message):
            assert key in config[section], alarm.message


def test_an_alarm_is_plain_data() -> None:
    (alarm,) = check({"fork_rate": 0.5}, {}, defaults())
    assert json.loads(json.dumps(alarm.to_dict())) == {
        "name": "fork_rate",
        "value": 0.5,
        "limit": 0.25,
        "stops": False,
        "message": alarm.message,
    }


def test_steps_without_a_finite_loss_or_gradient_are_counted_once() -> None:
    assert alarms.not_finite([1.0, 2.0], [0.1, 0.2]) == 0
    assert alarms.not_finite([math.nan, 1.0, math.inf], [math.nan, 0.1, 0.2]) == 2
    assert alarms.not_finite([], []) == 0


def test_alarms_need_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, art_gym_trainers.alarms, art_gym_trainers.checkpoints; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_the_examples_are_right() -> None:
    import doctest

    assert doctest.testmod(alarms) == (0, 3)
