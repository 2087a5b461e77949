"""Small games of `pvg train` on several ranks, in real processes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

PVG = [sys.executable, "-P", "-m", "pvg"]
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run"]
GAME = (
    "game.rounds=1",
    "training.steps=5",
    "training.groups=4",
    "verifier.steps=2",
    "game.mint_problems=16",
    "game.test.problems=4",
    "store.commit_every=2",
    "cluster.kind=local",
    "cluster.trainer_ranks=2",
)
PATIENCE_S = 240.0
FIRST_STEP = re.compile(r"\[step\].* phase=train_prover .*step=3 ")  # one step after the second commit of the phase
LAUNCHED = "TORCHELASTIC_RUN_ID"


def train(root: Path, *words: str, settings: Sequence[str] = GAME) -> list[str]:
    given = [word for text in (*settings, f"store.root={root}") for word in ("-s", text)]
    return ["train", *given, *words]


def weights(run: Path) -> dict[str, str]:
    """Digests of the weights of all players."""
    files = sorted((run / "weights").rglob("*.safetensors"))
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def trains(run: Path) -> None:
    """Wait until the run has made steps since a commit of its prover."""
    log = run / "events.log"
    wait_until(lambda: log.exists() and FIRST_STEP.search(log.read_text()) is not None, f"{log} has a step")


class Started:
    """Launchers: of pvg, or agents of torchrun."""

    def __init__(self, launchers: list[subprocess.Popen[str]]) -> None:
        self.launchers = launchers

    def rank(self, number: int) -> psutil.Process:
        """The process with this rank: 0 is the driver."""
        children = [child for launcher in self.launchers for child in psutil.Process(launcher.pid).children()]
        (found,) = [child for child in children if child.environ().get("RANK") == str(number)]
        return found

    def ended(self) -> tuple[list[int], list[str], str]:
        """The exit codes of the launchers, their stdout, and what all processes have printed to stderr."""
        told = [launcher.communicate(timeout=PATIENCE_S) for launcher in self.launchers]
        codes = [launcher.returncode for launcher in self.launchers]
        return codes, [stdout for stdout, _ in told], "".join(stderr for _, stderr in told)


@contextmanager
def running(*commands: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """The launchers. At the end, no process is left."""
    before = {process.pid for process in psutil.process_iter()}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    found = [subprocess.Popen(command, text=True, env=environment, **pipes) for command in commands]
    try:
        yield Started(found)
        wait_until(lambda: not _left(before), "all processes have ended")
    finally:
        for process in _left(before):
            process.kill()
        for launcher in found:
            launcher.kill()
            launcher.communicate()


def _left(before: set[int]) -> list[psutil.Process]:
    """Processes of this test that run."""
    own = []
    for process in psutil.process_iter():
        try:
            if process.pid in before or process.status() == psutil.STATUS_ZOMBIE:
                continue
            orphan = process.ppid() == 1 and LAUNCHED in process.environ()
            if orphan or os.getpid() in [parent.pid for parent in process.parents()]:
                own.append(process)
        except psutil.Error:
            continue
    return own


def played(root: Path, *words: str, settings: Sequence[str] = GAME) -> dict[str, str]:
    """The weights of a whole game."""
    with running([*PVG, *train(root, "--name", "run", *words, settings=settings)]) as started:
        codes, _, told = started.ended()
    assert codes == [0], told
    return weights(root / "run")
