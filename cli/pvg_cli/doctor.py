"""`pvg doctor`: check that this machine has everything that pvg needs, and say how to install what is missing."""

from __future__ import annotations

import importlib.util
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from pvg.errors import EXIT_CHECK_FAILED, SYSTEMS, PvgError, counted, one_line, shortened, system_module
from pvg.installation import DISTRIBUTION, install_extra, install_packages, version_of
from pvg_cli.boundary import announce_loading, emit, explanation
from pvg_cli.options import DebugOption, JsonOption, RunsOption

Verdict = Literal["ok", "missing", "notice"]

LEAST_DISK_GB = 1.0  # an embedded game writes about 100 MB
LEAST_MEMORY_GB = 2.0  # torch, transformers and the embedded models need about 1 GB
# The packages of each extra of pyproject.toml. Packages and not modules, because py-spy has no module.
EXTRAS = {
    "lora": "peft",
    "cluster": "ray",
    "reasoning-gym": "reasoning-gym",
    "textarena": "textarena",
    "bridges": "inspect-ai",
    "profile": "py-spy",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
GIB = 1024**3
# A verdict's word and style.
MARKS: dict[Verdict, tuple[str, str]] = {
    "ok": ("ok", "badge good"),
    "missing": ("MISSING", "badge bad"),
    "notice": ("note", "badge warn"),
}
SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow")  # of the others only problems are shown
LOADED = ("torch", "transformers")  # libraries that models need
MODULES = {"nvidia-ml-py": "pynvml"}  # required package -> its module, if it has another name
REQUIREMENT = re.compile(r"([\w.-]+)>=([\d.]+)")  # without a marker: on every system
OTHER_FOLDER = "Choose another folder: --set store.root=FOLDER"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line. `missing` makes the command fail, `notice` does not."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def doctor(runs: RunsOption = Path("runs"), as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Check the installation, and say how to install what is missing. Exit code 1: pvg cannot work.

    pvg supports Linux and macOS. On Windows, run it in WSL.
    """
    announce_loading()
    findings = [finding for check in CHECKS for finding in _findings(check, runs)]
    healthy = all(finding.verdict != "missing" for finding in findings)
    if as_json:
        emit({"healthy": healthy, "checks": [asdict(finding) for finding in findings]})
    else:
        _print(findings, healthy)
    if not healthy:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _findings(check: Callable[[Path], Iterator[CheckResult]], runs: Path) -> Iterator[CheckResult]:
    """What a check finds. If the machine ends it, that is a finding too."""
    try:
        yield from check(runs)
    except Exception as error:
        if (known := explanation(error)) is None:
            raise
        yield CheckResult(
            check.__name__.removeprefix("check_").replace("_", " "), "missing", known.message, known.remedy
        )


def _print(findings: list[CheckResult], healthy: bool) -> None:
    from pvg_cli.output import stdout

    try:
        from pvg.reporting.table import Column, Table, TableCell
    except ImportError:  # a package is missing, and these lines say which
        for finding in findings:
            typer.echo(f"{MARKS[finding.verdict][0]}: {finding.name}: {finding.found}. {finding.remedy}")
        return

    table = Table([Column(), Column(style="strong", wrap=False), Column()], narrow=True)
    for finding in findings:
        table.add(TableCell(*MARKS[finding.verdict]), finding.name, TableCell(finding.found, below=finding.remedy))
    stdout().print(table)
    stdout().print("\npvg has everything that it needs." if healthy else "\nSomething that pvg needs is missing.")


# --- the checks ----------------------------------------------------------------------------------------------------


def check_system(runs: Path) -> Iterator[CheckResult]:
    """The operating system: pvg needs the file locks of Linux and macOS."""
    yield CheckResult("python", "ok", platform.python_version())
    found = f"{platform.system()} {platform.release()}"
    if importlib.util.find_spec("fcntl") is None:
        yield CheckResult("system", "missing", f"{found}, without fcntl", SYSTEMS)
    else:
        yield CheckResult("system", "ok", found)


def check_packages(runs: Path) -> Iterator[CheckResult]:
    """The required packages: whether they are installed, new enough, and can be loaded."""
    for package, least in {**dict.fromkeys(SHOWN, ""), **least_versions()}.items():
        found = version_of(package)
        if found is None:
            yield CheckResult(package, "missing", "not installed", install_packages(package))
        elif _numbers(found) < _numbers(least):
            remedy = install_packages(f"{package}>={least}")
            yield CheckResult(package, "missing", f"{found}, but pvg needs {least} or newer", remedy)
        elif problem := why_not_loaded(MODULES.get(package, package.replace("-", "_"))):
            told = f"{found} is installed, but cannot be loaded: {problem}"
            yield CheckResult(package, "missing", told, f"Uninstall {package} first. Then: {install_packages(package)}")
        elif package == "torch":
            import torch

            yield CheckResult(package, "ok", f"{found}, {counted(torch.get_num_threads(), 'thread')}")
        elif package in SHOWN:
            yield CheckResult(package, "ok", found)


def least_versions() -> dict[str, str]:
    """Package -> the lowest version that pvg works with, of the packages that it requires on every system. Empty if
    pvg runs without being installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (REQUIREMENT.fullmatch(text) for text in required)
    return {match[1]: match[2] for match in found if match is not None}


def _numbers(version: str) -> tuple[int, ...]:
    """The release as numbers: 2.13.0+cpu -> (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


@cache
def why_not_loaded(package: str) -> str:
    """Why an installed package cannot be imported; empty if it can. A broken library raises errors of any kind."""
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - the check reports it
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def check_extras(runs: Path) -> Iterator[CheckResult]:
    for extra, package in EXTRAS.items():
        absent = CheckResult(f"extra {extra}", "notice", f"not installed ({package})", install_extra(extra))
        yield absent if version_of(package) is None else CheckResult(f"extra {extra}", "ok", "installed")


def check_vllm(runs: Path) -> Iterator[CheckResult]:
    """The interpreter that `pvg serve` starts. Only the vLLM engine needs one."""
    from pvg.servers.command import find_interpreter

    try:
        found = find_interpreter()
    except PvgError as error:
        yield CheckResult("vllm", "notice", error.message, error.remedy)
    else:
        yield CheckResult("vllm", "ok", f"{found.vllm} for the {found.device.upper()}, {found.origin}: {found.python}")


def check_models(runs: Path) -> Iterator[CheckResult]:
    """The models that come with pvg. The default models are required."""
    if any(why_not_loaded(package) for package in LOADED):
        return
    from pvg.config.experiment import Experiment
    from pvg.config.load import EMBEDDED, embedded_names
    from pvg.models.sources import GGUF_READERS, SMOLLM2, how_to_install

    present = embedded_names()
    models = Experiment().models
    expected = [section.source.removeprefix("embedded:") for section in (models.prover, models.verifier)]
    for name in dict.fromkeys([*expected, *present]):
        if name in present:
            size = sum(file.stat().st_size for file in (EMBEDDED / name).iterdir())
            yield CheckResult(f"model {name}", "ok", f"embedded, {size / 1e6:.1f} MB")
        else:
            yield CheckResult(f"model {name}", "missing", "not embedded", "make models")
    if absent := ", ".join(each for each in (SMOLLM2, *GGUF_READERS) if importlib.util.find_spec(each) is None):
        yield CheckResult("model SmolLM2-135M", "notice", f"not installed ({absent})", how_to_install(SMOLLM2))
    else:
        yield CheckResult("model SmolLM2-135M", "ok", f"installed: gguf:{SMOLLM2}")


def check_runs_folder(runs: Path) -> Iterator[CheckResult]:
    """Disk space, write permission and file locks in the folder of runs."""
    try:
        place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
        free = shutil.disk_usage(place).free / GIB
        enough = free >= LEAST_DISK_GB
        remedy = "" if enough else f"Free some space: a run needs {LEAST_DISK_GB:.0f} GB."
        yield CheckResult("disk", "ok" if enough else "missing", f"{free:.1f} GB free in {place}", remedy)
        file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - closed below
    except OSError as error:
        yield CheckResult("runs folder", "missing", f"{shortened(str(runs))}: {error.strerror}", OTHER_FOLDER)
        return
    yield CheckResult("runs folder", "ok", f"{runs} is writable")
    fcntl = system_module("fcntl")
    try:
        with file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        remedy = "Do not resume a run while another process of this machine plays it, or move runs to another disk."
        yield CheckResult("locks", "notice", f"the file system of {runs} cannot lock files", remedy)


def check_workers(runs: Path) -> Iterator[CheckResult]:
    """The worker processes that the embedded game gets on this machine."""
    from pvg.config.experiment import Experiment
    from pvg.workers.choice import with_workers

    workers = getattr(with_workers(Experiment()).cluster, "workers", None)
    none = "none by default: they need Linux, two cores, and no OMP_NUM_THREADS=1"
    yield CheckResult("workers", "ok", f"{counted(workers, 'worker')} by default" if workers else none)


def check_sandbox(runs: Path) -> Iterator[CheckResult]:
    """How well this machine isolates programs that a model wrote. Only task.kind = "code" runs such programs."""
    from pvg.sandbox.sandbox import probe

    try:
        isolation = probe()
    except PvgError as error:
        yield CheckResult("sandbox", "notice", error.message, "task.kind = 'code' cannot run on this machine.")
        return
    if isolation.complaints:
        remedy = "On this machine task.kind = 'code' requires task.sandbox = 'reduced'."
        yield CheckResult("sandbox", "notice", f"{isolation.describe()}: {'; '.join(isolation.complaints)}", remedy)
    else:
        yield CheckResult("sandbox", "ok", isolation.describe())


def check_machine(runs: Path) -> Iterator[CheckResult]:
    import psutil

    from pvg.installation import native_bfloat16
    from pvg.telemetry.waits import cpu_quota, usable_cores, usable_memory

    quota = cpu_quota()
    limit = "" if math.isinf(quota) else f", with a CPU quota of {quota:g} cores"
    yield CheckResult("cores", "ok", f"{usable_cores()} of {psutil.cpu_count() or 1}{limit}")
    memory = usable_memory()[0] / GIB
    remedy = "" if memory >= LEAST_MEMORY_GB else f"The embedded game needs {LEAST_MEMORY_GB:.0f} GB."
    yield CheckResult("memory", "notice" if remedy else "ok", f"{memory:.1f} GB", remedy)
    if native_bfloat16(Path("/")):
        yield CheckResult("bfloat16", "ok", "the CPU has instructions for it")
        return
    found = "the CPU has no instructions for it, or they are unknown; without them it is 10 to 100 times slower"
    yield CheckResult("bfloat16", "notice", found, "Leave models.precision and models.dtype out.")


def check_gpu(runs: Path) -> Iterator[CheckResult]:
    if why_not_loaded("torch"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device in range(count):
        properties = torch.cuda.get_device_properties(device)
        yield CheckResult(f"gpu {device}", "ok", f"{properties.name}, {properties.total_memory / GIB:.0f} GB")
    if count:
        yield CheckResult(
            "gpu support",
            "notice",
            "pvg has run on one GPU, with the torch engine; vLLM and several GPUs are untested (docs/scaling.md)",
            "Test them in a checkout: make gpu. Or compare a short run with one on the CPU: -s models.device=cpu",
        )
    else:
        yield CheckResult("gpu", "notice", "none, so pvg runs on the CPU")


CHECKS: tuple[Callable[[Path], Iterator[CheckResult]], ...] = (
    check_system,
    check_packages,
    check_extras,
    check_vllm,
    check_models,
    check_runs_folder,
    check_sandbox,
    check_machine,
    check_workers,
    check_gpu,
)
