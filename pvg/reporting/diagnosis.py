"""`pvg diagnose`: known problems (signatures) in the record of a run, with the numbers that show them.

A signature is a function from the times of a run to a `Criterion`. To add one: write the function and add it to
SIGNATURES. It is reported if its criterion is met and it costs at least LEAST_SHARE of the time. Loop lag is also
reported if a warning level was crossed, because a single stall can cause timeouts. The advice is general: it names
settings, not their values.
"""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pvg.config.experiment import Experiment
from pvg.errors import UsageError, counted
from pvg.reporting.formats import duration, percent, short_seconds
from pvg.reporting.run_summary import RunSummary, SamplerReading, read_run
from pvg.reporting.table import Column, Table
from pvg.reporting.terminal import HEADING, QUIET, pairs, section
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.spans import add_seconds
from pvg.telemetry.waits import LAG_LIMITS, SHARED, CoreTime, LagLimits

LEAST_SHARE = 0.05  # of the time; a smaller gain is within the noise between two runs on one machine
LEAST_EVENTS = 5  # fewer updates or steps show no pattern
DOMINATES = 0.5  # of an update's wall time: the larger half
CHECKPOINT_SHARE = 0.10  # of the time; more is too much for protection against a crash
STARVED_SHARE = 0.5  # of the steps' time; sampling and training in turns are balanced there
STRAGGLING_SHARE = 2 / 3  # of the slowest group's wait: the slowest then takes three times as long as the middle one
IDLE_WORKERS = 0.5  # of the time; two turns of equal length, the driver's and theirs, have this share
UNBALANCED = 0.2  # between the busiest worker and the mean; samples of 5 s differ by half of this by chance
OTHERS_CORES = 0.2  # cores that other programs use; less is the system itself
TICK_S = 0.1  # between two samples of the event loop
WORST = 3  # pieces of evidence per finding
UNSAMPLED = frozenset({"train_verifier", "warmup"})  # the steps of these phases do not wait for rollouts
NOTHING_TO_SET = "pvg knows no setting that would help."

_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TIMINGS: dict[str, str] = _DATA["timings"]  # quantity -> its row of the table
# Cause -> what to change, the keys of settings, and what else that changes: a name in CHANGES.
ADVICE: dict[str, tuple[str, str, str]] = _DATA["advice"]
CHANGES: dict[str, str] = _DATA["changes"]


@dataclass(frozen=True, slots=True)
class Evidence:
    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A signature that was seen. `measured` is compared with `threshold`, both as `criterion` says; `cost_s` seconds
    are lost, `share` of the time of the run. `settings` and `remedy` leave what is learned as it is; `changes` says
    what else they change. `trade_offs` are settings that change what is learned, which `trade` explains."""

    signature: str
    says: str
    criterion: str
    measured: float
    threshold: float
    cost_s: float
    share: float
    settings: tuple[str, ...]
    remedy: str
    changes: str
    trade_offs: tuple[str, ...]
    trade: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class TimingSummary:
    """A quantity over the run, in seconds."""

    n: int
    p50: float
    p95: float
    p99: float
    max: float
    total: float


@dataclass(slots=True)
class Quantity:
    """All values of one quantity, each with its evidence."""

    values: list[float] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def total(self) -> float:
        return math.fsum(self.values)

    @property
    def mean(self) -> float:
        return self.total / self.n

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def largest(self) -> float:
        return max(self.values, default=0.0)

    def worst(self) -> tuple[Evidence, ...]:
        """Of the largest values, the largest first; the earlier of equals."""
        order = sorted(range(self.n), key=lambda place: -self.values[place])
        return tuple(self.evidence[place] for place in order[:WORST])

    def summary(self) -> TimingSummary:
        p50, p95, p99 = np.quantile(self.values, (0.5, 0.95, 0.99)).tolist()
        return TimingSummary(self.n, p50, p95, p99, self.largest, self.total)


class RunTimes:
    """The quantities that the signatures look at, from the record of a run."""

    def __init__(self, experiment: Experiment, summary: RunSummary, limits: LagLimits = LAG_LIMITS) -> None:
        self.experiment, self.summary, self.limits = experiment, summary, limits
        self.seconds = summary.seconds
        self.machine_cores, self.usable_cores = (summary.cores.get(name, 0.0) for name in ("machine", "usable"))
        self.most_workers = max((reading.metrics.get("up", 0.0) for reading in summary.workers), default=0.0)
        self.quantities: defaultdict[str, Quantity] = defaultdict(Quantity)
        self.phases: dict[str, dict[str, float]] = {}  # phase -> steps, step_s, train_s, idle_s
        self.truncated = any(step.metrics.get("truncated") for step in summary.steps)
        # Of the driver, and of its workers: sums over the windows; `longest_s` sums the longest wait of each window.
        self.cores: CoreTime | None = None
        self.worker_cores: CoreTime | None = None
        self.lagged_s = self.lagged_shared_s = 0.0  # lower bounds of the time in which the event loop was blocked
        self._add_steps()
        self._add_loop()
        self._add_workers()
        self._add_machine()

    @property
    def others_run(self) -> bool:
        """Whether other programs used cores. Yes, if the run has no samples of the machine."""
        others = self.quantities["other_cores"]
        return not others.n or others.mean >= OTHERS_CORES

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _note(self, name: str, value: float, where: str, numbers: Mapping[str, float]) -> None:
        text = "  ".join(f"{key} {number:.4g}" for key, number in numbers.items())
        self.quantities[name].values.append(value)
        self.quantities[name].evidence.append(Evidence(where, text))

    def _add_steps(self) -> None:
        for step in self.summary.steps:
            where, found = f"round {step.round}, {step.phase}, step {step.step}", step.metrics
            times = _chosen(found, "latency_p50_s", "latency_p99_s", "group_wait_p50_s", "group_wait_max_s")
            if "weights_wall_s" in found:
                times |= _chosen(found, "weights_wall_s", "weights_queue_s")
                loading_s = found["weights_wall_s"] - found["weights_queue_s"]
                times["weights_load_s"] = round(loading_s, 6)
            if step.budget.get("checkpoint"):
                times["checkpoint_s"] = step.budget["checkpoint"]
            if "trainer_idle" in found:
                wall_s = sum(step.budget.values())
                idle_s = wall_s * found["trainer_idle"]
                of_step = {"step_s": wall_s, "train_s": wall_s - idle_s, "idle_s": idle_s}
                times |= of_step
                add_seconds(self.phases.setdefault(step.phase, {}), {"steps": 1.0, **of_step})
            shown = times | _chosen(found, "weights_in_flight")
            for name, value in times.items():
                family = name.partition("_")[0]
                self._note(name, value, where, {key: shown[key] for key in shown if key.startswith(family)})
        for phase in self.summary.phases:
            if seconds := phase.budget.get("checkpoint"):
                where = f"round {phase.round}, {phase.phase}, between steps"
                self._note("checkpoint_s", seconds, where, {"checkpoint_s": seconds})

    def _add_loop(self) -> None:
        """The lags, and a lower bound of the time in which the loop was blocked. Each sample is the lag of one tick.
        During a stall over several ticks each tick counts the rest of it, so a sample counts at most until the next
        tick. At least 40% of the samples are above p50, a further 9% above p90, and 1% above p99."""
        windows = []
        for reading in self.summary.loop:
            found = reading.metrics
            lags = _chosen(found, "lag_p50_s", "lag_p90_s", "lag_p99_s", "lag_max_s")
            p50, p90, p99 = (min(TICK_S, lags[f"lag_{name}_s"]) for name in ("p50", "p90", "p99"))
            from_shares = found.get("samples", 0.0) * (0.4 * p50 + 0.09 * p90 + 0.01 * p99)
            lagged_s = max(from_shares, lags["lag_max_s"])
            for name in ("lag_p90_s", "lag_p99_s", "lag_max_s"):
                self._note(name, lags[name], self._moment(reading), lags)
            self.lagged_s += lagged_s
            if (window := self._window(reading)) is not None:
                windows.append(window)
                self.lagged_shared_s += lagged_s if window.shared else 0.0
        self.cores = reduce(add, windows) if windows else None

    def _add_workers(self) -> None:
        for reading in self.summary.workers:
            found = _chosen(reading.metrics, "busy", "busy_most", "core_wait")
            for name in found.keys() & {"busy", "busy_most"}:
                self._note(name, found[name], self._moment(reading), found)
        windows = [window for reading in self.summary.workers if (window := self._window(reading)) is not None]
        self.worker_cores = reduce(add, windows) if windows else None

    def _add_machine(self) -> None:
        """How many cores of the machine all programs used, and how many of them pvg."""
        for reading in self.summary.device:
            if self.machine_cores and reading.metrics.keys() >= {"cpu", "process_cpu"}:
                busy, own = reading.metrics["cpu"] * self.machine_cores, reading.metrics["process_cpu"]
                used = {"busy_cores": busy, "own_cores": own}
                self._note("other_cores", max(0.0, busy - own), self._moment(reading), used)

    def _window(self, reading: SamplerReading) -> CoreTime | None:
        """The waits for cores of a window; None if the system is not Linux."""
        window = CoreTime.of_metrics(reading.metrics)
        if window is not None:
            numbers = _chosen(reading.metrics, "ran_s", "waited_s", "longest_wait_s")
            self._note("longest_wait_s", window.longest_s, self._moment(reading), numbers)
        return window

    def _moment(self, reading: SamplerReading) -> str:
        return f"after {duration(reading.time - (self.summary.began or reading.time))}"

    # --- the cost of a finding ----------------------------------------------------------------------------------------

    def share(self, cost_s: float) -> float:
        return cost_s / self.seconds if self.seconds else 0.0


def _chosen(metrics: Mapping[str, float], *names: str) -> dict[str, float]:
    return {name: metrics[name] for name in names if name in metrics}


# --- advice -----------------------------------------------------------------------------------------------------------


def _for_cores(times: RunTimes) -> list[str]:
    """The advice for threads that wait for a core."""
    threads, cores = times.summary.cores.get("threads", 1.0), times.usable_cores or 1.0
    found = ["own-cores"] if times.others_run else []
    if threads > cores:
        found.append("fewer-threads")
    elif threads > 1 and times.others_run:
        found.append("one-thread")
    return [*found, "fewer-workers"] if times.most_workers > cores else found


# --- signatures -------------------------------------------------------------------------------------------------------


class Criterion(NamedTuple):
    """What a signature measures: it is met from `threshold` on. `cost_s` seconds are lost. `advice`: keys of ADVICE.
    `evidence`: the quantity whose largest values are shown. `urgent`: also reported if the cost is small."""

    says: str
    words: str
    measured: float
    threshold: float
    cost_s: float
    advice: Sequence[str]
    evidence: str
    urgent: bool = False


def front_end_queue(times: RunTimes) -> Criterion:
    """Weight updates wait before the engine loads them."""
    queue, wall = times.quantities["weights_queue_s"], times.quantities["weights_wall_s"]
    share = queue.total / max(wall.total, 1e-9)
    says = f"Weight updates spend {percent(share)} of their wall time waiting, not loading."
    own_engine = times.experiment.rollout.engine.kind == "torch"
    advice = ["fewer-rows"] if own_engine else ["fewer-requests"]
    words = "queue / wall time of the updates"
    return Criterion(says, words, share, DOMINATES, queue.total, advice, "weights_queue_s")


def engine_reload(times: RunTimes) -> Criterion:
    """The engine itself takes long to load the weights."""
    load, wall = times.quantities["weights_load_s"], times.quantities["weights_wall_s"]
    share = load.total / max(wall.total, 1e-9)
    says = f"Loading weights takes the engine {short_seconds(load.median)} (median), {percent(share)} of an update."
    advice = ("smaller-weights", "weights-in-memory", "larger-batches", "more-minibatches")
    words = "loading / wall time of the updates"
    return Criterion(says, words, share, DOMINATES, load.total, advice, "weights_load_s")


def checkpoint(times: RunTimes) -> Criterion:
    """The run waits for commits."""
    found = times.quantities["checkpoint_s"]
    share = times.share(found.total)
    says = f"The run waits for checkpoints {percent(share)} of the time: {short_seconds(found.median)} each (median)."
    advice, words = ("rarer-commits", "faster-disk"), "time of checkpoints / time"
    return Criterion(says, words, share, CHECKPOINT_SHARE, found.total, advice, "checkpoint_s")


def starved_trainer(times: RunTimes) -> Criterion:
    """The trainer waits for something to train on."""
    phase, sums = max(times.phases.items(), key=lambda item: item[1]["idle_s"])
    share = sums["idle_s"] / max(sums["step_s"], 1e-9)
    says = f"In the steps of {phase} the trainer is idle {percent(share)} of the time: it waits for other work."
    shorter = ["shorter-solutions"] if times.truncated else []  # otherwise no completion hit the limit
    sampling = ["more-requests", "more-rows", "sample-ahead", *shorter, "more-minibatches"]
    advice = [*(sampling if phase not in UNSAMPLED else []), "budget"]
    words = "idle / wall time of the steps"
    return Criterion(says, words, share, STARVED_SHARE, sums["idle_s"], advice, "idle_s")


def stragglers(times: RunTimes) -> Criterion:
    """One slow rollout delays its group, and the group delays the batch."""
    slowest, middle = times.quantities["group_wait_max_s"], times.quantities["group_wait_p50_s"]
    excess_s = slowest.total - middle.total
    share = excess_s / max(slowest.total, 1e-9)
    says = (
        f"The slowest group of a batch waits {short_seconds(slowest.median)} for its last rollout, the middle group "
        f"{short_seconds(middle.median)} (medians over {slowest.n} batches)."
    )
    words = "(slowest - middle) / slowest group's wait"
    advice = [*(["shorter-solutions"] if times.truncated else []), "whole-groups", "deadline"]
    return Criterion(says, words, share, STRAGGLING_SHARE, excess_s, advice, "group_wait_max_s")


def loop_lag(times: RunTimes) -> Criterion:
    """The event loop is blocked, so requests, weight updates and all other work on it are late. Either something
    computes on the loop, or other programs use the cores."""
    levels = {"p90": times.limits.p90_s, "p99": times.limits.p99_s, "max": times.limits.max_s}
    crossed = {name: times.quantities[f"lag_{name}_s"].largest / level for name, level in levels.items()}
    name, ratio = max(crossed.items(), key=lambda item: item[1])
    urgent = ratio > 1.0
    says = f"The event loop was late by {short_seconds(times.quantities['lag_max_s'].largest)} at worst"
    if urgent:
        largest, level = short_seconds(ratio * levels[name]), short_seconds(levels[name])
        says += f"; the {name} of a window reached {largest} (warning level {level})"
    says += f". It was blocked for at least {short_seconds(times.lagged_s)} in all"
    if times.lagged_shared_s > times.lagged_s / 2:
        waited = short_seconds(times.lagged_shared_s)
        says += f", {waited} of it while pvg's threads waited for cores that were busy."
        advice = _for_cores(times)
    else:
        says += ". Something computes on it that should run in a thread."
        advice = ["profile", "fewer-requests"]
    if urgent:
        words, evidence = f"largest {name} / its warning level", f"lag_{name}_s"
        return Criterion(says, words, ratio, 1.0, times.lagged_s, advice, evidence, urgent)
    share = times.share(times.lagged_s)
    return Criterion(says, "blocked time / time", share, LEAST_SHARE, times.lagged_s, advice, "lag_max_s")


def shared_machine(times: RunTimes) -> Criterion:
    """Other programs use the cores while threads of pvg, or its workers, are ready to run. The kernel counts such waits
    on Linux."""
    found = [cores for cores in (times.cores, times.worker_cores) if cores is not None]
    cores = reduce(add, found)
    longest_s = max(part.longest_s for part in found)  # driver and workers wait at the same time
    others = times.quantities["other_cores"]
    why = "because other programs use the cores too"
    if others.n and times.others_run:
        why = f"because other programs used {others.mean:.1f} of {times.machine_cores:g} cores"
    elif others.n:
        why = "although hardly anything else ran: pvg has more threads and processes than cores"
    whose = "its threads" if times.worker_cores is None else "the threads of all its processes"
    says = (
        f"Added up over {whose}, pvg ran for {short_seconds(cores.ran_s)} and waited {short_seconds(cores.waited_s)} "
        f"for a core, {why}. Other times in this record are longer for the same reason."
    )
    words = "time threads waited for a core / time they were ready to run"
    return Criterion(says, words, cores.share, SHARED, longest_s, _for_cores(times), "longest_wait_s")


def idle_workers(times: RunTimes) -> Criterion:
    """The workers wait for the driver."""
    idle = 1.0 - times.quantities["busy"].mean
    says = f"The workers had nothing to do for {percent(idle)} of the time: the driver does not give them enough."
    advice = ("fewer-idle-workers", "larger-batches", "sample-ahead")
    return Criterion(says, "mean time without work / time", idle, IDLE_WORKERS, idle * times.seconds, advice, "busy")


def unbalanced_workers(times: RunTimes) -> Criterion:
    """One worker has much more to do than the others, which wait for it."""
    busy, most = times.quantities["busy"], times.quantities["busy_most"]
    gap = most.mean - busy.mean
    says = (
        f"The busiest worker had work for {percent(most.mean)} of the time, the mean worker for {percent(busy.mean)}: "
        "the others wait for the slowest."
    )
    advice, words = ("equal-shares", "slow-machine"), "share of the busiest worker - mean share"
    return Criterion(says, words, gap, UNBALANCED, gap * times.seconds, advice, "busy_most")


class Question(NamedTuple):
    """A signature. `look` needs at least `least` values of one of the quantities `of`. `lacks`: what they are."""

    look: Callable[[RunTimes], Criterion]
    of: Sequence[str]
    lacks: str
    least: int = LEAST_EVENTS

    def unknown(self, times: RunTimes) -> str:
        """What the record lacks to answer; empty if it lacks nothing."""
        count = max(times.quantities[name].n for name in self.of)
        if count >= self.least:
            return ""
        noun, space, more = self.lacks.partition(" ")
        return f"{counted(count, noun)}{space}{more}; {self.least} are needed" if self.least > 1 else self.lacks


SIGNATURES = {
    "front-end-queue": Question(front_end_queue, ["weights_queue_s"], "update of weights"),
    "engine-reload": Question(engine_reload, ["weights_load_s"], "update of weights"),
    "checkpoint": Question(checkpoint, ["checkpoint_s"], "wait for a commit"),
    "starved-trainer": Question(starved_trainer, ["step_s"], "step with an idle time"),
    "stragglers": Question(stragglers, ["group_wait_max_s"], "step with waits of groups"),
    "loop-lag": Question(loop_lag, ["lag_max_s"], "measurements of the event loop", 1),
    "shared-machine": Question(shared_machine, ["longest_wait_s"], "how long threads waited for cores", 1),
    "idle-workers": Question(idle_workers, ["busy"], "sample of the workers"),
    "unbalanced-workers": Question(unbalanced_workers, ["busy"], "sample of the workers"),
}
OF_WORKERS = ("idle-workers", "unbalanced-workers")  # not asked of a run without workers


def _finding(times: RunTimes, signature: str, found: Criterion) -> Finding:
    chosen = [ADVICE[name] for name in found.advice]
    plain = [advice for advice in chosen if advice[2] != "learned"]
    trades = [advice for advice in chosen if advice[2] == "learned"]
    return Finding(
        signature,
        found.says,
        found.words,
        found.measured,
        found.threshold,
        cost_s=found.cost_s,
        share=times.share(found.cost_s),
        settings=_keys(plain),
        remedy=_sentences(plain) or NOTHING_TO_SET,
        changes=" ".join(dict.fromkeys(CHANGES[advice[2]] for advice in plain if advice[2])),
        trade_offs=_keys(trades),
        trade=f"{CHANGES['learned']} {_sentences(trades)}" if trades else "",
        evidence=times.quantities[found.evidence].worst(),
    )


def _keys(advice: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for _, keys, _ in advice for key in keys.split()))


def _sentences(advice: Sequence[tuple[str, str, str]]) -> str:
    return " ".join(sentence for sentence, _, _ in advice)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`findings` are sorted by cost, highest first. `not_seen`: signature -> what the record lacks to check it.
    `steps_s`: phase -> its steps, and their wall, training and idle time. `notes` are about damage of the record."""

    run: str
    seconds: float
    findings: tuple[Finding, ...]
    not_seen: dict[str, str]
    timings_s: dict[str, TimingSummary]
    steps_s: dict[str, dict[str, float]]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "nothing_stands_out": not self.findings}


def diagnose(run: RunDirectory, limits: LagLimits = LAG_LIMITS) -> Diagnosis:
    """Look for every signature in the record of a run. Raises UsageError if it has no step yet, and what `read_run`
    raises."""
    times = RunTimes(run.experiment(), read_run(run), limits)
    if not times.summary.steps:
        raise UsageError(f"The run {run.name!r} has not recorded any step.", "Diagnose it after its first step.")
    asked = {name: of for name, of in SIGNATURES.items() if times.summary.workers or name not in OF_WORKERS}
    unknown = {name: lacks for name, of in asked.items() if (lacks := of.unknown(times))}
    looked = {name: of.look(times) for name, of in asked.items() if name not in unknown}
    findings = [
        _finding(times, name, found)
        for name, found in looked.items()
        if found.measured >= found.threshold and (found.urgent or times.share(found.cost_s) >= LEAST_SHARE)
    ]
    return Diagnosis(
        run=run.name,
        seconds=times.seconds,
        findings=tuple(sorted(findings, key=lambda finding: -finding.cost_s)),
        not_seen=unknown,
        timings_s={name: times.quantities[name].summary() for name in TIMINGS if times.quantities[name].n},
        steps_s=times.phases,
        notes=tuple(times.summary.notes),
    )


# --- on the terminal --------------------------------------------------------------------------------------------------


def rendered(found: Diagnosis) -> Group:
    """Everything that `pvg diagnose` prints, in order, without empty parts. No text is read as markup."""
    parts: list[RenderableType] = [Text.assemble((found.run, "bold"), (f"  {duration(found.seconds)}", QUIET))]
    for number, finding in enumerate(found.findings, start=1):
        parts += [Text(), _shown(number, finding)]
    if not found.findings:
        parts += [Text(), Text(f"Nothing stands out{' in what the record has' if found.not_seen else ''}.", "green")]
    parts += section("Timings", _timings_table(found))
    if found.not_seen:
        parts += section("Not in the record", pairs(found.not_seen.items()))
    if found.notes:
        parts += section("Notes", Text("\n".join(found.notes), "yellow", overflow="fold"))
    return Group(*parts)


def _shown(number: int, finding: Finding) -> Group:
    cost = f"{percent(finding.share)} of the time, {duration(finding.cost_s)}"
    head = Text.assemble((f"{number}  {finding.signature}", "bold yellow"), (f"   {cost}", HEADING))
    measured, threshold = (
        percent(value) if finding.threshold < 1.0 else f"{value:.2g}" for value in (finding.measured, finding.threshold)
    )
    rows = [("seen", finding.says), ("criterion", f"{finding.criterion}: {measured} (threshold {threshold})")]
    if finding.settings:
        rows.append(("change", ", ".join(finding.settings)))
    rows.append(("" if finding.settings else "advice", f"{finding.remedy} {finding.changes}".strip()))
    if finding.trade:
        rows += [("trade-off", ", ".join(finding.trade_offs)), ("", finding.trade)]
    for place, evidence in enumerate(finding.evidence):
        rows.append(("" if place else "evidence", f"{evidence.where}  {evidence.text}"))
    return Group(head, Padding(pairs(rows), (0, 0, 0, 3)))


def _timings_table(found: Diagnosis) -> Table:
    titles = ("n", "p50", "p95", "p99", "max", "in all")
    table = Table([Column(wrap=False), *(Column(title, "right", wrap=False) for title in titles)], narrow=True)
    for name, timing in found.timings_s.items():
        values = (timing.p50, timing.p95, timing.p99, timing.max)
        in_all = "" if name.startswith(("lag_", "latency_")) else short_seconds(timing.total)  # percentiles have no sum
        table.add(TIMINGS[name], f"{timing.n:,}", *map(short_seconds, values), in_all)
    return table
