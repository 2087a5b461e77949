"""Busy processes: they compute while the block lasts, and none outlives it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from pvg.bench.runner import busy_processes

OWNER = """
import time
from pvg.bench.runner import busy_processes
with busy_processes(2) as numbers:
    print(*numbers, flush=True)
    time.sleep(600)
"""


def alive(number: int) -> bool:
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


def until_gone(numbers: list[int]) -> None:
    """The test's own timeout ends it."""
    while any(map(alive, numbers)):
        time.sleep(0.05)


def test_they_compute_until_the_block_ends() -> None:
    with busy_processes(2) as numbers:
        assert len(set(numbers)) == 2
        for number in numbers:
            process = psutil.Process(number)
            before = process.cpu_times().user
            while process.cpu_times().user < before + 0.05:
                time.sleep(0.01)
    assert not any(map(psutil.pid_exists, numbers))


def test_they_end_when_their_owner_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        numbers = [int(number) for number in owner.stdout.readline().split()]
        assert len(numbers) == 2
        assert all(map(alive, numbers))
        owner.kill()
    until_gone(numbers)
