"""The credit workload: loops that give what the arrays give, and a ladder between them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from bench_runs import load_profile

from benchmarks import credit
from pvg.bench.planning import plan_bench
from pvg.bench.runner import run_plan
from pvg.errors import ConfigurationError

SMALL = ["workload.rollouts=64", "workload.pairs=50", "workload.environments=5", "workload.turns=2", "warmup=0"]


def test_all_rungs_of_the_ladder_do_the_same_work() -> None:
    report = run_plan(plan_bench("benchmarks/credit.toml", [*SMALL, "repeats=1"], ablate=True), command="test").report
    assert report.status == "ok", report.reason
    assert len(report.variants) == 4
    for variant in report.variants:
        assert {"credit", "vrex", "irm"} <= variant.budget.exposed.keys()
        assert variant.derived["groups"] == 16  # 8 groups of two roles


@pytest.mark.parametrize("way", ["credit_by_loop", "vrex_by_loop", "irm_by_loop"])
def test_a_loop_that_gives_something_else_is_refused(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    table = {"credit_by_loop": credit.CREDIT, "vrex_by_loop": credit.VREX, "irm_by_loop": credit.IRM}[way]
    right = table["loop"]
    monkeypatch.setitem(table, "loop", lambda *given: right(*given) * 1.01)
    with pytest.raises(AssertionError):
        asyncio.run(credit.make(load_profile("benchmarks/credit.toml", SMALL)).open())


def test_the_loops_by_hand() -> None:
    rewards, groups, roles = np.array([1.0, 0.0, 5.0, 3.0]), np.array([0, 0, 0, 0]), np.array([0, 0, 1, 1])
    np.testing.assert_allclose(credit.credit_by_loop(rewards, groups, roles), [1, -1, 1, -1], rtol=1e-5)
    scores, environments = torch.zeros(3, 2), torch.tensor([0, 0, 3])
    assert credit.vrex_by_loop(scores, environments, 4).item() == 0.0
    assert credit.irm_by_loop(scores, environments, 4).item() == 0.0


def test_rollouts_come_in_whole_groups() -> None:
    with pytest.raises(ConfigurationError, match="not a multiple of the group size 8"):
        credit.make(load_profile("benchmarks/credit.toml", ["workload.rollouts=12"]))
