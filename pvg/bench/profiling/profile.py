"""Profiles into a folder: `profile_stage` runs a stage under all profilers, `profile_run` draws the timeline of a run.

    made = profile_stage(stage_settings("rollout", "modchain", []), "rollout", Path("out"), steps=3)
    made.frames, made.files, made.missing

README.txt in the folder explains each file and how to open it; profile.json has the figures.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pvg.bench.profile import BenchSettings
from pvg.bench.profiling.passes import SamplingPass, Stage, py_spy_pass, slowdowns, spans_pass, torch_pass
from pvg.bench.profiling.py_spy import CostlyFrame, PySpyError, find_py_spy, read_speedscope
from pvg.bench.report import TimeBudget
from pvg.bench.variants import on_loop
from pvg.bench.workloads import WORKLOADS, WorkloadTable
from pvg.errors import MissingRequirementError, UsageError
from pvg.store.atomic import DamagedFileError
from pvg.store.journal import read_json_lines
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore
from pvg.telemetry.chrome_trace import trace_events, write_trace
from pvg.telemetry.spans import DeviceClock

PERFETTO = "Open https://ui.perfetto.dev and drop the file on it (it stays on your machine), or chrome://tracing."
WIDTH = 100  # columns of README.txt

OnPass = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """One file of the folder: what it shows and how to open it."""

    name: str
    what: str
    how: str


@dataclass(slots=True)
class ProfileResult:
    """The results of a profile. `frames_from`: "py-spy", or "torch" if py-spy is not available. `missing`: by tool, why
    it is missing and how to fix that."""

    folder: Path
    title: str
    frames: tuple[CostlyFrame, ...] = ()
    frames_from: str = ""
    samples: int = 0  # py-spy's samples of working threads
    waiting: int = 0  # py-spy's samples of waiting threads, which do not count
    passes: list[SamplingPass] = field(default_factory=list)
    budget: TimeBudget | None = None
    files: list[ProfileFile] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "folder": str(self.folder),
            "title": self.title,
            "frames": [asdict(frame) for frame in self.frames],
            "frames_from": self.frames_from,
            "samples": self.samples,
            "waiting_samples": self.waiting,
            "passes": [{"name": each.name, "walls_s": list(each.walls_s)} for each in self.passes],
            "slower_by": slowdowns(self.passes) if self.passes else {},
            "budget": self.budget.model_dump() if self.budget else None,
            "files": [asdict(file) for file in self.files],
            "missing": self.missing,
        }


def profile_stage(
    settings: BenchSettings,
    stage: Stage,
    folder: Path,
    *,
    steps: int,
    py_spy: bool | None = None,
    on_pass: OnPass = lambda told: None,
    workloads: WorkloadTable = WORKLOADS,
) -> ProfileResult:
    """Run the stage's work under each profiler and write everything into the new `folder`.

    `py_spy`: True requires it (MissingRequirementError without it), False leaves it out, None uses it if available.
    `on_pass` receives the name of each pass before it runs.
    """
    spy = _py_spy(py_spy)  # first, so that a missing tool is reported at once
    made = ProfileResult(_new(folder), f"{stage} of {settings.experiment.name}, {steps} steps")
    if isinstance(spy, PySpyError):
        made.missing["py-spy"] = str(spy)
        spy = None
    elif spy is None:
        made.missing["py-spy"] = "Left out because of --no-py-spy."
    work = _passes(settings, stage, made, steps, spy, py_spy is True, on_pass, workloads)
    on_loop(settings.experiment.telemetry.event_loop, work)
    _write_index(made)
    return made


def profile_run(run: RunDirectory, folder: Path) -> ProfileResult:
    """Write the timeline of a run, from its spans and samples. Raises UsageError if the run has none, DamagedFileError
    if the files differ from the commit."""
    if not run.spans.is_file():
        raise UsageError(f"The run {run.name!r} has no {run.spans.name}.", "Wait until it has finished a step.")
    state = next(iter(FileStateStore(run.state).commits()), {})
    for path in (run.metrics, run.spans):
        run.verify_journal(state, path)
    metrics = list(read_json_lines(run.metrics)) if run.metrics.is_file() else []
    spans = [_span(record, run) for record in read_json_lines(run.spans)]  # before the folder is created
    made = ProfileResult(_new(folder), f"the run {run.name}")
    path = made.folder / "timeline.json.gz"
    count = write_trace(path, trace_events(spans, metrics, name=f"pvg, {run.name}"))
    what = f"The run's phases, steps, spans by thread, device samples, loop lag and alerts ({count:,} events)."
    made.files.append(ProfileFile(path.name, what, PERFETTO))
    _write_index(made)
    return made


def _span(record: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    times = (record.get("start_s"), record.get("end_s"))
    if isinstance(record.get("name"), str) and all(isinstance(time, (int, float)) for time in times):
        return record
    raise DamagedFileError(
        f"{run.spans} has a line that is not a span: {orjson.dumps(record).decode()[:80]}", "Remove it from the file."
    )


def _py_spy(wanted: bool | None) -> Path | PySpyError | None:
    if wanted is False:
        return None
    try:
        return find_py_spy()
    except PySpyError as error:
        if wanted:
            raise
        return error


def _new(folder: Path) -> Path:
    """Make the folder. Raises UsageError if it exists and is not empty, MissingRequirementError if making it fails."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists and is not an empty folder.", "Name another one with --out.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MissingRequirementError(
            f"Cannot make the folder {folder}: {error.strerror}.", "Name another one with --out."
        ) from error
    return folder


async def _passes(
    settings: BenchSettings,
    stage: Stage,
    made: ProfileResult,
    steps: int,
    spy: Path | None,
    demanded: bool,
    on_pass: OnPass,
    workloads: WorkloadTable,
) -> None:
    """Open the workload, warm it up, and run all passes."""
    folder, warmup = made.folder, settings.profile.warmup
    workload = workloads[settings.profile.profile](settings)
    try:
        on_pass(f"opening, and {warmup} warm-up steps")
        await workload.open()
        for index in range(warmup):
            await workload.sample(index)
        on_pass(f"spans, {steps} steps")
        timeline = folder / "timeline.json.gz"
        timed, made.budget = await spans_pass(
            workload, steps, timeline, stage=stage, device_clock=_device_clock(settings)
        )
        made.passes.append(timed)
        made.files.append(ProfileFile(timeline.name, "pvg's spans by thread and task, with CPU and memory.", PERFETTO))
        on_pass(f"torch profiler, {steps} steps")
        trace, table = folder / "torch.json.gz", folder / "torch-operators.txt"
        timed, made.frames = await torch_pass(workload, steps, trace, table)
        made.frames_from = "torch"
        made.passes.append(timed)
        made.files += [
            ProfileFile(trace.name, "Every torch operator, in every thread.", PERFETTO),
            ProfileFile(table.name, "The same, summed by operator.", "Any text viewer; the table is wide."),
        ]
        if spy is not None:
            await _sampled(workload, made, steps, spy, demanded, on_pass)
    finally:
        await workload.close()


async def _sampled(workload: Any, made: ProfileResult, steps: int, spy: Path, demanded: bool, on_pass: OnPass) -> None:
    """Run two passes of py-spy, because it writes one format at a time."""
    stacks, flames = made.folder / "py-spy.speedscope.json", made.folder / "py-spy.svg"
    try:
        on_pass("py-spy, stacks")
        made.passes.append(await py_spy_pass(workload, steps, spy, stacks, "speedscope"))
        on_pass("py-spy, flame graph")
        made.passes.append(await py_spy_pass(workload, steps, spy, flames, "flamegraph"))
    except PySpyError as error:
        if demanded:
            raise
        made.missing["py-spy"] = str(error)
        return
    sampled = read_speedscope(stacks)
    made.frames, made.frames_from = sampled.frames, "py-spy"
    made.samples, made.waiting = sampled.samples, sampled.waiting
    made.files += [
        ProfileFile(
            flames.name,
            "Flame graph of the Python stacks: wide means expensive.",
            "Any browser; click to zoom, Ctrl-F to search.",
        ),
        ProfileFile(stacks.name, "The stacks by thread, in order of time.", "Drop it on https://www.speedscope.app."),
    ]


def _device_clock(settings: BenchSettings) -> DeviceClock | None:
    from pvg.models import pick_device
    from pvg.telemetry.spans import CudaClock

    return CudaClock() if pick_device(settings.experiment.models.device).type == "cuda" else None


def _write_index(made: ProfileResult) -> None:
    made.files.append(
        ProfileFile("profile.json", "The figures of this profile, as printed by `pvg profile --json`.", "")
    )
    lines = [f"pvg profile: {made.title}", ""]
    for file in made.files:
        lines += [
            file.name,
            *textwrap.wrap(f"{file.what} {file.how}".strip(), WIDTH, initial_indent="    ", subsequent_indent="    "),
        ]
    lines += ["", *(f"Missing: {tool}. {why}" for tool, why in made.missing.items())]
    if made.passes:
        lines += [
            "Each profiler slows down what it measures, so each had a separate pass. Seconds of the fastest step:"
        ]
        lines += [f"    {each.name:<22}{each.fastest_s:9.3f}" for each in made.passes]
    (made.folder / "README.txt").write_text("\n".join(lines).rstrip() + "\n")
    (made.folder / "profile.json").write_bytes(orjson.dumps(made.plain(), option=orjson.OPT_INDENT_2))
