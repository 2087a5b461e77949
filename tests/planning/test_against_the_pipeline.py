"""The planner against pvg's real pipeline, which plays in virtual time (benchmarks/planned_worlds.py)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.planned_worlds import BALANCED, WORLDS, lengths_of, play_world
from benchmarks.planning import BATCHES, PAGE, REPORT, TABLES, with_tables
from pvg.planning.simulation import simulate
from pvg.planning.world import AheadLimits, Cut

# Few and short rollouts, so that the real pipeline needs seconds.
SMALL = replace(
    BALANCED,
    groups=6,
    group_size=4,
    lengths=lengths_of(20, 20, 0.8),
    workers=2,
    slots=8,
    concurrency=16,
    train_token_s=0.012,
    update_s=0.5,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"ahead": AheadLimits(1, 2, "old"), "train_token_s": 0.03},
        {"ahead": AheadLimits(2, 1), "update_s": 2.0, "pause_s": 2.0, "lengths": lengths_of(10, 30, 0.8)},
        {"ahead": None, "row_s": 0.01},
        {"cut": Cut(3.0, 2), "score_s": 0.5},
        {"mtbf_s": 60.0, "restart_s": 5.0},
    ],
    ids=["fresh", "old", "drops", "in turns", "deadline", "failures"],
)
def test_small_worlds(change: dict[str, object]) -> None:
    world = replace(SMALL, **change)
    real, plan = play_world(world, batches=40, fill=6, seed=1), simulate(world, batches=400, seed=2)
    assert plan.batch_s == pytest.approx(real.batch_s, rel=0.1)
    assert plan.idle == pytest.approx(real.idle, abs=0.07)
    assert plan.staleness == pytest.approx(real.staleness, abs=0.25)
    assert plan.dropped == pytest.approx(real.dropped, abs=0.07)


def test_the_committed_report_meets_the_targets_and_is_that_of_the_page() -> None:
    """Batch time within 5 %, idle share within 5 points, drops within 15 %, in the six worlds."""
    found = json.loads(REPORT.read_text())
    assert [row["world"] for row in found["worlds"]] == list(WORLDS)
    assert found["batches"] == BATCHES
    for row in found["worlds"]:
        real, plan = row["played"], row["planned"]
        assert plan["batch_s"] == pytest.approx(real["batch_s"], rel=0.05)
        assert plan["idle"] == pytest.approx(real["idle"], abs=0.05)
        assert plan["dropped"] == pytest.approx(real["dropped"], rel=0.15)
    page = PAGE.read_text()
    assert all(f"<!-- {name} -->" in page for name in TABLES)
    assert with_tables(page, found) == page, "run: python -m benchmarks.planning"


def test_the_report_is_what_the_planner_says_today() -> None:
    found = json.loads(REPORT.read_text())
    for row, world in zip(found["worlds"], WORLDS.values(), strict=True):
        plan = simulate(world, found["batches"], found["planned_seed"], found["fill"])
        assert row["planned"]["batch_s"] == pytest.approx(plan.batch_s, rel=1e-6)
        assert row["planned"]["dropped"] == pytest.approx(plan.dropped, rel=1e-6)
