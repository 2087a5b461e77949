"""Profiles into a folder: `profile_stage` runs a stage under all profilers, `profile_run` draws the timeline of a run.

profile.json in the folder has the figures, and names each file and how to open it.

The work is the benchmark profile with the stage's name, on the experiment to profile. Each profiler slows down what the
others would measure, so each repeats the workload's sample in a pass of its own: pvg's spans alone (`spans_pass`, with
whose wall time the others are compared), the torch profiler (`torch_pass`), and py-spy, a process that samples the
Python stacks from outside (`py_spy_pass`). All passes share one opened and warmed-up workload.
"""

from __future__ import annotations

import ctypes
import gzip
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from pvg.bench.report import TimeBudget
from pvg.bench.runner import cuda_clock, on_loop, total
from pvg.bench.workloads import (
    WORKLOAD,
    BenchSettings,
    SettingChange,
    Workload,
    find_profile,
    make_workload,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.config.load import refuse_unknown
from pvg.errors import MissingRequirementError, UsageError, counted
from pvg.installation import install_extra
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import RunDirectory
from pvg.store.state import FileStateStore, JsonLinesReader
from pvg.telemetry.device import DeviceSampler
from pvg.telemetry.spans import DRIVER, CudaClock, Tracer, span_rows

# --- the work of a stage, and its passes ------------------------------------------------------------------------------

STAGES = ("rollout", "trainer", "e2e")
ROLLOUTS = "rollouts"  # key of a workload's table: the number of rollouts in a sample


def stage_settings(stage: str, experiment: str, overrides: Sequence[str]) -> BenchSettings:
    """The settings of a stage's workload on `experiment` (a name or a file), with the overrides.

    The profile's `changes` are left out: they belong to its benchmark. A sample has as many rollouts as a batch of the
    experiment, unless `workload.rollouts` is given. Raises UsageError, also for another stage, and ConfigurationError.
    """
    refuse_unknown("stage {}", stage, STAGES)
    path = find_profile(stage)
    profile = read_profile(path).model_copy(update={"experiment": experiment, "changes": {}})
    given = parse_overrides(overrides)
    settings = settings_of(profile, str(path), given)
    key = f"{WORKLOAD}{ROLLOUTS}"
    if ROLLOUTS not in profile.workload or key in {change.key for change in given}:
        return settings
    batch = settings.experiment.arithmetic().rollouts_per_batch
    return settings_of(profile, str(path), [SettingChange(key, batch, "the experiment's batch"), *given])


# --- the passes -------------------------------------------------------------------------------------------------------

SAMPLED = ("device", "loop", "alert")  # kinds of metrics.jsonl that a timeline shows
LEAST_SAMPLED_S = 5.0  # the shortest pass of py-spy: a thousand samples at its rate
OPERATORS_SHOWN = 40  # rows of the table of torch operators
COSTLIEST = 10  # of them in the result
SAMPLE_EVERY_S = 0.5  # period of the CPU, memory and GPU samples: a stage takes seconds, not hours


@dataclass(frozen=True, slots=True)
class SamplingPass:
    name: str
    walls_s: tuple[float, ...]

    @property
    def fastest_s(self) -> float:
        """The sample that other programs on the machine disturbed least."""
        return min(self.walls_s)


@dataclass(frozen=True, slots=True)
class CostlyOperator:
    """A torch operator: `own_s` seconds in the operator itself, `share` of all operators' seconds."""

    name: str
    own_s: float
    share: float


async def spans_pass(
    workload: Workload, steps: int, path: Path, *, stage: str, device_clock: CudaClock | None
) -> tuple[SamplingPass, TimeBudget]:
    """Write the timeline to `path`; returns the budget over all samples."""
    tracer = Tracer(device_clock=device_clock)
    spans: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    budgets = []
    sampler = DeviceSampler(
        SAMPLE_EVERY_S,
        lambda moment, metrics: samples.append({"kind": "device", "time": moment, "metrics": metrics}),
        lambda notice: None,  # without a GPU the trace has no GPU counters
    )
    sampler.start()
    try:
        with tracer.drive():
            tracer.close_step()
            for step in range(1, steps + 1):
                await workload.sample(step)
                budgets.append(tracer.close_step())
                spans += span_rows(tracer.take_spans(), round=0, phase=stage, step=step)
    finally:
        sampler.stop()
    write_trace(path, trace_events(spans, samples, name=f"pvg profile, {stage}"))
    return SamplingPass("spans", tuple(budget.wall_s for budget in budgets)), total(budgets)


async def torch_pass(
    workload: Workload, steps: int, trace: Path, table: Path
) -> tuple[SamplingPass, tuple[CostlyOperator, ...]]:
    """Write the trace and the table of operators; returns the operators with the most self time."""
    # Without this private option the profiler sees only the calling thread; our operators run in an executor's thread.
    import torch
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=config) as profiler:
        walls_s = await _timed(workload, lambda done, _: done < steps)
    return SamplingPass("torch profiler", walls_s), _write_torch(profiler, trace, table, on_gpu)


def _write_torch(profiler: Any, trace: Path, table: Path, on_gpu: bool) -> tuple[CostlyOperator, ...]:
    profiler.export_chrome_trace(str(trace))
    averages, own_time = profiler.key_averages(), "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table.write_text(averages.table(sort_by=own_time, row_limit=OPERATORS_SHOWN, max_name_column_width=60))
    own_us = {row.key: getattr(row, own_time) for row in averages}
    whole = sum(own_us.values())
    costliest = sorted(own_us.items(), key=lambda item: -item[1])[:COSTLIEST]
    return tuple(CostlyOperator(name, us / 1e6, us / whole if whole else 0.0) for name, us in costliest)


async def _timed(workload: Workload, keep_going: Callable[[int, float], bool]) -> tuple[float, ...]:
    """Sample while `keep_going(samples so far, their total seconds)`; returns the seconds of each sample."""
    walls_s: list[float] = []
    while keep_going(len(walls_s), sum(walls_s)):
        started = time.perf_counter()
        await workload.sample(len(walls_s))
        walls_s.append(time.perf_counter() - started)
    return tuple(walls_s)


def slowdowns(passes: Sequence[SamplingPass]) -> dict[str, float]:
    """How much longer the fastest sample took in each pass than in the first one: 0.25 is 25 % longer."""
    return {each.name: each.fastest_s / passes[0].fastest_s - 1.0 for each in passes[1:]}


# --- py-spy -----------------------------------------------------------------------------------------------------------

RATE = 200  # samples per second: a frame of 1 % has 40 in 20 s; each sample pauses this process for about 0.1 ms
LIMIT_S = 60.0  # beyond its duration: it reads the symbols of every library first, which takes seconds with torch
PR_SET_PTRACER, ANY_PROCESS = 0x59616D61, ctypes.c_ulong(-1)  # prctl of Linux' Yama module


class PySpyError(MissingRequirementError):
    """py-spy is missing, not permitted, or failed. `message` is one line, `remedy` the command that fixes it."""


def find_py_spy() -> Path:
    """py-spy of this Python installation, otherwise from PATH. Raises PySpyError."""
    folder = str(Path(sys.executable).parent)
    found = shutil.which("py-spy", path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if found is None:
        raise PySpyError("py-spy is not installed.", install_extra("profile"))
    return Path(found)


async def py_spy_pass(workload: Workload, seconds: float, py_spy: Path, output: Path) -> SamplingPass:
    """Take samples of the workload while py-spy watches this process for `seconds`, and let it write a flame graph.
    Raises PySpyError if it wrote nothing."""
    with _watched(py_spy, seconds, output) as child:
        walls_s = await _timed(workload, lambda _, taken_s: child.poll() is None and taken_s < seconds + LIMIT_S)
    return SamplingPass("py-spy", walls_s)


@contextmanager
def _watched(py_spy: Path, seconds: float, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(py_spy), "record", "--pid", str(os.getpid()), "--format", "flamegraph", "--output", str(output)]
    command += ["--rate", str(RATE), "--threads", "--duration", str(math.ceil(seconds))]
    with tempfile.TemporaryFile() as log:
        _allow_tracing(True)
        # In a separate session, Ctrl-C reaches only this process, which then stops py-spy.
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield child
            if child.poll() != 0 or not output.exists() or not output.stat().st_size:
                log.seek(0)
                raise _explained(log.read().decode("utf-8", "replace"))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            _allow_tracing(False)


def _allow_tracing(allowed: bool) -> None:
    """Let our child trace this process where Linux permits that only to parents (Yama's ptrace_scope = 1). Does nothing
    on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY_PROCESS if allowed else ctypes.c_ulong(0), 0, 0, 0)


def _explained(text: str) -> PySpyError:
    """The error for what py-spy printed, with a remedy."""
    if "denied" in text.lower() or "not permitted" in text.lower():
        return PySpyError(
            "py-spy may not inspect this process.",
            "Allow it: sudo sysctl kernel.yama.ptrace_scope=0; start a container with --cap-add=SYS_PTRACE.",
        )
    lines = [line.strip().removeprefix("Error: ") for line in text.splitlines() if line.strip()]
    return PySpyError(f"py-spy failed: {lines[0] if lines else 'without a message'}", "See its documentation.")


# --- the folder with all results --------------------------------------------------------------------------------------

PERFETTO = "Open https://ui.perfetto.dev and drop the file on it (it stays on your machine), or chrome://tracing."

OnPass = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileFile:
    """One file of the folder: what it shows and how to open it."""

    name: str
    what: str
    how: str


@dataclass(slots=True)
class ProfileResult:
    """The results of a profile. `missing`: by tool, why it is missing and how to fix that."""

    folder: Path
    title: str
    operators: tuple[CostlyOperator, ...] = ()
    passes: list[SamplingPass] = field(default_factory=list)
    budget: TimeBudget | None = None
    files: list[ProfileFile] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        budget = self.budget and self.budget.model_dump()
        slower_by = slowdowns(self.passes) if self.passes else {}
        return {**asdict(self), "folder": str(self.folder), "slower_by": slower_by, "budget": budget}


def profile_stage(
    settings: BenchSettings,
    stage: str,
    folder: Path,
    *,
    steps: int,
    py_spy: bool = True,
    on_pass: OnPass = lambda found: None,
) -> ProfileResult:
    """Run the stage's work under each profiler and write everything into the new `folder`.

    Without py-spy, or if `py_spy` is False, `missing` says so. `on_pass` receives the name of each pass before it runs.
    """
    made = ProfileResult(_new(folder), f"{stage} of {settings.experiment.name}, {counted(steps, 'step')}")
    on_loop(_passes(settings, stage, made, steps, py_spy, on_pass))
    _write_figures(made)
    return made


def profile_run(run: RunDirectory, folder: Path) -> ProfileResult:
    """Write the timeline of a run, from its spans and samples. Raises UsageError if the run has none, DamagedFileError
    if the files differ from the commit."""
    if not run.spans.is_file():
        raise UsageError(f"The run {run.name!r} has no {run.spans.name}.", "Wait until it has finished a step.")
    state = next(iter(FileStateStore(run.state).commits()), {})
    for path in (run.metrics, run.spans):
        run.verify_journal(state, path)
    metrics = list(JsonLinesReader(run.metrics)) if run.metrics.is_file() else []
    spans = [_span(record, run) for record in JsonLinesReader(run.spans)]  # before the folder is created
    made = ProfileResult(_new(folder), f"the run {run.name}")
    path = made.folder / "timeline.json.gz"
    count = write_trace(path, trace_events(spans, metrics, name=f"pvg, {run.name}"))
    what = f"The run's phases, steps, spans by thread, device samples, loop lag and alerts ({count:,} events)."
    made.files.append(ProfileFile(path.name, what, PERFETTO))
    _write_figures(made)
    return made


def _span(record: dict[str, Any], run: RunDirectory) -> dict[str, Any]:
    if record.keys() >= {"name", "start_s", "end_s", "depth", "track", *PLACE}:
        return record
    raise DamagedFileError(
        f"{run.spans} has a line that is not a span: {orjson.dumps(record).decode()[:80]}", "Remove it from the file."
    )


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
    settings: BenchSettings, stage: str, made: ProfileResult, steps: int, py_spy: bool, on_pass: OnPass
) -> None:
    """Open the workload, warm it up, and run all passes."""
    folder, warmup = made.folder, settings.profile.warmup
    workload = make_workload(settings)
    try:
        on_pass(f"opening, and {warmup} warm-up steps")
        await workload.open()
        for index in range(warmup):
            await workload.sample(index)
        on_pass(f"spans, {counted(steps, 'step')}")
        timeline = folder / "timeline.json.gz"
        timed, made.budget = await spans_pass(workload, steps, timeline, stage=stage, device_clock=cuda_clock(settings))
        made.passes.append(timed)
        made.files.append(ProfileFile(timeline.name, "pvg's spans by thread and task, with CPU and memory.", PERFETTO))
        on_pass(f"torch profiler, {counted(steps, 'step')}")
        trace, table = folder / "torch.json.gz", folder / "torch-operators.txt"
        timed, made.operators = await torch_pass(workload, steps, trace, table)
        made.passes.append(timed)
        made.files += [
            ProfileFile(trace.name, "Every torch operator, in every thread.", PERFETTO),
            ProfileFile(table.name, "The same, summed by operator.", "Any text viewer; the table is wide."),
        ]
        if py_spy:
            on_pass("py-spy")
            await _sampled(workload, made, steps)
        else:
            made.missing["py-spy"] = "Left out because of --no-py-spy."
    finally:
        await workload.close()


async def _sampled(workload: Any, made: ProfileResult, steps: int) -> None:
    path = made.folder / "py-spy.svg"
    try:
        seconds = max(LEAST_SAMPLED_S, steps * made.passes[0].fastest_s)
        made.passes.append(await py_spy_pass(workload, seconds, find_py_spy(), path))
    except PySpyError as error:
        made.missing["py-spy"] = str(error)
        return
    what = "Flame graph of the Python stacks by thread: wide means expensive."
    made.files.append(ProfileFile(path.name, what, "Any browser; click to zoom, Ctrl-F to search."))


def _write_figures(made: ProfileResult) -> None:
    made.files.append(
        ProfileFile("profile.json", "The figures of this profile, as printed by `pvg profile --json`.", "")
    )
    (made.folder / "profile.json").write_bytes(orjson.dumps(made.plain(), option=orjson.OPT_INDENT_2))


# --- the timeline -----------------------------------------------------------------------------------------------------
#
# Google's "Trace Event Format", which Perfetto (ui.perfetto.dev) and chrome://tracing open: complete events (X),
# counters (C), instants (i) and metadata (M). Spans of a lane nest; overlapping tasks (track "loop") get further lanes.
# So the viewer shows every span with its true start and end, in microseconds since the first.

PROCESS = 1
GAME_LANE = 1  # thread number of the lane of phases and steps; tracks follow
LANES = 1000  # lanes of one track have adjacent numbers, so that the viewer groups them
ROUNDING_S = 2e-6  # precision of seconds since 1970 as floats; a child may seem to end after its parent
PLACE = ("round", "phase", "step")

Event = dict[str, Any]


@dataclass(slots=True)
class _Lane:
    number: int
    open: list[tuple[float, int]] = field(default_factory=list)  # ends and depths of the enclosing spans

    def room_for(self, start_s: float, end_s: float, depth: int) -> int:
        """The number of spans that would enclose it; -1 if it would overlap one of them, or lie too deep."""
        while self.open and self.open[-1][0] <= start_s + ROUNDING_S:
            self.open.pop()
        if not self.open:
            return 0
        around_s, around_depth = self.open[-1]
        return len(self.open) if around_depth < depth and end_s <= around_s + ROUNDING_S else -1


def trace_events(
    spans: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]] = (), *, name: str = "pvg"
) -> Iterator[Event]:
    """The events of the trace: phases and steps, spans by track, device samples and loop lag as counters, and alerts.
    `spans`: lines of a spans.jsonl. `metrics`: lines of a metrics.jsonl; other kinds are skipped."""
    ordered = sorted(spans, key=lambda span: (span["start_s"], span["depth"], -span["end_s"]))
    samples = [record for record in metrics if record.get("kind") in SAMPLED and "time" in record]
    first_s = min([span["start_s"] for span in ordered[:1]] + [record["time"] for record in samples], default=0.0)
    yield _named("process_name", name, 0)
    yield from _game(ordered, first_s)
    yield from _tracks(ordered, first_s)
    for record in samples:
        yield from _sample_events(record, first_s)


def write_trace(path: Path, events: Iterable[Event]) -> int:
    """Write the events, compressed if `path` ends in .gz; returns their number."""
    count = 0
    with gzip.open(path, "wb", compresslevel=6) if path.suffix == ".gz" else open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events, start=1):
            file.write((b",\n" if count > 1 else b"") + orjson.dumps(event))
        file.write(b"\n]}\n")
    return count


def _tracks(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    lanes: dict[str, list[_Lane]] = {}
    names = sorted({span["track"] for span in ordered}, key=lambda track: (track != DRIVER, track != "loop", track))
    for span in ordered:
        track, start_s, end_s = span["track"], span["start_s"], span["end_s"]
        own = lanes.setdefault(track, [])
        # The lane in which the span lies deepest, or the first of equals, is that of its parent.
        room = {number: lane.room_for(start_s, end_s, span["depth"]) for number, lane in enumerate(own)}
        best = max(room, key=room.__getitem__, default=0)
        if room.get(best, -1) < 0:
            best = len(own)
            own.append(_Lane(GAME_LANE + 1 + LANES * names.index(track) + best))
            yield from _lane_named(own[best].number, track if best == 0 else f"{track} ({best + 1})")
        lane = own[best]
        if lane.open:  # clip a rounding error beyond the enclosing span
            end_s = min(end_s, lane.open[-1][0])
        lane.open.append((end_s, span["depth"]))
        arguments = {key: span[key] for key in (*PLACE, "device_s") if key in span}
        yield _complete(span["name"], start_s, end_s, first_s, lane.number, arguments)


def _game(ordered: list[Mapping[str, Any]], first_s: float) -> Iterator[Event]:
    """A lane of phases with their steps. Each lasts as long as its driver's spans follow one another."""
    driven = [span for span in ordered if span["track"] == DRIVER and "phase" in span]
    if not driven:
        return
    yield from _lane_named(GAME_LANE, "game")
    for keys, label in ((PLACE[:2], "round {round} {phase}"), (PLACE, "step {step}")):
        for values, stretch in groupby(driven, itemgetter(*keys)):
            lasting, place = list(stretch), dict(zip(keys, values, strict=True))
            end_s = max(span["end_s"] for span in lasting)
            yield _complete(label.format(**place), lasting[0]["start_s"], end_s, first_s, GAME_LANE, place)


def _sample_events(record: Mapping[str, Any], first_s: float) -> Iterator[Event]:
    at = {"ts": _microseconds(record["time"] - first_s), "pid": PROCESS}
    if record["kind"] == "alert":
        yield {"ph": "i", "name": f"{record['name']}: {record['message']}", **at, "tid": GAME_LANE, "s": "p"}
        return
    for metric, value in record["metrics"].items():
        yield {"ph": "C", "name": f"{record['kind']}/{metric}", **at, "args": {metric: value}}


def _complete(
    name: str, start_s: float, end_s: float, first_s: float, lane: int, arguments: Mapping[str, Any]
) -> Event:
    start_us = _microseconds(start_s - first_s)
    lasting_us = max(0.0, _microseconds(end_s - first_s) - start_us)
    event: Event = {"ph": "X", "name": name, "ts": start_us, "dur": round(lasting_us, 3), "pid": PROCESS, "tid": lane}
    return event | ({"args": dict(arguments)} if arguments else {})


def _named(kind: str, name: Any, lane: int) -> Event:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": lane, "args": {"name": name}}


def _lane_named(lane: int, name: str) -> Iterator[Event]:
    yield _named("thread_name", name, lane)
    yield {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": lane, "args": {"sort_index": lane}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
