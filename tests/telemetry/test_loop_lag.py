"""The lag of the event loop: percentiles, stalls counted in full, warnings, and the loops a run can have."""

import asyncio
import gc
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.telemetry.waits import CalmCollector, LagLimits, LagWindow, LoopLagMonitor, runner, warnings


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_stall_counts_as_every_tick_that_came_due_in_it() -> None:
    async def stalled() -> LagWindow | None:
        clock = Hands()
        monitor = LoopLagMonitor(10.0, clock=clock)
        monitor.start()
        await asyncio.sleep(0)
        clock.now += 1.05  # ticks were due after 0.1, 0.2, ... 1.0 s
        await monitor.stop()
        return monitor.take()

    window = asyncio.run(stalled())
    assert window is not None
    assert window.samples == 10
    assert window.max_s == pytest.approx(0.95)
    assert window.min_s == pytest.approx(0.05)
    assert window.mean_s == pytest.approx(0.5)
    assert window.p50_s == pytest.approx(0.45)
    assert window.p90_s == pytest.approx(0.85)
    assert window.p99_s == pytest.approx(0.95)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_nearest_rank(lags: list[float]) -> None:
    window = LagWindow.of(lags)
    expected = np.percentile(lags, [50, 90, 99], method="inverted_cdf").tolist()
    assert [window.p50_s, window.p90_s, window.p99_s] == expected
    assert (window.min_s, window.max_s, window.samples) == (min(lags), max(lags), len(lags))
    assert window.mean_s == pytest.approx(sum(lags) / len(lags))


def test_warnings_name_the_thresholds_that_were_exceeded() -> None:
    section = LagLimits()

    def names(p90: float, p99: float, most: float) -> list[str]:
        return [alert.name for alert in warnings(LagWindow(50, 0.0, 0.1, 0.1, p90, p99, most), section)]

    assert names(1.0, 5.0, 30.0) == []
    assert names(1.1, 5.0, 30.0) == ["loop_lag_p90"]
    assert names(0.1, 5.1, 30.0) == ["loop_lag_p99"]
    assert names(2.0, 9.0, 31.0) == ["loop_lag_p90", "loop_lag_p99", "loop_lag_max"]
    (alert,) = warnings(LagWindow(50, 0.0, 0.1, 0.1, 0.2, 0.3, 42.0), section)
    assert "42 s" in alert.message
    assert "above 30 s" in alert.message


def test_a_missing_uvloop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    run, notice = runner()
    with run:
        assert type(run.get_loop()).__module__.startswith("asyncio")
    assert notice is not None
    assert "uvloop is not installed" in notice


@pytest.fixture
def collector_of_python() -> Iterator[None]:
    """Python's own thresholds; `pvg_cli` sets others. A full collection also waits until the new objects are a quarter
    of the old ones that are not frozen, and other tests in this process may have left millions."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.freeze()
    gc.collect()
    yield
    gc.set_threshold(*before)


@pytest.mark.slow
@pytest.mark.usefixtures("collector_of_python")
def test_rollouts_in_flight_cause_no_full_garbage_collection() -> None:
    """The objects of 20,000 waiting rollouts: Python's own thresholds give several full collections."""

    def full_collections() -> int:
        before, kept = gc.get_stats()[2]["collections"], []
        for number in range(200_000):
            kept.append([number])
        assert len(kept) == 200_000
        return gc.get_stats()[2]["collections"] - before

    assert full_collections() > 0
    collector = CalmCollector()
    try:
        assert full_collections() == 0
    finally:
        collector.close()
    assert full_collections() > 0


def test_the_objects_of_torch_are_frozen_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # over the objects of all tests it takes seconds
    gc.unfreeze()
    collector = CalmCollector()
    assert gc.get_freeze_count() > 100_000
    collector.close()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as tests/conftest.py leaves it
