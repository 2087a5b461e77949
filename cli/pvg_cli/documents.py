"""The JSON documents that commands print with --json, as types, and their JSON Schemas.

A command prints a plain dictionary, and `boundary.emit` adds its `schema_version`. Where a part of the document is a
dataclass of pvg as it is, the type is that dataclass. `pvg schemas` prints the schemas, and the tests of the command
line check every document against its schema. To add a document: write its class here, and add it to DOCUMENTS.

Rules for a change: a new field is no new version. A field that is removed, renamed or gets another meaning raises
`schema_version` of that document by one, here and in the dictionary that the command prints.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from pvg.bench.compare import FieldDifference, MetricComparison, ReportSide
from pvg.bench.profiling import CostlyOperator, ProfileFile
from pvg.bench.report import BenchReport, TimeBudget
from pvg.config.experiment import BatchArithmetic
from pvg.evaluation.report import EvaluationReport
from pvg.hub import Download
from pvg.reporting.diagnosis import Finding, LoadCorrelation, TimingSummary
from pvg.reporting.run_summary import AlertRecord, PhaseSummary, ProcessSummary, ScalingRecord, StepRecord
from pvg.reporting.solutions import Example
from pvg.study.results import StudyResults
from pvg_cli.doctor import CheckResult

Metrics = dict[str, float]
Settings = dict[str, Any]  # an experiment as in its TOML file; `pvg config schema --json` is its schema


class DocumentPart(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JsonDocument(DocumentPart):
    """A whole document: one object on stdout."""

    schema_version: Literal[1]


class ErrorDetails(DocumentPart):
    """`message`: what is wrong, in one line. `remedy`: what to do, or "". `exit_code`: that of the command."""

    type: str
    message: str
    remedy: str
    exit_code: Literal[2, 3, 70, 130]


class ErrorDocument(JsonDocument):
    """Any command that cannot do its work prints this document instead."""

    error: ErrorDetails


class RoundMetrics(DocumentPart):
    round: int
    metrics: Metrics


class TrainDocument(JsonDocument):
    """A run that is complete or was stopped. `seconds`: the time of this call. `resume`: the command that resumes a
    stopped run."""

    status: Literal["complete", "interrupted"]
    run: str
    path: str
    experiment: str
    seconds: float
    rounds: list[RoundMetrics]
    alerts: list[AlertRecord]
    resume: str | None


class PlayerInput(DocumentPart):
    """What a player reads, special tokens included. `tokens`: their number, null without a tokenizer."""

    text: str
    tokens: int | None


class KnownGrade(DocumentPart):
    """How the task grades a known solution. `solution`: what it is."""

    solution: str
    text: str
    expected_correct: bool
    correct: bool
    well_formed: bool
    answer: str | None
    note: str


class VerifierQuestion(DocumentPart):
    """A question of the verifier about a correct solution, with an answer. `max_tokens`: of a prover's answer, which
    may differ from this one; null if the task answers."""

    question: str
    answer: str
    answered_by: Literal["prover", "task"]
    max_tokens: int | None


class TaskPreview(DocumentPart):
    """A training problem as the players read it. `prompts`: by role, empty for self-play. `challenge`: null in other
    protocols, without a tokenizer, and for a solution without a step."""

    problem: str
    question: str
    prompts: dict[str, PlayerInput]
    challenge: VerifierQuestion | None
    verifier_input: PlayerInput | None
    graded: list[KnownGrade]


class TaskCheckResult(DocumentPart):
    """`passed`: null if the check could not be made, and `detail` says why. `warning`: it passed, and `detail` says
    what to improve."""

    check: str
    passed: bool | None
    detail: str
    warning: bool


class TaskCheckDocument(JsonDocument):
    """Checks of a task, its prompts and its grader. `notice`: why there is no tokenizer, or ""."""

    task: str
    passed: bool
    checks: list[TaskCheckResult]
    preview: TaskPreview | None
    notice: str


class WarmStartNumbers(DocumentPart):
    """The demonstrations of a warm start, and how often training sees each."""

    demonstrations: int
    held_out: int
    epochs: float


class DryRunDocument(JsonDocument):
    """What a run would be. `hash`: of the settings that affect the result. `downloads`: by setting. `preview`: null
    before the downloads. `warmup`: only with a warm start."""

    experiment: Settings
    arithmetic: BatchArithmetic
    hash: str
    run: str
    resume: bool
    downloads: dict[str, Download]
    preview: TaskPreview | None
    warmup: WarmStartNumbers | None = None


class RolloutDocument(JsonDocument):
    """Samples of `pvg rollout`, and their metrics."""

    status: Literal["complete", "interrupted"]
    run: str
    path: str
    seconds: float
    metrics: Metrics


class RunFolder(DocumentPart):
    """A run. `last_activity`: seconds since 1970. `process`: the process that plays it. `notes`: what is damaged."""

    name: str
    path: str
    experiment: str
    task: str
    status: Literal["empty", "samples", "unfinished", "complete"]
    state: Literal["waiting", "running", "silent", "finished", "stopped", "failed", "died", "removed"]
    phase: str
    rounds_finished: int
    rounds_planned: int
    last_activity: float
    size_bytes: int
    tags: list[str]
    process: int | None
    host: str
    code_version: str
    notes: list[str]


class RunsListDocument(JsonDocument):
    """The runs of a folder, the one with the newest activity first."""

    runs: list[RunFolder]


class RunsShowDocument(RunFolder, JsonDocument):
    """One run. `sizes`: bytes by part of its folder. `commands`: what to type next."""

    sizes: dict[str, int]
    commands: list[str]


class RunsTagDocument(JsonDocument):
    """The tags of a run after the command."""

    run: str
    tags: list[str]


class RunsRemoveDocument(JsonDocument):
    """The folders that were deleted, and their size."""

    removed: list[str]
    bytes: int


class ValueRange(DocumentPart):
    mean: float
    min: float
    max: float
    last: float


class RunResults(DocumentPart):
    """What the files of a run say. Times in seconds, `began` since 1970. `notes`: remarks on incomplete or damaged
    files. `damaged`: files of its state are damaged. `warnings`: about settings that are probably not intended."""

    name: str
    path: str
    experiment: str
    config_hash: str
    status: Literal["empty", "samples", "unfinished", "complete"]
    phase: str
    rounds_planned: int
    rounds: list[RoundMetrics]
    phases: list[PhaseSummary]
    steps: list[StepRecord]
    alerts: list[AlertRecord]
    budget: dict[str, float]
    busy: dict[str, float]
    hidden: dict[str, float]
    device: dict[str, ValueRange]
    loop: dict[str, float]
    workers: dict[str, ValueRange]
    scaling: list[ScalingRecord]
    processes: list[ProcessSummary]
    machine: str
    code_version: str
    began: float | None
    peak_memory: dict[str, float]
    cores: dict[str, float]
    seconds: float
    notes: list[str]
    damaged: bool
    warnings: list[str]


class ReportDocument(RunResults, JsonDocument):
    """One run. `evaluation`: the results of `pvg evaluate`. `html`: the page, null with --no-html. `rollouts_html`: the
    page with all solutions, null with --no-html or without solutions."""

    evaluation: EvaluationReport | None
    examples: list[Example]
    html: str | None
    rollouts_html: str | None


class ComparedResults(RunResults):
    """`final`: the metrics of the last round, and medians of rates and step times."""

    final: Metrics


class ReportRunsDocument(JsonDocument):
    """Several runs. `settings`: by key, the value of every run, for the keys in which two runs differ."""

    runs: list[ComparedResults]
    settings: dict[str, list[str]]
    html: str | None


class ReportBenchmarksDocument(JsonDocument):
    """Reports of `pvg bench`, as they were written."""

    reports: list[BenchReport]
    html: str | None


class EvaluateDocument(JsonDocument):
    """`evaluation`: the content of `path`. `resume`: the command that resumes a stopped evaluation."""

    status: Literal["complete", "interrupted"]
    run: str
    path: str
    seconds: float
    evaluation: EvaluationReport
    resume: str | None


class ScoreDocument(JsonDocument):
    """The summary of `pvg score`. The scores are in the file `out`, one object per line."""

    run: str
    round: int
    rows: int
    accepted: int
    threshold: float
    calibrated: bool
    verifier_version: str
    out: str | None


class ExportDocument(JsonDocument):
    """The facts of an export, which are also in `pvg.json` of its folder. A verifier has more facts than a prover."""

    model_config = ConfigDict(extra="allow")

    out: str
    url: str | None
    player: Literal["prover", "verifier"]
    run: str
    round: int


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


class CompareDocument(JsonDocument):
    """Two benchmark reports. `failed`: a metric is worse than --fail-above, and the exit code is 1."""

    a: ReportSide
    b: ReportSide
    profile: str
    name: str
    same: bool
    environment: list[FieldDifference]
    settings: list[FieldDifference]
    metrics: list[MetricComparison]
    left_out: list[str]
    peak_memory: dict[str, list[float]]
    tested: int
    confidence: float
    joint_confidence: float
    fail_above: float | None
    counts: dict[str, int]
    failed: bool


class ProfilePass(DocumentPart):
    name: str
    walls_s: list[float]


class ProfileDocument(JsonDocument):
    """The results in `folder`. `slower_by`: how much longer a pass took than the first one. `missing`: by tool."""

    folder: str
    title: str
    operators: list[CostlyOperator]
    passes: list[ProfilePass]
    slower_by: dict[str, float]
    budget: TimeBudget | None
    files: list[ProfileFile]
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


class DiagnoseDocument(JsonDocument):
    """The causes that were found in a run, the costliest first. Times in seconds. `not_seen`: by cause, what the record
    lacks to check it. `with_load`: how weight updates depend on the requests in flight. `steps_s`: by phase."""

    run: str
    seconds: float
    findings: list[Finding]
    nothing_stands_out: bool
    not_seen: dict[str, str]
    timings_s: dict[str, TimingSummary]
    with_load: dict[str, LoadCorrelation]
    steps_s: dict[str, dict[str, float]]
    notes: list[str]


class DoctorDocument(JsonDocument):
    """The checks of `pvg doctor`. If `healthy` is false, the exit code is 1."""

    healthy: bool
    checks: list[CheckResult]


class ConfigShowDocument(JsonDocument):
    """All settings of an experiment. Without `schema_version`, `pvg config schema --json` is their schema."""

    model_config = ConfigDict(extra="allow")

    name: str
    seed: int


class SettingForm(DocumentPart):
    kinds: list[str]
    meaning: str
    type: str
    range: str
    default: str


class InnerSetting(DocumentPart):
    key: str
    kinds: list[str]
    meaning: str
    range: str
    default: str


class ConfigExplainDocument(JsonDocument):
    """A setting has `forms`; a table with kinds has `kinds` and `settings`; a section has `meaning` and `settings`.
    `experiments`: by name, the value that it sets."""

    key: str
    forms: list[SettingForm] = Field(default=[])
    meaning: str = ""
    default: str = ""
    kinds: dict[str, str] = Field(default={})
    settings: list[InnerSetting] = Field(default=[])
    experiments: dict[str, str] = Field(default={})


class ConfigValidateDocument(JsonDocument):
    """A valid experiment. For settings that are wrong, the command prints an error."""

    valid: Literal[True]
    name: str
    hash: str
    warnings: list[str]


class InitDocument(JsonDocument):
    """`files`: what was written. `next`: by command, its purpose."""

    files: list[str]
    next: dict[str, str]


class SchemaEntry(DocumentPart):
    name: str
    version: int
    about: str


class SchemasDocument(JsonDocument):
    """The schemas that pvg makes."""

    schemas: list[SchemaEntry]


class ServeDocument(JsonDocument):
    """Printed when the server is ready. `pid`: end this process to stop the server."""

    url: str
    pid: int
    server_pid: int
    experiment: str
    purpose: Literal["prover", "verifier", "reference"] = Field(alias="for")
    model: str
    runner: str
    log: str
    weights_root: str
    python: str
    vllm: str
    device: str


class ServeVerifierDocument(JsonDocument):
    """Printed when the server is ready."""

    url: str
    run: str
    round: int


class WatchDocument(JsonDocument):
    """Printed when the page is ready. `forward`: an ssh command that shows it on another machine."""

    url: str
    run: str
    path: str
    forward: str


# Name -> the command that prints the document, and its class.
DOCUMENTS: dict[str, tuple[str, type[BaseModel]]] = {
    "error": ("any command", ErrorDocument),
    "train": ("pvg train", TrainDocument),
    "train-dry-run": ("pvg train --dry-run", DryRunDocument),
    "rollout": ("pvg rollout", RolloutDocument),
    "task-check": ("pvg task check NAME", TaskCheckDocument),
    "runs-list": ("pvg runs list", RunsListDocument),
    "runs-show": ("pvg runs show RUN", RunsShowDocument),
    "runs-tag": ("pvg runs tag RUN", RunsTagDocument),
    "runs-remove": ("pvg runs remove RUN", RunsRemoveDocument),
    "report": ("pvg report RUN", ReportDocument),
    "report-runs": ("pvg report RUN RUN", ReportRunsDocument),
    "report-benchmarks": ("pvg report FILE", ReportBenchmarksDocument),
    "evaluate": ("pvg evaluate RUN", EvaluateDocument),
    "score": ("pvg score RUN FILE.jsonl --out FILE", ScoreDocument),
    "export": ("pvg export RUN --player prover --out DIR", ExportDocument),
    "bench": ("pvg bench --profile NAME", BenchDocument),
    "bench-profiles": ("pvg bench", BenchProfilesDocument),
    "compare": ("pvg compare A B", CompareDocument),
    "profile": ("pvg profile", ProfileDocument),
    "plan": ("pvg plan", PlanDocument),
    "study": ("pvg study NAME", StudyDocument),
    "study-list": ("pvg study", StudyListDocument),
    "study-plan": ("pvg study NAME --dry-run", StudyPlanDocument),
    "diagnose": ("pvg diagnose RUN", DiagnoseDocument),
    "doctor": ("pvg doctor", DoctorDocument),
    "config-show": ("pvg config show", ConfigShowDocument),
    "config-explain": ("pvg config explain KEY", ConfigExplainDocument),
    "config-validate": ("pvg config validate", ConfigValidateDocument),
    "init": ("pvg init", InitDocument),
    "schemas": ("pvg schemas", SchemasDocument),
    "serve": ("pvg serve EXPERIMENT", ServeDocument),
    "serve-verifier": ("pvg serve RUN --player verifier", ServeVerifierDocument),
    "watch": ("pvg watch RUN", WatchDocument),
}


# Files of pvg that other programs read: name -> the file, and its class.
FILES: dict[str, tuple[str, type[BaseModel]]] = {
    "evaluation.json": ("the file runs/NAME/evaluation/evaluation.json", EvaluationReport),
    "study.json": ("the file runs/STUDY/study.json", StudyResults),
    "benchmark-report": ("the files that pvg bench writes, and pvg compare reads", BenchReport),
}


class DocumentSchema(GenerateJsonSchema):
    """A number may be null: JSON has no other word for one that is not finite, such as a mean of no values. A dataclass
    is written with all its fields, and no others."""

    def float_schema(self, schema: core_schema.FloatSchema) -> JsonSchemaValue:
        return {"type": ["number", "null"]}

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        return {**found, "required": sorted(found["properties"]), "additionalProperties": False}


def schemas() -> dict[str, JsonSchemaValue]:
    """Name -> JSON Schema: first of the files that pvg writes, then of the documents that commands print."""
    found = {name: _schema(kind, about) for name, (about, kind) in FILES.items()}
    return found | {
        name: _schema(kind, command if name == "error" else f"{command} --json")
        for name, (command, kind) in DOCUMENTS.items()
    }


def _schema(kind: type[BaseModel], title: str) -> JsonSchemaValue:
    made = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=DocumentSchema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": title}
