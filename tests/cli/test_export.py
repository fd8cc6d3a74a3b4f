"""`art-gym export`: what is refused, what is written, and pushing with the real hub client to a stand-in of the hub."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from art_gym.cli import main
from art_gym.cli.config import RunConfig
from art_gym.evaluation import Evaluation
from art_gym_trainers import checkpoints

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

pytest.importorskip("huggingface_hub")


@pytest.fixture
def run(tmp_path):
    """The folder of a run of four batches, of which the last two checkpoints are left; nothing in it is what torch would have written."""
    model = tmp_path / "base-model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    config = {"env": {"id": "art_gym/Lookup-v0", "kwargs": {"topics": 2}}, "model": {"name": str(model)}, "grpo": {"batches": 4}, "seed": 5}
    RunConfig.from_values(config).save(folder / "config.yaml")
    for step in (3, 4):
        with checkpoints.writing(folder / "checkpoints", step, {"versions": {"torch": "2.13.0"}}) as scratch:
            (scratch / "adapter_model.safetensors").write_bytes(b"adapter" * step)
            (scratch / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": "/somewhere/else"}))
            (scratch / "optimizer.pt").write_bytes(b"optimiser")
    # Batch 4 was played by the policy of checkpoint 3.
    rows = [{"step": step, "success_rate": success} for step, success in [(1, 0.2), (2, 0.9), (3, 0.4), (4, 0.55)]]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = Evaluation("art_gym/Lookup-v0", "policy", 200, 130, 0.582, 0.713, mean_reward=0.7, mean_turns=2.5, invalid_calls=3)
    (folder / "evaluations.json").write_text(json.dumps({"grpo": outcome.to_dict()}))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_adapter_is_written_with_what_goes_with_it(run, tmp_path, capsys):
    assert main(["export", str(run), "--to", "out"]) == 0
    assert capsys.readouterr().out == "adapter of batch 4: out\n"
    out = tmp_path / "out"
    assert names(out) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "adapter_model.safetensors").read_bytes() == b"adapter" * 4
    # The base where it lies now, whatever it was called when the run began.
    assert json.loads((out / "adapter_config.json").read_text()) == {"r": 4, "base_model_name_or_path": str(tmp_path / "base-model")}
    assert names(tmp_path) == ["base-model", "out", "runs"]


def test_the_card_says_what_it_is_and_how_well_it_plays(run, tmp_path):
    assert main(["export", str(run), "--to", "out", "--step", "3"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["art_gym", "reinforcement-learning", "grpo", "tool-use"],
    }
    assert "base-model, trained with GRPO on art_gym/Lookup-v0 (topics=2)" in body
    assert "the policy after batch 3 of 4, seed 5. In the batch that it played, 55.0% of the training episodes succeeded." in body
    assert "“After GRPO” is the policy after batch 4, not this one." in body
    assert "| after GRPO | 65.0% | 58.2% to 71.3% | 200 |" in body
    assert "torch 2.13.0" in body
    assert str(tmp_path) not in text


@pytest.mark.parametrize(("step", "chosen"), [("latest", 4), ("best", 3), ("3", 3), ("4", 4)])
def test_the_checkpoint_is_chosen(run, tmp_path, step, chosen):
    assert main(["export", str(run), "--to", "out", "--step", step]) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == b"adapter" * chosen


def test_an_empty_folder_is_as_good_as_none(run, tmp_path):
    (tmp_path / "out").mkdir()
    assert main(["export", str(run), "--to", "out"]) == 0
    assert "adapter_config.json" in names(tmp_path / "out")


def test_nothing_is_written_over(run, tmp_path, refused):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    assert refused("export", str(run), "--to", "out") == "out is not empty; give another --to"
    assert refused("export", str(run), "--to", "file") == "file is a file; give another --to"
    assert "file is a file; give another --to" in refused("export", str(run), "--to", "file/out")


def test_what_a_kill_left_of_an_export_is_no_hindrance(run, tmp_path):
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "half").touch()
    assert main(["export", str(run), "--to", "out"]) == 0
    assert "half" not in names(tmp_path / "out")
    assert ".out.part" not in names(tmp_path)


def test_a_failure_on_the_way_leaves_nothing(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "step-0005"
    with checkpoints.writing(run / "checkpoints", 5, {}) as scratch:
        (scratch / "adapter_model.safetensors").write_bytes(b"adapter")
        (scratch / "adapter_config.json").write_text("no JSON")
    assert checkpoint.is_dir()
    assert main(["export", str(run), "--to", "out"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert names(tmp_path) == ["base-model", "runs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "where to? give --to FOLDER, --push-to OWNER/NAME, or both"),
        (["--to", "out", "--private"], "--private is about the repository of --push-to; give both"),
        (["--to", "out", "--dtype", "bfloat16"], "--dtype is of merged weights"),
        (["--to", "out", "--step", "last"], "--step 'last': expected latest, best, or a batch's number: 3, 4"),
        (["--to", "out", "--step", "7"], "has no checkpoint of step 7; there are: 3, 4"),
        (["--to", "out", "--form", "gguf"], "'gguf' is not one of 'adapter', 'merged'"),
        (["--to", "/proc/out"], "can't write the folder /proc/out"),
        (["--push-to", "a/b/c"], "--push-to 'a/b/c': expected OWNER/NAME"),
    ],
)
def test_a_wrong_request(run, refused, arguments, message):
    assert message in refused("export", str(run), *arguments)


def test_a_folder_that_is_no_run(refused, tmp_path):
    assert "base is not the folder of a run: it holds no config.yaml" in refused("export", "base", "--to", "out")


def test_a_run_without_a_checkpoint(run, refused):
    for step in (3, 4):
        (run / "checkpoints" / f"step-{step:04d}").rename(run / f"moved-{step}")
    assert "has no checkpoint yet; the first is written after the first batch of GRPO" in refused("export", str(run), "--to", "out")


def test_a_run_without_a_best(run, refused):
    (run / "metrics.jsonl").unlink()
    line = refused("export", str(run), "--to", "out", "--step", "best")
    assert line.endswith("has a success_rate yet, since the batch after it tells; give --step latest, or one of: 3, 4")


def test_a_damaged_checkpoint(run, refused):
    (run / "checkpoints" / "step-0004" / "adapter_model.safetensors").write_bytes(b"ADAPTER" * 4)
    line = refused("export", str(run), "--to", "out")
    assert "step-0004/adapter_model.safetensors has another checksum than when it was written" in line


def test_a_model_that_was_trained_whole_has_no_adapter(run, refused):
    with checkpoints.writing(run / "checkpoints", 5, {}) as scratch:
        (scratch / "model.safetensors").write_bytes(b"model")
    assert refused("export", str(run), "--to", "out").endswith("since the whole model was trained; export it with --form merged")


# ---------------------------------------------------------------------------------------------------------------------------- pushing


class Hub(ThreadingHTTPServer):
    """Speaks what huggingface_hub asks of the hub to make a repository and commit to it; keeps what it got."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[dict] = []
        self.writers = {"writes"}
        self.readers = {"reads"}
        self.broken = False


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments):
        pass

    def answer(self, status: int, body: object = None, headers: dict | None = None) -> None:
        data = json.dumps(body if body is not None else {}).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def allowed(self) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.server.broken:
            self.answer(500, {"error": "out of order"}, {"X-Error-Message": "out of order"})
        elif token in self.server.writers:
            return True
        elif token in self.server.readers:
            self.answer(403, {"error": "You don't have the rights to do this"})
        else:
            self.answer(401, {"error": "Invalid username or password."})
        return False

    def do_GET(self):
        repo = self.path.removeprefix("/api/models/").partition("?")[0]
        if repo in self.server.private:
            self.answer(200, {"id": repo, "private": self.server.private[repo], "sha": "0" * 40})
        else:
            self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})

    def do_PUT(self):
        data = self.body()
        assert hashlib.sha256(data).hexdigest() == self.path.rpartition("/")[2]
        self.server.large[self.path.rpartition("/")[2]] = data
        self.answer(200)

    def do_POST(self):
        data = self.body()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif not self.allowed():
            pass
        elif path == "/api/repos/create":
            asked = json.loads(data)
            repo = f"{asked['organization']}/{asked['name']}"
            existed = repo in self.server.private
            self.server.private.setdefault(repo, asked.get("visibility") == "private" or bool(asked.get("private")))
            self.answer(409 if existed else 200, {"url": f"{self.server.endpoint}/{repo}"})
        elif "/preupload/" in path:
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular", "shouldIgnore": False}
                for file in json.loads(data)["files"]
            ]
            self.answer(200, {"files": modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {"oid": entry["oid"], "size": entry["size"], "actions": {"upload": {"href": f"{self.server.endpoint}/lfs/{entry['oid']}"}}}
                for entry in json.loads(data)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            files = self.server.files.setdefault(repo, {})
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.server.commits.append(value)
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.large[value["oid"]]
            self.answer(200, {"commitUrl": f"{self.server.endpoint}/{repo}/commit/1", "commitOid": "1" * 40, "success": True})
        else:
            self.answer(404, {"error": path})


@pytest.fixture
def hub():
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def push(tmp_path):
    """Run the command in a process of its own, since the hub client reads its variables when it is imported; gives code and output."""

    def run(*arguments: str, endpoint: str, token: str | None = "writes", **variables: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / ".hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        env |= ({"HF_TOKEN": token} if token else {}) | variables
        program = "import sys; from art_gym.cli import main; sys.exit(main(sys.argv[1:]))"
        return subprocess.run([sys.executable, "-c", program, "export", *arguments], env=env, capture_output=True, text=True, check=False)

    return run


def error(done: subprocess.CompletedProcess[str]) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.splitlines()[-1] == line
    return line.removeprefix("error: ")


@pytest.mark.slow
def test_what_is_pushed_is_what_would_be_written(run, hub, push, tmp_path):
    done = push(str(run), "--push-to", "me/policy", "--to", "out", endpoint=hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"adapter of batch 4: out\nadapter of batch 4: {hub.endpoint}/me/policy\n"
    assert hub.files["me/policy"] == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert [commit["summary"].partition(", by")[0] for commit in hub.commits] == ["adapter of batch 4 of mine"]
    assert hub.private == {"me/policy": False}


@pytest.mark.slow
def test_a_push_alone_leaves_nothing_here_and_tells_no_path(run, hub, push, tmp_path):
    before = names(tmp_path)
    done = push(str(run), "--push-to", "me/policy", "--private", endpoint=hub.endpoint)
    assert done.returncode == 0, done.stderr
    assert [name for name in names(tmp_path) if name != ".hf"] == before
    assert hub.private == {"me/policy": True}
    assert all(str(tmp_path).encode() not in data for data in hub.files["me/policy"].values())
    assert json.loads(hub.files["me/policy"]["adapter_config.json"])["base_model_name_or_path"] == "base-model"


@pytest.mark.slow
def test_a_second_push_is_a_second_commit(run, hub, push):
    for step in ("3", "4"):
        assert push(str(run), "--push-to", "me/policy", "--step", step, endpoint=hub.endpoint).returncode == 0
    assert len(hub.commits) == 2
    assert hub.files["me/policy"]["adapter_model.safetensors"] == b"adapter" * 4


@pytest.mark.slow
def test_a_public_repository_is_not_taken_for_a_private_one(run, hub, push):
    hub.private["me/policy"] = False
    done = push(str(run), "--push-to", "me/policy", "--private", endpoint=hub.endpoint)
    assert done.returncode == 2
    assert error(done).startswith(f"{hub.endpoint}/me/policy is there already and public; make it private")
    assert hub.commits == []


@pytest.mark.slow
def test_a_push_without_a_token(run, hub, push):
    done = push(str(run), "--push-to", "me/policy", "--to", "out", endpoint=hub.endpoint, token=None)
    assert done.returncode == 2
    assert error(done) == "--push-to needs a token of the hub with write access; set HF_TOKEN to it, or log in with `hf auth login`"
    assert not Path("out").exists()


@pytest.mark.slow
def test_a_push_while_the_hub_is_switched_off(run, hub, push):
    done = push(str(run), "--push-to", "me/policy", endpoint=hub.endpoint, HF_HUB_OFFLINE="1")
    assert (done.returncode, error(done)) == (2, "--push-to needs the hub, and HF_HUB_OFFLINE is set; unset it, or export with --to alone")


@pytest.mark.parametrize(
    ("token", "message"),
    [("nobody's", "doesn't know the token; make a new one with write access"), ("reads", "the token may not write to me/policy on http://")],
)
@pytest.mark.slow
def test_a_token_that_may_not_write(run, hub, push, token, message):
    done = push(str(run), "--push-to", "me/policy", "--to", "out", endpoint=hub.endpoint, token=token)
    assert done.returncode == 2
    assert message in error(done)
    # What took work isn't lost.
    assert error(done).endswith("; the export is whole in out")
    assert "adapter_config.json" in names(Path("out"))
    assert hub.commits == []


@pytest.mark.slow
def test_a_token_that_may_write_elsewhere_only(run, hub, push):
    hub.private["me/policy"] = False
    done = push(str(run), "--push-to", "me/policy", endpoint=hub.endpoint, token="reads")
    assert done.returncode == 2
    assert "the token may not write to me/policy" in error(done)


@pytest.mark.slow
def test_a_hub_that_can_not_be_reached(run, push):
    done = push(str(run), "--push-to", "me/policy", endpoint="http://127.0.0.1:9")
    assert done.returncode == 1
    assert error(done).startswith("the upload to http://127.0.0.1:9 failed: ")
    assert error(done).endswith("; look at the network, or at HF_ENDPOINT")


@pytest.mark.slow
def test_a_hub_that_is_out_of_order(run, hub, push):
    hub.broken = True
    done = push(str(run), "--push-to", "me/policy", endpoint=hub.endpoint)
    assert done.returncode == 1
    assert "(HTTP 500)" in error(done)
    assert error(done).endswith("; try again later")
