"""The documents about measurements: benchmarks, profiles, plans, studies and diagnoses."""

from __future__ import annotations

from typing import Any, Literal

from pvg.bench.report import BenchReport, TimeBudget
from pvg.study.results import StudyResults
from pvg_cli.documents.base import DocumentPart, JsonDocument

# --- bench, compare, profile, plan -----------------------------------------------------------------------------------


class BenchDocument(BenchReport):
    """One call of `pvg bench`: the content of the report that it writes."""


class ProfileEntry(DocumentPart):
    name: str
    workload: str
    about: str
    path: str


class BenchProfilesDocument(JsonDocument):
    """The benchmark profiles that `pvg bench` knows."""

    profiles: list[ProfileEntry]


class ComparedReport(DocumentPart):
    path: str
    created: str
    command: str
    code: str


class DifferingField(DocumentPart):
    key: str
    a: Any
    b: Any


class RatioBounds(DocumentPart):
    """median(b) / median(a) with its interval; null: unbounded."""

    ratio: float
    low: float | None
    high: float | None


class ComparedMetric(DocumentPart):
    """One metric of one variant. `beyond`: the whole interval is worse than --fail-above."""

    variant: str
    name: str
    unit: str
    better: Literal["lower", "higher"]
    count_a: int
    count_b: int
    median_a: float
    median_b: float
    ratio: RatioBounds | None
    p: float
    verdict: Literal["worse", "better", "too few samples", "no difference seen"]
    beyond: bool


class CompareDocument(JsonDocument):
    """Two benchmark reports. `failed`: a metric is worse than --fail-above, and the exit code is 1."""

    a: ComparedReport
    b: ComparedReport
    profile: str
    name: str
    same: bool
    environment: list[DifferingField]
    settings: list[DifferingField]
    metrics: list[ComparedMetric]
    left_out: list[str]
    peak_memory: dict[str, list[float]]
    tested: int
    confidence: float
    joint_confidence: float
    fail_above: float | None
    counts: dict[str, int]
    failed: bool


class ProfiledFrame(DocumentPart):
    function: str
    file: str
    line: int
    own_s: float
    share: float


class ProfilePass(DocumentPart):
    name: str
    walls_s: list[float]


class WrittenFile(DocumentPart):
    name: str
    what: str
    how: str


class ProfileDocument(JsonDocument):
    """The results in `folder`. `slower_by`: how much longer a pass took than the first one. `missing`: by tool."""

    folder: str
    title: str
    frames: list[ProfiledFrame]
    frames_from: Literal["", "py-spy", "torch"]
    samples: int
    waiting_samples: int
    passes: list[ProfilePass]
    slower_by: dict[str, float]
    budget: TimeBudget | None
    files: list[WrittenFile]
    missing: dict[str, str]


class PlannedInput(DocumentPart):
    value: float | None
    unit: str
    source: str


class PlannedMemory(DocumentPart):
    """Bytes of one stage. `fits`: null without a GPU."""

    stage: str
    place: str
    parts: dict[str, float]
    total: float
    fits: bool | None


class PlanDocument(JsonDocument):
    """The prediction of `pvg plan`. Times in seconds; `step_s`: of an optimizer step, at least."""

    experiment: str
    machine: str
    workers: int
    slots: int
    concurrency: int
    inputs: dict[str, PlannedInput]
    step_s: float
    bounds: dict[str, float | str | None]
    memory: list[PlannedMemory]
    gpu_gb: float | None
    advice: list[str]
    notes: list[str]


# --- study -----------------------------------------------------------------------------------------------------------


class StudyDocument(StudyResults):
    """The results of a study: `study.json`, the page, and the `status` of the call. `cells` has that of each game."""

    status: Literal["complete", "failed", "stopped"]
    html: str


class StudyEntry(DocumentPart):
    name: str
    path: str
    about: str


class StudyListDocument(JsonDocument):
    """The studies that `pvg study` knows."""

    studies: list[StudyEntry]


class PlannedCell(DocumentPart):
    """One game. `steps`: the most optimizer steps that it may take."""

    arm: str
    seed: int
    run: str
    status: Literal["new", "unfinished", "played", "complete", "damaged"]
    reason: str
    steps: int
    steps_done: int
    hash: str


class StudyPlanDocument(JsonDocument):
    """The work of a study. `warnings`: what its seeds cannot show, one sentence each."""

    study: str
    warnings: list[str]
    folder: str
    processes: int
    threads: int
    steps: int
    cells: list[PlannedCell]


# --- diagnose and doctor ---------------------------------------------------------------------------------------------


class LogLine(DocumentPart):
    """`where`: log and line number."""

    where: str
    text: str


class FoundCause(DocumentPart):
    """`cost_s`: seconds lost. `share`: of the time of the log. `settings`: what to change; empty if no setting helps.
    `remedy`: the advice in words."""

    signature: str
    says: str
    criterion: str
    measured: float
    threshold: float
    cost_s: float
    share: float | None
    settings: list[str]
    remedy: str
    evidence: list[LogLine]


class ReadLines(DocumentPart):
    read: int
    events: int
    other: int
    malformed: int
    example: str
    cut_short: list[str]


class LoggedTimes(DocumentPart):
    """Milliseconds. `exact`: whether the quantiles are exact; otherwise they are within `relative_error`."""

    n: int
    p50: float
    p95: float
    p99: float
    max: float
    total: float
    exact: bool


class TimesWithLoad(DocumentPart):
    n: int
    correlation: float
    idle_load: float
    busy_load: float
    idle: float
    busy: float


class PairedUpdates(DocumentPart):
    paired: int
    client_only: int
    server_only: int
    unfinished: int
    evicted: int
    untraced: int
    failed: int


class DiagnoseDocument(JsonDocument):
    """The causes that were found in logs, the costliest first. `not_seen`: by cause, what the log lacks to check it."""

    sources: list[str]
    seconds: float
    lines: ReadLines
    findings: list[FoundCause]
    nothing_stands_out: bool
    not_seen: dict[str, str]
    timings_ms: dict[str, LoggedTimes]
    relative_error: float
    with_load: dict[str, TimesWithLoad]
    steps_ms: dict[str, dict[str, float]]
    updates: PairedUpdates
    notes: list[str]


class DoctorCheck(DocumentPart):
    """`missing`: pvg cannot work. `notice`: a part of pvg cannot work."""

    name: str
    verdict: Literal["ok", "missing", "notice"]
    found: str
    remedy: str


class DoctorDocument(JsonDocument):
    """The checks of `pvg doctor`. If `healthy` is false, the exit code is 1."""

    healthy: bool
    checks: list[DoctorCheck]
