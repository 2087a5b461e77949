"""Steps of the game on a shared machine, with 0, 1 and 2 other busy processes and with different numbers of threads.

    pvg bench --profile contention      # one thread per core against the default, in turn

A sample is `steps` optimizer steps of the e2e workload with no, one and two other busy processes. The steps run in a
child process (`play`), because two thread pools in one process slow each other down. The child sleeps while the other
variant is measured. `kept_1` is the throughput with one other busy process divided by the idle throughput of the same
sample; 1 is ideal.

With workers, the report also says what the exchange with them costs on an idle machine, as a share of a step's wall
time: an upper bound, by pvg.workers.load.ExchangeMeter.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

import orjson

from pvg.bench.busy import busy_processes
from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.runner import on_loop
from pvg.bench.workloads import BenchMetric, Workload, e2e
from pvg.bench.workloads.e2e import EndToEnd, EndToEndSettings
from pvg.config.base import Count, Section
from pvg.config.experiment import Experiment
from pvg.config.load import build_experiment
from pvg.errors import ConfigurationError, PvgError
from pvg.models.compute import ComputeExecutor
from pvg.telemetry.spans import Tracer, span
from pvg.telemetry.waits import CoreTime, CoreWaits, usable_cores

BUSY_PROCESSES = (0, 1, 2)  # numbers of other busy processes
LONGEST_LINE = 2**20


class ContentionSettings(Section):
    """The `[workload]` table. `steps`: optimizer steps for each number of busy processes. `threads`: one per core, or
    the default of models.threads."""

    steps: Count = 1
    threads: Literal["cores", "default"] = "default"


def make(settings: BenchSettings) -> Workload:
    """Raises ConfigurationError if models.threads is set too, or for settings that e2e cannot measure."""
    workload, experiment = workload_settings(ContentionSettings, settings), settings.experiment
    if experiment.models.threads:
        raise ConfigurationError(
            f"models.threads = {experiment.models.threads}, but this workload compares numbers of threads.",
            "Leave models.threads out.",
        )
    e2e.check(experiment, workload.steps)
    threads = usable_cores() if workload.threads == "cores" else 0
    models = experiment.models.model_copy(update={"threads": threads})
    return Contention(experiment.model_copy(update={"models": models}), workload)


class ChildFailedError(PvgError):
    """The process that plays the steps reported an error."""


class Contention:
    measures: Mapping[str, BenchMetric] = {
        "step_s": BenchMetric("s", "lower", "wall time of one optimizer step, no other busy process"),
        "step_1_s": BenchMetric("s", "lower", "wall time of one optimizer step, one other busy process"),
        "step_2_s": BenchMetric("s", "lower", "wall time of one optimizer step, two other busy processes"),
        "kept_1": BenchMetric(
            "1", "higher", "throughput with one other busy process, as a share of the idle throughput"
        ),
        "kept_2": BenchMetric(
            "1", "higher", "throughput with two other busy processes, as a share of the idle throughput"
        ),
    }

    def __init__(self, experiment: Experiment, workload: ContentionSettings) -> None:
        self._experiment, self._workload = experiment, workload
        self._process: asyncio.subprocess.Process | None = None
        self._opened: dict[str, Any] = {}
        self._times: dict[int, list[CoreTime]] = {busy: [] for busy in BUSY_PROCESSES}
        self._exchange: list[float] = []  # shares of the steps without other busy processes

    async def open(self) -> None:
        with span("start_process"):
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pvg.bench.workloads.contention",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
            )
            self._opened = await self._ask({"experiment": self._experiment.plain(), "steps": self._workload.steps})

    def work(self) -> dict[str, Any]:
        return {"beside": list(BUSY_PROCESSES), **self._opened["work"]}

    async def sample(self, index: int) -> dict[str, float]:
        seconds = []
        for busy in BUSY_PROCESSES:
            with span(f"beside_{busy}"), busy_processes(busy):
                answer = await self._ask({"sample": index})
            seconds.append(answer["step_s"])
            if (time := answer["core_time"]) is not None:
                self._times[busy].append(CoreTime(**time))
            if not busy and (share := answer["exchange_share"]) is not None:
                self._exchange.append(share)
        idle_s, one_s, two_s = seconds
        return {
            "step_s": idle_s,
            "step_1_s": one_s,
            "step_2_s": two_s,
            "kept_1": idle_s / one_s,
            "kept_2": idle_s / two_s,
        }

    def derived(self) -> dict[str, float]:
        """The number of threads and, on Linux, by number of busy processes, the share of their ready time in which the
        threads waited for a core, over all samples. With workers also the median share of the exchange with them."""
        found = {"threads": float(self._opened["threads"])}
        if self._exchange:
            found["exchange_share"] = statistics.median(self._exchange)
            found["workers"] = float(self._opened["workers"])
        for busy, times in self._times.items():
            if ready_s := sum(time.ran_s + time.waited_s for time in times):
                found[f"waited_share_{busy}"] = sum(time.waited_s for time in times) / ready_s
        return found

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # also closes its pipes before the event loop ends

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ChildFailedError for an error that the child reports, RuntimeError if it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(orjson.dumps(message) + b"\n")
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise RuntimeError(f"The process that plays the steps ended with code {await self._process.wait()}.")
        answer: dict[str, Any] = orjson.loads(line)
        if "error" in answer:
            raise ChildFailedError(answer["error"])
        return answer


# --- the child process ------------------------------------------------------------------------------------------------

# One JSON object per line on standard input, one answer per line on standard output:
#
#     {"experiment": {...}, "steps": n}   the first line -> {"threads": n, "workers": n, "work": {...}}
#     {"sample": index}         -> {"step_s": seconds, "core_time": {...} or null, "exchange_share": share or null}
#
# A user's mistake is answered with {"error": "..."}. The process ends when its input ends.


async def play(experiment: Experiment, steps: int) -> None:
    """Answer `sample` messages. Reading blocks the event loop, but the loop has no work between two samples."""
    workload, tracer = EndToEnd(experiment, EndToEndSettings(steps=steps)), Tracer()
    with tracer.drive():
        try:
            await workload.open()
            say({"threads": ComputeExecutor.in_use, "workers": workload.workers, "work": workload.work()})
            waits = CoreWaits()
            for line in sys.stdin.buffer:
                waits.take()
                values = await workload.sample(orjson.loads(line)["sample"])
                time = waits.take()
                tracer.close_step()
                tracer.take_spans()  # discarded, so that memory does not grow from sample to sample
                core_time = None if time is None else asdict(time)
                share = workload.exchange_share
                say({"step_s": values["step_s"], "core_time": core_time, "exchange_share": share})
        finally:
            await workload.close()


def say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    first = orjson.loads(sys.stdin.buffer.readline())
    experiment = build_experiment(first["experiment"])
    try:
        on_loop(experiment.telemetry.event_loop, play(experiment, first["steps"]))
    except PvgError as error:
        say({"error": str(error)})


if __name__ == "__main__":
    main()
