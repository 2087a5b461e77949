"""Metric sinks: what TensorBoard reads back, and a board that survives whatever its sinks do."""

import json
import math
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from full_disk import files_up_to
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pvg.telemetry.sinks import AlertPoint, ExamplesPoint, MetricPoint, MetricSink, SinkBoard, SinkContext, open_sinks


def point(step: int, **metrics: float) -> MetricPoint:
    named = {f"train_prover/{name}": value for name, value in metrics.items()}
    return MetricPoint(1000.0 + step, step, 0, "train_prover", named)


def opening(folder: Path, on_notice: Callable[[str], None] = print, *, resumed: bool = False) -> SinkContext:
    return SinkContext(folder, "first", {"seed": 0}, resumed, on_notice)


def board_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "metric sinks"]


class Kept(MetricSink):
    """A sink in memory."""

    def __init__(self) -> None:
        self.points: list[MetricPoint] = []
        self.closed = 0

    def write(self, point: MetricPoint) -> None:
        assert threading.current_thread().name == "metric sinks"
        assert not self.closed
        self.points.append(point)

    def close(self) -> None:
        self.closed += 1


class Gated(Kept):
    """Takes nothing until the test opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def write(self, point: MetricPoint) -> None:
        self.begun.set()
        assert self.go.wait(30)
        super().write(point)


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    board = SinkBoard(open_sinks(["tensorboard"], opening(tmp_path)), pytest.fail)
    board.put(point(1, loss=0.5, kl=math.nan))
    board.put(point(2, loss=0.25, kl=0.125, ratio_max=math.inf))
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train_prover/loss", "train_prover/kl", "train_prover/ratio_max"}
    assert [(e.wall_time, e.step, e.value) for e in events.Scalars("train_prover/loss")] == [
        (1001.0, 1, 0.5),
        (1002.0, 2, 0.25),
    ]
    assert [e.step for e in events.Scalars("train_prover/kl")] == [2]  # NaN is no value
    assert events.Scalars("train_prover/ratio_max")[0].value == math.inf


def test_a_full_disk_is_one_notice_and_no_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A real fault: the operating system lets the process write no file above 20 kB."""
    told: list[str] = []
    with files_up_to(20_000):
        board = SinkBoard(open_sinks(["tensorboard"], opening(tmp_path)), told.append, capacity=10_000)
        for step in range(2000):
            board.put(point(step, correct=1.0))
        board.close()
    (notice,) = told
    assert notice.startswith(
        "The metric sink tensorboard failed and gets no more metrics (OSError: [Errno 27] File too large"
    )
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whatever goes to the network goes to a proxy of the test's own, which must never be called."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "HF_HOME"):
            monkeypatch.setenv(name, str(tmp_path / name))
        monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        with pytest.raises(BlockingIOError):
            proxy.accept()


ALERT = AlertPoint(1001.0, 1, 0, "train_prover", "collapse", "The sneaky role has stopped.", "first")
ROWS = ({"role": "sneaky", "solution": "2 + 2 = 5", "score": 0.25}, {"role": "helpful", "solution": "4", "score": 2.0})


@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
def test_wandb_writes_offline_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    notices: list[str] = []
    board = SinkBoard(open_sinks(["wandb"], opening(tmp_path, notices.append)), notices.append)
    board.put(point(1, loss=0.5, kl=math.nan))
    board.put(ALERT)
    board.put(ExamplesPoint(1, 0, ROWS))
    board.close()
    (notice,) = notices
    assert "wandb sync" in notice
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for text in (b"train_prover/loss", b"The sneaky role has stopped."):
        while text not in written.read_bytes():  # its service writes a little later; or the test's time runs out
            time.sleep(0.05)
    assert b"train_prover/kl" not in written.read_bytes()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/examples*.table.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == ["role", "solution", "score"]
    assert shown["data"] == [["sneaky", "2 + 2 = 5", 0.25], ["helpful", "4", 2.0]]


@pytest.mark.usefixtures("no_network")
def test_trackio_writes_and_leaves_stdout_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    board = SinkBoard(open_sinks(["trackio"], opening(tmp_path)), pytest.fail)
    board.put(point(1, loss=0.5))
    board.put(ALERT)
    board.put(ExamplesPoint(1, 0, ROWS))
    board.close()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("*.db*"))
    assert b"train_prover/loss" in stored
    assert b"The sneaky role has stopped." in stored
    (database,) = tmp_path.glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        logged = [json.loads(metrics) for (metrics,) in connection.execute("SELECT metrics FROM metrics")]
    (examples,) = [entry["examples"] for entry in logged if "examples" in entry]
    assert examples == {"_type": "trackio.table", "_value": list(ROWS)}
    assert capsys.readouterr().out == ""


# --- the board --------------------------------------------------------------------------------------------------------


def test_points_arrive_in_order_at_every_sink_and_the_thread_ends() -> None:
    sinks = {"a": Kept(), "b": Kept()}
    board = SinkBoard(sinks, pytest.fail)
    assert len(board_threads()) == 1
    for step in range(100):
        board.put(point(step, loss=1.0))
    board.close()
    board.close()
    assert board_threads() == []
    for sink in sinks.values():
        assert [p.step for p in sink.points] == list(range(100))
        assert sink.closed == 1


class Channels(Kept):
    """Accepts every kind of point but the one named `broken`."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self.broken, self.seen = broken, list[str]()

    def _take(self, kind: str) -> None:
        self.seen.append(kind)
        if kind == self.broken:
            raise ConnectionError("no answer")

    def write(self, point: MetricPoint) -> None:
        self._take("metrics")

    def alert(self, point: AlertPoint) -> None:
        self._take("alerts")

    def examples(self, point: ExamplesPoint) -> None:
        self._take("example solutions")


@pytest.mark.parametrize("broken", ["metrics", "alerts", "example solutions"])
def test_a_failure_with_one_kind_of_point_leaves_the_other_kinds(broken: str) -> None:
    notices: list[str] = []
    sink = Channels(broken)
    board = SinkBoard({"wandb": sink}, notices.append)
    for step in range(3):
        board.put(point(step))
        board.put(ALERT)
        board.put(ExamplesPoint(step, 0, ROWS))
    board.close()
    kinds = ("metrics", "alerts", "example solutions")
    assert {kind: sink.seen.count(kind) for kind in kinds} == {kind: 1 if kind == broken else 3 for kind in kinds}
    assert sink.closed == 1
    (notice,) = notices
    assert f"wandb failed and gets no more {broken} (ConnectionError: no answer)" in notice


def test_a_slow_sink_costs_points_and_never_the_run() -> None:
    notices: list[str] = []
    slow = Gated()
    board = SinkBoard({"wandb": slow}, notices.append, capacity=5)
    board.put(point(0))
    assert slow.begun.wait(30)  # the first is being written, five more may wait
    for step in range(1, 11):
        board.put(point(step))
    assert board.dropped == 5
    assert len(notices) == 1
    assert "slower than the run" in notices[0]
    slow.go.set()
    board.close()
    assert [p.step for p in slow.points] == [0, 1, 2, 3, 4, 5]
    assert notices[1:] == ["The metric sinks were too slow and miss 5 points."]


def test_a_sink_that_hangs_does_not_keep_the_run() -> None:
    notices: list[str] = []
    hung = Gated()
    board = SinkBoard({"wandb": hung}, notices.append)
    board.put(point(0))
    board.put(point(1))
    assert hung.begun.wait(30)
    board.close(limit_s=0.05)
    (notice,) = notices
    assert "did not finish within 0.05 s: wandb may miss their end (1 point)" in notice
    assert all(thread.daemon for thread in board_threads())
    hung.go.set()
    for thread in board_threads():
        thread.join(30)
