"""Plays a study's cells: one `pvg train` process per cell, several at a time.

    play_cells(plan, todo, pvg=[sys.executable, ...], observer=board, stop=stop)

Invariants:
1. Cells share no files, so a cell cannot affect another one, even if it crashes.
2. All processes of a cell end when the study ends for any reason (on systems other than Linux, except after SIGKILL of
   the study). Each cell has a separate session, is killed as a group, and ends with its owner (pvg.study.child).
3. A stop sends SIGINT to every cell, which commits and ends. A second stop kills; committed data is kept.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import orjson

from pvg.config.load import leaves
from pvg.errors import StateError
from pvg.store.run_directory import exclusive
from pvg.study import child
from pvg.study.cells import (
    CellProgress,
    StudyFolder,
    forget_failure,
    note_failure,
    progress_of,
    unevaluated,
    write_settings,
)
from pvg.study.plan import Cell, StudyEvaluation, StudyPlan
from pvg.telemetry.cpu import bfloat16_settings

POLL_S = 0.1
LOOK_S = 1.0  # between two looks at the files of a running cell
ORPHAN_S = 20.0  # time for a process of a killed study to end
STOPPED = 130  # exit code of `pvg` after a stop

Ended = Literal["complete", "stopped", "failed"]
Job = Literal["train", "evaluate"]


class StudyObserver(Protocol):
    """Receives events from the thread that plays."""

    def began(self, cell: Cell, job: Job, progress: CellProgress) -> None: ...

    def progressed(self, cell: Cell, progress: CellProgress) -> None: ...

    def ended(self, cell: Cell, how: Ended, progress: CellProgress, seconds: float) -> None: ...

    def waited(self) -> None:
        """Called every POLL_S, to redraw."""

    def stopping(self, running: int) -> None: ...


class StopCounter(Protocol):
    """The number of requests to stop."""

    requests: int


@dataclass
class _Playing:
    cell: Cell
    job: Job
    process: subprocess.Popen[bytes]
    began: float
    looked: float = field(default=0.0)

    def signal_all(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def play_cells(
    plan: StudyPlan, todo: Sequence[Cell], *, pvg: Sequence[str], observer: StudyObserver, stop: StopCounter
) -> bool:
    """Play every cell of `todo` to its end; returns False if it was stopped, otherwise True.

    `pvg`: the command that starts pvg. A failed cell does not stop the others; its reason is stored in the study's
    folder. Raises StateError if a process outside this study plays a cell.
    """
    folder = StudyFolder(plan.folder)
    for cell in todo:
        _wait_for_orphan(cell)
    waiting = deque((cell, _job_of(cell, folder, plan.evaluate)) for cell in todo)
    running: list[_Playing] = []
    interrupted = killed = False
    try:
        while waiting or running:
            if stop.requests and not interrupted:
                interrupted = True
                waiting.clear()
                observer.stopping(len(running))
                for playing in running:
                    playing.signal_all(signal.SIGINT)
            if stop.requests > 1 and not killed:
                killed = True
                for playing in running:
                    playing.signal_all(signal.SIGKILL)
            while waiting and len(running) < plan.processes:
                cell, job = waiting.popleft()
                running.append(_start(plan, folder, cell, job, pvg))
                observer.began(cell, job, progress_of(cell, folder, plan.evaluate))
            for playing in list(running):
                code = playing.process.poll()
                if code is None:
                    _look(playing, plan, folder, observer)
                    continue
                running.remove(playing)
                if _finish(playing, code, plan, folder, observer, stopped=interrupted) and not interrupted:
                    waiting.appendleft((playing.cell, "evaluate"))
            observer.waited()
            time.sleep(POLL_S)
    finally:
        for playing in running:  # only after an unexpected error
            playing.signal_all(signal.SIGKILL)
            playing.process.wait()
    return not interrupted


# --- one cell ----------------------------------------------------------------------------------------------------


def train_command(cell: Cell, folder: StudyFolder) -> list[str]:
    """`pvg train` for a cell: a new run, or a resumed one."""
    how = ["--resume", str(cell.run.path)] if cell.run.experiment_file.is_file() else ["--name", cell.name]
    # Otherwise `pvg train` would choose float32 on a CPU without bfloat16, and the study has chosen already.
    kept = [word for key in bfloat16_settings(cell.experiment) for word in ("--set", f"{key}=bfloat16")]
    return ["train", str(folder.settings(cell)), *how, *kept, "--json"]


def evaluate_command(cell: Cell, evaluate: StudyEvaluation) -> list[str]:
    """`pvg evaluate` for a cell whose game is complete. Passes every setting, because the run's settings may be
    older."""
    assert cell.evaluated is not None
    what = ["--parts", ",".join(evaluate.parts)] if evaluate.parts else []
    if evaluate.rounds != "all":
        numbers = evaluate.numbers(cell.experiment.game.rounds)
        what += ["--rounds", ",".join(map(str, numbers))]
    final = dict(leaves(cell.evaluated.plain()))  # with --set of the command line, which wins over the study's file
    settings_by_key = {key: final.get(key, value) for key, value in leaves(evaluate.changes)}
    settings_by_key |= dict(leaves({"evaluate": cell.evaluated.evaluate.model_dump(mode="json", exclude_none=True)}))
    settings = [word for key, value in settings_by_key.items() for word in ("--set", f"{key}={_toml(value)}")]
    return ["evaluate", str(cell.run.path), *what, *settings, "--json"]


def _toml(value: object) -> str:
    return orjson.dumps(value).decode()  # JSON and TOML agree on numbers, booleans, texts and lists


def _job_of(cell: Cell, folder: StudyFolder, evaluate: StudyEvaluation | None) -> Job:
    return "evaluate" if progress_of(cell, folder, evaluate).status == "played" else "train"


def _start(plan: StudyPlan, folder: StudyFolder, cell: Cell, job: Job, pvg: Sequence[str]) -> _Playing:
    forget_failure(cell, folder)
    if job == "train":
        write_settings(cell, folder)
        command = train_command(cell, folder)
    else:
        assert plan.evaluate is not None
        command = evaluate_command(cell, plan.evaluate)
    with open(folder.log(cell), "ab") as log, open(folder.document(cell), "wb") as document:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *pvg, *command],
            stdin=subprocess.DEVNULL,
            stdout=document,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches only the study, which forwards it
            env=_environment(plan),
        )
    return _Playing(cell, job, process, time.monotonic())


def _environment(plan: StudyPlan) -> dict[str, str]:
    """A cell's environment. If models.threads is 0, parallel games share the cores. An existing limit is kept. A cell
    is no process of torchrun, even if torchrun has started the study."""
    most = {} if plan.threads else {"OMP_NUM_THREADS": str(plan.most_threads)}
    return most | {name: text for name, text in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}


def _look(playing: _Playing, plan: StudyPlan, folder: StudyFolder, observer: StudyObserver) -> None:
    now = time.monotonic()
    if now - playing.looked >= LOOK_S:
        playing.looked = now
        observer.progressed(playing.cell, progress_of(playing.cell, folder, plan.evaluate))


def _finish(
    playing: _Playing, code: int, plan: StudyPlan, folder: StudyFolder, observer: StudyObserver, *, stopped: bool
) -> bool:
    """Handle the end of a process; returns whether the cell's evaluation comes next."""
    cell, job = playing.cell, playing.job
    playing.signal_all(signal.SIGKILL)  # ends any remaining child processes
    now = progress_of(cell, folder, plan.evaluate)
    if code == 0 and job == "train" and now.status == "played":
        observer.progressed(cell, now)
        return True
    how: Ended = "complete" if now.status == "complete" else "failed"
    if how == "failed" and stopped:
        how = "stopped"
    if how == "failed":
        reason = reason_of(code, folder.document(cell), folder.log(cell))
        if code == 0 and job == "evaluate" and plan.evaluate is not None:
            reason = unevaluated(cell, plan.evaluate, len(now.rounds))
        note_failure(cell, folder, reason)
        now = progress_of(cell, folder, plan.evaluate)
    observer.ended(cell, how, now, time.monotonic() - playing.began)
    return False


def reason_of(code: int, document: Path, log: Path) -> str:
    """Why a process failed, in one line: the error in its document, otherwise its signal, or its last line of
    output."""
    try:
        error = orjson.loads(document.read_bytes()).get("error")
    except (orjson.JSONDecodeError, AttributeError):  # it was killed before it wrote its document
        error = None
    if isinstance(error, dict):
        kind = f"{error.get('type')}: " if code not in (1, 2, 3) else ""
        return " ".join(f"{kind}{error.get('message', '')}".split())
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
    if code == STOPPED:
        return "stopped by a signal from outside the study"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with exit code {code} without output"


def _wait_for_orphan(cell: Cell) -> None:
    """Wait until the kernel has ended the process of a study that was just killed; it holds the run's lock until
    then."""
    if not cell.run.lock_file.is_file():
        return

    def driven(owner: str) -> StateError:
        return StateError(
            f"The cell {cell.name} is being played by {owner}, which does not belong to this study.",
            "Stop it first (it commits at SIGINT): kill -INT PID",
        )

    deadline = time.monotonic() + ORPHAN_S
    while True:
        try:
            with exclusive(cell.run.lock_file, driven):
                return
        except StateError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)
