"""Progress displays: a bar on a terminal, lines with a heartbeat elsewhere."""

import io
import re
import threading
import time

import pytest

from art_gym.episodes import Episode, Failure, Turn
from art_gym.messages import say
from art_gym.rollout import Tally, show_progress
from art_gym.scenarios import Scenario


def episode(reward=0.0, failure=None):
    return Episode(id="e", env_id="x", scenario=Scenario("s", 1), turns=[Turn([], say("hi"), reward=reward)], failure=failure)


FAILED = Failure("tool_timeout", "too slow")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_tally_leaves_failed_episodes_out_of_the_rates():
    tally = Tally()
    for each in (episode(reward=1.0), episode(reward=0.0), episode(reward=1.0, failure=FAILED)):
        tally.on_episode(each)
    assert str(tally) == "success 0.50, reward 0.50, 1 failed (tool_timeout)"


def test_the_tally_of_nothing_says_nothing():
    assert str(Tally()) == ""


def test_off_a_terminal_the_end_is_one_plain_line():
    stream = io.StringIO()
    with show_progress("eval-after", 3, stream=stream) as progress:
        for _ in range(3):
            progress.on_episode(episode(reward=1.0))
    assert stream.getvalue() == "eval-after: 3/3 episodes, success 1.00, reward 1.00, 3 turns, 0 s\n"


def test_off_a_terminal_a_stalled_rollout_still_shows_a_heartbeat(monkeypatch):
    monkeypatch.setattr("art_gym.rollout.progress.HEARTBEAT_SECONDS", 0.1)
    stream = io.StringIO()
    with show_progress("train-0001", stream=stream):
        time.sleep(0.35)
    lines = stream.getvalue().splitlines()
    assert 3 <= len(lines) <= 5
    assert set(lines) == {"train-0001: 0 episodes, 0 turns, 0 s"}


def test_the_heartbeat_ends_with_an_error():
    with pytest.raises(KeyError), show_progress("x", stream=io.StringIO()):
        raise KeyError
    assert "art_gym heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_on_a_terminal_it_is_a_bar():
    stream = Terminal()
    with show_progress("eval-after", 4, stream=stream) as progress:
        progress.on_episode(episode(reward=1.0))
        progress.on_episode(episode(failure=FAILED))
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "eval-after" in shown
    assert "2/4" in shown
