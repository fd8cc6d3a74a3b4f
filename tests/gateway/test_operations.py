"""/health, /ready and /metrics."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from mock_vllm import Fault, MockVLLM
from prometheus_client.parser import text_string_to_metric_families

from art_gym import __version__

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}


def figures(url: str, **options: Any) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels, in the order of the labels' names."""
    answer = httpx.get(url + "/metrics", **options)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_health_tells_the_version(gateway: str) -> None:
    assert httpx.get(gateway + "/health").json() == {"schema": 1, "status": "ok", "version": __version__}


def test_a_gateway_that_can_answer_is_ready(gateway: str) -> None:
    answer = httpx.get(gateway + "/ready")

    assert answer.status_code == 200
    expected = {"schema": 1, "ready": True, "upstream": "ok", "store": "ok", "draining": False, "policy": "mock@0"}
    assert answer.json() == expected


def test_without_the_model_server_it_is_not_ready_but_healthy(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(upstream="http://127.0.0.1:9/v1")
    answer = httpx.get(url + "/ready")

    assert (answer.status_code, answer.json()["ready"], answer.json()["store"]) == (503, False, "ok")
    assert answer.json()["upstream"] != "ok"
    assert httpx.get(url + "/health").status_code == 200


def test_without_a_disk_it_is_not_ready(make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    url, app = make_gateway()

    async def full(_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(app.state.gateway.store._writer, "write", full)
    answer = httpx.get(url + "/ready")

    assert answer.status_code == 503
    assert "database or disk is full" in answer.json()["store"]


def test_a_gateway_that_is_being_shut_down_is_not_ready(make_gateway: Callable[..., Any]) -> None:
    url, app = make_gateway()
    app.state.draining = True
    answer = httpx.get(url + "/ready")

    assert (answer.status_code, answer.json()["draining"]) == (503, True)


def test_requests_are_counted_by_route_and_status(gateway: str, mock: MockVLLM) -> None:
    made = httpx.post(gateway + "/episodes", json={}).json()
    for _ in range(3):
        httpx.get(f"{gateway}/episodes/{made['id']}")
    httpx.get(gateway + "/episodes/none")
    httpx.get(gateway + "/nothing/of/the/kind")
    mock.faults.append(Fault(500))
    httpx.post(gateway + "/v1/chat/completions", json=CHAT)

    found = figures(gateway)
    assert found["art_gym_requests_total", "GET", "/episodes/{episode_id}", "200"] == 3
    assert found["art_gym_requests_total", "GET", "/episodes/{episode_id}", "404"] == 1
    assert found["art_gym_requests_total", "POST", "/episodes", "201"] == 1
    assert found["art_gym_requests_total", "GET", "unmatched", "404"] == 1
    assert found["art_gym_requests_total", "POST", "/v1/chat/completions", "500"] == 1
    assert found["art_gym_request_seconds_count", "/episodes/{episode_id}"] == 4
    assert found["art_gym_request_seconds_bucket", "+Inf", "/episodes/{episode_id}"] == 4
    assert found["art_gym_requests_under_way",] == 1  # this one


def test_calls_tokens_and_episodes_are_counted(gateway: str) -> None:
    made = [httpx.post(gateway + "/episodes", json={}).json() for _ in range(3)]
    said = httpx.post(made[0]["base_url"] + "/chat/completions", json=CHAT).json()
    httpx.post(gateway + "/v1/chat/completions", json=CHAT)
    httpx.post(f"{gateway}/episodes/{made[0]['id']}/finish", json={"reward": 1})
    httpx.post(f"{gateway}/episodes/{made[1]['id']}/finish", json={"failure": "crashed"})

    found = figures(gateway)
    assert found["art_gym_captured_calls_total",] == 1
    assert found["art_gym_sampled_tokens_total",] == said["usage"]["completion_tokens"]
    assert found["art_gym_calls_in_flight",] == 0
    assert [found["art_gym_episodes", state] for state in ("open", "finished", "failed", "expired")] == [1, 1, 1, 0]


def test_what_clients_make_up_does_not_make_new_figures(gateway: str) -> None:
    for number in range(20):
        httpx.request(f"METHOD{number}", f"{gateway}/path/{number}")
        httpx.get(f"{gateway}/episodes/ep-{number}")
    found = figures(gateway)
    labels = {key[1:] for key in found if key[0] == "art_gym_requests_total"}
    assert len(labels) <= 3


def test_two_gateways_in_one_process_count_for_themselves(make_gateway: Callable[..., Any]) -> None:
    (one, _), (other, _) = make_gateway(), make_gateway()
    httpx.post(one + "/episodes", json={})

    assert figures(one)["art_gym_episodes", "open"] == 1
    assert figures(other)["art_gym_episodes", "open"] == 0
