"""The runs of a folder, at a glance: what `pvg runs` shows.

Reads experiment.toml, state.json and the end of metrics.jsonl of each run, so that a folder with many long runs is
listed in a moment. A damaged run is listed too, with what is wrong with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pvg.errors import PvgError
from pvg.reporting.follow import RunState, situation, state_word
from pvg.reporting.formats import byte_size
from pvg.reporting.run_summary import Status, state_and_tags, status_of
from pvg.reporting.table import Column, Table, TableCell
from pvg.store.run_directory import RunDirectory, runs_in
from pvg.store.run_folders import SAMPLING_PHASE, folder_bytes

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
    tags: list[str]
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
    state, tags = state_and_tags(run, notes)
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
        tags=tags,
        process=now.process if now.state in ("running", "silent") else None,
        host=now.host,
        code_version=str(state.get("code_version", "")),
        notes=notes,
    )


def list_runs(root: Path, tags: list[str]) -> list[RunGlance]:
    """The runs in `root` that have all `tags`, the one with the newest activity first."""
    found = [glance_at(RunDirectory(root / name)) for name in runs_in(root)]
    chosen = [run for run in found if set(tags) <= set(run.tags)]
    return sorted(chosen, key=lambda run: (-run.last_activity, run.name))


def newest_runs(root: Path, most: int) -> list[str]:
    """The names of at most `most` runs in `root`, the one with the newest activity first. Reads no file of them."""
    return sorted(runs_in(root), key=lambda name: (-_last_activity(RunDirectory(root / name)), name))[:most]


def runs_table(runs: list[RunGlance], now: float) -> Table:
    """The table of `pvg runs`; `now` is the time in seconds since 1970."""
    columns = [
        Column("run", style="strong"),
        Column("experiment"),
        Column("rounds", "right", wrap=False),
        Column("state", wrap=False),
        Column("active", "right", wrap=False),
        Column("size", "right", wrap=False),
        Column("tags"),
    ]
    table = Table(columns, narrow=True)
    for run in runs:
        task = "" if run.task in ("", run.experiment) else run.task
        table.add(
            run.name,
            TableCell(run.experiment, below=task),
            "samples" if run.status == "samples" else f"{run.rounds_finished}/{run.rounds_planned or '?'}",
            _state_cell(run),
            age(now - run.last_activity),
            byte_size(run.size_bytes),
            " ".join(run.tags),
        )
    return table


def _state_cell(run: RunGlance) -> TableCell:
    word, kind = state_word(run.state, run.status, bool(run.notes))
    return TableCell(word, f"badge {kind}" if run.notes else PLAIN.get(run.state, f"badge {kind}"))


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
