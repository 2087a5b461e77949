"""The work of a stage, and one pass over it per profiler.

The work is the benchmark profile with the stage's name, on the experiment to profile. Each profiler slows down what the
others would measure, so each has a separate pass. A pass repeats the workload's sample; all passes share one opened and
warmed-up workload:

- `spans_pass`: only pvg's spans; the other passes are compared with its wall time
- `torch_pass`: the torch profiler, with every operator in every thread
- `py_spy_pass`: py-spy, which samples from another process
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pvg.bench.profile import (
    WORKLOAD,
    BenchSettings,
    SettingChange,
    find_profile,
    parse_overrides,
    read_profile,
    settings_of,
)
from pvg.bench.profiling.py_spy import SHOWN_FRAMES, CostlyFrame, Format, sampling
from pvg.bench.report import TimeBudget
from pvg.bench.runner import total
from pvg.bench.workload import Workload
from pvg.config.experiment import nearest
from pvg.errors import UsageError
from pvg.telemetry.chrome_trace import placed, trace_events, write_trace
from pvg.telemetry.device import DeviceSampler
from pvg.telemetry.spans import DeviceClock, Tracer

Stage = Literal["rollout", "trainer", "e2e"]
STAGES: tuple[Stage, ...] = ("rollout", "trainer", "e2e")
ROLLOUTS = "rollouts"  # key of a workload's table: the number of rollouts in a sample


def stage_of(name: str) -> Stage:
    for stage in STAGES:
        if stage == name:
            return stage
    hint = nearest(name, STAGES)
    raise UsageError(
        f"There is no stage {name!r}." + (f" Did you mean {hint!r}?" if hint else ""), f"Known: {', '.join(STAGES)}."
    )


def stage_settings(stage: Stage, experiment: str, overrides: Sequence[str]) -> BenchSettings:
    """The settings of a stage's workload on `experiment` (a name or a file), with the overrides.

    The profile's `changes` are left out: they belong to its benchmark. A sample has as many rollouts as a batch of the
    experiment, unless `workload.rollouts` is given. Raises UsageError and ConfigurationError.
    """
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

LEAST_SAMPLED_S = 5.0  # the shortest pass of py-spy: a thousand samples at its rate
OPERATORS_SHOWN = 40  # rows of the table of torch operators
SAMPLE_EVERY_S = 0.5  # period of the CPU, memory and GPU samples: a stage takes seconds, not hours


@dataclass(frozen=True, slots=True)
class SamplingPass:
    """The seconds of each sample of a pass."""

    name: str
    walls_s: tuple[float, ...]

    @property
    def fastest_s(self) -> float:
        """The sample that other programs on the machine disturbed least."""
        return min(self.walls_s)


async def spans_pass(
    workload: Workload, steps: int, path: Path, *, stage: str, device_clock: DeviceClock | None
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
                spans += placed(tracer.take_spans(), round=0, phase=stage, step=step)
    finally:
        sampler.stop()
    write_trace(path, trace_events(spans, samples, name=f"pvg profile, {stage}"))
    return SamplingPass("spans", tuple(budget.wall_s for budget in budgets)), total(budgets)


async def torch_pass(
    workload: Workload, steps: int, trace: Path, table: Path
) -> tuple[SamplingPass, tuple[CostlyFrame, ...]]:
    """Write the trace and the table of operators; returns the operators with the most self time."""
    # Without this private option the profiler sees only the calling thread; our operators run in an executor's thread.
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    on_gpu = _cuda()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    config = _ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=activities, experimental_config=config)
    with without_usdt_lines():
        profiler.start()
    try:
        walls_s = await _timed(workload, lambda done, _: done < steps)
    finally:
        with without_usdt_lines():
            profiler.stop()
    return SamplingPass("torch profiler", walls_s), _write_torch(profiler, trace, table, on_gpu)


def _write_torch(profiler: Any, trace: Path, table: Path, on_gpu: bool) -> tuple[CostlyFrame, ...]:
    profiler.export_chrome_trace(str(trace))
    averages = profiler.key_averages()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table.write_text(averages.table(sort_by=order, row_limit=OPERATORS_SHOWN, max_name_column_width=60))
    return _operators(averages, on_gpu)


@contextmanager
def without_usdt_lines() -> Iterator[None]:
    """Drop the lines with which torch's profiler reports its start and stop on stderr at any log level. Other output on
    stderr passes through."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            caught.seek(0)
            os.write(stderr, b"".join(line for line in caught if not line.startswith(b"USDT:")))
            os.close(stderr)


def _operators(averages: Any, on_gpu: bool) -> tuple[CostlyFrame, ...]:
    own_us = {row.key: row.self_device_time_total if on_gpu else row.self_cpu_time_total for row in averages}
    whole = sum(own_us.values())
    costliest = sorted(own_us.items(), key=lambda item: -item[1])[:SHOWN_FRAMES]
    return tuple(CostlyFrame(name, "", 0, us / 1e6, us / whole if whole else 0.0) for name, us in costliest)


async def py_spy_pass(workload: Workload, steps: int, py_spy: Path, output: Path, form: Format) -> SamplingPass:
    """Takes at least `steps` samples and LEAST_SAMPLED_S seconds. Raises PySpyError."""
    with sampling(py_spy, output, form):
        walls_s = await _timed(workload, lambda done, seconds: done < steps or seconds < LEAST_SAMPLED_S)
    return SamplingPass(f"py-spy, {form}", walls_s)


async def _timed(workload: Workload, goes_on: Callable[[int, float], bool]) -> tuple[float, ...]:
    """Sample while `goes_on(samples so far, their total seconds)`; returns the seconds of each sample."""
    walls_s: list[float] = []
    while goes_on(len(walls_s), sum(walls_s)):
        started = time.perf_counter()
        await workload.sample(len(walls_s))
        walls_s.append(time.perf_counter() - started)
    return tuple(walls_s)


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def slowdowns(passes: Sequence[SamplingPass]) -> dict[str, float]:
    """How much longer the fastest sample took in each pass than in the first one: 0.25 is 25 % longer."""
    return {each.name: each.fastest_s / passes[0].fastest_s - 1.0 for each in passes[1:]}
