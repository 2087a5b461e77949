"""A game on a core that another program uses too: its notice, its metric, and what `pvg diagnose` says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pvg.reporting.diagnosis import diagnose
from pvg.store.run_directory import RunDirectory
from pvg.store.state import JsonLinesReader
from pvg.telemetry.waits import SHARED

# Game and busy process are pinned to one core: whatever else this machine does, each gets a half of it at most.
GAME = """
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from kill_drill import small_experiment
from pvg.bench.runner import busy_processes
from pvg.config.load import build_experiment
from pvg.game.run import play
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.monitoring import Monitoring
from pvg.telemetry.events import SilentObserver
from pvg.telemetry.waits import LagLimits
from pvg.workers import pool

class Observer(SilentObserver):
    notices = []
    def noticed(self, message):
        self.notices.append(message)

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
plain = small_experiment().plain()
plain["game"]["rounds"], plain["cluster"] = 1, {"kind": "local", "workers": 2}
pool.PROBE_S = 0.1
Monitoring.device_every_s, Monitoring.lag_limits = 0.2, LagLimits(max_s=0.001)
experiment = build_experiment(plain)
run = RunDirectory.create(Path(sys.argv[1]), "shared", experiment)
observer = Observer()
with run.lock(), busy_processes(1):
    asyncio.run(play(experiment, run, observer=observer, stop=asyncio.Event(), resume=False))
print(json.dumps(observer.notices))
"""


@pytest.mark.drill
@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="needs the counters of Linux")
def test_a_game_beside_a_busy_process_says_that_the_machine_is_shared(tmp_path: Path) -> None:
    command = [sys.executable, "-c", GAME, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert [notice for notice in json.loads(done.stdout) if "pvg's threads waited for a core" in notice]
    records = list(JsonLinesReader(tmp_path / "shared" / "metrics.jsonl"))
    shares = [
        row["metrics"]["core_wait"] for row in records if row["kind"] == "device" and "core_wait" in row["metrics"]
    ]
    assert sum(shares) / len(shares) > SHARED
    alerts = [row["message"] for row in records if row["kind"] == "alert" and row["name"] == "loop_lag_max"]
    assert alerts
    assert not [message for message in alerts if "Something computes" in message]
    found = {finding.signature: finding for finding in diagnose(RunDirectory(tmp_path / "shared")).findings}
    assert found["shared-machine"].measured > SHARED
    assert found["shared-machine"].settings == ("cluster.max_workers",)  # each process has one thread already
    assert "threads of all its processes" in found["shared-machine"].says
    if "loop-lag" in found:
        assert "computes on the event loop" not in found["loop-lag"].remedy
