"""The client against a real gateway, before a stand-in for vLLM and with a scripted trainer."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

sys.path.insert(0, str(Path(__file__).parent))

from openai import AsyncOpenAI, OpenAI
from test_jobs import GROUPS
from test_jobs_api import Served

from art_gym.errors import UsageError
from art_gym.gateway import AsyncClient, Client, GatewayError, TrainingFailed


@pytest.fixture
def client(gateway: str) -> Any:
    with Client(gateway) as client:
        yield client


@pytest.fixture
def trained(make_gateway: Callable[..., Any], tmp_path: Path) -> Any:
    """A gateway that trains, and its client."""
    served = Served(make_gateway, tmp_path / "served")
    with Client(str(served.http.base_url)) as client:
        yield served, client


def ask(episode: Any, text: str = "Hello") -> str:
    with OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as openai:
        answer = openai.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


async def ask_async(episode: Any, text: str = "Hello") -> str:
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0) as openai:
        answer = await openai.chat.completions.create(model=episode.model, messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content or ""


def test_an_episode_is_played_rewarded_and_fetched(client: Client) -> None:
    with client.episode(group="q17", scenario={"number": 3}, metadata={"who": "me"}) as episode:
        assert ask(episode)
        record = episode.finish(reward=1.0, rewards={"found": 0.5}, metrics={"success": 1})
    assert (record["state"], record["group"], record["reward"]) == ("finished", "q17", 1.0)
    assert episode.is_finished
    assert episode.append_reward(rewards={"judge": 0.25})["rewards"] == {"found": 0.5, "judge": 0.25}
    fetched = client.fetch(episode.id)
    assert (fetched["scenario"], fetched["metadata"], fetched["calls"]) == ({"number": 3}, {"who": "me"}, 1)
    assert [one["id"] for one in client.episodes(group="q17")["episodes"]] == [episode.id]
    client.delete(episode.id)
    with pytest.raises(GatewayError) as refused:
        client.fetch(episode.id)
    assert refused.value.status == 404


def test_what_an_episode_raises_goes_on_and_it_is_kept_as_failed(client: Client) -> None:
    episode = client.episode()

    def play() -> None:
        with episode:
            ask(episode)
            raise ZeroDivisionError("no such number")

    with pytest.raises(ZeroDivisionError):
        play()
    record = client.fetch(episode.id)
    assert record["state"] == "failed"
    assert "ZeroDivisionError: no such number" in record["failure"]


async def test_the_asynchronous_client_does_the_same(gateway: str) -> None:
    async with AsyncClient(gateway) as client:
        async with client.episode(group="g") as episode:
            assert await ask_async(episode)
            await episode.finish(reward=0.5)
        with pytest.raises(KeyError):
            async with client.episode(group="g") as failed:
                raise KeyError("x")
        states = {one["id"]: one["state"] for one in (await client.episodes(group="g"))["episodes"]}
    assert states == {episode.id: "finished", failed.id: "failed"}


@pytest.mark.parametrize(
    ("figure", "text"), [({"reward": float("nan")}, "finite"), ({"reward": "much"}, "number"), ({"rewards": {"a": None}}, "number")]
)
def test_a_reward_that_is_none_is_refused_before_it_is_sent(client: Client, figure: dict[str, Any], text: str) -> None:
    episode = client.episode()
    with pytest.raises(UsageError, match=text):
        episode.finish(**figure)
    assert client.fetch(episode.id)["state"] == "open"


def test_groups_are_gathered_in_order_and_bounded(client: Client) -> None:
    lock, now, most = threading.Lock(), 0, 0

    @client.rollout(group_size=2, concurrency=3)
    def rollout(scenario: dict[str, Any], episode: Any) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        ask(episode, str(scenario["n"]))
        time.sleep(0.05)
        with lock:
            now -= 1
        if scenario["n"] == 1:
            raise ValueError("bad luck")
        return {"reward": scenario["n"], "metrics": {"success": 1}}

    seen: list[str] = []
    groups = rollout.gather([{"n": n} for n in range(3)], on_episode=lambda played: seen.append(played.id))
    assert [[one.reward for one in group.episodes] for group in groups] == [[0.0, 0.0], [None, None], [2.0, 2.0]]
    assert all("bad luck" in str(one.failure) for one in groups[1].episodes)
    assert sorted(seen) == sorted(one.id for group in groups for one in group.episodes)
    assert most == 3


async def test_coroutine_functions_are_gathered_in_the_event_loop(gateway: str) -> None:
    async def rollout(scenario: int, episode: Any) -> float:
        await ask_async(episode, str(scenario))
        if scenario == 1:
            await asyncio.sleep(60)
        return float(scenario)

    async with AsyncClient(gateway) as client:
        groups = await client.gather(rollout, [0, 1, 2], group_size=1, timeout=1.5)
    assert [group.episodes[0].reward for group in groups] == [0.0, None, 2.0]
    assert "did not end within 1.5 s" in str(groups[1].episodes[0].failure)


def test_a_job_is_followed_to_its_end(trained: Any, tmp_path: Path) -> None:
    served, client = trained
    events: list[dict[str, Any]] = []
    outcome = client.train(GROUPS, learning_rate=1e-3, on_event=events.append)
    assert outcome.version == "mock@1"
    assert [event["type"] for event in events if event["type"] != "heartbeat"] == ["queued", "started", "step", "published", "finished"]
    assert client.checkpoints()["active"] == 1
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (served.folder / "checkpoints" / "step-0001" / name).write_text("{}")
    with zipfile.ZipFile(client.download_adapter(1, tmp_path / "adapter.zip")) as archive:
        assert sorted(archive.namelist()) == ["adapter_config.json", "adapter_model.safetensors"]


async def test_a_job_is_followed_asynchronously(trained: Any) -> None:
    _, sync = trained
    async with AsyncClient(sync.address.url) as client:
        assert (await client.train(GROUPS)).version == "mock@1"


def test_a_job_that_fails_is_raised_with_reason_and_advice(trained: Any) -> None:
    served, client = trained
    served.hold(True)
    job: list[dict[str, Any]] = []

    def cancel(event: dict[str, Any]) -> None:
        if event["type"] == "started":
            job.append(client.cancel(event["job"]))

    with pytest.raises(TrainingFailed) as failed:
        client.train(GROUPS, on_event=cancel)
    assert failed.value.cancelled
    assert failed.value.reason


def test_what_cannot_be_trained_on_is_refused_at_once(trained: Any) -> None:
    _, client = trained
    with pytest.raises(GatewayError) as refused:
        client.train([["ep-none", "ep-neither"]])
    assert (refused.value.status, refused.value.param) == (422, "groups[0][0]")


def test_a_broken_connection_costs_no_event(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = trained
    whole, broken = httpx.Response.iter_lines, 0

    def breaks(self: httpx.Response) -> Any:
        nonlocal broken
        for number, line in enumerate(whole(self)):
            if number == 2 and broken < 2:
                broken += 1
                raise httpx.ReadError("gone")
            yield line

    monkeypatch.setattr(httpx.Response, "iter_lines", breaks)
    events: list[dict[str, Any]] = []
    client.train(GROUPS, on_event=events.append)
    assert broken == 2
    numbers = [event["number"] for event in events if event["type"] != "heartbeat"]
    assert numbers == [1, 2, 3, 4, 5]


def test_a_gateway_that_answers_late_is_asked_again_and_nothing_is_done_twice(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    send, lost = httpx.Client.request, 0

    def loses(self: httpx.Client, *args: Any, **options: Any) -> Any:
        nonlocal lost
        answer = send(self, *args, **options)
        if lost < 1:
            lost += 1
            raise httpx.ReadTimeout("lost")
        return answer

    monkeypatch.setattr(httpx.Client, "request", loses)
    client.episode(group="once")
    monkeypatch.undo()
    assert lost == 1
    assert len(client.episodes(group="once")["episodes"]) == 1


@pytest.mark.parametrize("url", ["ftp://x", "nonsense", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Client(url)


def test_where_nobody_listens_the_error_says_so() -> None:
    with Client("http://127.0.0.1:1", patience=0.1) as client, pytest.raises(GatewayError) as refused:
        client.episode()
    assert refused.value.status == 0
    assert "127.0.0.1:1" in str(refused.value)
