"""The train API over HTTP: what is answered, and how events are streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

sys.path.insert(0, str(Path(__file__).parent))

from pydantic import TypeAdapter
from test_jobs import GROUPS, ScriptedTrainer

from art_gym.cli.config import GRPOSection
from art_gym.gateway import train_schemas as schemas
from art_gym.gateway.jobs import Jobs
from art_gym.gateway.policy import PolicyState
from art_gym.gateway.train_schemas import Event, Job


class Served:
    """A gateway that trains with a scripted trainer."""

    def __init__(self, make_gateway: Callable[..., Any], folder: Path, **settings: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        policy = PolicyState("mock", "mock")
        self.trainer = ScriptedTrainer(folder)
        self.jobs = Jobs(policy, self.trainer, folder, in_place=True, heartbeat_seconds=0.1, grace_seconds=0.5)
        address, self.app = make_gateway(policy=policy, jobs=self.jobs, **settings)
        self.http = httpx.Client(base_url=address, timeout=20)

    def hold(self, on: bool) -> None:
        """Let training wait, or go on."""
        event = self.trainer.hold
        self.app.state.loop.call_soon_threadsafe(event.clear if on else event.set)

    def submit(self, **body: Any) -> dict[str, Any]:
        answer = self.http.post("/train", json={"groups": GROUPS} | body)
        assert answer.status_code == 202, answer.text
        data: dict[str, Any] = answer.json()
        return data

    def events(self, job: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        answer = self.http.get(job["events_url"], headers={"Accept": "application/x-ndjson"} | headers)
        return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
def served(make_gateway: Callable[..., Any], tmp_path: Path) -> Served:
    return Served(make_gateway, tmp_path / "served")


def test_a_job_is_accepted_with_its_address(served: Served) -> None:
    answer = served.http.post("/train", json={"groups": GROUPS, "config": {"learning_rate": 1e-3}})
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/train/{job['id']}"
    assert job["schema"] == 1
    assert job["config"] == {"learning_rate": 1e-3}
    assert served.events(job)[-1]["type"] == "finished"
    fetched = served.http.get(answer.headers["location"]).json()
    assert (fetched["state"], fetched["version"]) == ("finished", "mock@1")
    assert [one["id"] for one in served.http.get("/train?state=finished").json()["jobs"]] == [job["id"]]
    assert served.http.get("/train?state=failed").json()["jobs"] == []


def test_every_event_is_one_of_the_documented_ones(served: Served) -> None:
    events = served.events(served.submit())
    for event in events:
        parsed = TypeAdapter(Event).validate_python(event)
        assert set(event) <= {field.alias or name for name, field in type(parsed).model_fields.items()}
    assert [event["type"] for event in events if event["type"] != "heartbeat"] == ["queued", "started", "step", "published", "finished"]
    assert set(Job.model_fields) - {"schema_version"} <= set(served.http.get("/train").json()["jobs"][0])


def test_events_come_as_they_happen_with_heartbeats_in_between_in_both_forms(served: Served) -> None:
    served.hold(True)
    job = served.submit()
    for accept, alive in (("text/event-stream", ": heartbeat"), ("application/x-ndjson", '"heartbeat"')):
        with served.http.stream("GET", job["events_url"], headers={"Accept": accept}) as stream:
            assert stream.headers["content-type"].startswith(accept)
            for line in stream.iter_lines():
                if alive in line:
                    break
    served.hold(False)
    text = served.http.get(job["events_url"], headers={"Accept": "text/event-stream"}).text
    blocks = [block for block in text.split("\n\n") if "\ndata: " in block]
    last = dict(line.split(": ", 1) for line in blocks[-1].splitlines())
    assert (last["id"], last["event"]) == ("5", "finished")
    assert json.loads(last["data"])["number"] == 5


def test_a_stream_is_resumed_after_the_last_event_that_came(served: Served) -> None:
    job = served.submit()
    numbers = [event["number"] for event in served.events(job) if "number" in event]
    assert numbers == [1, 2, 3, 4, 5]
    assert [event["number"] for event in served.events(job, **{"Last-Event-ID": "3"})] == [4, 5]
    assert [
        json.loads(line)["number"]
        for line in served.http.get(f"{job['events_url']}?after=4", headers={"Accept": "application/x-ndjson"}).text.splitlines()
    ] == [5]
    # An EventSource reconnects until it is told that there is no more.
    assert served.http.get(job["events_url"], headers={"Last-Event-ID": "5"}).status_code == 204


@pytest.mark.parametrize(
    ("accept", "status", "form"),
    [
        ("*/*", 200, "text/event-stream"),
        ("text/event-stream;q=0.2, application/x-ndjson;q=0.9", 200, "application/x-ndjson"),
        ("application/*", 200, "application/x-ndjson"),
        ("text/html, */*;q=0.1", 200, "text/event-stream"),
        ("image/png", 406, ""),
        ("text/event-stream;q=zero", 406, ""),
    ],
)
def test_the_form_is_what_accept_prefers(served: Served, accept: str, status: int, form: str) -> None:
    answer = served.http.get(served.submit()["events_url"], headers={"Accept": accept})
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith(form)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"groups": []}, "groups"),
        ({"groups": [["ep-none", "ep-other"]]}, "groups[0][0]"),
        ({"groups": GROUPS, "config": {"learning_rat": 1}}, "config.learning_rat"),
        ({"groups": GROUPS, "config": {"learning_rate": -1}}, "config.learning_rate"),
        ({"groups": GROUPS, "config": {"credit": "episode", "discount": 0.5}}, "config"),
        ({"groups": GROUPS, "config": {"optimiser_steps": 0}}, "config.optimiser_steps"),
        ({"groups": [[{"turns": [{"prompt_ids": [-1]}]}, "ep-1"]]}, "groups.0.0.episode.turns.0.prompt_ids.0"),
        ({"groups": [[{"turns": [], "shared_turns": 1}, "ep-1"]]}, "groups.0.0.episode"),
        ({"groups": GROUPS, "more": 1}, "more"),
    ],
)
def test_a_bad_request_is_refused_in_one_line_that_names_what_is_wrong(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.http.post("/train", json=body)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert served.http.get("/train").json()["jobs"] == []


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"groups": NaN}', '{"groups": [["a", "b"]], "config": {"learning_rate": Infinity}}'])
def test_a_malformed_body_is_refused(served: Served, text: str) -> None:
    answer = served.http.post("/train", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)


def test_a_dry_run_tells_what_would_be_trained_on_and_starts_nothing(served: Served) -> None:
    answer = served.http.post("/train", json={"groups": GROUPS, "dry_run": True})
    assert answer.status_code == 200
    assert answer.json()["batch"] == {
        "groups": 1,
        "episodes": 2,
        "failed_episodes": 0,
        "turns": 2,
        "sampled_tokens": 6,
        "temperature": 1.0,
        "policies": {"mock@0": 2},
    }
    assert served.http.get("/train").json()["jobs"] == []


def test_a_request_that_is_sent_again_makes_one_job(served: Served) -> None:
    answers = [served.http.post("/train", json={"groups": GROUPS}, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json()["id"] == answers[1].json()["id"]


def test_a_job_is_cancelled_over_http(served: Served) -> None:
    served.hold(True)
    job = served.submit()
    answer = served.http.post(f"/train/{job['id']}/cancel")
    assert answer.status_code == 200
    assert served.events(job)[-1]["type"] == "cancelled"
    assert served.http.post("/train/job-none/cancel").status_code == 404
    assert served.http.get("/train/job-none").status_code == 404
    assert served.http.get("/train/..%2F..%2Fetc/events").status_code == 404


def test_checkpoints_are_listed_put_in_front_downloaded_and_deleted(served: Served) -> None:
    for _ in range(2):
        assert served.events(served.submit())[-1]["type"] == "finished"
    listed = served.http.get("/checkpoints").json()
    assert listed["active"] == 2
    assert [(one["step"], one["active"], one["served"]) for one in listed["checkpoints"]] == [
        (0, False, False),
        (1, False, False),
        (2, True, True),
    ]
    assert served.http.get("/checkpoints/1/adapter").status_code == 409
    folder = served.folder / "checkpoints" / "step-0001"
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.pt").write_bytes(b"private")
    answer = served.http.get("/checkpoints/1/adapter")
    assert answer.headers["content-disposition"] == 'attachment; filename="mock-0001.zip"'
    with zipfile.ZipFile(BytesIO(answer.content)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"weights",
        }
    assert not list(served.folder.glob("adapter-*.zip"))
    activated = served.http.post("/checkpoints/1/activate")
    assert (activated.status_code, activated.json()["active"]) == (200, True)
    assert served.http.delete("/checkpoints/1").status_code == 409
    assert served.http.delete("/checkpoints/2").status_code == 204
    assert served.http.delete("/checkpoints/2").status_code == 404
    assert served.http.post("/checkpoints/9/activate").status_code == 404
    assert served.http.post("/checkpoints/-1/activate").status_code == 422


def test_versions_stay_while_a_job_runs(served: Served) -> None:
    served.events(served.submit())
    served.hold(True)
    job = served.submit()
    while served.http.get(f"/train/{job['id']}").json()["state"] != "running":
        pass
    assert served.http.post("/checkpoints/0/activate").status_code == 409
    assert served.http.delete("/checkpoints/1").status_code == 409
    served.hold(False)
    assert served.events(job)[-1]["type"] == "finished"


def test_without_a_trainer_each_route_says_so(gateway: str) -> None:
    for method, path in (("POST", "/train"), ("GET", "/train"), ("GET", "/checkpoints"), ("GET", "/train/job-1/events")):
        answer = httpx.request(method, gateway + path, json={"groups": GROUPS} if method == "POST" else None)
        assert answer.status_code == 409
        assert "art-gym serve" in answer.json()["error"]["message"]


def test_the_openapi_document_has_every_event_and_example(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    names = set(document["components"]["schemas"])
    assert {
        "QueuedEvent",
        "StartedEvent",
        "StepEvent",
        "PublishedEvent",
        "FinishedEvent",
        "FailedEvent",
        "CancelledEvent",
        "Heartbeat",
    } <= names
    content = document["paths"]["/train/{job}/events"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"text/event-stream", "application/x-ndjson"}
    for name in ("TrainConfig", "TrainRequest", "Batch", "Job", "StepEvent", "FinishedEvent", "Checkpoint"):
        for field, schema in document["components"]["schemas"][name]["properties"].items():
            assert schema.get("description") or "const" in schema or "$ref" in schema, f"{name}.{field} isn't explained"


def test_open_event_streams_are_ended_with_the_gateway(served: Served) -> None:
    served.hold(True)
    job = served.submit()
    with served.http.stream("GET", job["events_url"], headers={"Accept": "application/x-ndjson"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        closing = asyncio.run_coroutine_threadsafe(served.jobs.close(), served.app.state.loop)
        events = [json.loads(line) for line in lines]
    closing.result(10)
    assert events[-1]["type"] == "failed"
    assert "shut down" in events[-1]["reason"]


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import uvicorn
from test_jobs import ScriptedTrainer
from art_gym.gateway import GatewaySettings, PolicyState, create_app
from art_gym.cli.config import GRPOSection
from art_gym.gateway import train_schemas as schemas
from art_gym.gateway.jobs import Jobs
folder = Path(sys.argv[2])
trainer, policy = ScriptedTrainer(folder), PolicyState("mock", "mock")
if sys.argv[4] == "hold":
    trainer.hold.clear()
jobs = Jobs(policy, trainer, folder, in_place=True)
settings = GatewaySettings.of(upstream="http://127.0.0.1:1/v1", model="mock", folder=folder)
uvicorn.run(create_app(settings, policy=policy, jobs=jobs), port=int(sys.argv[3]), log_level="error")
"""


def test_kill_9_under_load_leaves_no_job_without_an_end(tmp_path: Path) -> None:
    """Jobs come in while the gateway is killed: each that was accepted is there, and ends."""

    def start(hold: str) -> tuple[subprocess.Popen[bytes], httpx.Client]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path), str(port), hold]
        process, http = subprocess.Popen(command), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        for _ in range(400):
            try:
                http.get("/train").raise_for_status()
                return process, http
            except httpx.ConnectError:
                time.sleep(0.05)
        raise AssertionError("the gateway didn't start")

    process, http = start("hold")
    accepted: list[str] = []

    def send() -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                answer = http.post("/train", json={"groups": GROUPS})
                if answer.status_code == 202:
                    accepted.append(answer.json()["id"])

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    while len(accepted) < 5:
        time.sleep(0.005)
    process.kill()
    process.wait()
    for sender in senders:
        sender.join()
    process, http = start("go")
    try:
        states = []
        for id in accepted:
            with http.stream("GET", f"/train/{id}/events", headers={"Accept": "application/x-ndjson"}) as stream:
                events = [json.loads(line) for line in stream.iter_lines()]
            states.append(events[-1]["type"])
            assert [event["number"] for event in events if "number" in event] == list(range(1, len(events) + 1))
        # The one that ran is told as failed; the others went on.
        assert states == ["failed"] + ["finished"] * (len(accepted) - 1)
        everything = http.get("/train?limit=1000").json()["jobs"]
        assert all(job["state"] in ("failed", "finished") or job["id"] not in accepted for job in everything)
    finally:
        process.kill()
        process.wait()


def test_the_page_explains_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway-train.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([a-z_]+)`", page)) | set(re.findall(r"turns\[\]\.([a-z_]+)", page))
    models = [
        schemas.TrainRequest,
        schemas.TrainConfig,
        schemas.InlineTurn,
        schemas.InlineEpisode,
        schemas.Batch,
        schemas.Job,
        schemas.Checkpoint,
    ]
    models += [schemas.QueuedEvent, schemas.StartedEvent, schemas.StepEvent, schemas.PublishedEvent, schemas.FinishedEvent, schemas.FailedEvent]
    for model in models:
        fields = {field.alias or name for name, field in model.model_fields.items()}
        assert fields <= told | {"turns"}, f"{model.__name__}: {sorted(fields - told)}"


def test_the_pages_defaults_are_those_of_a_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway-train.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+) \|", page.partition("### `config`")[2].partition("###")[0], re.MULTILINE))
    ours = {"loss": "loss_type", "optimiser_steps": "steps_per_batch"}
    for name, written in rows.items():
        if name in ("temperature", "token_budget"):
            continue
        default = GRPOSection.model_fields[ours.get(name, name)].default
        shown = written.strip("` ")
        assert shown == str(default).lower() or float(shown) == default, name
