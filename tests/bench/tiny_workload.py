"""A real workload that takes a millisecond: numpy sorts fixed numbers, in a thread, inside spans."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pvg.bench.workloads import BenchMetric, BenchSettings, workload_settings
from pvg.errors import MissingRequirementError
from pvg.telemetry.spans import run_in, span

PROFILE = """
profile = "tiny"
name = "tiny"
about = "sorts numbers"
headline = "numbers_per_s"
warmup = 1
repeats = 3

[set]
"rollout.engine.max_rows" = 128
training.steps = 7

[workload]
numbers = 2000

[[ladder]]
switch = "workload.kind"
slow = "stable"
fast = "quicksort"
says = "the faster algorithm"

[[ladder]]
switch = "rollout.engine.max_rows"
slow = 8
fast = 128
"""


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    numbers: int = Field(default=1000, ge=1)
    kind: Literal["stable", "quicksort"] = "quicksort"
    fault: Literal["", "open", "sample", "not_finite", "derived", "defect", "close", "missing", "wait"] = ""


class TinyWorkload:
    measures: Mapping[str, BenchMetric] = {
        "numbers_per_s": BenchMetric("numbers/s", "higher"),
        "sort_s": BenchMetric("s", "lower"),
    }

    def __init__(self, settings: BenchSettings, log: list[str] | None = None) -> None:
        self.settings = workload_settings(Settings, settings)
        self.name = f"{self.settings.kind}/{settings.experiment.rollout.engine.max_rows}"
        self.log = log if log is not None else []

    async def open(self) -> None:
        self._fail("open")
        self.log.append(f"open {self.name}")
        self.executor = ThreadPoolExecutor(1)
        self.numbers_N = np.random.default_rng(0).random(self.settings.numbers)

    def work(self) -> Mapping[str, Any]:
        return {"numbers": self.settings.numbers, "seed": 0}

    async def sample(self, index: int) -> Mapping[str, float]:
        self.log.append(f"sample {self.name} {index}")
        if index == 2:
            self._fail("sample")
        with span("sort"):
            seconds = await run_in(self.executor, self._sort)
        if self.settings.fault == "wait":
            await self._wait()
        if self.settings.fault == "not_finite" and index == 2:
            return {"numbers_per_s": float("nan"), "sort_s": seconds}
        if self.settings.fault == "missing":
            return {"sort_s": seconds}
        return {"numbers_per_s": self.settings.numbers / seconds, "sort_s": seconds}

    def derived(self) -> Mapping[str, float]:
        return {"share": float("inf") if self.settings.fault == "derived" else 0.5}

    async def close(self) -> None:
        self.log.append(f"close {self.name}")
        self.executor.shutdown()
        self._fail("close")

    def _sort(self) -> float:
        import time

        began = time.perf_counter()
        with span("inner"):
            np.sort(self.numbers_N, kind=self.settings.kind)
        return time.perf_counter() - began

    async def _wait(self) -> None:
        import asyncio

        print("waiting", flush=True)
        await asyncio.sleep(60)

    def _fail(self, where: str) -> None:
        if self.settings.fault == where:
            raise MissingRequirementError(f"There is nothing to {where}.", "Bring it.")
        if self.settings.fault == "defect" and where == "sample":
            raise KeyError("a defect")


def write_profile(folder: Path, text: str = PROFILE, name: str = "tiny") -> Path:
    (folder / "profiles").mkdir(exist_ok=True)
    path = folder / "profiles" / f"{name}.toml"
    path.write_text(text)
    return path
