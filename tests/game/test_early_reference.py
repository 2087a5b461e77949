"""Reference log-probs of groups that wait for the rest of their batch: when they are computed, and what they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_configurations import changed, played, rows
from test_prefetch import AHEAD, made_group

from pvg.game.batch_logprobs import BatchLogprobs, EarlyReference
from pvg.game.players import Players
from pvg.game.round import GameBatches
from pvg.records import Float32, Rollout
from pvg.rollout.torch_engine import TorchEngine
from pvg.training.batch import PolicyBatch


def rollouts(*names: str, version: int = 0) -> list[Rollout]:
    made = [made_group(name).rollouts[0] for name in names]
    return [replace(r, spans=tuple(replace(s, version=version) for s in r.spans)) for r in made]


class Reference:
    """Hands out passes one by one: `gate.set()` lets the pass that waits go on."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.gate = asyncio.Event()

    async def __call__(self, asked: Sequence[Rollout]) -> list[Float32]:
        self.passes.append([rollout.id for rollout in asked])
        await self.gate.wait()
        self.gate.clear()
        if asked[0].id == "bad":
            raise ValueError("planted")
        return [np.full(2, float(len(self.passes)), dtype=np.float32) for _ in asked]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_arrives_during_a_wait_is_computed_pass_by_pass() -> None:
    async def work() -> None:
        reference = Reference()
        early = EarlyReference(reference)
        early.start()
        early.arrived(rollouts("a"))
        await turns()
        assert reference.passes == []  # the game waits for no rollouts: a pass would delay the trainer
        async with early.compute_passes():
            await turns()
            early.arrived(rollouts("b"))
            early.arrived(rollouts("c"))
            await turns()
            assert reference.passes == [["a"]]
            reference.gate.set()
            await turns()
            assert reference.passes == [["a"], ["b", "c"]]
            asyncio.get_running_loop().call_later(0.01, reference.gate.set)  # leaving waits for the pass
        early.arrived(rollouts("d"))
        found = early.take(rollouts("a", "c", "d"), oldest=0)
        assert {name: logprobs.tolist() for name, logprobs in found.items()} == {"a": [1.0, 1.0], "c": [2.0, 2.0]}
        assert early.take(rollouts("a", "c"), oldest=0) == {}  # not kept
        assert list(early.take(rollouts("b"), oldest=0)) == ["b"]
        async with early.compute_passes():
            await turns()
        assert len(reference.passes) == 2  # "d" was taken, so there is nothing left to compute
        await early.close()
        await early.close()

    asyncio.run(work())


def test_nothing_is_kept_of_what_is_too_old_to_train_on() -> None:
    async def work() -> None:
        reference = Reference()
        early = EarlyReference(reference)
        early.start()
        async with early.compute_passes():
            early.arrived(rollouts("old", version=3) + rollouts("new", version=4))
            await turns()
            reference.gate.set()
            await turns()
        early.arrived(rollouts("old and waiting", version=3))
        assert early.take([], oldest=4) == {}
        assert list(early.take(rollouts("old", "new"), oldest=4)) == ["new"]
        async with early.compute_passes():
            await turns()
        assert len(reference.passes) == 1
        await early.close()

    asyncio.run(work())


def test_the_error_of_a_pass_reaches_the_trainer() -> None:
    async def work() -> None:
        reference = Reference()
        early = EarlyReference(reference)
        early.start()
        reference.gate.set()

        async def wait() -> None:
            async with early.compute_passes():
                early.arrived(rollouts("bad"))
                await turns()

        with pytest.raises(ValueError, match="planted"):
            await wait()
        await early.close()

    asyncio.run(work())


def test_what_is_sampled_ahead_is_given_up_also_where_the_wait_for_a_pass_is_cancelled() -> None:
    closed: list[str] = []

    class Early:
        async def close(self) -> None:
            raise asyncio.CancelledError

    class Ahead:
        async def close(self) -> None:
            closed.append("ahead")

    async def close() -> None:
        parts = SimpleNamespace(logprobs=SimpleNamespace(early=Early()), groups=Ahead(), verifier=Ahead())
        with pytest.raises(asyncio.CancelledError):
            await GameBatches.close(parts)  # type: ignore[arg-type]

    asyncio.run(close())
    assert closed == ["ahead", "ahead"]


@pytest.mark.drill
@pytest.mark.parametrize(
    "settings",
    [
        {"training.adapters": {"rank": 2}, "training.minibatches": 2, "training.steps": 6},
        AHEAD,
        {**AHEAD, "cluster": {"kind": "local", "workers": 2, "trainers": 1}},
    ],
    ids=["adapters and minibatches", "ahead", "workers that only train"],
)
def test_in_a_game_they_are_those_of_a_pass_over_the_whole_batch(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int]] = []  # of each batch: rows that were computed early, and all
    taken = EarlyReference.take

    def counting(self: EarlyReference, asked: Sequence[Rollout], oldest: int) -> dict[str, Float32]:
        found = taken(self, asked, oldest)
        counts.append((len(found), len(asked)))
        return found

    given = BatchLogprobs.reference

    async def checked(self: BatchLogprobs, batch: PolicyBatch, asked: Sequence[Rollout]) -> list[Float32]:
        found = await given(self, batch, asked)
        players = self._players
        expected = await players.compute(partial(self._objective.recompute, players.base.module, batch))
        for row, logprobs in zip(found, expected, strict=True):
            np.testing.assert_allclose(row, logprobs, rtol=1e-5, atol=1e-5)
        return found

    monkeypatch.setattr(EarlyReference, "take", counting)
    monkeypatch.setattr(BatchLogprobs, "reference", checked)
    # Groups arrive one after the other, with real tokens: as from a server, or from workers that only sample.
    if "cluster" not in settings:
        monkeypatch.setattr(TorchEngine, "remote", True)
    little = {"rollout.engine.max_rows": 4, "verifier.steps": 2, "game.mint_problems": 12, "game.test.problems": 4}
    experiment = changed({**little, **settings})
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    assert len(counts) == experiment.training.steps // experiment.training.minibatches
    assert all(count == 16 for _, count in counts)
    assert sum(early for early, _ in counts) > 0
    steps = [row for row in rows(run, "step") if row["phase"] == "train_prover"]
    assert steps[0]["metrics"]["kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference yet
    # The computation overlapped with the wait: it is work, and no step waited for it.
    busy, exposed = (sum(step[kind].get("reference", 0.0) for step in steps) for kind in ("busy", "budget"))
    assert busy > exposed


def test_an_engine_in_the_trainers_process_needs_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: EarlyReference, compute: object) -> None:
        raise AssertionError("nothing is early here")

    monkeypatch.setattr(EarlyReference, "__init__", refuse)
    little = {"training.steps": 2, "verifier.steps": 2, "game.mint_problems": 12}
    outcome, _ = played(changed(little), tmp_path)
    assert outcome.status == "complete"


def test_workers_need_their_threads_unless_only_some_of_them_train() -> None:
    def elsewhere(training: range) -> bool:
        workers = SimpleNamespace(sampling=range(2), training=training)
        players: Any = SimpleNamespace(engine=SimpleNamespace(remote=False), workers=workers)
        return bool(Players.samples_elsewhere.fget(players))  # type: ignore[attr-defined]

    assert not elsewhere(range(2))
    assert elsewhere(range(1, 2))
