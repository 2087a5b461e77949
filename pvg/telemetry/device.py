"""Samples CPU, memory and GPUs every few seconds during a run, in a thread.

A stalled event loop does not stop the thread, which calls `on_sample` and `on_notice`. It reads all GPUs of the driver
with NVML's numbers, because an engine in another process may use other GPUs. Without a driver, a notice says so
and sampling continues without GPUs. A GPU that stops answering is dropped with a notice.
"""

from __future__ import annotations

import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import psutil

from pvg.telemetry.waits import CoreWaits

STOP_LIMIT_S = 5.0  # a driver that hangs must not keep a finished run from ending

NVIDIA, DISPLAY = "0x10de", "0x03"  # the vendor and the class of a GPU on the PCI bus

OnSample = Callable[[float, dict[str, float]], None]


class GpuUnavailableError(Exception):
    """One or all GPUs cannot be read; the message says why."""


class DeviceSampler:
    """Samples every `interval_s` seconds from `start` to `stop`; the first sample is immediate.

    catalogue.toml explains the names (`device`). cpu, process_cpu and core_wait are those since the previous sample,
    so the first sample has none. core_wait is missing where the kernel does not count it.
    """

    def __init__(
        self,
        interval_s: float,
        on_sample: OnSample,
        on_notice: Callable[[str], None],
        *,
        open_gpus: Callable[[], dict[int, NvmlGpu]] | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._on_sample = on_sample
        self._on_notice = on_notice
        self._open_gpus = open_gpus or open_nvml
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wake the thread and wait for its end; a second call does nothing. Gives a notice if the driver blocks it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_LIMIT_S)
            if self._thread.is_alive():
                self._on_notice(f"The GPU driver has not answered for {STOP_LIMIT_S:g} s; pvg no longer waits for it.")

    def _run(self) -> None:
        host, gpus = HostReader(), self._opened()
        try:
            due = time.monotonic()
            while True:
                self._on_sample(time.time(), host.read() | self._read(gpus))
                now = time.monotonic()
                due = max(due + self._interval_s, now)  # after a suspend, do not catch up on missed samples
                if self._stopping.wait(due - now):
                    break
        except (psutil.Error, OSError) as error:
            self._on_notice(f"The machine is no longer sampled: {error}.")
        finally:
            for gpu in gpus.values():
                gpu.close()

    def _opened(self) -> dict[int, NvmlGpu]:
        try:
            return self._open_gpus()
        except GpuUnavailableError as error:
            self._on_notice(f"No GPU metrics: {error}.")
            return {}

    def _read(self, gpus: dict[int, NvmlGpu]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for index, gpu in list(gpus.items()):
            try:
                found = gpu.read()
            except GpuUnavailableError as error:
                self._on_notice(f"GPU {index} is no longer sampled: {error}.")
                gpus.pop(index).close()
            else:
                metrics |= {f"gpu{index}_{name}": value for name, value in found.items()}
        return metrics


@dataclass
class HostReader:
    """CPU and memory of the machine and of this process with its children. Use it from one thread."""

    _process: psutil.Process = field(default_factory=psutil.Process)
    _cpu_before: dict[psutil.Process, float] = field(default_factory=dict)  # psutil compares pid and start time
    _waits: CoreWaits = field(default_factory=CoreWaits)
    _read_at: float = 0.0

    def read(self) -> dict[str, float]:
        now, memory = time.monotonic(), psutil.virtual_memory()
        seconds, rss = self._processes()
        metrics = {
            "rss_bytes": float(rss),
            "memory_used_bytes": float(memory.total - memory.available),
            "memory_total_bytes": float(memory.total),
        }
        busy, cores = psutil.cpu_percent() / 100, self._waits.take()
        if self._read_at:
            metrics["cpu"] = busy
            if cores is not None:
                metrics["core_wait"] = cores.share
            if now > self._read_at:
                # A process without an earlier value is new. The last part of one that has ended is missing.
                spent = sum(max(0.0, s - self._cpu_before.get(process, 0.0)) for process, s in seconds.items())
                metrics["process_cpu"] = spent / (now - self._read_at)
        self._cpu_before, self._read_at = seconds, now
        return metrics

    def _processes(self) -> tuple[dict[psutil.Process, float], int]:
        """CPU seconds so far by process, and the resident bytes of all of them."""
        seconds, rss = {}, 0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or has changed its user
                continue
            seconds[process] = times.user + times.system
        return seconds, rss


def peak_memory() -> dict[str, float]:
    """The peak memory of this process, rss_bytes; with CUDA gpu_bytes, what torch reserved on the fullest GPU; with
    workers worker_rss_bytes, the peak of the largest one, and workers_rss_bytes, the sum of their peaks. The sum is an
    upper bound: workers share pages, and have their peaks at different times."""
    peaks = {"rss_bytes": float(_peak_rss()), **_WORKER_PEAKS}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peaks["gpu_bytes"] = float(max(map(torch.cuda.max_memory_reserved, range(torch.cuda.device_count()))))
    return peaks


_WORKER_PEAKS: dict[str, float] = {}  # of this process, as its other peaks are


def note_worker_peaks(peaks_W: Collection[float]) -> None:
    """Keep the peaks of the worker processes that this process has now, in bytes, for `peak_memory`."""
    now = {"worker_rss_bytes": max(peaks_W), "workers_rss_bytes": sum(peaks_W)}
    _WORKER_PEAKS.update(larger(_WORKER_PEAKS, now))


def larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The larger value of each peak."""
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in sorted({*one, *other})}


def _peak_rss() -> int:
    """In bytes. On Linux from /proc, because getrusage includes the parent's memory before this program started."""
    status = Path("/proc/self/status")
    text = status.read_text(encoding="ascii", errors="replace") if status.exists() else ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE):
        return int(found[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # in kB on all systems except macOS


CPUINFO = Path("/proc/cpuinfo")  # Linux
VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # flags of the kernel, the widest first


def processor(cpuinfo: Path = CPUINFO) -> str:
    """The name of the first processor and its widest vector instructions, which change the last bits of results:
    "AMD EPYC (AVX2)". On other systems than Linux what Python knows, at least the architecture."""
    name, flags = processor_facts(cpuinfo, "model name", "flags")
    known = name or platform.processor() or platform.machine()
    widest = next((vectors for flag, vectors in VECTORS.items() if flag in flags.split()), "")
    return f"{known} ({widest})" if widest else known


def processor_facts(cpuinfo: Path, *keys: str) -> list[str]:
    """What Linux tells of the first processor; "" for what it does not tell."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    found = (re.search(rf"^{key}\s*:(.*)$", text, re.MULTILINE) for key in keys)
    return [match[1].strip() if match else "" for match in found]


# --- NVML -------------------------------------------------------------------------------------------------------------


@contextmanager
def driver(nvml: Any = None) -> Iterator[Any]:
    """NVML, as the module pynvml or a replacement, open in the body. Every GPU object keeps it open further. Raises
    GpuUnavailableError if the library or the driver is missing, and for an NVMLError in the body."""
    try:
        nvml = nvml or import_module("pynvml")
    except ImportError as error:
        raise GpuUnavailableError(f"the package nvidia-ml-py is not installed ({error})") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise GpuUnavailableError(f"NVML could not be started ({error})") from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise GpuUnavailableError(f"NVML does not show the GPUs ({error})") from error
    finally:
        nvml.nvmlShutdown()


def open_nvml() -> dict[int, NvmlGpu]:
    """The GPUs that the NVIDIA driver shows, by NVML's number; none on a machine without an NVIDIA GPU.

    Raises GpuUnavailableError if the machine has one, and the library or the driver is missing.
    """
    try:
        return gpus_of()
    except GpuUnavailableError:
        if not has_nvidia_gpu(Path("/")):
            return {}
        raise


def has_nvidia_gpu(root: Path) -> bool:
    """Whether the kernel of this machine has an NVIDIA GPU: on its PCI bus, as a device file, or through WSL. `root`:
    the root of the file system."""
    if any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists():
        return True
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # removed in the meantime
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            return True
    return False


def gpus_of(nvml: Any = None) -> dict[int, NvmlGpu]:
    """The GPUs that NVML shows. Raises GpuUnavailableError."""
    gpus: dict[int, NvmlGpu] = {}
    try:
        with driver(nvml) as opened:
            for index in range(opened.nvmlDeviceGetCount()):
                gpus[index] = NvmlGpu(opened, index)
    except GpuUnavailableError:
        for gpu in gpus.values():
            gpu.close()
        raise
    if not gpus:
        raise GpuUnavailableError("the driver shows none")
    return gpus


def nvml_number(uuid: str, nvml: Any = None) -> int | None:
    """The number by which NVML knows the GPU with this UUID; None if it shows no such GPU. torch numbers the GPUs that
    CUDA_VISIBLE_DEVICES leaves, so its numbers may be others. Raises GpuUnavailableError."""
    with driver(nvml) as opened:
        for index in range(opened.nvmlDeviceGetCount()):
            found = str(opened.nvmlDeviceGetUUID(opened.nvmlDeviceGetHandleByIndex(index)))
            if found.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
                return index
    return None


def gpu_number(device: Any) -> int | None:
    """NVML's number of a torch device, by which samples and charts name it. Raises GpuUnavailableError."""
    import torch

    return nvml_number(str(torch.cuda.get_device_properties(device).uuid))


class NvmlGpu:
    """One GPU through NVML. Values that the GPU does not offer are left out; any other error means that it is lost."""

    def __init__(self, nvml: Any, index: int) -> None:
        """Raises nvml.NVMLError."""
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._absent: set[Callable[[], dict[str, float]]] = set()
        self._gpm: GpmShares | None = None
        nvml.nvmlInit()
        try:
            self._gpm = GpmShares.open(nvml, self._handle)
        except nvml.NVMLError:
            nvml.nvmlShutdown()
            raise

    def read(self) -> dict[str, float]:
        """What the GPU offers of: utilisation, memory_activity and GPM's shares (0..1), memory_bytes,
        memory_total_bytes, power_w. Raises GpuUnavailableError if the GPU no longer answers."""
        metrics: dict[str, float] = {}
        for read in (self._utilisation, self._memory, self._power, self._gpm_shares):
            if read in self._absent:
                continue
            try:
                metrics |= read()
            except self._nvml.NVMLError_NotSupported:
                self._absent.add(read)
            except self._nvml.NVMLError as error:
                raise GpuUnavailableError(str(error)) from error
        return metrics

    def close(self) -> None:
        try:
            if self._gpm is not None:
                self._gpm.close()
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return  # a lost GPU cannot be closed; its loss has been reported

    def _utilisation(self) -> dict[str, float]:
        """Shares of time, as sampled by the driver. They do not say how much of the GPU worked."""
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"utilisation": rates.gpu / 100, "memory_activity": rates.memory / 100}

    def _memory(self) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_bytes": float(memory.used), "memory_total_bytes": float(memory.total)}

    def _power(self) -> dict[str, float]:
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000}

    def _gpm_shares(self) -> dict[str, float]:
        return self._gpm.read() if self._gpm is not None else {}


class GpmShares:
    """NVML's GPM metrics (Hopper and later), each averaged over the time between two reads.

    sm_activity: streaming multiprocessors (SMs) with at least one warp; sm_occupancy: warps on the SMs / their maximum;
    memory_bandwidth: bytes moved to and from the GPU's memory / the maximum.
    """

    METRICS: ClassVar = {
        "sm_activity": "NVML_GPM_METRIC_SM_UTIL",
        "sm_occupancy": "NVML_GPM_METRIC_SM_OCCUPANCY",
        "memory_bandwidth": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    }

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._older, self._newer = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._filled = False

    @classmethod
    def open(cls, nvml: Any, handle: Any) -> GpmShares | None:
        """None if the GPU or its driver has no GPM metrics."""
        try:
            supported = nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None
        return cls(nvml, handle) if supported else None

    def read(self) -> dict[str, float]:
        """Shares 0..1 by name since the last read. The first read is empty; metrics without a value are left out."""
        nvml = self._nvml
        nvml.nvmlGpmSampleGet(self._handle, self._newer)
        filled, self._filled = self._filled, True
        self._older, self._newer = self._newer, self._older
        if not filled:
            return {}
        wanted = nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(self.METRICS)
        wanted.sample1, wanted.sample2 = self._newer, self._older  # swapped above
        for place, constant in enumerate(self.METRICS.values()):
            wanted.metrics[place].metricId = getattr(nvml, constant)
        found = nvml.nvmlGpmMetricsGet(wanted).metrics
        return {
            name: float(found[place].value) / 100
            for place, name in enumerate(self.METRICS)
            if found[place].nvmlReturn == nvml.NVML_SUCCESS
        }

    def close(self) -> None:
        self._nvml.nvmlGpmSampleFree(self._older)
        self._nvml.nvmlGpmSampleFree(self._newer)
