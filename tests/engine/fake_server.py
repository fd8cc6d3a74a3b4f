"""A stand-in for the vLLM process in tests of supervision: listens, starts processes of its own, and misbehaves as told.

    python fake_server.py PORT PIDS_FILE [MODE…]

It writes the ids of all its processes into PIDS_FILE: itself, a child, and a grandchild that left its session and lost its parent.
Modes: "die" prints an error and exits; "silent" never listens; "stubborn" ignores SIGTERM; "late" listens after a second.
"""

import http.server
import os
import signal
import subprocess
import sys
import time

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
ORPHAN = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, start_new_session=True).pid)"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def main(port: int, pids_file: str, modes: list[str]) -> None:
    print("fake server: starting", flush=True)
    if "stubborn" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(SLEEP)
    orphan = subprocess.run([sys.executable, "-S", "-c", ORPHAN, *SLEEP], stdout=subprocess.PIPE, check=True)
    with open(pids_file + ".new", "w") as file:
        file.write(f"{os.getpid()} {child.pid} {int(orphan.stdout)}")
    os.rename(pids_file + ".new", pids_file)
    if "die" in modes:
        print("ValueError: the fake server was told to die", flush=True)
        sys.exit(3)
    if "silent" in modes:
        time.sleep(600)
    if "late" in modes:
        time.sleep(1)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
