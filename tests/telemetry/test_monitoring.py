"""Monitoring as a run uses it: what reaches the records, the log, the sinks and the endpoint, and that it all ends."""

import asyncio
import json
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pvg.config.operation import Telemetry
from pvg.errors import MissingRequirementError
from pvg.telemetry.alerts import Alert
from pvg.telemetry.catalogue import metric as catalogued
from pvg.telemetry.monitoring import CROWDED_SAMPLES, Monitoring
from pvg.telemetry.waits import LagLimits

pytestmark = pytest.mark.slow

LIMIT_S = 60.0


class Told:
    """Everybody a Monitoring tells, checking that it does so in the event loop and not after its end."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.notices: list[str] = []
        self.alerts: list[Alert] = []
        self.announced: list[Alert] = []
        self.over = False
        self.fault: Exception | None = None

    def _check(self) -> None:
        asyncio.get_running_loop()  # raises in any other thread
        assert not self.over

    def record(self, kind: str, **fields: Any) -> None:
        self._check()
        if self.fault is not None:
            raise self.fault
        self.records.append((kind, fields))

    def notice(self, message: str) -> None:
        self._check()
        self.notices.append(message)

    def alert(self, alert: Alert) -> None:
        self._check()
        self.alerts.append(alert)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for found, fields in self.records if found == kind]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def own_threads() -> list[str]:
    own = ("device sampler", "metric sinks", "heartbeat", "metrics endpoint")
    return [thread.name for thread in threading.enumerate() if thread.name in own]


def watch(
    folder: Path, body: Callable[[Monitoring, Told], Awaitable[None]], *, first_step: int = 0, **settings: Any
) -> Told:
    """Run `body` while a Monitoring watches it, then give what was started a chance to show that it goes on."""
    told = Told()
    pace = {"device_every_s": 0.05, "lag_hz": 100.0} | {
        key: settings.pop(key) for key in ("device_every_s", "command_s", "lag_limits") if key in settings
    }
    workers = {key: settings.pop(key) for key in ("load", "workers_here") if key in settings}
    paced = type("Paced", (Monitoring,), pace)
    section = Telemetry(**settings)

    async def run() -> None:
        try:
            async with paced(
                section,
                record=told.record,
                notice=told.notice,
                announce=told.announced.append,
                alert=told.alert,
                run_directory=folder,
                name="first",
                config={"seed": 0},
                first_step=first_step,
                **workers,
            ) as monitoring:
                await body(monitoring, told)
        finally:
            told.over = True
            await asyncio.sleep(0.06)  # longer than the pace
            assert own_threads() == []
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    return told


async def until(done: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not done():  # noqa: ASYNC110 - the condition is what a run sees, and it sets no event
            await asyncio.sleep(0.01)


def test_device_and_loop_records_come_while_a_run_goes_on(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        await until(lambda: len(told.of("device")) >= 3 and len(told.of("loop")) >= 2)
        assert monitoring.endpoint_url is None

    told = watch(tmp_path, body)
    assert {"rss_bytes", "memory_used_bytes", "cpu", "process_cpu"} <= set(told.of("device")[2]["metrics"])
    assert told.of("device")[0]["time"] <= told.of("device")[2]["time"] <= time.time()
    lags = {*(f"lag_{name}_s" for name in ("min", "mean", "p50", "p90", "p99", "max")), "samples"}
    waits = {"ran_s", "waited_s", "longest_wait_s"} if Path("/proc/self/schedstat").is_file() else set()
    assert set(told.of("loop")[0]["metrics"]) == lags | waits


@pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="needs the counters of Linux")
@pytest.mark.parametrize("here", [True, False])
def test_the_notice_of_a_shared_machine_counts_what_its_workers_wait(tmp_path: Path, here: bool) -> None:
    """Threads of the driver that never wait, and workers that wait for 60 % of their time."""
    cores = {"ran_s": 4e5, "waited_s": 6e5, "longest_wait_s": 3e5}
    load = {"up": 2.0, "busy": 0.9, "core_wait": 0.6, "w0_busy": 0.9, **cores}

    async def body(monitoring: Monitoring, told: Told) -> None:
        await until(lambda: told.of("workers"))
        for _ in range(CROWDED_SAMPLES):
            monitoring._record_device(time.time(), {"core_wait": 0.0, "cpu": 1.0, "process_cpu": 1.5})

    told = watch(tmp_path, body, load=lambda: load, workers_here=here)
    waits = [notice for notice in told.notices if "waited for a core" in notice]
    assert len(waits) == here
    assert all("60 %" in notice for notice in waits)


def test_a_stall_is_an_alert(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        await asyncio.sleep(0.05)
        time.sleep(0.2)  # noqa: ASYNC251 - the fault

    told = watch(tmp_path, body, lag_limits=LagLimits(p90_s=0.1), device_every_s=3600.0)
    assert [alert.name for alert in told.alerts] == ["loop_lag_p90"]
    assert max(fields["metrics"]["lag_max_s"] for fields in told.of("loop")) > 0.15


def test_a_run_that_stands_still_is_an_alert_until_a_step_ends(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        await until(lambda: told.alerts)
        await asyncio.sleep(0.1)
        assert len(told.alerts) == 1
        monitoring.step(0, "mint", 1, {}, {}, {})
        await until(lambda: len(told.alerts) == 2)

    told = watch(tmp_path, body, stall_s=0.05, lag_limits=LagLimits(p90_s=100.0))
    assert {alert.name for alert in told.alerts} == {"stall"}
    assert told.announced == told.alerts


def test_a_blocked_loop_is_announced_while_it_is_blocked(tmp_path: Path) -> None:
    """The loop waits for what the announcement sets. An announcement on the loop would deadlock."""
    announced = threading.Event()

    async def body(monitoring: Monitoring, told: Told) -> None:
        monitoring._announce = lambda alert: (told.announced.append(alert), announced.set())  # type: ignore[assignment,func-returns-value]
        assert announced.wait(LIMIT_S), "no alert came while the loop was blocked"
        assert told.alerts == []
        await until(lambda: told.alerts)

    told = watch(tmp_path, body, lag_limits=LagLimits(100.0, 100.0, 0.1))
    assert [alert.name for alert in told.alerts] == ["loop_lag_max"]  # and once, though the window's lag is too long
    (alert,) = told.announced
    assert "has been blocked for" in alert.message
    assert "(threading.py:" in alert.message


def test_alerts_reach_the_endpoint_and_the_command(tmp_path: Path) -> None:
    port, heard = free_port(), tmp_path / "heard"
    program = f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read() + chr(10)); print('not shown')"

    async def body(monitoring: Monitoring, told: Told) -> None:
        monitoring.step(2, "train_prover", 1, {}, {}, {})
        monitoring.send(Alert("collapse", "a message; $(touch injected)"))
        monitoring.send(Alert("collapse", "once more"))

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                return str(answer.read().decode())

        found = ""
        while 'pvg_alerts_total{kind="collapse"} 2.0' not in found:  # or the test's time runs out
            found = await asyncio.to_thread(scrape)
        assert 'pvg_alerts_total{kind="stall"} 0.0' in found

    told = watch(tmp_path, body, metrics_port=port, alert_command=(sys.executable, "-c", program), device_every_s=3600)
    first, second = [json.loads(line) for line in heard.read_text().splitlines()]
    assert first.pop("time") <= time.time()
    place = {"step": 1, "round": 2, "phase": "train_prover", "run": "first"}
    assert first == {"kind": "collapse", "message": "a message; $(touch injected)", **place}
    assert second["message"] == "once more"
    assert not (Path.cwd() / "injected").exists()
    assert [notice for notice in told.notices if "command" in notice] == []


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("no-such-program-of-pvg",), "could not be started"),
        ((sys.executable, "-c", "import sys; sys.exit(7)"), "exit status 7"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "was killed after 0.2 s"),
    ],
)
def test_a_command_that_fails_is_one_notice_and_the_run_goes_on(
    command: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        for _ in range(2):
            monitoring.send(Alert("nan", "loss is inf"))
        await until(lambda: any("alert command" in notice for notice in told.notices))

    limit_s = 0.2 if "killed" in says else 30.0
    told = watch(tmp_path, body, alert_command=command, command_s=limit_s, device_every_s=3600)
    (notice,) = [notice for notice in told.notices if "alert command" in notice]
    assert re.search(says, notice)


def test_steps_reach_the_sinks_under_their_full_names(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        await until(lambda: told.of("device"))
        monitoring.step(0, "mint", 32, {"correct": 0.5}, {"decode": 1.0}, {"decode": 1.5})
        monitoring.step(0, "train_prover", 1, {"loss": 0.25}, {"decode": 2.0}, {"decode": 2.5})
        monitoring.step(0, "train_verifier", 1, {"loss": 0.5, "pairs": 8.0}, {}, {})
        monitoring.step(0, "train_verifier", 2, {"loss": 0.25}, {}, {}, whole=False)
        monitoring.phase(0, "train_verifier", {"loss": 0.5, "pairs": 8.0, "threshold": 0.75})
        monitoring.round(0, {"verifier_auc": 0.9})

    watch(tmp_path, body, sinks=("tensorboard",), first_step=40)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = set(events.Tags()["scalars"])
    assert [name for name in found if not catalogued(name)] == []
    assert {"mint/correct", "train_prover/loss", "train_verifier/threshold", "round/verifier_auc"} <= found
    assert {"device/rss_bytes", "loop/lag_p50_s"} <= found
    assert [(e.step, e.value) for e in events.Scalars("budget/decode")] == [(41, 1.0), (42, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("busy/decode")] == [(41, 1.5), (42, 2.5)]
    assert [(e.step, e.value) for e in events.Scalars("train_verifier/threshold")] == [(44, 0.75)]
    # What a step has told is not told again at the end of the phase, be it not the last step.
    assert [(e.step, e.value) for e in events.Scalars("train_verifier/loss")] == [(43, 0.5), (44, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("train_verifier/pairs")] == [(43, 8.0)]
    assert [e.step for e in events.Scalars("round/verifier_auc")] == [44]


def test_everything_ends_with_a_run_that_is_cancelled(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_later(0.05, task.cancel)
        await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        watch(tmp_path, body, sinks=("tensorboard",), metrics_port=free_port())


def test_a_sink_that_cannot_be_opened_leaves_the_port_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(monitoring: Monitoring, told: Told) -> None:
        pytest.fail("the run began")

    monkeypatch.setitem(sys.modules, "wandb", None)
    port = free_port()
    with pytest.raises(MissingRequirementError, match="names wandb"):
        watch(tmp_path, never, metrics_port=port, sinks=("wandb",))
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_full_disk_surfaces_at_the_next_step(tmp_path: Path) -> None:
    async def body(monitoring: Monitoring, told: Told) -> None:
        await until(lambda: told.of("device"))
        told.fault = MissingRequirementError("No space left for metrics.jsonl.")
        while True:
            monitoring.step(0, "mint", 1, {}, {}, {})
            await asyncio.sleep(0.01)

    with pytest.raises(MissingRequirementError, match="No space left"):
        watch(tmp_path, body)
