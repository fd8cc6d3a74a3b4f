"""Environments in actors of a Ray cluster that starts with the first of them and ends with their factory."""

import asyncio
import os
import signal
import threading
import time
from contextlib import asynccontextmanager

import psutil
import pytest

import art_gym
from art_gym import Scenario, ToolEnv, call, tool
from art_gym._steps import reset_env, step_env
from art_gym.errors import EnvironmentDied, UsageError
from art_gym.rollout._hosts import HostTimeoutError
from art_gym.rollout.isolation import Ray, host_factory

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray")

MIB = 1 << 20
START = Scenario("s", 0, {})


class Rogue(ToolEnv):
    @tool
    def echo(self, text: str) -> str:
        """Say it back."""
        return text

    @tool
    def process(self) -> str:
        """Tell the process."""
        return str(os.getpid())

    @tool
    def nap(self, seconds: float) -> str:
        """Sleep."""
        time.sleep(seconds)
        return "awake"

    @tool
    def die(self, signal_number: int = 0) -> str:
        """End the process."""
        if signal_number:
            os.kill(os.getpid(), signal_number)
        os._exit(3)

    @tool
    def take(self, mib: int) -> str:
        """Take memory."""
        self.held = bytearray(mib * MIB)
        return "taken"


@asynccontextmanager
async def opened(settings):
    factory = host_factory(settings, Rogue)
    try:
        yield factory
    finally:
        await factory.close()


async def begun(factory):
    host = factory.new()
    await host.call(reset_env, START, timeout=60)
    return host


async def answer(host, name, *, timeout=30.0, **arguments):
    return (await host.call(step_env, call(name, **arguments), timeout=timeout)).observation[0]["content"]


@pytest.fixture
def cluster():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


async def test_a_stuck_or_dying_environment_is_replaced_and_disturbs_no_other(cluster):
    async with opened(Ray(memory=500 * MIB)) as factory:
        other = await begun(factory)

        host = await begun(factory)
        pid = int(await answer(host, "process"))
        begin = time.perf_counter()
        with pytest.raises(HostTimeoutError):
            await answer(host, "nap", seconds=3600, timeout=0.3)
        assert time.perf_counter() - begin < 2
        host.abandon()

        for arguments in ({}, {"signal_number": int(signal.SIGKILL)}):
            host = await begun(factory)
            with pytest.raises(EnvironmentDied, match=r"^the environment's process died: ") as caught:
                await answer(host, "die", **arguments)
            assert caught.value.kind == "environment"
            assert "\n" not in str(caught.value)
            # The next episode has a new actor, also where the host is the same.
            await host.call(reset_env, START, timeout=60)
            assert await answer(host, "echo", text="again") == "again"
            await host.close()

        host = await begun(factory)
        assert await answer(host, "take", mib=100) == "taken"
        with pytest.raises(MemoryError, match="took more than 500 MiB beyond what it started with") as error:
            await answer(host, "take", mib=1000)
        assert "in take" in art_gym.Failure.of("environment", error.value).traceback
        host.abandon()

        assert await answer(other, "echo", text="still here") == "still here"
        await other.close()
    assert not psutil.pid_exists(pid)
    assert ray.is_initialized()  # it isn't the factory's to shut down


async def test_an_environment_without_a_place_waits_until_its_deadline(cluster):
    async with opened(Ray(num_cpus=1)) as factory:
        host, waiting = await begun(factory), factory.new()
        with pytest.raises(HostTimeoutError):
            await waiting.call(reset_env, START, timeout=0.5)
        waiting.abandon()
        await host.close()


async def test_a_cluster_that_the_factory_started_ends_with_it():
    threads = threading.active_count()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    async with opened(Ray(address="local")) as factory:
        hosts = await asyncio.gather(*(begun(factory) for _ in range(3)))
        assert len(set(await asyncio.gather(*(answer(host, "process") for host in hosts)))) == 3
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= others
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("art_gym ")]
    assert threading.active_count() <= threads + 1  # Ray keeps one


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
async def test_a_cluster_that_is_not_there_is_the_users_error(address):
    async with opened(Ray(address=address)) as factory:
        host = factory.new()
        with pytest.raises(UsageError, match=f"no Ray cluster at '{address}': "):
            await host.call(reset_env, START, timeout=60)
        host.abandon()
