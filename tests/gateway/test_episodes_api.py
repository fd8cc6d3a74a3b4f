"""The routes of episodes, over HTTP, before a stand-in for vLLM."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from art_gym.gateway import _episodes_api, _operations, schemas

CHAT = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def client(gateway: str) -> Any:
    with httpx.Client(base_url=gateway, timeout=30) as made:
        yield made


def begun(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/episodes", json=body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def refused(answer: httpx.Response, status: int, text: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["code"] == status


def test_an_episode_from_its_beginning_to_its_end(client: httpx.Client, gateway: str) -> None:
    made = begun(client, group="q17", scenario={"question": "why"}, metadata={"agent": 2})
    assert made["base_url"] == f"{gateway}/episodes/{made['id']}/v1"
    assert (made["schema"], made["state"], made["model"], made["group"]) == (1, "open", "mock", "q17")

    said = httpx.post(made["base_url"] + "/chat/completions", json=CHAT, timeout=30)
    assert said.status_code == 200, said.text
    ended = client.post(f"/episodes/{made['id']}/finish", json={"reward": 1, "rewards": {"found": 0.5}, "metrics": {"success": 1}}).json()
    found = client.get(f"/episodes/{made['id']}", params={"include": "calls"}).json()

    assert (ended["state"], ended["reward"], ended["rewards"], ended["metrics"], ended["calls"]) == (
        "finished",
        1.0,
        {"found": 0.5},
        {"success": 1.0},
        1,
    )
    (call,) = found.pop("captured")
    assert found == ended
    assert call["action"]["content"] == said.json()["choices"][0]["message"]["content"]
    assert len(call["completion_ids"]) == len(call["logprobs"]) == ended["tokens"] == said.json()["usage"]["completion_tokens"]
    assert "api_key" not in found
    assert client.get(f"/episodes/{made['id']}").json()["captured"] is None


def test_an_episode_finished_as_failed_tells_why(client: httpx.Client) -> None:
    id = begun(client)["id"]

    ended = client.post(f"/episodes/{id}/finish", json={"failure": "TimeoutError: late"}).json()

    assert (ended["state"], ended["failure"], ended["reward"]) == ("failed", "TimeoutError: late", None)


def test_rewards_that_come_later_add_up(client: httpx.Client) -> None:
    id = begun(client)["id"]
    client.post(f"/episodes/{id}/finish", json={"reward": 1})

    body, headers = {"reward": 0.5, "rewards": {"judge": 0.5}}, {"Idempotency-Key": "judge-1"}
    answers = [client.post(f"/episodes/{id}/rewards", json=body, headers=headers).json() for _ in range(3)]

    assert {one["reward"] for one in answers} == {1.5}
    assert client.get(f"/episodes/{id}").json()["reward"] == 1.5


def test_the_same_creation_has_the_same_answer_with_the_key(client: httpx.Client) -> None:
    answers = [client.post("/episodes", json={"group": "a"}, headers={"Idempotency-Key": "k"}).json() for _ in range(2)]

    assert answers[0] == answers[1]
    assert begun(client, group="a")["api_key"] != answers[0]["api_key"]
    refused(client.post("/episodes", json={"group": "b"}, headers={"Idempotency-Key": "k"}), 422, "a key of its own")


def test_episodes_are_listed_by_page_group_and_state(client: httpx.Client) -> None:
    ids = [begun(client, group="ab"[number % 2])["id"] for number in range(5)]
    client.post(f"/episodes/{ids[1]}/finish", json={})

    first = client.get("/episodes", params={"limit": 3}).json()
    rest = client.get("/episodes", params={"limit": 3, "after": first["next"]}).json()

    assert [one["id"] for one in first["episodes"] + rest["episodes"]] == ids
    assert (first["schema"], rest["next"]) == (1, None)
    assert [one["id"] for one in client.get("/episodes", params={"group": "b", "state": "open"}).json()["episodes"]] == [ids[3]]


def test_a_deleted_episode_is_gone(client: httpx.Client) -> None:
    made = begun(client)
    assert client.delete(f"/episodes/{made['id']}").json() == {"schema": 1, "id": made["id"], "deleted": True}

    for answer in (
        client.get(f"/episodes/{made['id']}"),
        client.delete(f"/episodes/{made['id']}"),
        httpx.post(made["base_url"] + "/chat/completions", json=CHAT),
    ):
        refused(answer, 404, "There is no episode")


def test_what_is_over_takes_no_call_and_no_other_end(client: httpx.Client) -> None:
    made = begun(client)
    for _ in range(2):
        assert client.post(f"/episodes/{made['id']}/finish", json={"reward": 1}).status_code == 200

    refused(client.post(f"/episodes/{made['id']}/finish", json={"reward": 2}), 409, "is finished already")
    refused(httpx.post(made["base_url"] + "/chat/completions", json=CHAT), 409, "takes no more calls")


def test_limits_are_refused_with_their_names(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(limits={"calls_per_episode": 1, "open_episodes": 2})
    with httpx.Client(base_url=url) as client:
        made = begun(client)
        begun(client)
        refused(client.post("/episodes", json={}), 429, "2 episodes are open")
        assert httpx.post(made["base_url"] + "/chat/completions", json=CHAT).status_code == 200
        refused(httpx.post(made["base_url"] + "/chat/completions", json=CHAT), 409, "has 1 calls, and may have no more (1)")


def test_an_episode_may_be_too_large(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(limits={"episode_bytes": 1000})
    with httpx.Client(base_url=url) as client:
        made = begun(client)
        body = {**CHAT, "messages": [{"role": "user", "content": "x" * 2000}]}
        refused(httpx.post(made["base_url"] + "/chat/completions", json=body), 409, "may have 1000")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("", {"grup": "q"}, "grup"),
        ("", {"group": ""}, "group"),
        ("", {"group": "a\nb"}, "group"),
        ("", {"group": "x" * 201}, "group"),
        ("", {"group": 3}, "group"),
        ("", {"metadata": [1]}, "metadata"),
        ("", {"metadata": None}, "metadata"),
        ("", {"metadata": {"a": math.nan}}, "NaN"),
        ("", {"scenario": {"a": "x" * 2**20}}, "1048576 bytes"),
        ("", {"scenario": {"a": "\ud800"}}, "surrogate"),
        ("", {"\ud800": "a"}, ""),
        ("", [], ""),
        ("/finish", {"reward": math.inf}, "reward"),
        ("/finish", {"reward": "much"}, "reward"),
        ("/finish", {"reward": 1e300}, "reward"),
        ("/finish", {"rewards": {"": 1}}, "rewards"),
        ("/finish", {"rewards": {"a": None}}, "rewards"),
        ("/finish", {"metrics": {str(number): 1 for number in range(201)}}, "metrics"),
        ("/finish", {"failure": ""}, "failure"),
        ("/rewards", {}, "give a reward"),
        ("/rewards", {"failure": "x"}, "failure"),
    ],
)
def test_what_is_not_right_is_said(client: httpx.Client, path: str, body: Any, said: str) -> None:
    id = begun(client)["id"]
    url = "/episodes" + (f"/{id}{path}" if path else "")

    answer = client.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})

    refused(answer, 422, said)
    assert client.get(f"/episodes/{id}").json()["state"] == "open"


def test_data_may_not_be_nested_without_end(client: httpx.Client) -> None:
    for depth, status in ((30, 201), (40, 422), (100_000, 400)):
        text = '{"metadata": {"a": ' + "[" * depth + "]" * depth + "}}"
        assert client.post("/episodes", content=text, headers={"Content-Type": "application/json"}).status_code == status


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"nul", b'{"reward": 1' + b"0" * 5000 + b"}"])
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, content: bytes) -> None:
    id = begun(client)["id"]

    answer = client.post(f"/episodes/{id}/finish", content=content, headers={"Content-Type": "application/json"})

    assert answer.status_code in (400, 422)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=-1", f"after={10**30}", "state=gone", f"group={'x' * 300}"])
def test_a_query_that_is_not_right_is_refused(client: httpx.Client, query: str) -> None:
    refused(client.get(f"/episodes?{query}"), 422, query.partition("=")[0])


@pytest.mark.parametrize("id", ["ep-x", "..%2F..%2Fetc%2Fpasswd", "%00", "ep-" + "x" * 97, "%F0%9F%98%80"])
def test_an_unknown_id_is_not_found_whatever_it_is(client: httpx.Client, id: str) -> None:
    for answer in (client.get(f"/episodes/{id}"), client.post(f"/episodes/{id}/finish", json={}), client.delete(f"/episodes/{id}")):
        assert answer.status_code == 404, answer.text


def test_a_public_address_is_what_clients_are_given(make_gateway: Callable[..., Any]) -> None:
    url, _ = make_gateway(public_url="https://train.example.com/gateway/")
    made = httpx.post(url + "/episodes", json={}).json()

    assert made["base_url"] == f"https://train.example.com/gateway/episodes/{made['id']}/v1"


def test_every_field_is_explained_with_an_example_and_every_object_has_a_version() -> None:
    objects = [one for one in vars(schemas).values() if isinstance(one, type) and issubclass(one, schemas.BaseModel)]
    models = {one.__name__: one for one in objects if not one.__name__.startswith("_") and one is not schemas.BaseModel}
    assert len(models) == 11
    for name, model in models.items():
        for key, field in model.model_fields.items():
            assert field.description, (name, key)
            nested = key in ("episodes", "error", "captured")
            assert nested or field.examples, (name, key)
    for name in ("EpisodeObject", "CreatedEpisode", "EpisodeWithCalls", "EpisodeList", "Deleted"):
        assert models[name].model_json_schema()["properties"]["schema"]["const"] == 1


def test_answers_are_as_documented(client: httpx.Client) -> None:
    made = begun(client, group="a", scenario={"a": 1})
    httpx.post(made["base_url"] + "/chat/completions", json=CHAT)
    schemas.CreatedEpisode.model_validate(made, strict=True, extra="forbid")
    listed = client.get("/episodes").json()
    schemas.EpisodeList.model_validate(listed, extra="forbid")
    schemas.EpisodeWithCalls.model_validate(client.get(f"/episodes/{made['id']}?include=calls").json(), extra="forbid")
    schemas.ErrorObject.model_validate(client.get("/episodes/none").json(), extra="forbid")
    _operations.Health.model_validate(client.get("/health").json(), extra="forbid")
    _operations.Readiness.model_validate(client.get("/ready").json(), extra="forbid")


def test_errors_are_documented_for_every_route() -> None:
    for route in _episodes_api.router.routes:
        assert isinstance(route, APIRoute)
        assert {401, 403, 413, 429, 503} <= set(route.responses), route.path
        if "{episode_id}" in route.path:
            assert 404 in route.responses, route.path
