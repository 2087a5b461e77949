"""How long threads waited for cores: the kernel's figures, where it has them, and what is said of them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pvg.telemetry.waits import SHARED, CoreTime, CoreWaits, cpu_quota, crowding, usable_cores, usable_memory

LINUX = Path("/proc/self/schedstat").is_file()

# Pinned to one core, as the busy process that it starts is: the kernel gives each a half of it.
BESIDE_A_BUSY_PROCESS = """
import json, os, sys, time
from pvg.bench.runner import busy_processes
from pvg.telemetry.waits import CoreWaits

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
with busy_processes(1):
    waits, began = CoreWaits(), time.process_time()
    while time.process_time() < 0.2 + began:
        pass
    found = waits.take()
print(json.dumps([found.ran_s, found.waited_s, found.longest_s, found.shared]))
"""


def kernel(folder: Path, **threads: tuple[int, int]) -> None:
    """What the kernel says of each thread: nanoseconds that it ran, and that it waited."""
    for name, (ran, waited) in threads.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(f"{ran} {waited} 7\n")


def test_a_window_is_what_the_threads_ran_and_waited_since_the_one_before(tmp_path: Path) -> None:
    kernel(tmp_path, t1=(5_000_000_000, 1_000_000_000), t2=(1, 1))
    waits = CoreWaits(tmp_path)
    kernel(tmp_path, t1=(6_000_000_000, 1_500_000_000), t3=(500_000_000, 2_000_000_000))
    found = waits.take()
    assert found == CoreTime(pytest.approx(1.5), pytest.approx(2.5), pytest.approx(2.0))
    assert found is not None
    assert found.share == pytest.approx(2.5 / 4.0)
    assert waits.take() == CoreTime(0.0, 0.0, 0.0)
    kernel(tmp_path, t3=(100_000_000, 0))  # another thread of that number
    assert waits.take() == CoreTime(pytest.approx(0.1), 0.0, 0.0)


def test_nothing_is_said_where_the_kernel_counts_nothing(tmp_path: Path) -> None:
    assert CoreWaits(tmp_path / "proc").take() is None  # another system than Linux
    assert CoreWaits(tmp_path).take() is None
    kernel(tmp_path, t1=(0, 0))  # the kernel was built without the count
    assert CoreWaits(tmp_path).take() is None
    (tmp_path / "t1" / "schedstat").write_text("what?\n")
    assert CoreWaits(tmp_path).take() is None


@pytest.mark.skipif(not LINUX, reason="needs the counters of Linux")
def test_a_busy_process_on_the_same_core_is_seen() -> None:
    command = [sys.executable, "-c", BESIDE_A_BUSY_PROCESS]
    ran_s, waited_s, longest_s, shared = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shared
    assert ran_s > 0.1
    assert waited_s > ran_s * SHARED
    assert 0.5 * waited_s < longest_s <= waited_s


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"core_wait": 0.4, "process_cpu": 1.5}, True),
        ({"core_wait": SHARED, "process_cpu": 1.5}, False),
        ({"core_wait": 0.9, "process_cpu": 0.01}, False),  # it has nothing to do
        ({"process_cpu": 1.5}, False),  # not known here
        ({"core_wait": 0.9}, False),  # the first sample
    ],
)
def test_threads_that_wait_for_a_core_are_a_notice(metrics: dict[str, float], said: bool) -> None:
    assert (crowding(metrics) is not None) is said


def test_with_workers_their_waits_and_those_of_the_driver_are_one_share() -> None:
    workers = CoreTime.of_metrics({"busy": 0.9, "ran_s": 5.0, "waited_s": 4.0, "longest_wait_s": 2.0})
    assert workers == CoreTime(5.0, 4.0, 2.0)
    device = {"core_wait": 0.01, "cpu": 1.0, "process_cpu": 1.5}
    message = crowding(device, CoreTime(1.0, 0.0, 0.0) + workers)
    assert message is not None
    assert "waited for a core 40 %" in message
    # A driver that waits, next to workers that hardly do.
    assert crowding({**device, "core_wait": 0.9}, CoreTime(0.1, 0.9, 0.9) + CoreTime(9.0, 0.5, 0.3)) is None
    assert CoreTime.of_metrics({"up": 2.0}) is None  # nothing was measured yet


@pytest.mark.parametrize(
    ("groups", "files", "quota", "cores"),
    [
        ("0::/", {"cpu.max": "50000 100000"}, 0.5, 1),  # a container with its own view of the groups
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5, 2),  # the outer group has a quota
        ("0::/a/b", {"a/cpu.max": "max 100000", "a/b/cpu.max": "300000 100000"}, 3, 3),
        ("0::/of/the/host", {"cpu.max": "200000 100000"}, 2, 2),  # a container that sees the path of its host
        ("4:cpu,cpuacct:/a\n0::/", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5, 1),
        ("1:cpu:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, 4),
        ("0::/", {"cpu.max": "1000 100000"}, 0.01, 1),
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 4),
        ("nonsense", {"cpu.max": "nonsense"}, math.inf, 4),
        ("0::/", {"cpu.max": ""}, math.inf, 4),
        ("0::/", {"cpu.max": "900000 100000"}, 9, 4),  # more than the machine has
        (None, {}, math.inf, 4),
    ],
)
def test_a_cpu_quota_of_a_container_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], quota: float, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4), raising=False)
    of_process = {} if groups is None else {"proc/self/cgroup": groups}
    for name, text in {**of_process, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert (cpu_quota(tmp_path), usable_cores(tmp_path)) == (quota, cores)


@pytest.mark.parametrize(
    ("groups", "folder", "names"),
    [
        ("0::/", ".", ("memory.max", "memory.current", "inactive_file")),  # a container with its own view of the groups
        ("0::/of/the/host", ".", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b", "a", ("memory.max", "memory.current", "inactive_file")),  # the outer group has a limit
        ("4:memory:/a", "memory/a", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_a_memory_limit_of_a_container_counts_as_the_memory(
    tmp_path: Path, groups: str, folder: str, names: tuple[str, str, str]
) -> None:
    assert usable_memory(tmp_path)[0] == psutil.virtual_memory().total
    own = tmp_path / "sys/fs/cgroup" / folder
    for path, text in (
        (tmp_path / "proc/self/cgroup", groups),
        (own / names[0], "4000000"),
        (own / names[1], "3000000"),
        (own / "memory.stat", f"anon 1\n{names[2]} 500000"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert usable_memory(tmp_path) == (4_000_000, 1_500_000)
    (own / names[0]).write_text("max\n")
    assert usable_memory(tmp_path)[0] == psutil.virtual_memory().total
