"""Engines over a fake server, and an HTTP server in the test's own process."""

import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from art_gym.engine import Engine, EngineConfig

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


class Fake:
    """Builds engines over `fake_server.py` and knows the ids of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids_file = folder / "pids"
        self.log = folder / "engine.log"
        self.engines: list[Engine] = []

    def command(self, *modes: str) -> list[str]:
        return [sys.executable, "-S", str(FAKE_SERVER), "{port}", str(self.pids_file), *modes]

    def engine(self, *modes: str, progress=None, **options) -> Engine:
        config = EngineConfig(model="fake", **{"start_timeout": 20.0, "stop_timeout": 2.0, **options})
        self.engines.append(Engine(config, log=self.log, command=self.command(*modes), progress=progress))
        return self.engines[-1]

    @property
    def pids(self) -> list[int]:
        assert wait_until(self.pids_file.exists)
        return [int(pid) for pid in self.pids_file.read_text().split()]

    def all_gone(self, seconds: float = 10.0, *, but: int = 0) -> bool:
        """Whether all processes end within the time, leaving the last `but` out."""
        return wait_until(lambda: not any(alive(pid) for pid in self.pids[: 3 - but]), seconds)

    def collected(self, index: int, seconds: float = 5.0) -> bool:
        """Whether nothing is left of a process within the time, not even a zombie."""
        return wait_until(lambda: not Path(f"/proc/{self.pids[index]}").exists(), seconds)


@pytest.fixture
def fake(tmp_path: Path):
    fake = Fake(tmp_path)
    yield fake
    for engine in fake.engines:
        engine.stop()
    if fake.pids_file.exists():
        for pid in fake.pids:
            if alive(pid):
                os.kill(pid, 9)


class Endpoint:
    """Answers `path` with what `answers[path]` holds: a body, or (status, body); a list is used up one by one, its last for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}
        self.requests: list[tuple[str, str, object, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                outer.requests.append((self.command, self.path, body, self.headers.get("Authorization")))
                answer = outer.answers.get(self.path, (404, {"detail": "Not Found"}))
                if isinstance(answer, list):
                    answer = answer.pop(0) if len(answer) > 1 else answer[0]
                status, body = answer if isinstance(answer, tuple) else (200, answer)
                data = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST  # noqa: N815 - the name that http.server looks for

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()
