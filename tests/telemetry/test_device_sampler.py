"""The device sampler: a thread that goes on whatever the event loop does, and GPUs that come, lack things and go."""

import ctypes
import platform
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pvg.telemetry import device
from pvg.telemetry.device import (
    DeviceSampler,
    GpuUnavailableError,
    HostReader,
    NvmlGpu,
    gpus_of,
    has_nvidia_gpu,
    nvml_number,
    processor,
)


class FakeNvml:
    """pynvml with GPUs whose answers the test sets. Errors, constants and structures are those of the real one."""

    def __init__(self, gpus: int = 1, *, sm_percents: tuple[float, ...] | None = (50.0,)) -> None:
        self.gpus, self.users, self.samples = gpus, 0, 0
        self._sm_percents = sm_percents
        self._readings = 0
        self.faults: dict[str, Exception] = {}
        self.returns: dict[int, int] = {}  # of single GPM metrics

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVML", "c_nvml")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def _fault(self, name: str) -> None:
        if name in self.faults:
            raise self.faults[name]

    def nvmlInit(self) -> None:
        self._fault("init")
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._fault("count")
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._fault(f"handle {index}")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._fault("uuid")
        return f"GPU-0000000{handle}-AAAA"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self._fault("utilisation")
        return SimpleNamespace(gpu=37, memory=4)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._fault("memory")
        return SimpleNamespace(total=80 * 2**30, free=60 * 2**30, used=20 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._fault("power")
        return 412_500

    def nvmlGpmQueryDeviceSupport(self, handle: int) -> Any:
        self._fault("gpm")
        return SimpleNamespace(isSupportedDevice=int(self._sm_percents is not None))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def nvmlGpmSampleGet(self, handle: int, sample: Any) -> Any:
        """A sample is the number of the reading that filled it."""
        self._readings += 1
        ctypes.cast(ctypes.byref(sample), ctypes.POINTER(ctypes.c_void_p))[0] = self._readings
        return sample

    def nvmlGpmMetricsGet(self, wanted: Any) -> Any:
        older, newer = (ctypes.cast(s, ctypes.c_void_p).value for s in (wanted.sample1, wanted.sample2))
        assert newer == older + 1 == self._readings  # type: ignore[operator]
        assert wanted.version == 1
        assert self._sm_percents is not None
        values = {
            pynvml.NVML_GPM_METRIC_SM_UTIL: self._sm_percents[older - 1],
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 25.0,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 75.0,
        }
        for metric in wanted.metrics[: wanted.numMetrics]:
            metric.value = values[metric.metricId]
            metric.nvmlReturn = self.returns.get(metric.metricId, pynvml.NVML_SUCCESS)
        return wanted


def test_a_gpu_is_read_in_the_units_of_the_records() -> None:
    nvml = FakeNvml(sm_percents=(12.5, 80.0))
    gpu = gpus_of(nvml)[0]
    plain = {
        "utilisation": 0.37,
        "memory_activity": 0.04,
        "memory_bytes": 20 * 2.0**30,
        "memory_total_bytes": 80 * 2.0**30,
        "power_w": 412.5,
    }
    assert gpu.read() == plain  # SM activity lies between two reads
    shares = {"sm_occupancy": 0.25, "memory_bandwidth": 0.75}
    assert gpu.read() == plain | shares | {"sm_activity": 0.125}
    nvml.returns[pynvml.NVML_GPM_METRIC_SM_OCCUPANCY] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert gpu.read() == plain | {"sm_activity": 0.8, "memory_bandwidth": 0.75}
    gpu.close()
    assert (nvml.users, nvml.samples) == (0, 0)


def test_what_a_gpu_does_not_offer_is_left_out() -> None:
    nvml = FakeNvml(sm_percents=None)
    nvml.faults["power"] = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    gpu = gpus_of(nvml)[0]
    offered = {"utilisation", "memory_activity", "memory_bytes", "memory_total_bytes"}
    assert set(gpu.read()) == set(gpu.read()) == offered
    old_driver = FakeNvml()
    old_driver.faults["gpm"] = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    gpu = gpus_of(old_driver)[0]
    gpu.read()
    assert "sm_activity" not in gpu.read()


@pytest.mark.parametrize("fault", ["init", "count", "handle 1", "gpm"])
def test_a_driver_that_fails_to_start_leaves_nothing_open(fault: str) -> None:
    nvml = FakeNvml(gpus=2)
    nvml.faults[fault] = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(GpuUnavailableError):
        gpus_of(nvml)
    assert (nvml.users, nvml.samples) == (0, 0)


def test_a_gpu_is_found_on_the_bus_or_among_the_devices(tmp_path: Path) -> None:
    def add(name: str, vendor: str, kind: str) -> None:
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")

    assert not has_nvidia_gpu(tmp_path)
    add("0000:00:01.0", "0x8086", "0x030000")  # another vendor's GPU
    add("0000:00:02.0", "0x10de", "0x040300")  # NVIDIA's sound
    assert not has_nvidia_gpu(tmp_path)
    add("0000:00:03.0", "0x10de", "0x030200")
    assert has_nvidia_gpu(tmp_path)
    other = tmp_path / "other"
    (other / "dev").mkdir(parents=True)
    (other / "dev/nvidiactl").touch()
    assert not has_nvidia_gpu(other)
    (other / "dev/nvidia0").touch()
    assert has_nvidia_gpu(other)


# --- the sampler ------------------------------------------------------------------------------------------------------


class Kept:
    """What a sampler handed out."""

    def __init__(self) -> None:
        self.samples: list[dict[str, float]] = []
        self.notices: list[str] = []
        self._arrived = threading.Condition()

    def sample(self, at: float, metrics: dict[str, float]) -> None:
        assert abs(at - time.time()) < 60
        assert threading.current_thread().name == "device sampler"
        with self._arrived:
            self.samples.append(metrics)
            self._arrived.notify()

    def wait(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.samples) >= count, timeout=30)

    def sampler(self, interval_s: float, open_gpus: Callable[[], dict[int, NvmlGpu]]) -> DeviceSampler:
        return DeviceSampler(interval_s, self.sample, self.notices.append, open_gpus=open_gpus)


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "device sampler"]


def test_a_gpu_that_fails_in_mid_run_is_dropped_with_one_notice() -> None:
    nvml = FakeNvml(gpus=2, sm_percents=None)
    kept = Kept()
    sampler = kept.sampler(0.01, lambda: gpus_of(nvml))
    sampler.start()
    kept.wait(2)
    lost = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: _raise(lost) if handle == 1 else SimpleNamespace(used=1, total=2)  # type: ignore[method-assign]
    kept.wait(len(kept.samples) + 4)
    sampler.stop()
    assert "gpu0_power_w" in kept.samples[0]
    assert "gpu1_power_w" in kept.samples[0]
    assert kept.samples[-1]["gpu0_memory_bytes"] == 1.0
    assert not [name for name in kept.samples[-1] if name.startswith("gpu1_")]
    assert kept.notices == ["GPU 1 is no longer sampled: GPU is lost."]
    assert nvml.users == 0


def _raise(error: Exception) -> Any:
    raise error


def test_a_driver_that_hangs_does_not_keep_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "STOP_LIMIT_S", 0.05)
    hanging, hung = threading.Event(), threading.Event()

    class Hung:
        def read(self) -> dict[str, float]:
            hanging.set()
            hung.wait(30)
            return {}

        def close(self) -> None: ...

    kept = Kept()
    sampler = kept.sampler(1.0, lambda: {0: Hung()})
    sampler.start()
    assert hanging.wait(30)
    sampler.stop()
    (notice,) = kept.notices
    assert "has not answered" in notice
    hung.set()
    for thread in sampling_threads():
        thread.join(30)


@pytest.mark.slow
def test_children_count_in_memory_and_cpu() -> None:
    reader = HostReader()
    alone = reader.read()
    code = "held = bytes(1) * 100_000_000\nprint(flush=True)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        reader.read()
        time.sleep(0.3)
        together = reader.read()
    finally:
        child.kill()
        child.communicate()
    assert together["rss_bytes"] - alone["rss_bytes"] > 90_000_000
    assert together["process_cpu"] > 0
    assert reader.read()["process_cpu"] >= 0  # the child is gone


def test_the_peak_of_memory_is_what_was_held_once() -> None:
    """In a new process: its peak does not include that of other tests, and nothing samples there."""
    program = """
        from pvg.telemetry.device import peak_memory
        before = peak_memory()["rss_bytes"]
        held = bytearray(200_000_000)
        held[::4096] = bytes([1]) * len(held[::4096])
        del held
        grown = peak_memory()["rss_bytes"] - before
        assert 195e6 < grown < 230e6, grown
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_gpu_of_torch_is_found_by_its_uuid() -> None:
    """torch numbers only the GPUs that CUDA_VISIBLE_DEVICES names, and writes UUIDs in lower case without a prefix."""
    nvml = FakeNvml(gpus=4)
    assert nvml_number("00000002-aaaa", nvml) == 2
    assert nvml_number("GPU-00000003-AAAA", nvml) == 3
    assert nvml_number("00000009-aaaa", nvml) is None
    assert nvml.users == 0
    nvml.faults["uuid"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(GpuUnavailableError):
        nvml_number("00000002-aaaa", nvml)
    assert nvml.users == 0


# --- the processor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("fpu sse2 avx avx2 fma", "AMD EPYC (AVX2)"),
        ("fpu sse2 avx avx2 avx512f avx512bw", "AMD EPYC (AVX-512)"),
        ("fpu sse2 avx", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart_by_their_vectors(tmp_path: Path, flags: str, name: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    first = f"processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\nflags\t\t: {flags}\n"
    cpuinfo.write_text(f"{first}\nprocessor\t: 1\nvendor_id\t: Other\nmodel name\t: Other\nflags\t\t: avx512f\n")
    assert processor(cpuinfo) == name


def test_other_systems_name_at_least_the_architecture(tmp_path: Path) -> None:
    known = platform.processor() or platform.machine()
    assert known
    cpuinfo = tmp_path / "cpuinfo"
    assert processor(cpuinfo) == known
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd\n")  # as on ARM
    assert processor(cpuinfo) == known
