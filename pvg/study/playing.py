"""Plays a study's cells: one `pvg train` process per cell, several at a time.

Invariants:
1. Cells share no files, so a cell cannot affect another one, even if it crashes.
2. All processes of a cell end when the study ends for any reason (on systems other than Linux, except after SIGKILL of
   the study). Each cell has a separate session, is killed as a group, and ends with its owner (BOUND).
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from pvg.config.load import differences, leaves
from pvg.config.sections import value_of
from pvg.errors import PvgError, StateError, UsageError, user_paths
from pvg.evaluation.report import attack_kinds, default_parts, report_of
from pvg.inputs import open_own
from pvg.reporting.run_summary import status_of
from pvg.store.atomic import make_directory, remove_temporaries, write_atomic
from pvg.store.run_directory import exclusive
from pvg.study.plan import Cell, StudyEvaluation, StudyPlan

# A study on disk: its folder, the progress of each cell, and whether a cell's evaluation matches the study.


def unevaluated(cell: Cell, evaluate: StudyEvaluation, rounds: int) -> str:
    """What the cell's evaluation lacks of what the study requires, in one line; "" if it is complete."""
    wanted = cell.evaluated
    assert wanted is not None, "a study with [evaluate] has its settings for every cell"
    try:
        found = report_of(cell.run)
    except StateError:
        return "its evaluation is damaged"
    if found is None:
        return "it is not evaluated"
    if found.config_hash != cell.as_played(wanted).hash():
        return "its evaluation is of another game"
    settings = {key: value for key, value in found.settings.items() if value is not None}
    if changed := differences(settings, wanted.evaluate.model_dump(mode="json", exclude_none=True), "evaluate."):
        return f"its evaluation has other settings: {'; '.join(changed)}"
    parts = evaluate.parts or default_parts(wanted)
    return found.missing(parts, evaluate.numbers(rounds), attack_kinds(wanted))


# --- the study's folder -----------------------------------------------------------------------------------------------

# "played": the game is complete but its evaluation is not. "damaged": its files cannot be read.
Status = Literal["new", "unfinished", "played", "complete", "damaged"]
MOST_NAMED = 6  # cells with other settings in one error message


@dataclass(frozen=True, slots=True)
class CellProgress:
    """The progress of a cell. `done`: optimizer steps. `rounds`: metrics of its finished rounds. `reason`: why it
    failed last, or why it cannot be read."""

    status: Status
    round: int = 0
    phase: str = ""
    done: int = 0
    rounds: tuple[dict[str, float], ...] = ()
    reason: str = ""
    code_version: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The paths of a study. The constructor does not touch the disk."""

    path: Path

    @property
    def results(self) -> Path:
        return self.path / "study.json"

    @property
    def page(self) -> Path:
        return self.path / "study.html"

    @property
    def cells(self) -> Path:
        return self.path / "cells"

    def of(self, cell: Cell, ending: str) -> Path:
        """A file of a cell: its settings (toml), its log, its document (json), why it failed last (failed)."""
        return self.cells / f"{cell.name}.{ending}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Become the one process that plays this study; makes its folder. Raises UsageError with the other process's
        id."""
        with user_paths():
            if (self.path / "experiment.toml").exists():
                raise UsageError(f"{self.path} is a run, not a study.", "Choose another folder with --runs FOLDER.")
            make_directory(self.cells)
        with exclusive(self.path / "lock", self._played_elsewhere):
            for folder in (self.path, self.cells):
                remove_temporaries(folder)
            yield

    def _played_elsewhere(self, owner: str) -> UsageError:
        return UsageError(
            f"The study {self.path.name!r} is being played by {owner}.",
            "Wait until it is done, or stop it with Ctrl-C (its cells commit first).",
        )


def progress_of(cell: Cell, folder: StudyFolder, evaluate: StudyEvaluation | None) -> CellProgress:
    failure = folder.of(cell, "failed")
    reason = failure.read_text(encoding="utf-8", errors="replace").strip() if failure.is_file() else ""
    if not cell.run.experiment_file.is_file():
        return CellProgress("new", reason=reason)
    try:
        state = cell.run.load_state().state or {}
    except PvgError as error:
        return CellProgress("damaged", reason=str(error))
    rounds = tuple({k: v for k, v in row.items() if v is not None} for row in state.get("rounds", ()))
    fields: dict[str, Any] = {
        "round": state.get("round", 0),
        "phase": state.get("phase", ""),
        "rounds": rounds,
        "reason": reason,
        "code_version": str(state.get("code_version", "")),
        "machine": str(state.get("machine", "")),
    }
    if status_of(state) != "complete":
        return CellProgress("unfinished", done=steps_done(cell, state), **fields)
    if evaluate is not None and unevaluated(cell, evaluate, len(rounds)):
        return CellProgress("played", done=cell.steps, **fields)
    # A failed game may have been completed by hand.
    return CellProgress("complete", done=cell.steps, **fields | {"reason": ""})


def steps_done(cell: Cell, state: dict[str, Any]) -> int:
    """The optimizer steps of the game up to its last commit."""
    experiment, round_ = cell.experiment, int(state.get("round", 0))
    prover = experiment.training.steps + experiment.verifier_update_steps(experiment.training.steps)
    done = sum(experiment.verifier_phase_steps(earlier) + prover for earlier in range(round_))
    verifier, step = experiment.verifier_phase_steps(round_), int(state.get("step", 0))
    if round_ or state.get("phase") in ("train_verifier", "train_prover", "checkpoint"):
        done += experiment.judge_steps
    match state.get("phase"):
        case "train_verifier":
            done += step
        case "train_prover":
            done += verifier + step + experiment.verifier_update_steps(step)
        case "checkpoint":
            done += verifier + prover
    return done


def refuse_other_settings(cells: Sequence[Cell]) -> None:
    """Raises StateError with every existing cell that has other settings, and with these settings."""
    by_change: dict[str, list[str]] = {}
    for cell in (cell for cell in cells if cell.run.experiment_file.is_file()):
        if changed := differences(cell.run.experiment().hashed(), cell.as_played(cell.experiment).hashed()):
            by_change.setdefault("; ".join(changed), []).append(cell.name)
    if by_change:
        changes = " | ".join(f"{', '.join(names[:MOST_NAMED])}: {what}" for what, names in by_change.items())
        raise StateError(
            f"{sum(map(len, by_change.values()))} cells were played with other settings. {changes}.",
            "Give the changed study another name, move its folder away, or undo the change.",
        )


def note_failure(cell: Cell, folder: StudyFolder, reason: str) -> None:
    write_atomic(folder.of(cell, "failed"), f"{reason}\n".encode())


# A cell's process becomes its command like this. If the cell outlived its killed study, it would hold its run's lock
# unseen and block the next start. So on Linux the kernel kills it when the study ends, which loses nothing that it
# committed. PR_SET_PDEATHSIG (1, linux/prctl.h) stays in effect after exec.
BOUND = """
import ctypes, os, signal, sys
if sys.platform == "linux" and ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0):
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("The study that started this cell has ended.")
os.execv(sys.argv[2], sys.argv[2:])
"""
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
    waiting: deque[tuple[Cell, Job]] = deque()
    for cell in todo:
        played = progress_of(cell, folder, plan.evaluate).status == "played"
        waiting.append((cell, "evaluate" if played else "train"))
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
                    if time.monotonic() - playing.looked >= LOOK_S:
                        playing.looked = time.monotonic()
                        observer.progressed(playing.cell, progress_of(playing.cell, folder, plan.evaluate))
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
    """`pvg train` for a cell: a new run, or a resumed one. Sizes that the study sets are not lowered."""
    how = ["--resume", str(cell.run.path)] if cell.run.experiment_file.is_file() else ["--name", cell.name]
    sizes = [word for key in cell.sizes for word in ("--set", f"{key}={value_of(cell.experiment, key)}")]
    return ["train", str(folder.of(cell, "toml")), *how, *sizes, "--json"]


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
    # JSON and TOML agree on numbers, booleans, texts and lists.
    settings = [
        word for key, value in settings_by_key.items() for word in ("--set", f"{key}={orjson.dumps(value).decode()}")
    ]
    return ["evaluate", str(cell.run.path), *what, *settings, "--json"]


OUTPUTS = {"log": os.O_APPEND, "json": os.O_TRUNC}  # of a cell's process, by ending


def _start(plan: StudyPlan, folder: StudyFolder, cell: Cell, job: Job, pvg: Sequence[str]) -> _Playing:
    folder.of(cell, "failed").unlink(missing_ok=True)
    if job == "train":
        write_atomic(folder.of(cell, "toml"), cell.experiment.to_toml().encode())
        command = train_command(cell, folder)
    else:
        assert plan.evaluate is not None
        command = evaluate_command(cell, plan.evaluate)
    log_file, document_file = (open_own(folder.of(cell, ending), os.O_WRONLY | how) for ending, how in OUTPUTS.items())
    with open(log_file, "ab") as log, open(document_file, "wb") as document:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), *pvg, *command],
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
        reason = reason_of(code, folder.of(cell, "json"), folder.of(cell, "log"))
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
