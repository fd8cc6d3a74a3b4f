"""Which version answers, when it may be replaced, and what a gateway may be started with."""

import asyncio
import threading
import time

import httpx
import pytest

from art_gym.errors import UsageError
from art_gym.gateway import GatewaySettings
from art_gym.gateway.policy import PolicyState, UnknownModel, VersionInUse

ASK = [{"role": "user", "content": "Hi"}]


def _two_versions() -> PolicyState:
    policy = PolicyState("name", "base", step=0)
    policy.add(3, "adapter-3")
    policy.add(12, "adapter-12")
    policy.activate(3)
    return policy


@pytest.mark.parametrize(
    ("model", "step"),
    [(None, 3), ("", 3), ("name", 3), ("name@latest", 12), ("name@12", 12), ("name@0", 0), ("name@012", 12), ("adapter-12", 12), ("base", 0)],
)
def test_names_mean_versions(model, step):
    assert _two_versions().resolve(model).step == step


@pytest.mark.parametrize("model", ["other", "name@4", "name@", "name@-1", "name@x", "other@3", "name@" + "9" * 5000, "name@²", "@3"])
def test_an_unknown_name_is_told_what_there_is(model):
    with pytest.raises(UnknownModel, match="name, name@latest, name@0, name@3, name@12"):
        _two_versions().resolve(model)


def test_aliases_mean_the_current_version():
    assert PolicyState("name", "base", aliases=("gpt-4o",)).resolve("gpt-4o").version == "name@0"
    assert PolicyState("name", "base", aliases=("*",)).resolve("whatever").version == "name@0"
    with pytest.raises(UnknownModel):
        PolicyState("name", "base", aliases=("*",)).resolve("name@7")


def test_the_version_that_answers_stays():
    policy = _two_versions()
    with pytest.raises(VersionInUse):
        policy.remove(3)
    policy.remove(12)
    policy.remove(99)
    assert policy.steps == [0, 3]
    with pytest.raises(UnknownModel):
        policy.activate(12)


async def test_publishing_waits_for_calls_and_calls_wait_for_publishing():
    policy, order = PolicyState("name", "base"), []

    async def call(name: str, hold: asyncio.Event) -> None:
        async with policy.call(None) as resolved:
            order.append((name, resolved.step))
            await hold.wait()

    async def publish() -> None:
        async with policy.publishing():
            order.append(("publish", policy.running))
            policy.replace(1, "base")

    hold, free = asyncio.Event(), asyncio.Event()
    free.set()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call("before", hold))
        await asyncio.sleep(0)
        tasks.create_task(publish())
        await asyncio.sleep(0.01)
        tasks.create_task(call("after", free))
        await asyncio.sleep(0.01)
        assert order == [("before", 0)]
        hold.set()
    assert order == [("before", 0), ("publish", 0), ("after", 1)]


async def test_calls_that_take_too_long_are_interrupted():
    policy = PolicyState("name", "base", drain_seconds=0.05)
    entered = asyncio.Event()

    async def call() -> None:
        async with policy.call(None):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(call())
    await entered.wait()
    async with policy.publishing():
        assert policy.running == 0
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_publish_lets_calls_in_again():
    policy = PolicyState("name", "base")
    with pytest.raises(RuntimeError):
        async with policy.publishing():
            raise RuntimeError
    async with asyncio.timeout(1), policy.call("name") as resolved:
        assert resolved.step == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_publish_cuts_a_long_call_short_and_tells_the_client(mock, make_gateway, stream):
    address, app = make_gateway(drain_seconds=0.1, capture_all=True)
    mock.hold_after = 2
    answers = []
    asked = {"messages": ASK, "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{address}/v1/chat/completions", json=asked, timeout=20)))
    thread.start()
    while not mock.running:
        time.sleep(0.01)
    time.sleep(0.1)
    policy = app.state.gateway.policy

    async def publish() -> None:
        async with policy.publishing():
            assert policy.running == 0
            policy.replace(1, "mock")

    asyncio.run_coroutine_threadsafe(publish(), app.state.loop).result(10)
    thread.join()
    (answer,) = answers
    assert answer.status_code == (200 if stream else 503)
    assert "weights are being replaced" in answer.text
    assert mock.cancelled == 1
    mock.hold_after = None
    assert httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK, "model": "mock@1"}).status_code == 200
    assert httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK, "model": "mock@0"}).status_code == 404


def test_versions_answer_and_are_listed(mock, make_gateway):
    policy = PolicyState("policy", "mock")
    address, _ = make_gateway(model="policy", policy=policy)
    mock.adapters["policy@5"] = "/adapters/5"
    policy.add(5, "policy@5")
    policy.activate(5)
    models = {
        model: httpx.post(f"{address}/v1/chat/completions", json={"messages": ASK, "model": model}).json()["model"]
        for model in ("policy", "policy@0")
    }
    assert models == {"policy": "policy@5", "policy@0": "mock"}
    cards = {card["id"]: card for card in httpx.get(f"{address}/v1/models").json()["data"]}
    assert set(cards) == {"mock", "policy", "policy@0", "policy@5"}
    assert cards["policy"]["root"] == "/adapters/5"


def _settings(**values):
    return GatewaySettings.of(**{"upstream": "http://127.0.0.1:1/v1", "model": "m", "folder": ".", **values})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"host": "0.0.0.0"}, "no API key is set"),
        ({"host": "::"}, "no API key is set"),
        ({"host": "gpu-box"}, "no API key is set"),
        ({"api_keys": ("short",)}, "at least 16 printable characters"),
        ({"api_keys": ("with a line's\nend in it",)}, "at least 16 printable characters"),
        ({"upstream": "127.0.0.1:8000"}, "is no address"),
        ({"upstream": "http://user:secret@host/v1"}, "is no address"),
        ({"upstream": "http://host:99999999/v1"}, "is no address"),
        ({"model": "name@3"}, "letters, digits"),
        ({"port": 70000}, "setting port can't be used"),
        ({"sampling": {"temperature": 0}}, "setting sampling.temperature can't be used"),
        ({"limits": {"calls_per_episode": 0}}, "setting limits.calls_per_episode can't be used"),
        ({"colour": "red"}, "setting colour can't be used"),
    ],
)
def test_settings_that_cant_be_right_are_refused_in_a_line(values, text):
    with pytest.raises(UsageError, match=text) as raised:
        _settings(**values)
    assert "\n" not in str(raised.value)
    assert "secret@" not in str(raised.value) or "upstream" in values


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.8.9.1"])
def test_loopback_needs_no_key(host):
    assert _settings(host=host).api_keys == ()


def test_keys_are_never_shown():
    settings = _settings(host="0.0.0.0", api_keys=("0123456789abcdef",), upstream_key="fedcba9876543210")
    assert "0123456789abcdef" not in repr(settings)
    assert "fedcba9876543210" not in repr(settings)
