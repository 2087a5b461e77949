"""Ctrl-C, as real signals to a real process; the work is a stand-in that needs no torch."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import orjson
import pytest
from calling import at_import
from run_samples import begin

from pvg_cli.boundary import handled
from pvg_cli.driving import SIGNALS, StopSwitch
from pvg_cli.run_display import RunDisplay

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, sys
from pvg.telemetry.events import PhaseInfo
from pvg_cli.driving import drive
from pvg_cli.output import stderr
from pvg_cli.run_display import RunDisplay

async def work(observer, stop):
    observer.phase_started(PhaseInfo(0, 1, "mint", "rollouts", 4))
    print("working", flush=True)
    await stop.wait()
    if {stubborn}:
        print("stubborn", flush=True)
        await asyncio.sleep(60)
    observer.noticed("committed")
    return "stopped"

print(drive(work, RunDisplay("r", 1, stderr()), b"last words"), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_work_to_stop_and_the_second_quits_with_the_last_words(
    number: signal.Signals,
) -> None:
    stubborn = number == signal.SIGTERM
    program = PROGRAM.format(stubborn=stubborn)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(number)
    if stubborn:
        assert process.stdout.readline() == "stubborn\n"
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == ((130, "last words") if stubborn else (0, "stopped\n"))
    assert "Stopping at the next commit point" in err
    assert ("committed" in err) is not stubborn


def stopped_at_import(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = at_import(module, "os.kill(os.getpid(), signal.SIGINT); time.sleep(3600)", arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 130
    return done


@pytest.mark.parametrize(("command", "module"), [("rollout", "torch"), ("train", "pvg.models.sources")])
def test_a_stop_during_the_start_waits_for_no_load_and_leaves_no_run(
    command: str, module: str, empty_folder: Path
) -> None:
    """`rollout` imports in the main thread; `train` opens a model in a thread."""
    done = stopped_at_import(module, command, "-s", "cluster=none", "--name", "new")
    assert done.stdout == ""
    assert done.stderr.endswith(
        "Stopping. Ctrl-C again quits at once.\nStopped before 'new' began. pvg removed its empty folder.\n"
    )
    assert list((empty_folder / "runs").iterdir()) == []


def test_a_stop_during_the_start_keeps_a_run_that_is_resumed(empty_folder: Path) -> None:
    begin(Path("runs"), "old")
    done = stopped_at_import("torch", "train", "--resume", "old", "--json")
    assert orjson.loads(done.stdout)["error"] == {
        "type": "Stopped",
        "message": "Stopped while 'old' was starting.",
        "remedy": "To resume it: pvg train --resume old",
        "exit_code": 130,
    }
    assert (empty_folder / "runs" / "old" / "experiment.toml").is_file()


class Starting:
    """What a switch asks of a display that has begun no phase."""

    is_stopping, starting, live = False, True, True

    def stop_requested(self) -> None: ...


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_whose_exception_python_drops_takes_effect_later() -> None:
    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    async def work(display: object, stop: asyncio.Event) -> bool:
        Ends()
        await asyncio.sleep(0)
        return stop.is_set()

    switch = StopSwitch(cast(RunDisplay, Starting()))
    with handled(switch.handle, SIGNALS):
        assert asyncio.run(switch.attached(work))
