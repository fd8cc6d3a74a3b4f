"""Hosts: the same environment, wherever it lives."""

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import gymnasium
import pytest

import art_gym
from art_gym import Scenario, ToolEnv, call, say, tool
from art_gym._steps import reset_env, restore_env, snapshot_env, step_env
from art_gym.errors import MissingExtra, ToolTimeout, UsageError
from art_gym.rollout._hosts import HostTimeoutError
from art_gym.rollout._making import Making
from art_gym.rollout.isolation import Processes, Ray, host_factory

GUESS = "art_gym/GuessNumber-v0"
RAY = pytest.param("ray", marks=pytest.mark.slow)
ELSEWHERE = ["process", RAY]
APART = ["thread", *ELSEWHERE]
ALL = ["loop", *APART]


class Naps(ToolEnv):
    """Sleeps, draws, fails and tells where it lives."""

    def __init__(self, *, closed: str = "", **kwargs):
        super().__init__(**kwargs)
        self.closed = closed

    @tool
    def nap(self, seconds: float) -> str:
        """Sleep."""
        time.sleep(seconds)
        return f"slept {seconds} s, drew {self.np_random.integers(1000)}"

    @tool(timeout=0.3)
    def hurry(self, seconds: float) -> str:
        """Sleep against the clock."""
        time.sleep(seconds)
        return "in time"

    @tool
    def where(self) -> str:
        """Tell the process and the thread."""
        return f"{os.getpid()} {threading.get_ident()}"

    @tool
    def fail(self, how: str) -> str:
        """Raise an error."""
        raise {
            "plain": ZeroDivisionError("a bug"),
            "own": OwnError("mine", code=3),
            "demanding": DemandingError("mail", port=25),
            "unpicklable": LockedError(),
            "usage": UsageError("write it otherwise"),
            "extra": MissingExtra("it", extra="train", package="torch"),
            "exit": SystemExit(3),
        }[how]

    def close(self):
        if self.closed:
            Path(self.closed).touch()


class OwnError(Exception):
    def __init__(self, text, *, code=0):
        super().__init__(text)
        self.code = code


class DemandingError(Exception):
    def __init__(self, host, *, port):
        super().__init__(f"{host}:{port}")


class LockedError(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture
def opened(request):
    """Opens host factories for the length of a block."""

    @asynccontextmanager
    async def open_(kind, make):
        if kind == "ray":
            request.getfixturevalue("cluster")
        factory = host_factory(kind, make)
        try:
            yield factory
        finally:
            await factory.close()

    return open_


async def episode(host, scenario, actions):
    """Play the actions; return everything that an episode is made of."""
    start = await host.call(reset_env, scenario, timeout=30)
    return [start, *[await host.call(step_env, action, timeout=30) for action in actions]]


async def content(host, action, timeout=30.0):
    return (await host.call(step_env, action, timeout=timeout)).observation[0]["content"]


async def expected(env_id, scenario, actions, **kwargs):
    """What the environment gives without a host."""
    env = art_gym.make(env_id, **kwargs) if isinstance(env_id, str) else env_id(**kwargs)
    return [reset_env(env, scenario), *[step_env(env, action) for action in actions]]


@pytest.mark.parametrize("kind", ALL)
async def test_the_same_scenarios_give_the_same_episodes_everywhere(opened, kind):
    actions = [call("guess", number=9), say("hm"), call("guess", number="x"), call("shout"), call("guess", number=1)]
    async with opened(kind, Making(GUESS)) as factory:
        host = factory.new()
        for seed in range(4):
            scenario = Scenario(f"s{seed}", seed, {})
            assert await episode(host, scenario, actions) == await expected(GUESS, scenario, actions)
        await host.close()


@pytest.mark.parametrize("kind", ALL)
async def test_a_slow_environment_gives_the_same_episodes_everywhere(opened, kind):
    actions = [call("nap", seconds=0.01)] * 3
    async with opened(kind, Naps) as factory:
        hosts = [factory.new() for _ in range(3)]
        starts = [Scenario(f"s{seed}", seed, {}) for seed in range(3)]
        played = await asyncio.gather(*(episode(host, start, actions) for host, start in zip(hosts, starts, strict=True)))
        assert played == [await expected(Naps, start, actions) for start in starts]
        await asyncio.gather(*(host.close() for host in hosts))


@pytest.mark.parametrize("kind", ALL)
async def test_a_snapshot_of_one_host_goes_on_in_another(opened, kind):
    before, after = [call("nap", seconds=0.01)] * 2, [call("nap", seconds=0.0)] * 3
    start = Scenario("s", 7, {})
    async with opened(kind, Naps) as factory:
        host, other = factory.new(), factory.new()
        await episode(host, start, before)
        state = await host.call(snapshot_env, None, timeout=30)
        await other.call(reset_env, start, timeout=30)
        await other.call(restore_env, (state, before), timeout=30)
        went_on = [await content(other, action) for action in after]
        assert went_on == [step.observation[0]["content"] for step in (await expected(Naps, start, before + after))[3:]]
        await host.close()
        await other.close()


@pytest.mark.parametrize("kind", APART)
async def test_an_environment_stays_in_one_place_over_episodes(opened, kind):
    async with opened(kind, Naps) as factory:
        host, other = factory.new(), factory.new()
        places = []
        for seed in range(3):
            await host.call(reset_env, Scenario("s", seed, {}), timeout=30)
            places.append(await content(host, call("where")))
        await other.call(reset_env, Scenario("s", 0, {}), timeout=30)
        assert len(set(places)) == 1
        assert await content(other, call("where")) != places[0]
        await host.close()
        await other.close()


@pytest.mark.parametrize("kind", ELSEWHERE)
async def test_an_environment_elsewhere_is_in_another_process(opened, kind):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        assert not (await content(host, call("where"))).startswith(f"{os.getpid()} ")
        await host.close()


@pytest.mark.parametrize("kind", APART)
async def test_a_stuck_step_is_left_at_its_deadline(opened, kind):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        begin = time.perf_counter()
        with pytest.raises(HostTimeoutError):
            await host.call(step_env, call("nap", seconds=1.5), timeout=0.3)
        assert 0.25 < time.perf_counter() - begin < 1.3
        host.abandon()


@pytest.mark.parametrize("kind", APART)
async def test_a_tool_past_its_own_limit_ends_at_the_limit(opened, kind):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        begin = time.perf_counter()
        with pytest.raises(ToolTimeout, match=r"tool 'hurry' ran past its time limit of 0\.3 s") as caught:
            await host.call(step_env, call("hurry", seconds=1.5), timeout=10)
        assert 0.25 < time.perf_counter() - begin < 1.3
        assert caught.value.details == {"timeout": 0.3}
        host.abandon()


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_blocking_tools_of_20_environments_run_side_by_side(opened, kind):
    async with opened(kind, Naps) as factory:
        hosts = [factory.new() for _ in range(20)]
        await asyncio.gather(*(host.call(reset_env, Scenario("s", 0, {}), timeout=30) for host in hosts))
        begin = time.perf_counter()
        await asyncio.gather(*(content(host, call("nap", seconds=0.2)) for host in hosts))
        assert time.perf_counter() - begin < 2
        await asyncio.gather(*(host.close() for host in hosts))


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *[(kind, how) for kind in ("loop", "thread", "process") for how in ("close", "abandon")],
        # Hosts in this process share nothing that a factory could close.
        ("process", "close the factory"),
        *[pytest.param("ray", how, marks=pytest.mark.slow) for how in ("close", "abandon", "close the factory")],
    ],
)
async def test_the_end_closes_the_environment(opened, kind, how, tmp_path):
    marker = tmp_path / "closed"
    async with opened(kind, lambda: Naps(closed=str(marker))) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        assert not marker.exists()
        if how == "close":
            await host.close()
            assert marker.exists()
        elif how == "abandon":
            host.abandon()
    for _ in range(400):
        if not marker.exists():
            await asyncio.sleep(0.01)  # an abandoned thread closes it in its own time
    assert marker.exists()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("how", "type_", "text"),
    [
        ("plain", ZeroDivisionError, "a bug"),
        ("own", OwnError, "mine"),
        ("usage", UsageError, "write it otherwise"),
    ],
)
async def test_an_error_keeps_its_type_its_text_and_where_it_was_raised(opened, kind, how, type_, text):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        with pytest.raises(type_) as caught:
            await host.call(step_env, call("fail", how=how), timeout=30)
        assert str(caught.value) == text
        failure = art_gym.Failure.of("environment", caught.value)
        assert "in fail" in failure.traceback
        assert "test_hosts.py" in failure.traceback
        assert how != "own" or caught.value.code == 3
        host.abandon()


@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.parametrize(
    ("how", "type_", "text"),
    [
        ("demanding", RuntimeError, "DemandingError: mail:25"),
        ("unpicklable", RuntimeError, "LockedError: locked"),
        ("extra", UsageError, "it needs the package 'torch', which isn't installed: pip install 'art-gym[train]'"),
        ("exit", RuntimeError, "tool 'fail' raised SystemExit(3), which would end more than this call: catch it there, or raise an Exception"),
    ],
)
async def test_an_error_that_does_not_travel_keeps_its_text(opened, kind, how, type_, text):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        with pytest.raises(type_) as caught:
            await host.call(step_env, call("fail", how=how), timeout=30)
        assert str(caught.value) == text
        assert "in fail" in art_gym.Failure.of("environment", caught.value).traceback
        # The host is still of use.
        assert await episode(host, Scenario("s", 1, {}), [])
        await host.close()


def _unpicklable(env):
    return threading.Lock()


@pytest.mark.parametrize("kind", ELSEWHERE)
async def test_what_cannot_be_sent_is_an_error_of_the_environment(opened, kind):
    async with opened(kind, Naps) as factory:
        host = factory.new()
        with pytest.raises(TypeError, match="what the environment returned can't be sent from its process: cannot pickle"):
            await host.call(_unpicklable, timeout=30)
        await host.close()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Making("art_gym/GuessNumbr-v0"), "did you mean 'art_gym/GuessNumber-v0'"),
        (Making(GUESS, {"higth": 4}), "no option 'higth'"),
        (Making("no_such_package:a/B-v0"), "can't import 'no_such_package'"),
        (Making(lambda: 3), "must return a gymnasium.Env"),
    ],
)
async def test_an_environment_that_cannot_be_made_is_the_users_error(opened, kind, make, text):
    async with opened(kind, make) as factory:
        host = factory.new()
        with pytest.raises(UsageError, match=text):
            await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        host.abandon()


@pytest.mark.parametrize("kind", ELSEWHERE)
async def test_an_id_that_only_this_process_registered_works(opened, kind):
    art_gym.register("example/Few-v0", "art_gym_envs.guess_number:GuessNumber", high=2)
    gymnasium.register("example/Made-v0", entry_point=Naps)
    for env_id, name in (("example/Few-v0", "guess"), ("art_gym_envs:art_gym/GuessNumber-v0", "guess"), ("example/Made-v0", "nap")):
        async with opened(kind, Making(env_id)) as factory:
            host = factory.new()
            (start,) = await episode(host, Scenario("s", 0, {}), [])
            assert start.env_id == env_id.rpartition(":")[2]
            assert start.tools[0]["function"]["name"] == name
            await host.close()


@pytest.mark.parametrize("kind", ALL)
async def test_closures_and_classes_of_a_function_make_environments(opened, kind):
    answer = "from the closure"

    class Local(ToolEnv):
        @tool
        def ask(self) -> str:
            """Ask."""
            return answer

    async with opened(kind, Local) as factory:
        host = factory.new()
        await host.call(reset_env, Scenario("s", 0, {}), timeout=30)
        assert await content(host, call("ask")) == "from the closure"
        await host.close()


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_cannot_travel_is_refused_before_anything_is_played(kind):
    if kind == "ray":
        pytest.importorskip("ray")
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"doesn't pickle .*isolation='thread'"):
        host_factory(kind, lambda: Naps(closed=str(lock)))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (lambda: host_factory("fork", Naps), "isolation must be one of auto, loop, thread, process, ray"),
        (lambda: host_factory(None, Naps), "isolation must be one of"),
        (lambda: host_factory(Processes, Naps), r"write Processes\(\)"),
        (lambda: Processes(memory=512), "bytes of at least 1048576"),
        (lambda: Processes(memory=1e9), "Processes.memory is a number of bytes"),
        (lambda: Processes(cpu_seconds=0), "Processes.cpu_seconds must be a number of more than 0"),
        (lambda: Processes(cpu_seconds=True), "Processes.cpu_seconds must be a number of more than 0"),
        (lambda: Processes(start_method="fork"), "must be one of forkserver, spawn"),
        (lambda: Ray(num_cpus=-1), "Ray.num_cpus must be a number of more than 0"),
        (lambda: Ray(memory="1 GiB"), "Ray.memory is a number of bytes"),
        (lambda: Ray(address=6379), "Ray.address must be text"),
        (lambda: Ray(runtime_env="x"), "Ray.runtime_env must be a mapping"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(settings, text):
    with pytest.raises(UsageError, match=text):
        settings()


def test_ray_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"art-gym\[ray\]"):
        host_factory("ray", Naps)
