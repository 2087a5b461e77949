"""Benchmark reports made of given or simulated samples, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pvg.bench.report import BenchReport, MachineInfo, Samples, TimeBudget, Variant, write_report

ENVIRONMENT = MachineInfo(
    python="3.11.7",
    platform="Linux",
    pvg="0.1.0",
    git_commit="0123456789abcdef",
    git_dirty=False,
    torch="2.13.0",
    transformers="5.0.0",
    vllm=None,
    cpu="A CPU",
    cores=2,
    threads=2,
    memory_gb=8.0,
    gpu=None,
    driver=None,
    event_loop="uvloop",
)
PROFILE = {
    "profile": "rollout",
    "name": "rollout",
    "about": "tokens per second",
    "experiment": "modchain",
    "headline": "tokens_per_s",
    "warmup": 1,
    "repeats": 5,
    "set": {},
    "workload": {"rollouts": 256},
    "ladder": [],
}
WORK = {"model": "modchain-prover", "rollouts": 256, "lengths": {"prompt": 37, "completion": 48}}


def noisy(random: np.random.Generator, middle: float, count: int, spread: float = 0.02) -> list[float]:
    """`count` positive samples around `middle`, with a relative standard deviation of `spread`."""
    return [float(value) for value in middle * np.exp(spread * random.standard_normal(count))]


def lower(values: Sequence[float], unit: str = "s") -> Samples:
    return Samples(unit=unit, better="lower", values=tuple(values))


def higher(values: Sequence[float], unit: str = "tokens/s") -> Samples:
    return Samples(unit=unit, better="higher", values=tuple(values))


def variant(samples: Mapping[str, Samples], label: str = "", derived: Mapping[str, float] | None = None) -> Variant:
    count = len(next(iter(samples.values())).values)
    budget = TimeBudget(wall_s=2.0 * count, steps=count, exposed={"decode": 2.0 * count}, busy={"decode": 2.0 * count})
    return Variant(label=label, status="ok", samples=dict(samples), budget=budget, derived=dict(derived or {}))


def made_report(*variants: Variant, **changes: Any) -> BenchReport:
    """A report of these variants: of a sweep when there are several, unless `changes` says otherwise."""
    fields: dict[str, Any] = {
        "kind": "bench" if len(variants) == 1 else "sweep",
        "profile": "rollout",
        "name": "rollout",
        "status": "ok",
        "created": "2026-11-21T12:00:00+00:00",
        "command": "pvg bench --profile rollout",
        "config": {"profile": PROFILE, "experiment": {"rollout": {"engine": {"max_rows": 256}}}},
        "work": WORK,
        "environment": ENVIRONMENT,
        "warmup": 1,
        "repeats": len(next(iter(variants[0].samples.values())).values),
        "variants": variants,
    }
    return BenchReport(**(fields | changes))


def failed_report() -> BenchReport:
    broken = Variant(label="", status="failed", reason="No model of that name.")
    return made_report(variant({"wall_s": lower([1.0])})).model_copy(
        update={"status": "failed", "reason": broken.reason, "variants": (broken,)}
    )


def saved(report: BenchReport, path: Path) -> str:
    write_report(path, report)
    return str(path)
