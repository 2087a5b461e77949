"""The loop workload: what is served is what is stored, and stalls are really seen."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_runs import load_profile

from benchmarks import loop
from benchmarks.loop import LoopWorkload
from pvg.game import prover_phase
from pvg.game import round as round_
from pvg.game.groups import ScoredGroups
from pvg.game.ledger import Ledger
from pvg.store.shards import RolloutShards, ShardInfo
from pvg.verifier.data import VerifierTemplate

pytestmark = pytest.mark.slow

PROFILE = "benchmarks/loop.toml"
TINY = (
    "workload.rollouts=16",
    "workload.tokens=300",
    "workload.chunk=16",
    "workload.seconds=0.02",
    "task.problems=64",
    "task.test_problems=8",
    "models.threads=1",
)
STALL_S = 0.3


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def make(*overrides: str) -> LoopWorkload:
    workload = loop.make(load_profile(PROFILE, [*TINY, *overrides]))
    assert isinstance(workload, LoopWorkload)
    return workload


def stored(workload: LoopWorkload) -> dict[str, tuple[Any, ...]]:
    rows = RolloutShards(workload._run.path).read(ShardInfo.from_plain(workload._ledger.state.shards[-1]))
    return {
        row.id: (row.completion_ids.tolist(), row.logprobs.tolist(), row.text, row.routed_experts.tolist(), row.reward)
        for row in rows
        if row.routed_experts is not None
    }


def sampled(*overrides: str, plant: Any = None, look: Any = stored) -> tuple[dict[str, float], dict[str, float], Any]:
    """One sample's measures, the derived figures, and what was stored: id -> (ids, log-probs, text, experts, paid)."""

    async def play() -> tuple[dict[str, float], dict[str, float], Any]:
        workload = make(*overrides)
        await workload.open()
        try:
            if plant is not None:
                plant(workload)
            return await workload.sample(0), workload.derived(), look(workload)
        finally:
            await workload.close()

    return asyncio.run(play())


def test_what_is_served_is_stored_and_the_folder_goes(temporary: Path) -> None:
    measured, derived, stored_once = sampled()
    _, _, stored_again = sampled()
    assert stored_once == stored_again
    assert len(stored_once) == 16
    assert len({reward for *_, reward in stored_once.values()}) > 4
    for ids, logprobs, _, experts, _ in stored_once.values():
        assert 250 < len(ids) == len(logprobs) <= 300
        assert np.asarray(experts).shape[0] > len(ids)  # those of the prompt too
        assert np.asarray(experts).shape[1:] == (4, 2)
    assert measured["bytes_written_mb"] > 0
    assert all(derived[name] >= 0 for name in ("commit_stall_ms", "rollout_stall_ms", "batch_stall_ms"))
    assert list(temporary.glob("pvg-*")) == []


def test_no_work_on_a_batch_is_done_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these takes milliseconds for a batch of long rollouts."""
    places: dict[str, Any] = {"pay": prover_phase, "batch_of": round_, "metrics": ScoredGroups, "stored": ScoredGroups}
    threads: dict[str, set[str]] = {name: set() for name in (*places, "tokens")}

    def noting(name: str, work: Any) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            threads[name].add(threading.current_thread().name)
            return work(*arguments, **named)

        return noted

    for name, place in places.items():
        monkeypatch.setattr(place, name, noting(name, getattr(place, name)))
    monkeypatch.setattr(VerifierTemplate, "tokens", noting("tokens", VerifierTemplate.tokens))
    sampled()
    assert all(found == {"pvg-batch_0"} for found in threads.values()), threads


# --- stalls ------------------------------------------------------------------------------------------------------


def test_a_stall_while_rollouts_arrive_is_seen_where_it_happened() -> None:
    def plant(workload: LoopWorkload) -> None:
        """Block the loop at the first request."""
        engine, stalls = workload._dispatcher.engine, iter([STALL_S])
        generate = engine.generate

        async def stalling(request: Any) -> Any:
            time.sleep(next(stalls, 0.0))  # noqa: ASYNC251
            return await generate(request)

        engine.generate = stalling  # type: ignore[method-assign]

    measured, derived, _ = sampled(plant=plant)
    # A tick comes due at most 10 ms after the stall begins and can run when it ends.
    assert measured["lag_max_ms"] > (STALL_S - 0.02) * 1e3
    assert derived["rollout_stall_ms"] > (STALL_S - 0.02) * 1e3


def test_a_stall_while_committing_is_seen_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Ledger.commit

    async def slow(self: Ledger, *arguments: Any, **named: Any) -> None:
        time.sleep(STALL_S)  # noqa: ASYNC251
        await commit(self, *arguments, **named)

    def plant(_: LoopWorkload) -> None:
        monkeypatch.setattr(Ledger, "commit", slow)

    measured, derived, _ = sampled(plant=plant)
    assert derived["commit_stall_ms"] > (STALL_S - 0.02) * 1e3
    assert measured["lag_max_ms"] > (STALL_S - 0.02) * 1e3
    assert measured["write_s"] > STALL_S


@pytest.mark.skipif(not loop.HAS_PEAK, reason="needs the peak memory of Linux")
def test_a_batch_takes_at_most_twice_its_size_in_memory() -> None:
    """With 384 bytes of experts per token: 100 MB in 16 rollouts."""
    large = ("workload.tokens=16384", "workload.expert_layers=48", "workload.experts_per_token=8", "workload.chunk=256")
    measured, _, _ = sampled(*large, look=lambda _: None)
    assert 0.9 < measured["memory_over_payload"] < 1.5
