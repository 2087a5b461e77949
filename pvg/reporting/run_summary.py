"""A run directory read into plain data: what `pvg view` and the end of `pvg train` show.

Reads experiment.toml, state.json and metrics.jsonl. The last two may be unfinished or missing. An incomplete last line
(the run was killed while writing it, or is writing it now) is left out and noted. Lines that differ from the commit are
noted too. If a step was recorded twice, the last record counts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pvg.config.experiment import Experiment
from pvg.errors import PvgError, counted, user_paths
from pvg.reporting.formats import percent
from pvg.store.atomic import DamagedFileError
from pvg.store.run_directory import SAMPLING_PHASE, RunDirectory, has_only_samples, runs_in
from pvg.store.state import JsonLinesReader
from pvg.telemetry.spans import total_seconds
from pvg.telemetry.waits import SHARED

# "empty": nothing was committed; "samples": what `pvg rollout` makes, a run that is never played.
Status = Literal["empty", "samples", "unfinished", "complete"]
# "waiting": nothing has happened yet; "silent": its process lives, but does not beat; "failed": its process ended with
# an error; "died": its process is gone, and did not end the run; "removed": the run's folder is gone.
RunState = Literal["waiting", "running", "silent", "finished", "stopped", "failed", "died", "removed"]
# The word of a state wherever a user reads it, and its colour. JSON documents contain the name of the state.
WORDS: dict[RunState, tuple[str, Literal["good", "warn", "bad"]]] = {
    "waiting": ("empty", "warn"),
    "running": ("running", "good"),
    "silent": ("silent", "warn"),
    "finished": ("complete", "good"),
    "stopped": ("stopped", "warn"),
    "failed": ("failed", "bad"),
    "died": ("died", "bad"),
    "removed": ("removed", "bad"),
}
# The state of a run that no process plays, as far as its status tells it.
SETTLED: dict[Status, RunState] = {
    "empty": "waiting",
    "samples": "finished",
    "unfinished": "stopped",
    "complete": "finished",
}


def state_word(
    state: RunState | None, status: Status, damaged: bool = False
) -> tuple[str, Literal["good", "warn", "bad"]]:
    """The word of a run's state, and its colour. `state`: None for a run that this process has just ended. `damaged`:
    whether files are damaged that tell the state (pvg.reporting.run_summary.committed_state)."""
    known = SETTLED[status] if state is None else state
    if damaged and known != "removed":
        return "damaged", "bad"
    return ("samples", "good") if status == "samples" and known == "finished" else WORDS[known]


NOTEWORTHY = 0.005  # share of all steps' time; less overlap than this is not reported as hidden
WORKER = re.compile(r"w(\d+)_busy")
SAMPLERS = ("device", "loop", "workers")  # kinds of records that are readings


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of a phase: its finite metrics, and its seconds by part. `time` is in seconds since 1970.

    `budget` is exposed time and sums to the step's wall time. `busy` also counts overlapped work, `device_s` is time
    measured on a GPU (empty without one).
    """

    round: int
    phase: str
    step: int
    of: int | None
    time: float
    metrics: dict[str, float]
    budget: dict[str, float]
    busy: dict[str, float] = field(default_factory=dict)
    device_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """A phase that has started. `seconds` is the sum of its steps' budgets over all processes that played it, `budget`
    the time outside of steps."""

    round: int
    phase: str
    finished: bool
    seconds: float | None
    steps: int
    metrics: dict[str, float]
    budget: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AlertRecord:
    round: int
    phase: str
    step: int | None
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class SamplerReading:
    """One measurement of a sampler (device, event loop or workers) at `time`, in seconds since 1970."""

    time: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ScalingRecord:
    """A change of the number of worker processes at `time`, in seconds since 1970: the new number, and what was done
    and why."""

    time: float
    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class ProcessSummary:
    """A process that played the run and ended normally: all of its time by part."""

    status: str
    seconds: float
    budget: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run read from its files: metrics by finished round, phases in order, steps, and their time.

    `budget` is seconds by part over all steps, largest first and `unaccounted` last. `busy` also counts overlapped
    work. `notes` are about files, `warnings` about settings. `machine`, `code_version` and `peak_memory` (bytes, of the
    largest process) are those of the last commit. `cores` of the newest process: its compute threads, and the usable
    cores and all cores of its machine. `damaged`: files of its state are damaged.
    """

    name: str
    path: Path
    experiment: str
    config_hash: str
    status: Status
    phase: str
    rounds_planned: int
    rounds: dict[int, dict[str, float]]
    phases: list[PhaseSummary]
    steps: list[StepRecord]
    alerts: list[AlertRecord]
    budget: dict[str, float]
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    device: list[SamplerReading] = field(default_factory=list)
    loop: list[SamplerReading] = field(default_factory=list)
    workers: list[SamplerReading] = field(default_factory=list)
    scaling: list[ScalingRecord] = field(default_factory=list)
    processes: list[ProcessSummary] = field(default_factory=list)
    machine: str = ""
    code_version: str = ""
    began: float | None = None
    peak_memory: dict[str, float] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)
    damaged: bool = False

    @property
    def hidden(self) -> dict[str, float]:
        """Seconds by part that overlapped with another part; without negligible amounts."""
        least = NOTEWORTHY * sum(self.budget.values())
        over = {part: seconds - self.budget.get(part, 0.0) for part, seconds in self.busy.items()}
        return {part: seconds for part, seconds in over.items() if seconds > least}

    @property
    def seconds(self) -> float:
        """The time of all phases, without pauses between two processes."""
        return sum(phase.seconds or 0.0 for phase in self.phases)

    def series(self, name: str, phase: str | None = None) -> list[float]:
        """The values of metric `name` over the steps (of one phase, or of all), in order; missing ones are skipped."""
        return [s.metrics[name] for s in self.steps if name in s.metrics and phase in (None, s.phase)]

    def plain(self) -> dict[str, Any]:
        """As JSON-compatible data; rounds as a list in order, the samplers' readings as their ranges."""
        return {
            **asdict(replace(self, device=[], loop=[], workers=[])),
            "path": str(self.path),
            "device": reading_ranges(self.device),
            "loop": lag_summary(self.loop),
            "workers": reading_ranges(self.workers),
            "hidden": self.hidden,
            "seconds": self.seconds,
            "rounds": [{"round": number, "metrics": self.rounds[number]} for number in sorted(self.rounds)],
        }


def base_metrics(rounds: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of the base prover, which the first round measures."""
    every = {name: value for metrics in rounds.values() for name, value in metrics.items()}
    return {name.removeprefix("base_"): value for name, value in every.items() if name.startswith("base_")}


@user_paths()
def read_run(run: RunDirectory) -> RunSummary:
    """Summarise a run, finished or not. Raises ConfigurationError when its experiment.toml was damaged."""
    experiment = run.experiment()
    notes: list[str] = []
    state = committed_state(run, notes)
    damaged = bool(notes)
    try:
        run.verify_journal(state, run.metrics)
    except DamagedFileError as error:
        notes.append(str(error))
    found, status = _records(run, notes), status_of(state)
    steps = _steps(found["step"])
    ended = {(record["round"], record["phase"]): record for record in found["phase"]}
    committed = dict(enumerate(_finite(metrics) for metrics in state.get("rounds", ())))
    return RunSummary(
        name=run.name,
        path=run.path,
        experiment=experiment.name,
        config_hash=experiment.hash(),
        status=status,
        phase=state.get("phase", SAMPLING_PHASE),
        rounds_planned=experiment.game.rounds,
        rounds=committed | {record["round"]: _finite(record["metrics"]) for record in found["round"]},
        phases=_phases(ended, steps),
        steps=steps,
        alerts=list(
            dict.fromkeys(
                AlertRecord(r["round"], r["phase"], r.get("step"), r["name"], r["message"]) for r in found["alert"]
            )
        ),
        budget=total_seconds(step.budget for step in steps),
        notes=notes,
        # Most are about a game, and samples of `pvg rollout` are none.
        warnings=[] if status == "samples" else [f"{warning}." for warning in experiment.warnings()],
        busy=total_seconds(step.busy for step in steps),
        **{kind: _readings(found[kind]) for kind in SAMPLERS},
        scaling=[ScalingRecord(record["time"], record["workers"], record["why"]) for record in found["scaling"]],
        processes=[ProcessSummary(r["status"], r["seconds"], total_seconds([r["budget"]])) for r in found["run"]],
        machine=str(state.get("machine", "")),
        code_version=str(state.get("code_version", "")),
        peak_memory=_finite(state.get("peak_memory", {})),
        cores=_finite(found["start"][-1]["cores"]) if found["start"] else {},
        began=min((record["time"] for kind in found.values() for record in kind if "time" in record), default=None),
        damaged=damaged,
    )


def status_of(state: Mapping[str, Any]) -> Status:
    """How far a run is, from its committed state (empty: none)."""
    if state.get("phase") == "complete":
        return "complete"
    if has_only_samples(state):
        return "samples"
    return "empty" if state.get("phase", SAMPLING_PHASE) == SAMPLING_PHASE else "unfinished"


def has_ended(state: Mapping[str, Any], experiment: Experiment) -> bool:
    """Whether the run of a committed state is complete, and `experiment` gives it no more rounds."""
    begun = state.get("config", {}).get("game", {}).get("rounds", experiment.game.rounds)
    return status_of(state) == "complete" and bool(experiment.game.rounds <= begun)


def unfinished_runs(root: Path, experiment: str | None = None) -> list[RunDirectory]:
    """The runs in `root` that can be resumed, newest commit first; of one experiment, or of all.

    A run with a damaged experiment.toml or state is skipped. Resuming it by name reports the error.
    """
    found = []
    for name in runs_in(root):
        run = RunDirectory(root / name)
        try:
            of = run.experiment().name
            state = run.load_state().state or {}
        except PvgError:
            continue
        if status_of(state) in ("empty", "unfinished") and experiment in (None, of):
            touched = run.state if run.state.exists() else run.experiment_file
            found.append((touched.stat().st_mtime, run))
    return [run for _, run in sorted(found, key=lambda pair: pair[0], reverse=True)]


# --- reading -----------------------------------------------------------------------------------------------------


def committed_state(run: RunDirectory, notes: list[str]) -> dict[str, Any]:
    """The last commit; empty if there is none. Adds remarks on damaged files to `notes`. Every view of the run then
    shows "damaged" as its state."""
    try:
        loaded = run.load_state()
    except PvgError as error:
        notes.append(str(error))
        return {}
    if loaded.notice:
        notes.append(loaded.notice)
    return loaded.state or {}


# The fields that a record of each kind has.
NUMBER = int | float
FIELDS: dict[str, dict[str, Any]] = {
    "step": {"round": int, "phase": str, "step": int, "time": NUMBER, "metrics": dict, "budget": dict},
    "phase": {"round": int, "phase": str, "metrics": dict},
    "round": {"round": int, "metrics": dict},
    "alert": {"round": int, "phase": str, "name": str, "message": str},
    "device": {"time": NUMBER, "metrics": dict},
    "loop": {"time": NUMBER, "metrics": dict},
    "workers": {"time": NUMBER, "metrics": dict},
    "scaling": {"time": NUMBER, "workers": int, "why": str},
    "start": {"cores": dict},
    "run": {"status": str, "seconds": NUMBER, "budget": dict},
}


def _records(run: RunDirectory, notes: list[str]) -> defaultdict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl by kind, as far as they can be read. Adds remarks on other lines to `notes`."""
    found, foreign = defaultdict[str, list[dict[str, Any]]](list), 0
    if not run.metrics.is_file():
        notes.append(f"{run.metrics.name} is not there yet.")
        return found
    reader = JsonLinesReader(run.metrics)
    try:
        for record in reader:
            kind = record.get("kind")
            fields = FIELDS.get(kind, {}) if isinstance(kind, str) else {"kind": str}
            if all(isinstance(record.get(name), expected) for name, expected in fields.items()):
                found[str(kind)].append(record)
            else:
                foreign += 1
    except PvgError as error:
        notes.append(f"{error.message} What follows it is not shown.")
    if reader.torn:
        notes.append(f"The last line of {run.metrics.name} is incomplete and was left out.")
    if foreign:
        notes.append(f"{foreign} of the lines of {run.metrics.name} are not records of pvg and were left out.")
    return found


def _steps(records: Iterable[Mapping[str, Any]]) -> list[StepRecord]:
    """If a step was recorded twice, the last record counts, at the place of the first."""
    newest = {(record["round"], record["phase"], record["step"]): record for record in records}
    return [
        StepRecord(
            *place,
            of=record.get("of"),
            time=record["time"],
            metrics=_finite(record["metrics"]),
            budget=_finite(record["budget"]),
            busy=_finite(record.get("busy", {})),
            device_s=_finite(record.get("device_s", {})),
        )
        for place, record in newest.items()
    ]


def _readings(records: Iterable[Mapping[str, Any]]) -> list[SamplerReading]:
    """In order of time, because the machine's clock may have been set back."""
    readings = (SamplerReading(record["time"], _finite(record["metrics"])) for record in records)
    return sorted(readings, key=lambda reading: reading.time)


def _phases(ended: Mapping[tuple[int, str], dict[str, Any]], steps: list[StepRecord]) -> list[PhaseSummary]:
    """Every phase that has a step or an end, in the order in which they began. `ended`: the records of their ends."""
    own: dict[tuple[int, str], list[StepRecord]] = {}
    for step in steps:
        own.setdefault((step.round, step.phase), []).append(step)
    summaries = []
    for key in sorted(dict.fromkeys([*own, *ended]), key=lambda key: key[0]):  # stable: by round, then as they began
        end, found = ended.get(key, {}), own.get(key, [])
        # The phase's own clock restarts when the run is resumed. The steps' budgets cover all processes, but not the
        # time after the last step. The longer of the two is closer.
        worked_s = sum(sum(step.budget.values()) for step in found)
        seconds = max(worked_s, end.get("seconds") or 0.0) or None
        metrics, outside = _finite(end.get("metrics", {})), _finite(end.get("budget", {}))
        summaries.append(PhaseSummary(*key, key in ended, seconds, len(found), metrics, outside))
    return summaries


def reading_ranges(readings: Sequence[SamplerReading]) -> dict[str, dict[str, float]]:
    """The mean, lowest, highest and last value of every metric."""
    values = defaultdict[str, list[float]](list)
    for reading in readings:
        for name, value in reading.metrics.items():
            values[name].append(value)
    return {
        name: {"mean": sum(found) / len(found), "min": min(found), "max": max(found), "last": found[-1]}
        for name, found in values.items()
    }


def lag_summary(readings: Sequence[SamplerReading]) -> dict[str, float]:
    """The event loop's lag over all readings, in seconds. Percentiles cannot be merged, so p50 is that of the median
    reading, p90 and p99 those of the worst reading."""
    if not readings:
        return {}
    found = reading_ranges(readings)
    figures = {f"worst_{name}": found[f"lag_{name}"]["max"] for name in WORST_LAGS if f"lag_{name}" in found}
    if medians := sorted(reading.metrics["lag_p50_s"] for reading in readings if "lag_p50_s" in reading.metrics):
        figures["median_p50_s"] = medians[len(medians) // 2]
    return {**figures, "samples": sum(reading.metrics.get("samples", 0.0) for reading in readings)}


def workers_text(summary: RunSummary) -> str:
    """How many workers there were, how busy, and how often one was replaced."""
    readings, found = summary.workers, reading_ranges(summary.workers)
    words = [counted(round(found["up"]["max"]), "worker")]
    if summary.scaling:
        words[0] = f"{found['up']['min']:.0f} to {words[0]}"
    if "busy" in found:
        words.append(f"busy {percent(found['busy']['mean'])} of the time")
        names = sorted((name for name in found if WORKER.fullmatch(name)), key=lambda name: found[name]["mean"])
        if len(names) > 1:
            least, most = (percent(found[name]["mean"]) for name in (names[0], names[-1]))
            words[-1] += f" ({least} to {most})"
        if found["core_wait"]["mean"] > SHARED:
            words.append(f"{percent(found['core_wait']['mean'])} of that waiting for a core")
    # The count starts at 0 in every process of the run.
    counts = [0.0, *(reading.metrics.get("restarts", 0.0) for reading in readings)]
    restarts = sum(max(0.0, after - before) for before, after in itertools.pairwise(counts))
    return ", ".join([*words, counted(round(restarts), "replacement")])


WORST_LAGS = ("p90_s", "p99_s", "max_s")


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers. A mean of no values is null in the file."""
    return {
        name: float(value) for name, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }
