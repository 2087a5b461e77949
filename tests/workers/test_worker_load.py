"""How busy workers are: by hand, and of real processes that have work and have none."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from test_worker_processes import experiment, sampled, workers_of
from worker_stand_ins import RecordedEvents, kept_supply

from pvg.telemetry import device
from pvg.telemetry.catalogue import metric
from pvg.workers import pool as pool_module
from pvg.workers.pool import WorkerPool
from pvg.workers.scaling import MOST_NAMED, LoadMeter

pytestmark = pytest.mark.slow


def test_shares_of_the_time_between_reports_by_hand() -> None:
    meter = LoadMeter()
    for worker, ran_s, waited_s in ((0, 1.0, 0.5), (0, 1.0, 0.5), (1, 0.5, 0.0)):
        meter.report(worker, {"ran_s": ran_s, "waited_s": waited_s, "wall_s": 2.0, "peak_bytes": 0})
    assert meter.sample([True, False], [0, 3]) == pytest.approx(
        {
            "up": 1,
            "restarts": 3,
            "busy": (0.75 + 0.25) / 2,
            "busy_most": 0.75,
            "busy_least": 0.25,
            "core_wait": 1.0 / 3.5,
            "ran_s": 2.5,
            "waited_s": 1.0,
            "longest_wait_s": 1.0,
            "w0_busy": 0.75,
            "w1_busy": 0.25,
            "w0_up": 1,
            "w1_up": 0,
            "w0_restarts": 0,
            "w1_restarts": 3,
        }
    )
    # Without a new report there is no share; a system that does not count has never one.
    meter.report(0, {"wall_s": 2.0, "peak_bytes": 0})
    assert "busy" not in meter.sample([True, True], [0, 3])


def test_many_workers_have_no_metrics_of_their_own() -> None:
    meter = LoadMeter()
    meter.report(5, {"ran_s": 1.0, "waited_s": 0.0, "wall_s": 10.0, "peak_bytes": 0})
    found = meter.sample([True] * (MOST_NAMED + 1), [0] * (MOST_NAMED + 1))
    shares = {"busy", "busy_most", "busy_least", "core_wait"}
    assert set(found) == {"up", "restarts", "ran_s", "waited_s", "longest_wait_s", *shares}
    assert all(metric(f"workers/{name}") is not None for name in found)
    assert metric("workers/w12_busy") is not None


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs the counters of Linux")
def test_workers_report_their_load_their_peaks_and_their_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PROBE_S", 0.1)
    monkeypatch.setattr(device, "_WORKER_PEAKS", {})
    assert set(device.peak_memory()) == {"rss_bytes"}

    async def play() -> None:
        pool = WorkerPool(experiment(2), kept_supply(), RecordedEvents())
        await pool.start()
        try:
            least = [peak_of(pid) for pid in workers_of(pool)]
            async with asyncio.timeout(120):
                while device.peak_memory().get("workers_rss_bytes", 0.0) < sum(least):  # noqa: ASYNC110 - nothing tells it
                    await asyncio.sleep(0.05)
            peaks, most = device.peak_memory(), [peak_of(pid) for pid in workers_of(pool)]
            assert sum(least) <= peaks["workers_rss_bytes"] <= sum(most)
            assert max(least) <= peaks["worker_rss_bytes"] <= max(most)
            pool.measured()
            found: dict[str, float] = {}
            while "w0_busy" not in found or "w1_busy" not in found:
                await sampled(pool, 1)
                found |= pool.measured()
            assert (found["up"], found["restarts"]) == (2, 0)
            assert 0.0 < found["w0_busy"] <= 1.0
            assert 0.0 < found["w1_busy"] <= 1.0
            os.kill(workers_of(pool)[1], signal.SIGKILL)
            while (found := pool.measured())["restarts"] == 0 or found["up"] < 2:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.05)
            assert (found["w0_restarts"], found["w1_restarts"]) == (0, 1)
        finally:
            await pool.close()

    asyncio.run(play())
    assert "workers_rss_bytes" in device.peak_memory()  # also of workers that have ended


def peak_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(size) * 1024
