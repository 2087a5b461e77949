"""A program that starts as slowly, answers as simply, and leaves as many processes as a server; for tests of
pvg.servers.process. Its tree: this process, a child (with `stubborn`: one that ignores SIGTERM), and a grandchild.

python serve_stand_in.py PORT MODE    MODE: serve | stubborn | fail | hang (never healthy) | refuse | die
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHILD = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.{disposition});"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)"
)


class Answers(BaseHTTPRequestHandler):
    mode = ""
    posts = 0

    def do_GET(self) -> None:
        if self.path == "/pvg/info":
            self._say(200, json.dumps({"boot": os.environ.get("PVG_BOOT")}).encode())
        else:
            self._say(200, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.mode == "refuse":
            self._say(500, b'{"error": {"message": "no kernel for this", "code": 500}}')
        else:
            self._say(200, b"{}")
        Answers.posts += 1
        if self.mode == "die" and self.posts == 2:  # the last request by which its owner sees that it serves
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def main(port: int, mode: str) -> None:
    code = CHILD.format(disposition="SIG_IGN" if mode == "stubborn" else "SIG_DFL")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    print("(APIServer pid=1) INFO 11-21 14:08:27 [api_utils.py:286] non-default args: {}", flush=True)
    print("(Worker pid=1) INFO 11-21 14:08:45 [runner.py:68] Starting to load model x...", flush=True)
    if mode == "fail":
        print("ValueError: the model is a teapot", flush=True)
        sys.exit(3)
    if mode == "hang":
        time.sleep(600)
    Answers.mode = mode
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
