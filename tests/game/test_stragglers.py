"""Whole games with batches cut at a deadline, and with spo: they train, are recorded and resume."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from kill_drill import differences, fingerprint
from small_games import changed, played, prover_steps, recorded, rows, state_of, trained_on

from pvg.config.rollout import CuttingDeadline
from pvg.records import Role
from pvg.rollout.engine import Completion, GenerationRequest
from pvg.rollout.torch_engine import TorchEngine

pytestmark = pytest.mark.slow

SPO = {"training.loss": "spo", "rollout.group_size": 1, "training.groups": 16, "game.reward": "cgc"}


@pytest.mark.drill
def test_spo_stopped_and_resumed_ends_like_the_uninterrupted_run(tmp_path: Path) -> None:
    experiment = changed(SPO)
    _, whole = played(experiment, tmp_path / "whole")
    outcome, stopped = played(experiment, tmp_path / "stopped", stop_at=("train_prover", 5))
    assert outcome.status == "interrupted"
    state = state_of(stopped)
    seen = state["progress"]["batches"]["credit"]["prover"]["seen"]
    assert sum(map(len, seen.values())) > 16  # more than one batch has been learnt
    played(experiment, tmp_path / "stopped", resume=True)
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "whole")) == []
    metrics = prover_steps(whole)
    assert all(found["zero_signal"] < 1.0 and found["rollouts"] == 16.0 for found in metrics)
    assert all(found["value_error"] > 0.0 for found in metrics)


def test_what_spo_has_tracked_ends_with_its_round(tmp_path: Path) -> None:
    """The next round's prover starts from the base again, against another verifier. In a first batch every row's value
    is its role's mean reward there, so both means are one; in the next the values are what was learnt before."""
    _, run = played(changed({**SPO, "game.rounds": 2, "training.steps": 3}), tmp_path)
    steps = {(row["round"], row["step"]): row["metrics"] for row in rows(run, "step") if row["phase"] == "train_prover"}
    assert sorted(steps) == [(round_, step) for round_ in (0, 1) for step in (1, 2, 3)]
    for round_ in (0, 1):
        first, second = steps[round_, 1], steps[round_, 2]
        assert first["value_mean"] == pytest.approx(first["reward_mean"], rel=1e-6)
        assert abs(second["value_mean"] - second["reward_mean"]) > 1e-3
        # By the rollouts: |R - mean of its role|, role by role.
        batch = [r for r in recorded(run) if r.id.startswith(f"{round_:03d}/train_prover/00000/")]
        paid = {role: [r.reward for r in batch if r.role is role and r.reward is not None] for role in Role}
        off = [abs(reward - np.mean(of)) for of in paid.values() for reward in of]
        assert len(off) == 16
        assert first["value_error"] == pytest.approx(np.mean(off), rel=2e-6)


@pytest.fixture
def stragglers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prover's training, every rollout whose index is 2 modulo 3 takes for ever. (The torch engine hands over
    whole batches, which know no stragglers.)"""
    generate = TorchEngine.generate

    async def slow(self: TorchEngine, request: GenerationRequest) -> Completion:
        if "train_prover" in request.id and int(request.id.rsplit("/")[-1]) % 3 == 2:
            assert request.on_tokens is not None
            request.on_tokens(5)
            await asyncio.Event().wait()
        return await generate(self, request)

    monkeypatch.setattr(TorchEngine, "generate", slow)


@pytest.mark.drill
@pytest.mark.usefixtures("stragglers")
def test_batches_that_are_cut_train_and_are_recorded_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Groups of 4, one of each for ever: 3 are waited for however late they come, so every machine gets the same.
    monkeypatch.setattr(CuttingDeadline, "min_rollouts", 3)
    settings = {"training.minibatches": 2, "training.steps": 6, "training.loss": "dapo"}
    experiment = changed({"rollout.deadline": {"kind": "cut", "seconds": 0.01}, **settings})
    _, whole = played(experiment, tmp_path / "whole")
    outcome, _ = played(experiment, tmp_path / "stopped", stop_at=("train_prover", 4))  # within the second batch
    assert outcome.status == "interrupted"
    played(experiment, tmp_path / "stopped", resume=True)
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "whole")) == []
    steps = prover_steps(whole)
    metrics = steps[:: experiment.training.minibatches]
    names = ("rollouts", "groups_cut", "rollouts_cancelled", "tokens_lost")
    assert {tuple(found[name] for name in names) for found in metrics} == {(12.0, 4.0, 4.0, 20.0)}
    batches = experiment.training.steps // experiment.training.minibatches
    kept = trained_on(whole)
    assert len(kept) == 12 * batches
    assert {int(rollout.id.rsplit("/")[-1]) for rollout in kept} == {0, 1, 3}
    assert all(rollout.score is not None and rollout.reward is not None for rollout in kept)


@pytest.mark.usefixtures("stragglers")
def test_spo_is_cut_as_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuttingDeadline, "min_rollouts", 8)
    # Of 4 problems of 3 rollouts each, two in three come.
    deadline = {"kind": "cut", "seconds": 0.01}
    settings = {**SPO, "rollout.group_size": 3, "training.groups": 4, "rollout.deadline": deadline}
    _, run = played(changed(settings), tmp_path)
    metrics = prover_steps(run)
    assert {(found["rollouts"], found["rollouts_cancelled"]) for found in metrics} == {(8.0, 4.0)}
