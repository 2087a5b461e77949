"""Takes the samples of one variant, or of several in turn, and makes the report of a whole call of `pvg bench`.

Every sample is one step of a tracer. The report contains its budget, and the runner adds its wall time as the measure
`wall_s`. Time between samples belongs to no sample.

Invariants:
- If a workload raises a PvgError or measures a value that is not finite, its variant is failed, with the reason and no
  metrics. Any other exception is a defect and propagates.
- Everything that was opened is closed, also after an error.

Variants run one after the other, or interleaved: all are open at once and take their samples in turn. The speed of a
shared machine drifts over minutes. Without interleaving, this drift looks like a difference between variants;
interleaved, it affects all of them alike. The price is that all models are in memory at once. So interleaving is the
default only for an ablation of models that come with pvg, which are small. Variants on vLLM servers are never
interleaved: a server has one set of weights, those of the session that published last.
"""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

from pvg.bench.planning import (
    BenchPlan,
    Kind,
    OnServer,
    PlannedVariant,
    described,
    is_served,
    look,
    own_server,
    start_settings,
    versions,
    with_servers,
)
from pvg.bench.report import BenchReport, Samples, TimeBudget, Variant, read_environment, torch_threads
from pvg.bench.workloads import WALL, BenchMetric, BenchSettings, Workload, make_workload
from pvg.config.experiment import Experiment
from pvg.errors import EXIT_CHECK_FAILED, ConfigurationError, PvgError
from pvg.servers.control import ServerInfo
from pvg.telemetry.device import peak_memory
from pvg.telemetry.spans import UNACCOUNTED, CudaClock, StepBudget, Tracer, total_seconds, trained_seconds
from pvg.telemetry.waits import runner

RESET = "reset"  # the span in which a workload returns to its start or calibrates itself; real steps have none


@dataclass(frozen=True, slots=True)
class SampleTaken:
    """Progress: sample `number` (from 1) of `of`, warm-up samples included."""

    label: str
    number: int
    of: int
    warmup: bool
    wall_s: float


OnSample = Callable[[SampleTaken], None]


class NotFiniteError(PvgError):
    """A measured value is not finite, so the variant cannot be trusted."""

    exit_code = EXIT_CHECK_FAILED


class VariantTrial:
    """One variant while it is measured: its workload, its tracer, its samples so far. `error` ends it."""

    def __init__(
        self,
        make: Callable[[], Workload],
        *,
        warmup: int,
        repeats: int,
        label: str = "",
        overrides: Mapping[str, Any] | None = None,
        on_sample: OnSample | None = None,
        device_clock: CudaClock | None = None,
    ) -> None:
        self.label = label
        self.warmup, self.repeats = warmup, repeats
        self.error: PvgError | None = None
        self._make = make
        self._overrides = dict(overrides or {})
        self._on_sample = on_sample
        self._workload: Workload | None = None
        self._measures: Mapping[str, BenchMetric] = {}
        self._tracer = Tracer(device_clock=device_clock)
        self._values: dict[str, list[float]] = {}
        self._budgets: list[StepBudget] = []
        self._work: dict[str, Any] = {}
        self._derived: dict[str, float] = {}

    async def open(self) -> None:
        gc.collect()  # so that garbage of an earlier variant is not collected during a sample of this one
        with self._failing(), self._tracer.drive():
            workload = self._make()
            await workload.open()
            self._workload = workload

    async def sample(self, index: int) -> None:
        """Do the work once. The first `warmup` samples are not kept. A failed variant does nothing."""
        if self._workload is None or self.error is not None:
            return
        with self._failing(), self._tracer.drive():
            self._tracer.close_step()  # time since the last sample does not belong to this one
            values = dict(await self._workload.sample(index))
            budget = self._tracer.close_step()
            self._tracer.take_spans()  # discarded: nothing may grow from sample to sample
            self._keep(index, values, budget)
        if self._on_sample is not None and self.error is None:
            of = self.warmup + self.repeats
            self._on_sample(SampleTaken(self.label, index + 1, of, index < self.warmup, budget.wall_s))

    def _keep(self, index: int, values: dict[str, float], budget: StepBudget) -> None:
        assert self._workload is not None
        self._measures = {WALL: BenchMetric("s", "lower"), **self._workload.measures}
        if WALL in values or {WALL, *values} != self._measures.keys():
            raise ValueError(f"Measured {sorted(values)}, announced {sorted(self._workload.measures)}.")
        values[WALL] = budget.wall_s
        _require_finite(values)
        if index >= self.warmup:
            self._budgets.append(budget)
            for name, value in values.items():
                self._values.setdefault(name, []).append(value)

    def finish(self) -> None:
        """Read the work and the derived figures. Call it once, before `close`."""
        if self._workload is None or self.error is not None:
            return
        with self._failing():
            self._work = dict(self._workload.work())
            self._derived = {**shares(total(self._budgets)), **self._workload.derived()}
            _require_finite(self._derived)

    async def close(self) -> None:
        workload, self._workload = self._workload, None  # frees its models before others are measured
        if workload is not None:
            with self._failing(), self._tracer.drive():
                await workload.close()

    def result(self) -> tuple[Variant, dict[str, Any]]:
        """The variant for the report, and its work."""
        if self.error is not None:
            reason = str(self.error)
            return Variant(label=self.label, overrides=self._overrides, status="failed", reason=reason), {}
        samples = {
            name: Samples(unit=measure.unit, better=measure.better, values=tuple(self._values[name]))
            for name, measure in self._measures.items()
        }
        return Variant(
            label=self.label,
            overrides=self._overrides,
            status="ok",
            samples=samples,
            budget=total(self._budgets),
            derived=self._derived,
        ), self._work

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Records the first PvgError as the variant's error; later ones follow from it."""
        try:
            yield
        except PvgError as error:
            self.error = self.error or error


async def run_trials(trials: Sequence[VariantTrial]) -> None:
    """Open all, take the samples in turn (one of each trial per round), close all.

    Every second round runs backwards, so that no variant always follows the same one. All trials need the same warm-up
    and repeats.
    """
    rounds = {trial.warmup + trial.repeats for trial in trials}
    async with AsyncExitStack() as stack:
        for trial in trials:
            stack.push_async_callback(trial.close)
            await trial.open()
        for index in range(max(rounds)):
            for trial in trials if index % 2 == 0 else reversed(trials):
                await trial.sample(index)
        for trial in trials:
            trial.finish()


def total(budgets: Sequence[StepBudget]) -> TimeBudget:
    """The sum of the samples' budgets, the largest parts first."""
    wall_s = sum(budget.wall_s for budget in budgets)
    summed = {
        name: total_seconds(getattr(budget, name) for budget in budgets) for name in ("exposed", "busy", "device_s")
    }
    return TimeBudget(wall_s=wall_s, steps=len(budgets), **summed)


def shares(budget: TimeBudget) -> dict[str, float]:
    """Shares of the wall time: what no span accounts for, and how long a trainer that waits for rollouts was idle."""
    if not budget.wall_s:
        return {}
    found = {"unaccounted_share": budget.exposed.get(UNACCOUNTED, 0.0) / budget.wall_s}
    if "wait_for_rollouts" in budget.exposed:
        played_s = budget.wall_s - budget.exposed.get(RESET, 0.0)
        found["trainer_idle_share"] = 1.0 - trained_seconds(budget.exposed) / played_s
    return found


def _require_finite(values: Mapping[str, float]) -> None:
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = ", ".join(f"{name} = {value}" for name, value in wrong.items())
        raise NotFiniteError(f"Measured a value that is not finite: {named}.")


# --- other processes, which keep cores busy as other programs on the machine would ------------------------------------

# Uses a core until the standard input ends, also because the owner was killed. It looks about once per millisecond.
BUSY = """
import select, sys
print("computing", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for _ in range(20_000):
        pass
"""


@contextmanager
def busy_processes(count: int) -> Iterator[list[int]]:
    """The process ids of `count` processes. All of them compute when the block begins; none is left when it ends.

    Each has its own session, because Linux divides the cores between sessions first (autogroup), and a program in
    another terminal has its own session too."""
    command = [sys.executable, "-I", "-S", "-c", BUSY]
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            )
            stack.callback(process.kill)  # runs first; then the process closes its pipes and waits
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield [process.pid for process in processes]


# --- all variants of one call of `pvg bench`, and their report --------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True)
class BenchResult:
    """The report, and the exit code: 0, or that of the first failed variant."""

    report: BenchReport
    exit_code: int


def run_plan(
    plan: BenchPlan, *, command: str, on_sample: OnSample | None = None, on_server: OnServer | None = None
) -> BenchResult:
    """Measure every variant. A workload's PvgError fails its variant; any other exception propagates, as does Ctrl-C.

    Before measuring, raises the errors of `pvg.bench.planning.look` about missing or unsuitable servers. `on_server`
    receives a line of progress for each server that pvg starts.
    """
    profile, experiment = plan.base.profile, plan.base.experiment
    created = datetime.now(UTC).isoformat(timespec="seconds")
    environment = read_environment()
    clock = None if environment.gpu is None else cuda_clock(plan.base)  # not every workload needs torch

    def trial(choice: PlannedVariant, executor: Executor | None, own: Experiment | None) -> VariantTrial:
        settings = replace(choice.settings, executor=executor, experiment=own or choice.settings.experiment)
        return VariantTrial(
            partial(make_workload, settings),
            warmup=profile.warmup,
            repeats=profile.repeats,
            label=choice.label,
            overrides=choice.overrides,
            on_sample=on_sample,
            device_clock=clock,
        )

    infos = [] if plan.serve else _look_at_servers(plan)
    with busy_processes(profile.beside):
        trials = _run_on_own_servers(plan, trial, infos, on_server) if plan.serve else _run_here(plan, trial)
    variants, works = _results(trials, plan.kind)
    reason = next(
        (f"{variant.label}: {variant.reason}".removeprefix(": ") for variant in variants if variant.reason), ""
    )
    report = BenchReport(
        kind=plan.kind,
        profile=profile.workload_name,
        name=profile.name,
        status="failed" if reason else "ok",
        reason=reason,
        created=created,
        command=command,
        config=plan.base.plain()
        | ({} if plan.kind == "bench" else {"interleave": plan.interleave})
        | ({"servers": described(infos)} if infos else {}),
        work=common_work(works),
        environment=environment.model_copy(
            update={"threads": torch_threads(experiment.models.threads), "vllm": versions(infos) or environment.vllm}
        ),
        warmup=profile.warmup,
        repeats=profile.repeats,
        variants=variants,
        peak_memory=peak_memory(),
    )
    failed = next((trial.error for trial in trials if trial.error is not None), None)
    return BenchResult(report, failed.exit_code if failed is not None else 0)


# Arguments: the executor of the compute thread and the experiment of the workload; None: the choice's defaults.
MakeTrial = Callable[[PlannedVariant, Executor | None, Experiment | None], VariantTrial]


def _run_here(plan: BenchPlan, trial: MakeTrial) -> list[VariantTrial]:
    """One variant after the other, or all in turn. Interleaved variants share one compute thread: with one thread each,
    they would slow each other down even while idle."""
    if not plan.interleave:
        trials = []
        for choice in plan.choices:
            trials.append(trial(choice, None, None))
            on_loop(run_trials(trials[-1:]))
        return trials
    from pvg.models.compute import compute_executor

    with compute_executor(plan.base.experiment.models.threads) as executor:
        trials = [trial(choice, executor, None) for choice in plan.choices]
        on_loop(run_trials(trials))
    return trials


def _run_on_own_servers(
    plan: BenchPlan, trial: MakeTrial, infos: list[ServerInfo], on_server: OnServer | None
) -> list[VariantTrial]:
    """Measure on servers that pvg starts. Adjacent variants share a server if they can. Adds each server's description
    to `infos`. A server that does not start fails the variants that need it."""

    async def measure(choices: Sequence[PlannedVariant]) -> list[VariantTrial]:
        trials: list[VariantTrial] = []
        try:
            async with own_server(choices[0].settings.experiment, on_server) as served:
                infos.extend(await look(served))
                for choice in choices:
                    own = with_servers(choice.settings.experiment, served.serving.servers)
                    trials.append(trial(choice, None, own))
                    await run_trials(trials[-1:])
        except PvgError as error:
            for choice in choices[len(trials) :]:
                trials.append(trial(choice, None, None))
                trials[-1].error = error
        return trials

    done: list[VariantTrial] = []
    for _, group in groupby(plan.choices, key=lambda choice: start_settings(choice.settings.experiment)):
        choices = list(group)
        done += on_loop(measure(choices))
    return done


def _look_at_servers(plan: BenchPlan) -> list[ServerInfo]:
    """The descriptions of the running servers, each server once."""
    found: dict[str, ServerInfo] = {}
    for choice in filter(is_served, plan.choices):
        experiment = choice.settings.experiment
        if not set(experiment.serving.servers) <= found.keys():
            infos = on_loop(look(experiment))
            found |= dict(zip(experiment.serving.servers, infos, strict=True))
    return list(found.values())


class ChangedWorkError(ConfigurationError):
    """A rung of a ladder changes the work itself, so its gain cannot be measured."""


def _results(trials: Sequence[VariantTrial], kind: Kind) -> tuple[tuple[Variant, ...], dict[str, dict[str, Any]]]:
    """The variants, and the work of those that ran. All rungs of a ladder must do the same work."""
    works: dict[str, dict[str, Any]] = {}
    variants = []
    for trial in trials:
        variant, work = trial.result()
        if variant.status == "ok":
            first = next(iter(works.values()), work)
            if kind == "ablation" and work != first:
                keys = sorted(key for key in first.keys() | work.keys() if first.get(key) != work.get(key))
                differing = ", ".join(f"{key} is {work.get(key)}, not {first.get(key)}" for key in keys)
                trial.error = ChangedWorkError(f"Its work differs from that of {next(iter(works))!r}: {differing}.")
                variant, _ = trial.result()
            else:
                works[variant.label] = work
        variants.append(variant)
    return tuple(variants), works


def common_work(works: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The work that all variants have in common; differences stand under "by_variant", by label."""
    if not works:
        return {}
    first = next(iter(works.values()))
    alike = {key: value for key, value in first.items() if all(work.get(key) == value for work in works.values())}
    rest = {label: {k: v for k, v in work.items() if k not in alike} for label, work in works.items()}
    return alike | ({"by_variant": rest} if any(rest.values()) else {})


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in a new event loop of the kind that runs use."""
    with runner()[0] as loop:
        return loop.run(work)


def cuda_clock(settings: BenchSettings) -> CudaClock | None:
    """A clock for CUDA if the models run there. Imports torch."""
    from pvg.models import pick_device

    device = pick_device(settings.experiment.models.device)
    return CudaClock(device) if device.type == "cuda" else None
