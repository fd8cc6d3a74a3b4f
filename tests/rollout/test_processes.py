"""Environments in processes: what they may do to themselves, and what is left of them."""

import asyncio
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager

import psutil
import pytest

import art_gym
from art_gym import Scenario, ToolEnv, call, tool
from art_gym._steps import reset_env, step_env
from art_gym.errors import EnvironmentDied
from art_gym.rollout import Reply, Runner
from art_gym.rollout._hosts import HostTimeoutError
from art_gym.rollout._making import Making
from art_gym.rollout.isolation import Processes, host_factory

MIB = 1 << 20
SLEEPER = "import time; time.sleep(3600)"


class Rogue(ToolEnv):
    """Does to its process what environments do, and worse."""

    held = ()

    @tool
    def echo(self, text: str) -> str:
        """Say it back."""
        return text

    @tool
    def nap(self, seconds: float) -> str:
        """Sleep."""
        time.sleep(seconds)
        return "awake"

    @tool
    def shout(self) -> str:
        """Write to everything that can be written to."""
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.write(1, b"to descriptor 1\n")
        subprocess.run(["echo", "from a child"], check=True)
        return "shouted"

    @tool
    def die(self, signal_number: int = 0, code: int = 0, words: str = "") -> str:
        """End the process."""
        print(words, file=sys.stderr)
        if signal_number:
            os.kill(os.getpid(), signal_number)
        os._exit(code)

    @tool
    def die_later(self, seconds: float) -> str:
        """End the process when nobody asks."""
        threading.Timer(seconds, os._exit, (9,)).start()
        return "soon"

    @tool
    def burn(self, seconds: float) -> str:
        """Use processor time."""
        begin = time.process_time()
        while time.process_time() - begin < seconds:
            try:
                sum(range(1000))
            except BaseException:  # noqa: BLE001  # as environments do
                continue
        return "burnt"

    @tool
    def take(self, mib: int, how: str) -> str:
        """Take memory."""
        match how:
            case "at once":
                self.held = bytearray(mib * MIB)
            case "bit by bit":
                self.held = []
                while len(self.held) < mib:
                    self.held.append(b"x" * MIB)
            case "shared":
                self.held = mmap.mmap(-1, mib * MIB)
                self.held.write(b"x" * (mib * MIB // 2))
                self.held.write(b"x" * (mib * MIB // 2))
                time.sleep(3600)
            case "children":
                code = f"import time; held = bytearray({mib // 2} << 20); time.sleep(3600)"
                for _ in range(2):
                    subprocess.Popen([sys.executable, "-c", code])
                time.sleep(3600)
        return "taken"

    @tool
    def spawn(self) -> list[int]:
        """Start a child, one in a session of its own, and one whose parent has ended."""
        child = subprocess.Popen([sys.executable, "-c", SLEEPER])
        apart = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], start_new_session=True, stdout=-3).pid)"
        orphan = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
        return [os.getpid(), child.pid, apart.pid, int(orphan)]


START = Scenario("s", 0, {})


@asynccontextmanager
async def opened(isolation="process", make=Rogue):
    factory = host_factory(isolation, make)
    try:
        yield factory
    finally:
        await factory.close()


async def begun(factory, timeout=30.0):
    host = factory.new()
    await host.call(reset_env, START, timeout=timeout)
    return host


async def answer(host, name, *, timeout=30.0, **arguments):
    return (await host.call(step_env, call(name, **arguments), timeout=timeout)).observation[0]["content"]


def gone(pids, within=5.0):
    give_up = time.monotonic() + within
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not left


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def nothing_left():
    """See that no process, thread or descriptor is left."""
    here = psutil.Process()
    descriptors, threads = here.num_fds(), threading.active_count()
    others = {child.pid for child in here.children(recursive=True)}
    yield
    assert {child.pid for child in here.children(recursive=True)} <= others
    assert here.num_fds() <= descriptors
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"signal_number": signal.SIGKILL}, "the environment's process died of signal 9 (SIGKILL: out of memory?)"),
        ({"signal_number": signal.SIGSEGV}, "the environment's process died of signal 11 (SIGSEGV)"),
        ({"code": 3}, "the environment's process ended with exit code 3"),
        ({"code": 0}, "the environment's process ended with exit code 0"),
    ],
)
async def test_a_process_that_dies_is_told_with_its_last_words_and_replaced(how, text):
    async with opened() as factory:
        host, other = await begun(factory), await begun(factory)
        with pytest.raises(EnvironmentDied) as caught:
            await answer(host, "die", words="the browser is gone", **how)
        assert str(caught.value).startswith(f"{text}; its last output:\nthe browser is gone")
        assert caught.value.kind == "environment"
        host.abandon()
        assert await answer(other, "echo", text="still here") == "still here"
        host = await begun(factory)
        assert await answer(host, "echo", text="again") == "again"
        await host.close()
        await other.close()


async def test_a_process_that_dies_between_episodes_is_replaced_for_the_next():
    async with opened() as factory:
        host = await begun(factory)
        await answer(host, "die_later", seconds=0.05)
        await asyncio.sleep(0.5)
        await host.call(reset_env, START, timeout=30)
        assert await answer(host, "echo", text="again") == "again"
        await host.close()


async def test_a_process_that_dies_between_turns_fails_its_episode():
    async with opened() as factory:
        host = await begun(factory)
        await answer(host, "die_later", seconds=0.05)
        await asyncio.sleep(0.5)
        with pytest.raises(EnvironmentDied, match="exit code 9"):
            await answer(host, "echo", text="again")
        host.abandon()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", ["at once", "bit by bit"])
async def test_an_allocation_beyond_the_limit_is_refused(start_method, how):
    async with opened(Processes(memory=200 * MIB, start_method=start_method)) as factory:
        host = await begun(factory)
        assert await answer(host, "take", mib=100, how=how) == "taken"
        with pytest.raises(MemoryError) as caught:
            await answer(host, "take", mib=400, how=how)
        assert str(caught.value) == "the environment's process took more than 200 MiB beyond what it started with"
        assert "in take" in art_gym.Failure.of("environment", caught.value).traceback
        host.abandon()


@pytest.mark.parametrize("how", ["shared", "children"])
async def test_memory_that_is_shared_or_that_children_took_counts_too(how):
    async with opened(Processes(memory=200 * MIB)) as factory:
        host = await begun(factory)
        with pytest.raises(MemoryError, match="took more than 200 MiB beyond what it started with, and was killed"):
            await answer(host, "take", mib=300, how=how)
        host.abandon()


async def test_processor_time_is_limited_by_the_episode():
    async with opened(Processes(cpu_seconds=0.6)) as factory:
        host = await begun(factory)
        for _ in range(3):
            await host.call(reset_env, START, timeout=30)
            assert await answer(host, "burn", seconds=0.3) == "burnt"
        assert await answer(host, "nap", seconds=0.7) == "awake"
        with pytest.raises(EnvironmentDied) as caught:
            await answer(host, "burn", seconds=30)
        text = str(caught.value)
        assert text.startswith("the environment used more than 0.6 s of processor time in one episode; its last output:")
        assert "in burn" in text
        host.abandon()


async def test_a_stuck_environment_is_killed_with_all_it_started():
    async with opened() as factory:
        host, other = await begun(factory), await begun(factory)
        pids = [int(pid) for pid in (await answer(host, "spawn")).strip("[]").split(",")]
        assert all(map(running, pids))
        with pytest.raises(HostTimeoutError):
            await answer(host, "nap", seconds=3600, timeout=0.2)
        host.abandon()
        await asyncio.to_thread(gone, pids)
        assert not any(map(running, pids))
        assert await answer(other, "echo", text="still here") == "still here"
        await other.close()


@pytest.mark.parametrize("how", ["closes", "dies"])
async def test_what_an_environment_started_ends_with_it(how):
    async with opened() as factory:
        host, other = await begun(factory), await begun(factory)
        pids = [int(pid) for pid in (await answer(host, "spawn")).strip("[]").split(",")]
        others = [int(pid) for pid in (await answer(other, "spawn")).strip("[]").split(",")]
        if how == "dies":
            with pytest.raises(EnvironmentDied):
                await answer(host, "die", code=1)
        await host.close()
        assert await asyncio.to_thread(gone, pids)
        assert all(map(running, others))
    assert gone(others)


PARENT = """
import asyncio, sys
sys.path[:] = {path!r}
from art_gym import Scenario, ToolEnv, call, tool
from art_gym._steps import reset_env, step_env
from art_gym.rollout.isolation import Processes, host_factory
import os, subprocess, time
class Env(ToolEnv):
    @tool
    def stick(self) -> str:
        "Stick."
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        os.write(2, f"{{os.getpid()}} {{os.getppid()}} {{child.pid}}\\n".encode())
        time.sleep(3600)
async def main():
    factory = host_factory(Processes(start_method={start_method!r}), Env)
    hosts = [factory.new() for _ in range(2)]
    await asyncio.gather(*(host.call(reset_env, Scenario("s", 0, {{}}), timeout=60) for host in hosts))
    # Such as a data loader, which holds whatever is open.
    if (fork := os.fork()) == 0:
        time.sleep(3600)
    os.write(2, f"{{fork}}\\n".encode())
    await hosts[0].call(step_env, call("stick"), timeout=3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_the_death_of_the_parent_leaves_no_process(start_method):
    script = PARENT.format(path=sys.path, start_method=start_method)
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) as parent:
        fork = int(parent.stderr.readline())
        line = parent.stderr.readline()
        pids = [int(pid) for pid in line.split()]
        pids += [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        pids.remove(fork)
        assert len(set(pids)) == 4, line  # the server, two workers, what one of them started
        parent.kill()
        try:
            assert gone(pids)
            assert running(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


async def test_the_death_of_the_fork_server_fails_the_episodes_in_play_only():
    async with opened() as factory:
        host, other = await begun(factory), await begun(factory)
        (server,) = [child for child in psutil.Process().children() if "serve_forks" in " ".join(child.cmdline())]
        stuck = asyncio.create_task(answer(host, "nap", seconds=3600))
        await asyncio.sleep(0.1)
        server.kill()
        with pytest.raises(EnvironmentDied, match="the environment's process is gone: what started it has ended"):
            await stuck
        host.abandon()
        await other.call(reset_env, START, timeout=30)
        assert await answer(other, "echo", text="again") == "again"
        await other.close()


async def test_what_an_environment_prints_goes_to_stderr_and_disturbs_nothing(capfd):
    async with opened() as factory:
        host = await begun(factory)
        assert await answer(host, "shout") == "shouted"
        await host.close()
    out, err = capfd.readouterr()
    assert out == ""
    assert sorted(err.splitlines()) == ["from a child", "to descriptor 1", "to stderr", "to stdout"]


async def test_large_messages_travel_both_ways():
    text = "x" * (3 * MIB)
    async with opened() as factory:
        host = await begun(factory)
        assert await answer(host, "echo", text=text) == text
        await host.close()


@pytest.mark.parametrize("text", ["", "x" * (3 * MIB)], ids=["small", "large"])
async def test_a_call_that_is_cancelled_leaves_nothing(monkeypatch, text):
    monkeypatch.setattr("art_gym.rollout._hosts.CLOSE_SECONDS", 0.2)
    async with opened() as factory:
        host = await begun(factory)
        first = asyncio.create_task(answer(host, "nap", seconds=3600))
        await asyncio.sleep(0.1)
        first.cancel()
        # More than the connection holds while nobody reads, so that it is cut in the middle.
        second = asyncio.create_task(answer(host, "echo", text=text))
        await asyncio.sleep(0.1)
        second.cancel()
        assert all(isinstance(result, asyncio.CancelledError) for result in await asyncio.gather(first, second, return_exceptions=True))
        await host.close()


async def test_a_call_cancelled_in_mid_step_does_not_disturb_the_next():
    async with opened() as factory:
        host = await begun(factory)
        first = asyncio.create_task(answer(host, "nap", seconds=0.3))
        await asyncio.sleep(0.1)
        first.cancel()
        assert await answer(host, "echo", text="the right answer") == "the right answer"
        await host.close()


async def test_an_import_that_never_ends_is_left_at_the_deadline(tmp_path, monkeypatch):
    (tmp_path / "endless_import.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("art_gym.rollout._processes.KILL_SECONDS", 0.3)
    async with opened(make=Making("endless_import:endless/Import-v0")) as factory:
        host = factory.new()
        with pytest.raises(HostTimeoutError):
            await host.call(reset_env, START, timeout=0.5)
        host.abandon()


async def test_a_process_may_be_started_from_nothing():
    async with opened(Processes(start_method="spawn"), Making("art_gym/GuessNumber-v0")) as factory:
        host = await begun(factory)
        assert await answer(host, "guess", number=1) in ("Higher.", "Correct.")
        await host.close()


async def test_a_fork_shares_no_global_random_numbers():
    async with opened(make=_drawing) as factory:
        hosts = [await begun(factory) for _ in range(2)]
        assert await answer(hosts[0], "draw") != await answer(hosts[1], "draw")
        for host in hosts:
            await host.close()


def _drawing():
    import random

    import numpy

    class Draws(ToolEnv):
        @tool
        def draw(self) -> str:
            """Draw from what isn't the environment's own."""
            return f"{random.random()} {numpy.random.rand()}"

    return Draws()


class Misbehaves(Rogue):
    """Does what its option says at the second turn."""

    max_turns = 3

    def start(self):
        return str(self.np_random.integers(1000))

    @tool
    def go(self) -> str:
        """Go on."""
        drawn = str(self.np_random.integers(1000))
        if self.turn == 2:
            match self.options.get("how"):
                case "stuck":
                    time.sleep(3600)
                case "crash":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "eat":
                    self.held = bytearray(1000 * MIB)
        return drawn


class Goes:
    name = "goes on"

    async def act(self, state):
        return Reply(call("go"))

    async def close(self):
        pass


async def test_a_rollout_records_what_misbehaves_and_finishes_the_rest_as_ever():
    odd = {3: "stuck", 5: "crash", 8: "eat"}
    starts = [Scenario(f"s{number}", number, {"how": odd[number]} if number in odd else {}) for number in range(12)]
    clean = [Scenario(start.id, start.seed, {}) for start in starts]
    runner = Runner(Misbehaves, Goes(), concurrency=4, tool_timeout=1.0, isolation=Processes(memory=200 * MIB))
    played = [group.episodes[0] async for group in runner.run(starts)]
    alone = [group.episodes[0] async for group in Runner(Misbehaves, Goes(), isolation="thread").run(clean)]
    failures = {episode.scenario.seed: (episode.failure.kind, episode.failure.message) for episode in played if episode.failure}
    assert failures.keys() == odd.keys()
    assert failures[3] == ("tool_timeout", "TimeoutError: the environment's step did not return within 1 s")
    assert failures[5][0] == "environment"
    assert "EnvironmentDied: the environment's process died of signal 11 (SIGSEGV)" in failures[5][1]
    assert failures[8] == ("environment", "MemoryError: the environment's process took more than 200 MiB beyond what it started with")
    for episode, other in zip(played, alone, strict=True):
        turns = [(turn.observation, turn.reward) for turn in episode.turns]
        expected = [(turn.observation, turn.reward) for turn in other.turns]
        assert turns == (expected[:1] if episode.failure else expected)


def fork_server():
    """The one that this process has."""
    (server,) = [child for child in psutil.Process().children() if any("serve_forks" in word for word in child.cmdline())]
    return server


@pytest.mark.parametrize("busy", [False, True])
async def test_a_fork_server_that_no_longer_runs_does_not_hold_up_the_end(monkeypatch, busy):
    monkeypatch.setattr("art_gym.rollout._hosts.CLOSE_SECONDS", 0.5)
    monkeypatch.setattr("art_gym.rollout._processes.KILL_SECONDS", 0.5)
    factory = host_factory("process", Rogue)
    hosts = [await begun(factory) for _ in range(3)]
    calls = [asyncio.create_task(answer(host, "nap", seconds=3600.0, timeout=3600.0)) for host in hosts if busy]
    await asyncio.sleep(0.1)
    fork_server().suspend()
    begin = time.monotonic()
    for task in calls:
        task.cancel()
    hosts[0].abandon()
    await asyncio.gather(*(host.close() for host in hosts[1:]), *calls, return_exceptions=True)
    await factory.close()
    assert time.monotonic() - begin < 5


async def test_an_end_that_is_cancelled_again_and_again_leaves_nothing(monkeypatch):
    monkeypatch.setattr("art_gym.rollout._hosts.CLOSE_SECONDS", 0.5)
    factory = host_factory("process", Rogue)
    host = await begun(factory)
    call_ = asyncio.create_task(answer(host, "nap", seconds=3600.0, timeout=3600.0))
    await asyncio.sleep(0.1)
    ending = asyncio.create_task(factory.close())
    await asyncio.sleep(0)  # cancelled before it begins, it would never do so
    for _ in range(20):
        ending.cancel()
        call_.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await ending
    await asyncio.gather(call_, return_exceptions=True)


async def test_workers_that_were_ordered_when_the_fork_server_died_end_like_others():
    async with opened() as factory:
        await begun(factory)
        server = fork_server()
        server.suspend()
        hosts = [factory.new() for _ in range(40)]
        calls = [asyncio.create_task(host.call(reset_env, START, timeout=30)) for host in hosts]
        await asyncio.sleep(0.2)
        server.kill()
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, EnvironmentDied)


@pytest.mark.slow
async def test_two_hundred_processes_play_at_once():
    async with opened(make=Making("art_gym/GuessNumber-v0")) as factory:
        hosts = [factory.new() for _ in range(200)]
        starts = await asyncio.gather(*(host.call(reset_env, Scenario("s", seed, {}), timeout=120) for seed, host in enumerate(hosts)))
        assert len(starts) == 200
        assert set(await asyncio.gather(*(answer(host, "guess", number=1) for host in hosts))) == {"Higher.", "Correct."}
        assert threading.active_count() < 20
        await asyncio.gather(*(host.close() for host in hosts))
