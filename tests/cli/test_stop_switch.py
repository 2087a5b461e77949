"""Ctrl-C, as real signals to a real process; the work is a stand-in that needs no torch."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from pvg_cli.driving import drive
from pvg_cli.output import stderr
from pvg_cli.run_display import RunBoard, RunWatcher

async def work(observer, stop):
    print("working", flush=True)
    await stop.wait()
    if {stubborn}:
        print("stubborn", flush=True)
        await asyncio.sleep(60)
    observer.noticed("committed")
    return "stopped"

print(drive(work, RunWatcher(RunBoard("e", "r", 1), stderr()), b"last words"), flush=True)
"""


def started(*, stubborn: bool) -> subprocess.Popen[str]:
    program = PROGRAM.format(stubborn=stubborn)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_work_to_stop(number: signal.Signals) -> None:
    process = started(stubborn=False)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "stopped\n"
    assert "Stopping when the start is done" in err  # the work has reported no phase
    assert "committed" in err


def test_the_second_signal_quits_at_once_with_the_last_words() -> None:
    process = started(stubborn=True)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "stubborn\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == "last words"
