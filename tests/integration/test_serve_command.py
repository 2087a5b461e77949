"""`pvg serve` with a real vLLM: what it prints when it is ready, and that no process survives its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from vllm_servers import free_port, vllm_python

from pvg.servers import supervisor
from pvg.servers.control import KEY_FILE, KEY_VARIABLE

ENTRY = [sys.executable, "-c", "import sys; from pvg_cli.main import app; sys.exit(app(prog_name='pvg'))"]
LIMIT_S = 300.0  # a busy machine of two cores
LEAST_PROCESSES = 4  # supervisor, web server, engine core, worker


@dataclass
class Serving:
    """A `pvg serve` that is ready."""

    process: subprocess.Popen[str]
    document: Any
    session: int  # of its supervisor, and so of all processes of the server
    root: Path

    def post(self, path: str, body: object, key: str = "") -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(self.document["url"] + path, orjson.dumps(body), headers)
        with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
            return orjson.loads(reply.read())

    def ended(self) -> int:
        """The exit code of `pvg serve`, once no process of the server is left."""
        code = self.process.wait(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while left := supervisor.members(self.session):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.1)
        return code


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    port = free_port()
    command = [*ENTRY, "serve", "modchain", "--json", "--port", str(port), "-s", f"weights.root={folder / 'root'}"]
    environment = {**os.environ, "PVG_VLLM_PYTHON": vllm_python(), "OMP_NUM_THREADS": "1"}
    environment.pop(KEY_VARIABLE, None)
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                line = process.stdout.readline()
                assert line, (folder / "stderr").read_text()
                lines.append(line)
            document = orjson.loads("".join(lines))
            yield Serving(process, document, os.getsid(document["server_pid"]), folder / "root")
        finally:
            process.kill()


def test_a_prover_answers_and_sigterm_ends_it_in_order(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        found = server.document
        assert (found["model"], found["runner"], found["for"]) == ("modchain-prover", "generate", "prover")
        assert found["pid"] == server.process.pid
        assert len(supervisor.members(server.session)) >= LEAST_PROCESSES
        body = {"token_ids": [2, 3, 4], "sampling_params": {"max_tokens": 3, "logprobs": 0, "ignore_eos": True}}
        assert len(server.post("/inference/v1/generate", body)["choices"][0]["token_ids"]) == 3
        key = (server.root / KEY_FILE).read_text()
        for given, status in (("", 401), ("not-the-key", 401), (key, 200)):
            assert _status(server, "/pvg/info", given) == status
        assert key not in Path(f"/proc/{found['server_pid']}/cmdline").read_text()
        assert key not in Path(found["log"]).read_text()
        port = found["url"].rpartition(":")[2]
        second = subprocess.run(
            [*ENTRY, "serve", "modchain", "--port", port], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert second.returncode == 3
        assert f"Port {port} of 127.0.0.1 cannot be used" in second.stderr
        server.process.terminate()
        assert server.ended() == 130
    assert "No process of the server is left" in (tmp_path / "stderr").read_text()


def test_nothing_survives_when_pvg_serve_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert len(supervisor.members(server.session)) >= LEAST_PROCESSES
        server.process.kill()
        assert server.ended() == -signal.SIGKILL


def test_a_classifier_scores_zero_untrained_and_nothing_survives_a_killed_supervisor(tmp_path: Path) -> None:
    options = "--for verifier -s verifier.head=scalar -s models.verifier.source=embedded:modchain-prover"
    with serving(tmp_path, *options.split()) as server:
        assert server.document["runner"] == "pooling"
        body = {"model": server.document["model"], "input": [2, 3, 4], "use_activation": False}
        assert server.post("/classify", body)["data"][0]["probs"] == [0.0]
        assert len(supervisor.members(server.session)) >= LEAST_PROCESSES
        os.kill(server.session, signal.SIGKILL)
        assert server.ended() == 3
    assert "error: The server ended" in (tmp_path / "stderr").read_text()


def _status(server: Serving, path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.document["url"] + path, headers=headers), timeout=LIMIT_S
        ) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
