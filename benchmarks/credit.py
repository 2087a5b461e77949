"""Credit and the verifier's penalties: vectorised, compared with loops over groups and environments.

    pvg bench --profile benchmarks/credit.toml
    pvg bench --profile benchmarks/credit.toml --ablate

A sample computes, `turns` times each, GRPO's advantages of a batch of rollouts, and V-REx and IRMv1 of as many pairs in
`environments` environments, forward from the scores and backward to them. The loops are the usual implementation:
rewards gathered by group in a dictionary; a mask per environment, and for IRMv1 the gradient with respect to a dummy
multiplier by autograd. `open` checks that both ways give the same result.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from pvg.bench.profile import BenchSettings, workload_settings
from pvg.bench.workloads import BenchMetric, Workload
from pvg.config.base import Count, Section
from pvg.records import Float32
from pvg.telemetry.spans import span
from pvg.training.credit import EPSILON, advantages
from pvg.verifier.losses import bradley_terry
from pvg.verifier.robust import bradley_terry_slopes, irm_v1, vrex

Array = NDArray[Any]
Penalty = Callable[[Tensor, Tensor, int], Tensor]  # scores_M2, environments_M, environments


class CreditSettings(Section):
    """The `[workload]` table: rollouts per batch and per group (half of them of each role), pairs and their
    environments, turns per sample, and the implementation of each of the three computations."""

    rollouts: Count = 4_096
    group_size: Count = 8
    pairs: Count = 4_096
    environments: Annotated[int, Field(ge=2)] = 16
    turns: Count = 20
    credit: Literal["vectorised", "loop"] = "vectorised"
    vrex: Literal["scatter", "loop"] = "scatter"
    irm: Literal["scatter", "loop"] = "scatter"
    seed: int = 0

    @model_validator(mode="after")
    def _whole_groups(self) -> CreditSettings:
        if self.rollouts % self.group_size:
            raise ValueError(
                f"workload.rollouts = {self.rollouts} is not a multiple of the group size {self.group_size}"
            )
        return self


def make(settings: BenchSettings) -> Workload:
    return CreditWork(workload_settings(CreditSettings, settings))


class CreditWork:
    measures: Mapping[str, BenchMetric] = {
        "credit_ms": BenchMetric("ms", "lower", "from a batch's rewards to its advantages"),
        "vrex_ms": BenchMetric("ms", "lower", "V-REx of the batch's pairs, forward and backward to the scores"),
        "irm_ms": BenchMetric("ms", "lower", "IRMv1 of the batch's pairs, forward and backward to the scores"),
    }

    def __init__(self, workload: CreditSettings) -> None:
        self._workload = workload

    async def open(self) -> None:
        workload, rng = self._workload, np.random.default_rng(self._workload.seed)
        self._rewards_N = rng.normal(size=workload.rollouts)
        # In arrival order, the rows of a group are not adjacent.
        rows_N = rng.permutation(workload.rollouts)
        self._groups_N, self._roles_N = rows_N // workload.group_size, rows_N % 2
        generator = torch.Generator().manual_seed(workload.seed)
        self._scores_M2 = torch.randn(workload.pairs, 2, generator=generator)
        self._environments_M = torch.randint(workload.environments, (workload.pairs,), generator=generator)
        self._check()

    def _check(self) -> None:
        """Check that both implementations of each computation agree, so that only their time differs."""
        found, expected = (way(self._rewards_N, self._groups_N, self._roles_N) for way in CREDIT.values())
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        for ways in (VREX, IRM):
            (value, gradient_M2), (expected_value, expected_M2) = (self._gradient(way) for way in ways.values())
            np.testing.assert_allclose(value, expected_value, rtol=1e-4)
            torch.testing.assert_close(gradient_M2, expected_M2, rtol=1e-3, atol=1e-8)

    def work(self) -> dict[str, Any]:
        workload = self._workload
        return workload.model_dump(exclude={"credit", "vrex", "irm"})

    async def sample(self, index: int) -> dict[str, float]:
        workload = self._workload
        jobs: dict[str, Callable[[], object]] = {
            "credit": lambda: CREDIT[workload.credit](self._rewards_N, self._groups_N, self._roles_N),
            "vrex": lambda: self._gradient(VREX[workload.vrex]),
            "irm": lambda: self._gradient(IRM[workload.irm]),
        }
        found = {}
        for name, job in jobs.items():
            with span(name):
                found[f"{name}_ms"] = 1e3 * median(_seconds(job) for _ in range(workload.turns))
            await asyncio.sleep(0)  # so that Ctrl-C can end it
        return found

    def _gradient(self, penalty: Penalty) -> tuple[float, Tensor]:
        """The penalty and its gradient, float32 [M, 2]."""
        scores_M2 = self._scores_M2.detach().requires_grad_()
        value = penalty(scores_M2, self._environments_M, self._workload.environments)
        (gradient_M2,) = torch.autograd.grad(value, scores_M2)
        return value.item(), gradient_M2

    def derived(self) -> dict[str, float]:
        return {"groups": float(len(np.unique(self._groups_N * 2 + self._roles_N)))}

    async def close(self) -> None:
        pass


def _seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def _vectorised_credit(rewards_N: Array, groups_N: Array, roles_N: Array) -> Float32:
    return advantages("grpo", rewards_N, groups_N, roles_N)


def credit_by_loop(rewards_N: Array, groups_N: Array, roles_N: Array) -> Float32:
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (group, role) in enumerate(zip(groups_N, roles_N, strict=True)):
        rows[int(group), int(role)].append(row)
    found_N = np.zeros(len(rewards_N), dtype=np.float32)
    for members in rows.values():
        rewards = rewards_N[members]
        if rewards.max() > rewards.min():
            found_N[members] = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
    return found_N


def _scattered_vrex(scores_M2: Tensor, environments_M: Tensor, environments: int) -> Tensor:
    return vrex(bradley_terry(*scores_M2.unbind(1)), environments_M, environments)


def vrex_by_loop(scores_M2: Tensor, environments_M: Tensor, environments: int) -> Tensor:
    risks = []
    for environment in range(environments):
        scores_K2 = scores_M2[environments_M == environment]
        if len(scores_K2):
            risks.append(bradley_terry(*scores_K2.unbind(1)).mean())
    return torch.stack(risks).var(correction=0)


def _scattered_irm(scores_M2: Tensor, environments_M: Tensor, environments: int) -> Tensor:
    return irm_v1(bradley_terry_slopes(*scores_M2.unbind(1)), environments_M, environments)


def irm_by_loop(scores_M2: Tensor, environments_M: Tensor, environments: int) -> Tensor:
    """mean_e g_e^2, environment by environment, g_e by autograd (as in arXiv 1907.02893, appendix D)."""
    squares = []
    for environment in range(environments):
        scores_K2 = scores_M2[environments_M == environment]
        if len(scores_K2):
            scale = torch.ones((), requires_grad=True)
            risk = bradley_terry(*(scale * scores_K2).unbind(1)).mean()
            (slope,) = torch.autograd.grad(risk, [scale], create_graph=True)
            squares.append(slope.square())
    return torch.stack(squares).mean()


CREDIT: dict[str, Callable[[Array, Array, Array], Float32]] = {
    "vectorised": _vectorised_credit,
    "loop": credit_by_loop,
}
VREX: dict[str, Penalty] = {"scatter": _scattered_vrex, "loop": vrex_by_loop}
IRM: dict[str, Penalty] = {"scatter": _scattered_irm, "loop": irm_by_loop}
