"""What a run shows: plain lines with a heartbeat, or a table on a terminal."""

import io
import re
import time

import pytest
from rich.console import Console

from art_gym.cli.live import COLUMNS, LiveTable

STEP = {"step": 3, "phase": "grpo", "reward": 0.4125, "success_rate": 0.5, "forks": 0.0, "seconds_train": 31.4, "unknown_key": 1}


@pytest.fixture
def console():
    """Not a terminal, as under nohup."""
    return Console(file=io.StringIO(), width=100)


def lines(console) -> list[str]:
    return [re.sub(r"^\[\d+:\d\d\] ", "", line) for line in console.file.getvalue().splitlines()]


def test_plain_lines_say_the_title_each_phase_and_each_step(console):
    with LiveTable("a run", console=console) as live:
        live.phase("rollout", "batch 1")
        live.row(STEP)
        live.note("untrained: 0.0%")
    assert lines(console) == ["a run", "rollout: batch 1", "step 3, reward 0.412, success 50.0%, forks 0, train s 31", "untrained: 0.0%"]


def test_a_figure_that_a_step_has_not_is_a_dash(console):
    with LiveTable("a run", console=console) as live:
        live.row({"step": 3, "entropy": None, "clip_fraction": None})
    assert lines(console)[1] == "step 3, entropy –, clipped –"


def test_a_new_detail_of_the_same_phase_is_no_new_line(console):
    with LiveTable("a run", console=console) as live:
        live.phase("rollout", "1 of 64 episodes")
        live.phase("rollout", "2 of 64 episodes")
    assert lines(console) == ["a run", "rollout: 1 of 64 episodes"]


def test_a_stalled_phase_is_told_by_a_heartbeat_with_its_newest_detail(console):
    with LiveTable("a run", console=console, heartbeat=0.1) as live:
        live.phase("rollout", "1 of 64 episodes")
        live.phase("rollout", "2 of 64 episodes")
        deadline = time.monotonic() + 10
        while len(lines(console)) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert lines(console)[1] == "rollout: 1 of 64 episodes"
    assert lines(console)[2].startswith("rollout: 2 of 64 episodes")
    assert lines(console)[3].startswith("rollout: 2 of 64 episodes")


def test_nothing_more_is_said_after_the_end(console):
    with LiveTable("a run", console=console, heartbeat=0.01) as live:
        live.phase("rollout")
    said = console.file.getvalue()
    time.sleep(0.05)
    assert console.file.getvalue() == said


def test_long_lines_are_not_broken(console):
    with LiveTable("a run", console=console) as live:
        live.note("x" * 300)
    assert lines(console)[1] == "x" * 300


def test_square_brackets_are_shown_as_they_are(console):
    with LiveTable("a run", console=console) as live:
        live.note("tools [search] [/answer]")
    assert lines(console)[1] == "tools [search] [/answer]"


def test_on_a_terminal_the_steps_stand_in_a_table():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveTable("a run", console=console, rows=2) as live:
        for step in (1, 2, 3):
            live.row({"step": step, "reward": step / 10})
        live.phase("training", "batch 4")
        live.note("a note")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    final = shown[shown.rindex("a run") :]
    assert "a note" in shown
    assert re.search(r"step +reward", final)
    assert re.findall(r"^ *(\d) +(0\.\d+)", final, re.MULTILINE) == [("2", "0.200"), ("3", "0.300")]


def test_on_a_narrow_terminal_the_least_important_figures_are_left_out():
    console = Console(file=io.StringIO(), force_terminal=True, width=50)
    with LiveTable("a run", console=console) as live:
        live.row({column.key: 1 for column in COLUMNS})
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert max(len(line) for line in shown.splitlines()) <= 50
    assert all(heading in shown for heading in ("step", "reward", "success", "entropy", "Δ logprob"))
    assert "publish s" not in shown


def test_an_error_goes_through_and_the_terminal_is_left_clean():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with pytest.raises(KeyError), LiveTable("a run", console=console):
        raise KeyError
    # The cursor is shown again.
    assert console.file.getvalue().count("\x1b[?25h") == 1
