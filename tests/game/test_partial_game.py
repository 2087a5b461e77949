"""Whole games whose unfinished rollouts go on under the next version: they train, are recorded and resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_games import changed, played, prover_steps, state_of, trained_on
from test_stragglers import SPO

from pvg.config.rollout import ContinuingDeadline
from pvg.store.run_directory import RunDirectory

pytestmark = pytest.mark.slow

# Fewer rows than requests and turns of one step: some groups are complete while others have not begun. The deadline has
# always passed, so what is cut is up to min_rollouts, on every machine.
SHORT = {"game.mint_problems": 12, "game.mint_samples": 2, "verifier.steps": 2, "game.test.problems": 2}
PARTIAL = {
    **SHORT,
    "rollout.deadline": {"kind": "continue", "seconds": 1e-6},
    "rollout.max_staleness": 3,
    "rollout.engine.max_rows": 8,
    "training.groups": 6,
}


@pytest.fixture(autouse=True)
def eight_rollouts_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContinuingDeadline, "min_rollouts", 8)


@pytest.fixture
def turns_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the event loop hears of a finished row before the next step."""
    monkeypatch.setattr("pvg.rollout.lean_rows.TURN_STEPS", 1)


def told_lost(run: RunDirectory) -> list[int]:
    """Rollouts that were dropped because no engine could continue them."""
    lines = [line for line in run.events.read_text().splitlines() if "event=lost" in line]
    return [int(line.split("rollouts=")[1].split()[0]) for line in lines]


@pytest.mark.usefixtures("turns_of_one_step")
def test_what_went_on_is_clipped_around_the_policy_at_the_start_of_its_batch(tmp_path: Path) -> None:
    decoupled = {"training.loss": "dapo", "training.importance": "decoupled", "training.steps": 5}
    outcome, run = played(changed({**PARTIAL, **decoupled}), tmp_path)
    assert outcome.status == "complete"
    stale = [step for step in prover_steps(run) if step["staleness_max"] > 0]
    assert stale
    assert all(step["start_ratio_max"] > 0 for step in stale)


@pytest.mark.usefixtures("turns_of_one_step")
@pytest.mark.parametrize(
    "settings",
    [
        {"training.loss": "dapo", "training.minibatches": 2, "training.steps": 12},
        {**SPO, "training.groups": 24},
        {"training.loss": "spo", "game.reward": "src"},
    ],
    ids=["groups", "spo", "spo by a reward that compares"],
)
def test_unfinished_groups_go_on_and_every_rollout_is_accounted_for(settings: dict[str, Any], tmp_path: Path) -> None:
    experiment = changed({**PARTIAL, **settings})
    outcome, run = played(experiment, tmp_path)
    assert outcome.status == "complete"
    steps = prover_steps(run)[:: experiment.training.minibatches]
    kept = trained_on(run)
    assert len({rollout.id for rollout in kept}) == len(kept) == sum(step["rollouts"] for step in steps)
    carried = [0.0, *(step["groups_carried"] for step in steps)]
    assert max(carried) > 0
    assert sum(step["tokens_continued"] for step in steps) > 0

    size, versions = experiment.rollout.group_size, experiment.rollout.continued_versions
    ordered = size * sum(experiment.training.groups - before for before in carried[:-1])
    cancelled = sum(step["rollouts_cancelled"] for step in steps)
    assert ordered == len(kept) + cancelled + sum(told_lost(run))
    assert sum(told_lost(run)) == size * carried[-1]

    assert all(step["staleness_max"] <= versions for step in steps)
    continued = [rollout for rollout in kept if len(rollout.spans) > 1]
    assert continued
    for rollout in continued:
        sampled_by = [span.version for span in rollout.spans]
        assert sampled_by == sorted(set(sampled_by))
        assert max(sampled_by) - min(sampled_by) <= versions
        assert len(rollout.logprobs) == len(rollout.completion_ids) <= experiment.rollout.max_tokens
        assert np.all(np.isfinite(rollout.logprobs))
    assert all(rollout.score is not None and rollout.reward is not None for rollout in kept)
    # What is compared with others of its group is never trained on without them.
    batch_of = np.repeat(np.arange(len(steps)), [int(step["rollouts"]) for step in steps])
    together = Counter((int(batch), rollout.group) for batch, rollout in zip(batch_of, kept, strict=True))
    assert min(together.values()) >= min(2, size)
    # Those of a group that was not cut short are trained on in one step, whatever their versions.
    members = Counter(rollout.group for rollout in kept)
    assert set(members.values()) <= {size, *range(2, size)}


@pytest.mark.drill
@pytest.mark.usefixtures("turns_of_one_step")
def test_a_stopped_run_says_what_it_has_lost_and_uses_no_id_twice(tmp_path: Path) -> None:
    experiment = changed(PARTIAL)
    outcome, run = played(experiment, tmp_path, stop_at=("train_prover", 4))
    assert outcome.status == "interrupted"
    state = state_of(run)
    left = state["progress"]["batches"]["groups"]
    assert left["carried"] > 0
    assert told_lost(run) == []
    before = {rollout.id for rollout in trained_on(run)}
    outcome, run = played(experiment, tmp_path, resume=True)
    assert outcome.status == "complete"
    assert told_lost(run)[0] == left["carried"]
    kept = trained_on(run)
    assert len({rollout.id for rollout in kept}) == len(kept)
    assert before <= {rollout.id for rollout in kept}
    assert all(rollout.group >= left["ordered"] for rollout in kept if rollout.id not in before)


def test_without_a_cut_the_game_is_the_one_without_partial_rollouts(tmp_path: Path) -> None:
    settings = {**SHORT, "training.steps": 3}
    _, plain = played(changed(settings), tmp_path / "plain")
    settings |= {"rollout.deadline": {"kind": "continue", "seconds": 1e6}}
    _, partial = played(changed(settings), tmp_path / "partial")
    assert [step["rollouts"] for step in prover_steps(partial)] == [16.0] * 3
    assert weights_of(plain) == weights_of(partial)


def weights_of(run: RunDirectory) -> bytes:
    return (run.weights / "round-000-prover" / "tensors.safetensors").read_bytes()
