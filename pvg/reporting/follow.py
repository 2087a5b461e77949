"""How a run is doing: its state, from its lease and its newest record, and how long it will take.

Invariant: nothing in the run's folder is locked or written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pvg.errors import PvgError, UsageError
from pvg.reporting.formats import byte_size
from pvg.reporting.run_summary import RunState, RunSummary, Status, committed_state, state_word, status_of
from pvg.reporting.table import Column, Table, TableCell
from pvg.store.atomic import DamagedFileError, open_stored
from pvg.store.lease import BEAT_S, WATCH_S, is_gone, newest_lease, read_driver, sees
from pvg.store.run_directory import SAMPLING_PHASE, RunDirectory, folder_bytes, has_only_samples, runs_in

LAST_BLOCK = 1 << 18  # bytes at the end of a journal that are read for a short look at the run
PROGRESS = ("step", "phase", "round", "run")  # kinds of records that no sampler writes
RATE_STEPS = 20  # over which the speed is averaged
MISSED_BEATS = 3
ENDED: frozenset[RunState] = frozenset({"finished", "stopped", "failed", "died", "removed"})


@dataclass(frozen=True, slots=True)
class RunSituation:
    """How a run is doing. `process` and `host`: what plays it or played it last. `quiet_s`: seconds since its last
    sign of life; None before the first."""

    state: RunState
    process: int | None = None
    host: str = ""
    quiet_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Where a run is: its newest step, and the seconds that are left of the phase. None: not known."""

    round: int
    phase: str
    step: int
    of: int | None
    left_s: float | None

    @property
    def share(self) -> float:
        """The finished share of the phase."""
        return min(1.0, self.step / self.of) if self.of else 0.0


def state_of(run: RunDirectory) -> RunState:
    """The state of `run` now, from its last commit."""
    return situation(run, committed_state(run, [])).state


def situation(run: RunDirectory, state: Mapping[str, Any]) -> RunSituation:
    """How a run with the committed `state` (empty: none) is doing.

    From the lease: a driver counts its beats in it, and releases it at its end. A driver that was killed does neither.
    The kind of the newest record that no sampler wrote tells how a driver ended that released it.
    """
    newest = _newest_kind(run.metrics)
    try:
        lease = newest_lease(run.path)
    except FileNotFoundError:
        return RunSituation("removed")
    driver, shards = read_driver(lease), state.get("shards")
    phase, begun = state.get("phase", SAMPLING_PHASE), bool(newest or shards)
    process, host = driver.get("process") or None, str(driver.get("host", ""))
    quiet_s = _age(lease) if lease is not None else None
    plays = bool(driver) and not driver.get("ended") and driver.get("work") != "evaluate"
    gone = is_gone(driver)
    beats = quiet_s is None or quiet_s < MISSED_BEATS * BEAT_S
    if phase == "complete" and (gone or not plays or not beats):  # else it gets more rounds
        return RunSituation("finished", process, host, quiet_s)
    if not plays:
        if phase == SAMPLING_PHASE:
            return RunSituation("finished" if has_only_samples(state) else "waiting", None, host, quiet_s)
        stopped = newest == "run" or not begun
        return RunSituation("stopped" if stopped else "failed", None, host, quiet_s)
    if quiet_s is None or beats:
        # A process of another container may be invisible here, and then a fresh beat counts more.
        certain = sees(driver) or (quiet_s is not None and quiet_s > 1.5 * BEAT_S)
        now: RunState = "died" if gone and certain else "running"
        return RunSituation(now, process, host, quiet_s)
    return RunSituation(
        "died" if gone or (not sees(driver) and quiet_s > WATCH_S) else "silent", process, host, quiet_s
    )


def _newest_kind(journal: Path) -> str:
    """The kind of the newest record in the last block of `journal` that no sampler wrote; "" if there is none."""
    try:
        with open_stored(journal) as file:
            size = os.fstat(file.fileno()).st_size
            lines = os.pread(file.fileno(), LAST_BLOCK, max(0, size - LAST_BLOCK)).splitlines()
    except (OSError, DamagedFileError):  # missing, no file, or another user's; `pvg runs` still lists the run
        return ""
    for line in reversed(lines):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:  # cut off at the start of the block, or still being written
            continue
        if isinstance(record, dict) and (kind := record.get("kind")) in PROGRESS:
            return str(kind)
    return ""


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


# --- progress ----------------------------------------------------------------------------------------------------


def progress_of(summary: RunSummary) -> RunProgress | None:
    """Where the run is, from its newest step; None before the first. The remaining steps take as long as the last
    RATE_STEPS steps took on average."""
    if not summary.steps:
        return None
    newest = max(summary.steps[-RATE_STEPS:], key=lambda step: (step.time, step.round, step.step))
    place = (newest.round, newest.phase)
    own = [step for step in summary.steps[-RATE_STEPS:] if (step.round, step.phase) == place]
    own.sort(key=lambda step: step.step)
    # The seconds that the steps took, not those between their records: a run may pause between two processes.
    units, seconds = own[-1].step - own[0].step, sum(sum(step.budget.values()) for step in own[1:])
    left_s = (newest.of - newest.step) * seconds / units if newest.of is not None and units and seconds else None
    return RunProgress(newest.round, newest.phase, newest.step, newest.of, left_s)


# The runs of a folder, at a glance: what `pvg runs` shows.

PLAIN: dict[RunState, str] = {"waiting": "quiet", "finished": ""}  # the styles of states without a badge


@dataclass(frozen=True, slots=True)
class RunGlance:
    """A run at a glance. `last_activity`: seconds since 1970. `notes`: what is damaged; the facts that cannot be read
    are then empty. `process`: the process that plays it."""

    name: str
    path: Path
    experiment: str
    task: str
    status: Status
    state: RunState
    phase: str
    rounds_finished: int
    rounds_planned: int
    last_activity: float
    size_bytes: int
    process: int | None = None
    host: str = ""
    code_version: str = ""
    notes: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def glance_at(run: RunDirectory) -> RunGlance:
    """What a glance at a run's files shows. Never raises an error about damaged files; `notes` has them."""
    notes: list[str] = []
    experiment = task = ""
    planned = 0
    try:
        settings = run.experiment()
        experiment, task, planned = settings.name, settings.task.kind, settings.game.rounds
    except PvgError as error:
        notes.append(str(error))
    state = committed_state(run, notes)
    now = situation(run, state)
    return RunGlance(
        name=run.name,
        path=run.path,
        experiment=experiment,
        task=task,
        status=status_of(state),
        state=now.state,
        phase=state.get("phase", SAMPLING_PHASE),
        rounds_finished=len(state.get("rounds", ())),
        rounds_planned=planned,
        last_activity=_last_activity(run),
        size_bytes=folder_bytes(run.path),
        process=now.process if now.state in ("running", "silent") else None,
        host=now.host,
        code_version=str(state.get("code_version", "")),
        notes=notes,
    )


def list_runs(root: Path) -> list[RunGlance]:
    """The runs in `root`, the one with the newest activity first."""
    found = [glance_at(RunDirectory(root / name)) for name in runs_in(root)]
    return sorted(found, key=lambda run: (-run.last_activity, run.name))


def newest_run(root: Path) -> RunDirectory:
    """The run in `root` with the newest activity. Raises UsageError if there is none."""
    found = [RunDirectory(root / name) for name in runs_in(root)]
    if not found:
        raise UsageError(f"There is no run in {root}.", "Start one with: pvg train")
    return max(found, key=_last_activity)


def runs_table(runs: list[RunGlance], now: float) -> Table:
    """The table of `pvg runs`; `now` is the time in seconds since 1970."""
    columns = [
        Column("run", style="strong"),
        Column("experiment"),
        Column("rounds", "right", wrap=False),
        Column("state", wrap=False),
        Column("active", "right", wrap=False),
        Column("size", "right", wrap=False),
    ]
    table = Table(columns, narrow=True)
    for run in runs:
        task = "" if run.task in ("", run.experiment) else run.task
        word, kind = state_word(run.state, run.status, bool(run.notes))
        style = f"badge {kind}" if run.notes else PLAIN.get(run.state, f"badge {kind}")
        table.add(
            run.name,
            TableCell(run.experiment, below=task),
            "samples" if run.status == "samples" else f"{run.rounds_finished}/{run.rounds_planned or '?'}",
            TableCell(word, style),
            age(now - run.last_activity),
            byte_size(run.size_bytes),
        )
    return table


def age(seconds: float) -> str:
    """Time since an event, in one unit: `now`, `5 min ago`, `3 h ago`, `12 days ago`."""
    for unit, length in (("day", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''} ago"
    return "now"


def _last_activity(run: RunDirectory) -> float:
    """When the run last wrote or committed, in seconds since 1970."""
    times = []
    for path in (run.experiment_file, run.state, run.metrics, run.events):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
