"""Takes the samples of one variant, or of several in turn.

    variant, work = await run_variant(lambda: WORKLOADS["rollout"](settings), warmup=1, repeats=5)

Every sample is one step of a tracer. The report contains its budget, and the runner adds its wall time as the measure
`wall_s`. Time between samples belongs to no sample.

Invariants:
- If a workload raises a PvgError or measures a value that is not finite, its variant is failed, with the reason and no
  metrics. Any other exception is a defect and propagates.
- Everything that was opened is closed, also after an error.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from pvg.bench.report import Samples, TimeBudget, Variant
from pvg.bench.workload import BenchMetric, Workload
from pvg.errors import EXIT_CHECK_FAILED, PvgError
from pvg.telemetry.spans import UNACCOUNTED, DeviceClock, StepBudget, Tracer, trained_seconds

RESET = "reset"  # the span in which a workload returns to its start or calibrates itself; real steps have none
WALL = "wall_s"
WALL_MEASURE = BenchMetric("s", "lower", "wall time of one sample")


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
        device_clock: DeviceClock | None = None,
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
        self._measures = {WALL: WALL_MEASURE, **self._workload.measures}
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


async def run_variant(
    make: Callable[[], Workload],
    *,
    warmup: int,
    repeats: int,
    label: str = "",
    overrides: Mapping[str, Any] | None = None,
    on_sample: OnSample | None = None,
) -> tuple[Variant, dict[str, Any]]:
    """Open, sample and close one workload. Returns the variant, and what one sample's work was."""
    trial = VariantTrial(make, warmup=warmup, repeats=repeats, label=label, overrides=overrides, on_sample=on_sample)
    await run_trials([trial])
    return trial.result()


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
    """The sum of the samples' budgets, the largest exposed part first."""
    exposed, busy, device_s = (
        _summed(budget.exposed for budget in budgets),
        _summed(budget.busy for budget in budgets),
        _summed(budget.device_s for budget in budgets),
    )
    wall_s = sum(budget.wall_s for budget in budgets)
    return TimeBudget(wall_s=wall_s, steps=len(budgets), exposed=exposed, busy=busy, device_s=device_s)


def shares(budget: TimeBudget) -> dict[str, float]:
    """Shares of the wall time: what no span accounts for, and how long a trainer that waits for rollouts was idle."""
    if not budget.wall_s:
        return {}
    found = {"unaccounted_share": budget.exposed.get(UNACCOUNTED, 0.0) / budget.wall_s}
    if "wait_for_rollouts" in budget.exposed:
        played_s = budget.wall_s - budget.exposed.get(RESET, 0.0)
        found["trainer_idle_share"] = 1.0 - trained_seconds(budget.exposed) / played_s
    return found


def _summed(tables: Iterator[Mapping[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for table in tables:
        for part, amount in table.items():
            seconds[part] = seconds.get(part, 0.0) + amount
    return dict(sorted(seconds.items(), key=lambda entry: -entry[1]))


def _require_finite(values: Mapping[str, float]) -> None:
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = ", ".join(f"{name} = {value}" for name, value in wrong.items())
        raise NotFiniteError(f"Measured a value that is not finite: {named}.")
