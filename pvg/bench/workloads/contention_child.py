"""Plays steps of the e2e workload on request, in a process with its own number of threads.

    python -m pvg.bench.workloads.contention_child

Protocol: one JSON object per line on standard input, one answer per line on standard output:

    {"experiment": {...}, "steps": n}   the first line -> {"threads": n, "work": {...}}
    {"sample": index}                                  -> {"step_s": seconds, "core_time": {...} or null}

A user's mistake is answered with {"error": "..."}. The process ends when its input ends.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

import orjson

from pvg.bench.variants import on_loop
from pvg.bench.workloads.e2e import EndToEnd, EndToEndSettings
from pvg.config.experiment import Experiment, build_experiment
from pvg.errors import PvgError
from pvg.models.compute import ComputeExecutor
from pvg.telemetry.core_waits import CoreWaits
from pvg.telemetry.spans import Tracer


async def play(experiment: Experiment, steps: int) -> None:
    """Answer `sample` messages. Reading blocks the event loop, but the loop has no work between two samples."""
    workload, tracer = EndToEnd(experiment, EndToEndSettings(steps=steps)), Tracer()
    with tracer.drive():
        try:
            await workload.open()
            say({"threads": ComputeExecutor.in_use, "work": workload.work()})
            waits = CoreWaits()
            for line in sys.stdin.buffer:
                waits.take()
                values = await workload.sample(orjson.loads(line)["sample"])
                time = waits.take()
                tracer.close_step()
                tracer.take_spans()  # discarded, so that memory does not grow from sample to sample
                say({"step_s": values["step_s"], "core_time": None if time is None else asdict(time)})
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
