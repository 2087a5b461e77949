"""The documents about runs: playing, listing, reporting, evaluating and exporting them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from pvg.bench.report import BenchReport
from pvg.evaluation.report import EvaluationReport
from pvg_cli.documents.base import DocumentPart, JsonDocument, Metrics, Settings

# --- train and rollout -----------------------------------------------------------------------------------------------


class RoundMetrics(DocumentPart):
    round: int
    metrics: Metrics


class AlertDetails(DocumentPart):
    round: int
    phase: str
    step: int | None
    name: str
    message: str


class TrainDocument(JsonDocument):
    """A run that is complete or was stopped. `seconds`: the time of this call. `resume`: the command that resumes a
    stopped run."""

    status: Literal["complete", "interrupted"]
    run: str
    path: str
    experiment: str
    seconds: float
    rounds: list[RoundMetrics]
    alerts: list[AlertDetails]
    resume: str | None


class PendingDownload(DocumentPart):
    """The files of one repository. `missing`: those not in the cache. `size`: their bytes."""

    files: int
    missing: int
    size: int


class BatchNumbers(DocumentPart):
    """Numbers that follow from the settings."""

    groups: int
    group_size: int
    rollouts_per_batch: int
    optimizer_steps_per_batch: int
    rollouts_per_optimizer_step: int
    micro_batch_rollouts: int
    accumulation_steps: int
    completion_tokens_per_batch: int
    mint_rollouts_per_round: int
    verifier_pairs_per_round: int
    prover_rollouts_per_round: int
    verifier_update_steps_per_round: int
    optimizer_steps: int


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
    arithmetic: BatchNumbers
    hash: str
    run: str
    resume: bool
    downloads: dict[str, PendingDownload]
    preview: TaskPreview | None
    warmup: WarmStartNumbers | None = None


class RolloutDocument(JsonDocument):
    """Samples of `pvg rollout`, and their metrics."""

    status: Literal["complete", "interrupted"]
    run: str
    path: str
    seconds: float
    metrics: Metrics


# --- runs ------------------------------------------------------------------------------------------------------------


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


# --- report ----------------------------------------------------------------------------------------------------------


class PhaseDetails(DocumentPart):
    round: int
    phase: str
    finished: bool
    seconds: float | None
    steps: int
    metrics: Metrics
    budget: dict[str, float]


class StepDetails(DocumentPart):
    """`budget`: seconds by part; they sum to the step's wall time. `busy` also counts overlapped work."""

    round: int
    phase: str
    step: int
    of: int | None
    time: float | None
    metrics: Metrics
    budget: dict[str, float]
    busy: dict[str, float]
    device_s: dict[str, float]


class ScalingDetails(DocumentPart):
    time: float
    workers: int
    why: str


class ProcessDetails(DocumentPart):
    status: str
    seconds: float | None
    budget: dict[str, float]


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
    phases: list[PhaseDetails]
    steps: list[StepDetails]
    alerts: list[AlertDetails]
    budget: dict[str, float]
    busy: dict[str, float]
    hidden: dict[str, float]
    device: dict[str, ValueRange]
    loop: dict[str, float]
    workers: dict[str, ValueRange]
    scaling: list[ScalingDetails]
    processes: list[ProcessDetails]
    machine: str
    code_version: str
    began: float | None
    peak_memory: dict[str, float]
    seconds: float
    notes: list[str]
    damaged: bool
    warnings: list[str]


class ExampleSolution(DocumentPart):
    """A solution. `why`: the reason for choosing it. `dialogue`: writer and text of the turns after the solution."""

    why: str
    id: str
    role: Literal["helpful", "sneaky"]
    round: int
    source: str
    question: str
    text: str
    reference: str
    answer: str | None
    correct: bool
    well_formed: bool
    note: str
    score: float | None
    reward: float | None
    solver_text: str | None
    dialogue: list[list[str]]


class ReportDocument(RunResults, JsonDocument):
    """One run. `evaluation`: the results of `pvg evaluate`. `html`: the page, null with --no-html. `rollouts_html`: the
    page with all solutions, null with --no-html or without solutions."""

    evaluation: EvaluationReport | None
    examples: list[ExampleSolution]
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


# --- evaluate, score, export -----------------------------------------------------------------------------------------


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
