"""Who may write into a run's folder, and that runs never mix."""

import contextlib
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from art_gym.cli import run_folder
from art_gym.cli.config import RunConfig
from art_gym.cli.run_folder import check, check_writable, claim, named, saved_config
from art_gym.errors import EngineError, UsageError


@pytest.fixture
def config():
    return RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}})


@pytest.fixture
def run(tmp_path, config):
    """A folder in which a run has begun."""
    with claim(tmp_path / "run", config, resume=False, fresh=False):
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    return tmp_path / "run"


def test_a_new_run_begins_with_its_configuration(tmp_path, config):
    folder = tmp_path / "runs" / "a"
    with claim(folder, config, resume=False, fresh=False):
        assert saved_config(folder) == config


def test_an_empty_folder_is_as_good_as_none(tmp_path, config):
    with claim(tmp_path, config, resume=False, fresh=False):
        assert saved_config(tmp_path) == config


def test_a_second_run_must_say_whether_it_goes_on_or_starts_anew(run, config):
    with pytest.raises(UsageError, match="--resume goes on with it, --fresh"):
        check(run, config, resume=False, fresh=False)


def test_going_on_and_starting_anew_exclude_each_other(run, config):
    with pytest.raises(UsageError, match="give one of them"):
        check(run, config, resume=True, fresh=True)


def test_a_resumed_run_keeps_what_is_there(run, config):
    with claim(run, config, resume=True, fresh=False):
        assert (run / "metrics.jsonl").read_text() == "{}\n"


def test_resuming_with_other_settings_names_them(run, config):
    other = config.model_copy(update={"seed": 5})
    with pytest.raises(UsageError, match=r"has other settings than you ask for: seed;"):
        check(run, other, resume=True, fresh=False)


def test_a_resumed_run_may_change_what_it_keeps_and_warns_of(run, config):
    other = RunConfig.from_values({"env": {"id": "art_gym/Lookup-v0"}, "checkpoints": {"keep_last": 9}, "alarms": {"entropy": {"warn": None}}})
    with claim(run, other, resume=True, fresh=False):
        assert saved_config(run) == other


def test_resuming_nothing_is_refused(tmp_path, config):
    with pytest.raises(UsageError, match="no run to resume"):
        check(tmp_path / "nowhere", config, resume=True, fresh=False)
    assert list(tmp_path.iterdir()) == []


def test_starting_anew_keeps_the_old_runs_under_other_names(run, config):
    for seed in (1, 2):
        with claim(run, config.model_copy(update={"seed": seed}), resume=False, fresh=True):
            assert not (run / "metrics.jsonl").exists()
            (run / "metrics.jsonl").write_text(f"{seed}")
    assert (run.with_name("run.old-1") / "metrics.jsonl").read_text() == "{}\n"
    assert (run.with_name("run.old-2") / "metrics.jsonl").read_text() == "1"
    assert (run / "metrics.jsonl").read_text() == "2"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_something_else_is_never_touched(tmp_path, config, fresh):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not empty and not the folder of a run"):
        check(tmp_path, config, resume=False, fresh=fresh)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_request_that_turns_out_impossible_leaves_nothing(tmp_path, config):
    with pytest.raises(UsageError, match="no such thing"), claim(tmp_path / "run", config, resume=False, fresh=False):
        raise UsageError("no such thing")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_left_empty_by_an_impossible_request(tmp_path, config):
    def run():
        with claim(tmp_path, config, resume=False, fresh=False):
            (tmp_path / "weights").mkdir()
            (tmp_path / "engine.log").touch()
            raise UsageError("no such thing")

    with pytest.raises(UsageError, match="no such thing"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_request_to_start_anew_puts_the_old_run_back(run, config):
    with pytest.raises(UsageError, match="no such thing"), claim(run, config, resume=False, fresh=True):
        raise UsageError("no such thing")
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    assert (run / "metrics.jsonl").read_text() == "{}\n"


def test_a_run_that_fails_on_its_way_keeps_its_folder(tmp_path, config):
    with pytest.raises(EngineError), claim(tmp_path / "run", config, resume=False, fresh=False):
        raise EngineError("the engine died")
    assert saved_config(tmp_path / "run") == config


def test_a_usage_error_after_results_keeps_them(tmp_path, config):
    def run():
        with claim(tmp_path / "run", config, resume=False, fresh=False):
            (tmp_path / "run" / "episodes").mkdir()
            raise UsageError("too late")

    with pytest.raises(UsageError):
        run()
    assert (tmp_path / "run" / "episodes").is_dir()


@pytest.mark.slow
def test_another_process_in_the_folder_is_noticed(run):
    program = (
        "import sys, pathlib; from art_gym.cli.run_folder import claim, saved_config; folder = pathlib.Path(sys.argv[1]);"
        "claimed = claim(folder, saved_config(folder), resume=True, fresh=False); claimed.__enter__(); print('in', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        for resume, fresh in [(True, False), (False, True)]:
            with pytest.raises(UsageError, match="another process is working"), claim(run, saved_config(run), resume=resume, fresh=fresh):
                pass
        other.kill()
    # The lock went with the process.
    with claim(run, saved_config(run), resume=True, fresh=False):
        pass


@pytest.mark.parametrize("fresh", [False, True])
def test_who_comes_second_to_a_folder_leaves_the_first_ones_files_alone(tmp_path, config, monkeypatch, fresh):
    folder = tmp_path / "run"
    if fresh:
        with claim(folder, config.model_copy(update={"seed": 1}), resume=False, fresh=False):
            (folder / "metrics.jsonl").touch()
    checked = run_folder.check
    with contextlib.ExitStack() as first:

        def check_and_be_overtaken(*arguments, **options):
            checked(*arguments, **options)
            monkeypatch.setattr(run_folder, "check", checked)
            first.enter_context(claim(folder, config, resume=False, fresh=fresh))
            (folder / "weights").mkdir()

        monkeypatch.setattr(run_folder, "check", check_and_be_overtaken)
        with pytest.raises(UsageError, match="another process is working"), claim(folder, config, resume=False, fresh=fresh):
            pytest.fail("two runs hold the folder")
        assert saved_config(folder) == config
        assert (folder / "weights").is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == (["run", "run.old-1"] if fresh else ["run"])


def test_a_run_that_began_and_ended_in_between_is_not_written_over(tmp_path, config, monkeypatch):
    checked = run_folder.check

    def check_and_be_overtaken(*arguments, **options):
        checked(*arguments, **options)
        monkeypatch.setattr(run_folder, "check", checked)
        with claim(tmp_path / "run", config, resume=False, fresh=False):
            (tmp_path / "run" / "metrics.jsonl").touch()

    monkeypatch.setattr(run_folder, "check", check_and_be_overtaken)
    other = config.model_copy(update={"seed": 5})
    with pytest.raises(UsageError, match="already holds a run"), claim(tmp_path / "run", other, resume=False, fresh=False):
        pytest.fail("two runs in one folder")
    assert saved_config(tmp_path / "run") == config


def test_a_folder_that_is_undone_while_one_waits_for_it_is_not_taken(tmp_path, config, monkeypatch):
    lock = fcntl.flock

    def overtaken(*arguments):
        # Between the opening of the lock's file and the lock, the first one fails and removes all that it made.
        for entry in (tmp_path / "run").iterdir():
            entry.unlink()
        (tmp_path / "run").rmdir()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with pytest.raises(UsageError, match="another process is working"), claim(tmp_path / "run", config, resume=False, fresh=False):
        pytest.fail("the folder isn't there any more")


def test_a_kill_before_the_configuration_leaves_a_folder_as_good_as_empty(tmp_path, config):
    (tmp_path / ".lock").touch()
    with claim(tmp_path, config, resume=False, fresh=False):
        assert saved_config(tmp_path) == config


def test_the_working_folder_itself_can_be_started_anew(run, config, monkeypatch):
    monkeypatch.chdir(run)
    assert named(Path()) == run
    assert named(Path("..")) == run.parent
    assert named(Path("../run")) == Path("../run")
    with claim(named(Path()), config, resume=False, fresh=True):
        assert saved_config(run) == config
    assert (run.with_name("run.old-1") / "metrics.jsonl").exists()
    assert Path(os.getcwd()) == run.with_name("run.old-1")


def test_a_folder_below_a_file_can_not_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=r"file is a file; give another --run-dir"):
            check_writable(folder)


def test_a_folder_that_can_not_be_written_is_named():
    # Nobody, not even the superuser, makes files in /proc.
    with pytest.raises(UsageError, match=r"can't write the folder /proc/art_gym: /proc: .*; give another --run-dir"):
        check_writable(Path("/proc/art_gym"))
