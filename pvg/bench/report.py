"""The JSON report of a benchmark, schema version 1 (measurement.md, "Benchmark report").

Raw samples are kept, so that whoever reads the report can do other statistics than ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Samples(Record):
    """The raw values of one metric, in the order they were taken."""

    unit: str
    better: Literal["lower", "higher"]
    values: Annotated[tuple[float, ...], Field(min_length=1)]


class Budget(Record):
    """Seconds by part over all samples (see pvg.telemetry.spans): `exposed` sums to `wall_s`."""

    wall_s: float
    steps: int
    exposed: dict[str, float]
    busy: dict[str, float]
    device_s: dict[str, float] = {}


class Variant(Record):
    """One way of doing the work. A failed one says why, and has no metrics."""

    label: str  # "" for the only one, otherwise what differs, such as "rollout.max_rows=64"
    overrides: dict[str, Any] = {}  # the settings in which it differs from `config`
    status: Literal["ok", "failed"]
    reason: str = ""
    samples: dict[str, Samples] = {}
    budget: Budget | None = None
    derived: dict[str, float] = {}


class Environment(Record):
    python: str
    platform: str
    pvg: str
    git_commit: str | None
    git_dirty: bool | None
    torch: str | None
    transformers: str | None
    vllm: str | None
    cpu: str
    cores: int
    threads: int | None
    memory_gb: float
    gpu: str | None
    driver: str | None
    event_loop: str


class BenchReport(Record):
    """One call of `pvg bench`. `kind`: "bench" has one variant; "sweep" one per value; "ablation" one per rung of the
    ladder, slowest first. `status` is "failed" when a variant failed; `work` is what every sample did."""

    schema_version: Literal[1] = 1
    kind: Literal["bench", "sweep", "ablation"]
    profile: str
    name: str
    status: Literal["ok", "failed"]
    reason: str = ""
    created: str  # ISO 8601, UTC
    command: str
    config: dict[str, Any]  # resolved: {"profile": ..., "experiment": ...}
    work: dict[str, Any]
    environment: Environment
    warmup: int
    repeats: int
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
