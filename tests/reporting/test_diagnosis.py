"""The diagnosis: every signature in a run that has it, none in a run that does not; quantiles, load and evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diagnosed_runs import recorded
from run_samples import begin

from pvg.config.experiment import UNHASHED_SECTIONS
from pvg.config.load import valid_keys
from pvg.errors import UsageError
from pvg.reporting.diagnosis import (
    ADVICE,
    CHANGES,
    SIGNATURES,
    TICK_S,
    Diagnosis,
    Evidence,
    Quantity,
    RunTimes,
    diagnose,
)
from pvg.reporting.run_summary import read_run
from pvg.telemetry.monitoring import Monitoring
from pvg.telemetry.waits import LagLimits, LagWindow


def of(folder: Path, **times: Any) -> Diagnosis:
    return diagnose(recorded(folder, **times))


def seen(found: Diagnosis) -> list[str]:
    return [finding.signature for finding in found.findings]


def test_nothing_stands_out_in_a_healthy_run(tmp_path: Path) -> None:
    found = of(tmp_path)
    assert (found.findings, found.not_seen, found.notes) == ((), {}, ())
    assert found.seconds == pytest.approx(40 * 1.6)
    assert found.plain()["nothing_stands_out"] is True
    assert found.steps_s["train_prover"] == pytest.approx(
        {"steps": 40, "step_s": 40 * 1.6, "train_s": 40.0, "idle_s": 40 * 0.6}
    )


@pytest.mark.parametrize(
    ("engine", "settings"), [("torch", ("rollout.engine.max_rows",)), ("vllm", ("rollout.concurrency",))]
)
def test_a_front_end_queue_is_told_with_its_largest_waits(
    engine: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    found = of(tmp_path, queue_s=lambda load: 0.02 * load, idle_s=5.0, train_s=6.0, engine=engine)
    (finding,) = found.findings
    assert finding.signature == "front-end-queue"
    # 14 x 4, 13 x 90 and 13 x 180 requests at 20 ms each, beside 40 x 20 ms of loading
    queued = 0.02 * (14 * 4 + 13 * 90 + 13 * 180)
    assert finding.cost_s == pytest.approx(queued)
    assert finding.measured == pytest.approx(queued / (queued + 0.8))
    assert finding.share == pytest.approx(queued / found.seconds)
    assert finding.settings == settings
    assert finding.evidence[0].where == "round 0, train_prover, step 2"
    assert finding.evidence[0].text == (
        "weights_wall_s 3.62  weights_queue_s 3.6  weights_load_s 0.02  weights_in_flight 180"
    )


# What is slow -> the signatures, the cost of the first in seconds, and its settings ("*": any).
SLOW: list[tuple[dict[str, Any], str, float, str]] = [
    ({"load_s": 0.8}, "engine-reload", 32.0, "weights.root"),
    ({"commit_s": 0.9}, "checkpoint", 36.0, "store.commit_every store.root"),
    ({"idle_s": 3.0, "truncated": 0.1}, "starved-trainer", 120.0, "rollout.concurrency rollout.engine.max_rows"),
    ({"idle_s": 3.0, "phase": "train_verifier"}, "starved-trainer", 120.0, ""),  # no rollouts are missing there
    ({"group_max_s": 0.45}, "stragglers", 40 * 0.35, "rollout.engine.max_rows"),
    ({"lag_s": 0.6}, "loop-lag", 24.0, "rollout.concurrency"),
    # The threads waited for 1000 of 2500 ms in each window.
    ({"waited_s": 1.0, "lag_s": 0.6}, "shared-machine loop-lag", 40.0, "models.threads"),
    ({"waited_s": 1.0, "threads": 1}, "shared-machine", 40.0, ""),
    # pvg alone uses the machine, with more threads than cores.
    ({"waited_s": 1.0, "threads": 8, "busy_cores": 1.9, "own_cores": 1.85}, "shared-machine", 40.0, "models.threads"),
    ({"workers": (0.8, 0.9, 0.0)}, "", 0.0, ""),
    ({"workers": (0.3, 0.4, 0.0)}, "idle-workers", 0.7 * 64, "cluster.max_workers"),
    ({"workers": (0.6, 0.9, 0.0)}, "unbalanced-workers", 0.3 * 64, ""),
    # The driver's threads hardly wait, the workers for half of their time: 2.5 s in each of 20 windows.
    ({"workers": (0.8, 0.9, 4.0)}, "shared-machine", 50.0, "models.threads"),
    ({"idle_s": 5.0, "load_s": 0.6, "commit_s": 0.9}, "starved-trainer checkpoint engine-reload", 200.0, "*"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "signatures", "cost_s", "settings"), SLOW)
def test_what_is_slow_is_found_with_its_cost_and_its_settings(
    slow: dict[str, Any], signatures: str, cost_s: float, settings: str, tmp_path: Path
) -> None:
    found = of(tmp_path, **slow)
    assert " ".join(seen(found)) == signatures
    assert all(finding.evidence and finding.share == finding.cost_s / found.seconds for finding in found.findings)
    if signatures:
        assert found.findings[0].cost_s == pytest.approx(cost_s, rel=0.02)
        assert settings == "*" or " ".join(found.findings[0].settings) == settings


def test_every_signature_has_a_case_and_every_setting_that_is_named_exists() -> None:
    assert {name for _, names, _, _ in SLOW for name in names.split()} | {"front-end-queue"} == set(SIGNATURES)
    assert {key for _, keys, _ in ADVICE.values() for key in keys.split()} <= set(valid_keys())


def test_advice_names_what_else_it_changes_and_sells_no_change_of_learning_as_a_speed_up(tmp_path: Path) -> None:
    hashed = {name for name, (_, keys, _) in ADVICE.items() if hashed_sections(keys)}
    assert hashed == {name for name in hashed if ADVICE[name][2] in CHANGES}
    (starved,) = of(tmp_path, idle_s=3.0, truncated=0.1).findings
    assert starved.trade_offs == ("rollout.prefetch.kind", "rollout.max_tokens", "training.minibatches")
    assert starved.settings == ("rollout.concurrency", "rollout.engine.max_rows")
    assert CHANGES["draws"] in starved.changes
    assert CHANGES["learned"] in starved.trade


def hashed_sections(keys: str) -> set[str]:
    return {key.partition(".")[0] for key in keys.split()} - UNHASHED_SECTIONS


def test_loop_lag_above_a_warning_level(tmp_path: Path) -> None:
    run = recorded(tmp_path, lag_s=0.06)
    assert seen(diagnose(run)) == []
    (finding,) = diagnose(run, LagLimits(p99_s=0.05)).findings
    assert finding.signature == "loop-lag"
    assert finding.measured == pytest.approx(1.2)


@pytest.mark.parametrize("stall_s", [0.3, 5.0])
def test_a_stall_costs_no_more_than_it_lasted(stall_s: float, tmp_path: Path) -> None:
    """As the monitor tells it: every tick of the stall with the rest of it."""
    late = [tick / 10 for tick in range(1, round(stall_s * 10) + 1)]
    window = LagWindow.of([*late, *[0.0005] * (50 - len(late))])
    run = recorded(tmp_path, steps=1, idle_s=4.0, lags=window.metrics())
    times = RunTimes(run.experiment(), read_run(run))
    assert 0.5 * stall_s <= times.lagged_s <= stall_s + 0.001


def test_what_the_record_cannot_tell_is_said(tmp_path: Path) -> None:
    found = of(tmp_path, steps=1, lags={}, waited_s=None)
    assert set(found.not_seen) == set(SIGNATURES) - {"idle-workers", "unbalanced-workers"}  # not every run has any


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        diagnose(begin(tmp_path))


def test_quantiles_are_those_of_numpy_and_the_worst_are_the_largest_and_the_earlier_of_equals() -> None:
    values = [1.0, 7.0, 3.0, 7.0, 2.0, 7.0, 7.0]
    quantity = Quantity(values, [Evidence(str(place), "") for place in range(len(values))])
    assert [evidence.where for evidence in quantity.worst()] == ["1", "3", "5"]
    found = quantity.summary()
    assert (found.n, found.p50, found.max, found.total) == (7, 7.0, 7.0, 34.0)
    assert found.p95 == np.quantile(values, 0.95)


def test_a_tick_is_as_long_as_the_monitor_makes_it() -> None:
    assert pytest.approx(1.0) == TICK_S * Monitoring.lag_hz


@pytest.mark.parametrize(("queue_s", "seen"), [(0.4, False), (0.6, True)])
def test_an_update_that_waits_for_more_than_half_of_its_time_waits_in_a_queue(
    queue_s: float, seen: bool, tmp_path: Path
) -> None:
    run = recorded(tmp_path, queue_s=queue_s, load_s=1.0 - queue_s)
    assert ("front-end-queue" in [finding.signature for finding in diagnose(run).findings]) == seen


def test_what_is_lacking_is_counted_in_words_that_are_right(tmp_path: Path) -> None:
    run = begin(tmp_path)
    times = RunTimes(run.experiment(), read_run(run))
    lacking = [question.unknown(times) for question in SIGNATURES.values()]
    assert "0 steps with waits of groups; 5 are needed" in lacking
    assert "0 updates of weights; 5 are needed" in lacking
