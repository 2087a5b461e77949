"""`pvg serve` and `pvg train` as a user runs them, in folders of the test's own, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_servers import free_port, vllm_python

PVG = Path(sys.executable).parent / "pvg"
LONGEST_STOP_S = 300.0  # of a busy machine; a quiet one takes 10
# A round in which every phase does a little; each test says what else it wants.
SMALL = (
    "game.rounds=1 game.mint_problems=32 game.mint_samples=4 verifier.steps=8 verifier.pairs=16 training.steps=4 "
    "training.groups=8 rollout.group_size=4 rollout.concurrency=64 game.test.problems=8 "
    "store.commit_every=2"
)


@dataclass
class Served:
    """A running `pvg serve`. `pid` is vLLM's own."""

    url: str
    pid: int
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """SIGKILL vLLM itself, as the kernel's out-of-memory killer would."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def serving(folder: Path, *settings: str, purpose: str = "prover", port: int | None = None) -> Iterator[Served]:
    """`pvg serve modchain` until the block is left. `folder` holds the weights' root."""
    port = port or free_port()
    command = [str(PVG), "serve", "modchain", "--for", purpose, "--port", str(port), "--json"]
    command += overrides(folder, *settings)
    environment = os.environ | {"PVG_VLLM_PYTHON": vllm_python()}
    with open(folder / f"serve-{port}.err", "ab") as errors:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors)
    try:
        document = _document(process, folder / f"serve-{port}.err")
        yield Served(document["url"], int(document["pid"]), port, process, Path(document["log"]))
    finally:
        process.terminate()  # SIGINT is ignored where a script has started the tests in the background
        process.wait(timeout=LONGEST_STOP_S)
        assert process.stdout is not None
        process.stdout.close()


def train(folder: Path, name: str, *settings: str) -> subprocess.Popen[str]:
    """`pvg train modchain` in the background, with its document on stdout."""
    command = [str(PVG), "train", "modchain", "--name", name, "--json", *overrides(folder, *SMALL.split(), *settings)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained(folder: Path, name: str, *settings: str) -> dict[str, Any]:
    """The document of a game that was played to its end."""
    game = train(folder, name, *settings)
    out, err = game.communicate(timeout=900)
    assert game.returncode == 0, err[-3000:]
    document: dict[str, Any] = json.loads(out)
    assert document["status"] == "complete"
    return document


def overrides(folder: Path, *settings: str) -> list[str]:
    return [part for setting in (f"weights.root={folder / 'weights'}", *settings) for part in ("--set", setting)]


def steps(folder: Path, run: str, phase: str = "train_prover") -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [line["metrics"] for line in found if line["kind"] == "step" and line["phase"] == phase]


def events(folder: Path, run: str, tag: str) -> list[dict[str, str]]:
    """The fields of the lines of a tag in a run's event log."""
    lines = (folder / "runs" / run / "events.log").read_text().splitlines()
    return [dict(part.split("=", 1) for part in shlex.split(line)[1:]) for line in lines if line.startswith(f"[{tag}]")]


def wait_for_step(folder: Path, run: str, game: subprocess.Popen[str], count: int) -> None:
    """Until the prover has made `count` steps."""
    path, deadline = folder / "runs" / run / "metrics.jsonl", time.monotonic() + 900
    while time.monotonic() < deadline:
        assert game.poll() is None, game.stderr and game.stderr.read()[-3000:]
        if path.is_file() and path.read_text().count('"phase":"train_prover"') >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} steps in time")


def _document(process: subprocess.Popen[bytes], errors: Path) -> dict[str, Any]:
    """What `pvg serve --json` says when it is ready."""
    assert process.stdout is not None
    text = b""
    while chunk := process.stdout.read1(65536):
        text += chunk
        try:
            document: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError:
            continue
        assert "url" in document, document
        return document
    raise AssertionError(f"pvg serve ended: {errors.read_text()[-3000:]}")
