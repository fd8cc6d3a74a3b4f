"""Servers that run already, in an evaluation: what they are asked, and what of it ends up in the outcome."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from art_gym.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

GUESS = "art_gym/GuessNumber-v0"


class Server:
    """Guesses `number` whatever it is asked; notes the requests and their keys."""

    def __init__(self, model: str, number: int) -> None:
        self.model, self.number = model, number
        self.bodies, self.keys = [], set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self._answer({"data": [{"id": outer.model}]})

            def do_POST(self):
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                call = {"id": "c", "type": "function", "function": {"name": "guess", "arguments": json.dumps({"number": outer.number})}}
                message = {"role": "assistant", "content": None, "tool_calls": [call]}
                self._answer({"model": outer.model, "choices": [{"message": message, "finish_reason": "tool_calls"}]})

            def _answer(self, data):
                outer.keys.add(self.headers.get("Authorization"))
                body = json.dumps(data).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def servers():
    made = []

    def serve(model: str, number: int) -> Server:
        made.append(Server(model, number))
        return made[-1]

    yield serve
    for server in made:
        server.close()


def test_two_servers_play_the_same_scenarios(servers, capsys):
    right, wrong = servers("org/right", 1), servers("wrong", 9)
    agents = ["--agent", f"{right.url}#org/right", "--agent", f"b={wrong.url}"]
    sampling = ["--temperature", "0.5", "--max-tokens", "20", "--api-key", "secret"]
    environment = ["--env", "high=1", "--env", "max_turns=1"]
    assert main(["eval", GUESS, *agents, *sampling, *environment, "--n", "6", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(entry["agent"], entry["successes"], entry["invalid_calls"]) for entry in result["evaluations"]] == [
        ("org/right", 6, 0),
        ("b", 0, 6),
    ]
    # 2 · (1/2)⁶
    assert result["differences"][0]["success"]["p"] == 2 / 64
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in right.bodies} == {("org/right", 0.5, 20)}
    assert {body["model"] for body in wrong.bodies} == {"wrong"}
    assert right.keys == wrong.keys == {"Bearer secret"}
    # Such a server gives no token ids, and isn't asked for them.
    assert result["evaluations"][0]["tokens"] is None
    assert all("return_token_ids" not in body for body in right.bodies)


def test_base_url_and_model_say_what_chat_is(servers, capsys):
    server = servers("served", 1)
    arguments = ["eval", GUESS, "--base-url", server.url, "--agent", "chat", "--agent", "random", "--n", "2", "--env", "high=1"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert f"agent          {server.url.removeprefix('http://').removesuffix('/v1')}\n" in output
    assert "agent          random\n" in output


def test_a_model_that_the_server_has_not_is_refused(servers, refused):
    server = servers("served", 1)
    line = refused("eval", GUESS, "--agent", "random", "--agent", f"{server.url}#other")
    assert line == f"{server.url} has no model 'other'; it serves: served"


@pytest.fixture
def kept(servers, tmp_path, monkeypatch):
    """An evaluation of which one episode is missing; gives its server, and the arguments that go on with it."""
    monkeypatch.setattr("art_gym.cli._eval_report.draw", lambda result, path: "")
    server = servers("served", 1)
    arguments = ["eval", GUESS, "--agent", f"a={server.url}", "--n", "3", "--env", "high=1", "--out", "out"]
    assert main(arguments) == 0
    journal = tmp_path / "out" / "episodes" / "eval.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:2]))
    return server, [*arguments, "--resume"]


@pytest.mark.parametrize(
    ("option", "what"),
    [("--temperature", "temperature 1.0, and now it is 0.5"), ("--max-tokens", "max_tokens 64, and now it is 20")],
)
def test_another_way_of_sampling_is_not_gone_on_with(kept, refused, option, what):
    _, arguments = kept
    line = refused(*arguments, option, what.split()[-1])
    assert line == f"the episodes in out/episodes/eval.jsonl were played with {what}; resume with the same, or play anew in another folder"


def test_a_server_that_serves_another_model_meanwhile_is_not_gone_on_with(kept, refused, capsys):
    server, arguments = kept
    capsys.readouterr()
    server.model = "other"
    assert "were played with model 'served', and now it is 'other'; resume with the same" in refused(*arguments)
    server.model = "served"
    assert main([*arguments, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["evaluations"]
    assert (result["n"], result["played_by"]["model"], result["played_by"]["base_url"]) == (3, "served", server.url)


def test_an_agent_that_has_nothing_left_to_play_is_not_asked_for(kept, capsys, refused):
    server, arguments = kept
    assert main(arguments) == 0
    server.close()
    capsys.readouterr()
    assert main([*arguments, "--agent", "random"]) == 0
    assert f"agent          a\nplayed by      {server.url}, " in capsys.readouterr().out
    # What was asked of it is compared all the same.
    assert "temperature 1.0, and now it is 0.1;" in refused(*arguments, "--agent", "random", "--temperature", "0.1")
