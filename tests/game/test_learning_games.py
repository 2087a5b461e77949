"""Whole games of the settings that say what the prover's trainer learns from: they train, are logged and resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kill_drill import differences, fingerprint
from small_games import changed, played, prover_steps, state_of, told, trained_on
from test_configurations import ONE_ANSWER

from pvg.records import Rollout
from pvg.store.run_directory import RunDirectory
from pvg.telemetry.catalogue import metric as catalogued
from pvg.training.batch import PolicyBatch
from pvg.training.losses import PolicyObjective

pytestmark = pytest.mark.slow

# Little of everything but the prover's training.
SHORT = {"game.mint_problems": 12, "game.mint_samples": 2, "verifier.steps": 2, "game.test.problems": 2}
RAE = {**SHORT, "training.loss": "rae", "rollout.group_size": 1, "training.groups": 16, "game.reward": "cgc"}
# Groups of two: most of them are both right or both wrong, and `correctness` pays them alike.
DYNAMIC = {
    **SHORT,
    "training.loss": "dapo",
    "training.dynamic_sampling": 4,
    "training.groups": 6,
    "training.steps": 4,
    "rollout.group_size": 2,
    "rollout.max_tokens": 48,
    "game.reward": "correctness",
    "game.sneaky_share": 0.5,
}

GAMES: dict[str, dict[str, Any]] = {
    "rae and adapted coefficients": {
        **RAE,
        "training.kl": {"target": 0.001},
        "training.minibatches": 2,
        "training.steps": 8,
    },
    "dynamic sampling": {**DYNAMIC, "training.dynamic_sampling": 2},
}


def batches(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that have the figures of a batch: the first one on each."""
    return [step for step in steps if "rollouts" in step]


def progress(root: Path) -> dict[str, Any]:
    return dict(state_of(RunDirectory.open("drill", root))["progress"]["batches"])


@pytest.mark.drill
@pytest.mark.parametrize("name", GAMES)
def test_stopped_and_resumed_it_ends_like_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    experiment = changed(GAMES[name])
    outcome, whole = played(experiment, tmp_path / "whole")
    assert outcome.status == "complete"
    batch = experiment.training.minibatches
    outcome, _ = played(experiment, tmp_path / "stopped", stop_at=("train_prover", 1 + 3 * batch))
    assert outcome.status == "interrupted"
    state = progress(tmp_path / "stopped")
    assert bool(state["credit"]["prover"]) == (experiment.training.loss.kind == "rae")
    played(experiment, tmp_path / "stopped", resume=True)
    assert differences(fingerprint(tmp_path / "stopped"), fingerprint(tmp_path / "whole")) == []
    steps = prover_steps(whole)
    assert [
        name for name in (f"train_prover/{metric}" for step in steps for metric in step) if not catalogued(name)
    ] == []
    for check in CHECKS[name]:
        check(steps, whole)


def of_rae(steps: list[dict[str, Any]], run: RunDirectory) -> None:
    steps = batches(steps)
    assert all(step["value_error"] > 0.0 for step in steps)
    assert all(step["zero_signal"] < 1.0 for step in steps)
    # What a first batch is measured by is its own mean; later ones by what was before.
    kept = trained_on(run)
    first, second = ([r.reward or 0.0 for r in kept if r.step == step] for step in (0, 1))
    assert steps[0]["value_mean"] == pytest.approx(np.mean(first), rel=1e-5)
    by_role = {
        role: np.mean([r.reward for r in kept if r.step == 0 and r.role is role]) for role in set(map(role_of, kept))
    }
    expected = np.mean([by_role[r.role] for r in kept if r.step == 1])
    assert steps[1]["value_mean"] == pytest.approx(expected, rel=1e-5)
    assert steps[1]["value_mean"] != pytest.approx(np.mean(second), rel=1e-5)


def role_of(rollout: Rollout) -> Any:
    return rollout.role


def of_dynamic(steps: list[dict[str, Any]], run: RunDirectory) -> None:
    kept = trained_on(run)
    assert len({rollout.id for rollout in kept}) == len(kept)
    assert any(step["refills"] > 0 for step in steps)
    for number, step in enumerate(steps):
        of_step = [rollout for rollout in kept if rollout.step == number]
        groups: dict[int, list[Rollout]] = {}
        for rollout in of_step:
            groups.setdefault(rollout.group, []).append(rollout)
        assert sorted(groups) == list(range(len(groups)))  # numbered through
        # Everything that was sampled is recorded, and counts.
        assert step["rollouts"] == len(of_step) == 2 * step["groups_sampled"]
        assert step["helpful_accuracy"] == pytest.approx(
            np.mean([r.grade.correct for r in of_step if r.role.number == 1])
        )
        live = {name: len({r.reward for r in group}) > 1 for name, group in groups.items()}
        assert step["zero_signal"] == pytest.approx(1 - np.mean(list(live.values())))
        for number_of_role in (0, 1):
            of_role = [name for name, group in groups.items() if group[0].role.number == number_of_role]
            wanted = sum(name < 6 for name in of_role)  # of those that were ordered first
            assert wanted == 3
            problems = [groups[name][0].problem_id for name in of_role]
            assert len(set(problems)) == len(problems)  # no problem was asked twice in a role
        found = Counter(group[0].role for name, group in groups.items() if live[name])
        assert step["groups_missing"] == sum(max(0, 3 - found[role]) for role in set(map(role_of, kept)))
        assert step["groups_surplus"] == sum(max(0, found[role] - 3) for role in set(map(role_of, kept)))
        assert ("skipped" in step) == (not any(live.values()))
    short = [step["groups_missing"] > 0 for step in steps]
    assert any(short) == ("event=short" in run.events.read_text())


def of_adapted(steps: list[dict[str, Any]], run: RunDirectory) -> None:
    assert steps[0]["kl_coefficient"] == 0.02
    assert len({step["kl_coefficient"] for step in steps}) == len(steps)  # it moves in every step of a batch


CHECKS: dict[str, list[Callable[[list[dict[str, Any]], RunDirectory], None]]] = {
    "rae and adapted coefficients": [of_rae, of_adapted],
    "dynamic sampling": [of_dynamic],
}


def test_what_is_trained_on_are_groups_with_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[PolicyBatch] = []
    prepare = PolicyObjective.prepare

    def noting(self: PolicyObjective, batch: PolicyBatch) -> PolicyBatch:
        batches.append(batch)
        return prepare(self, batch)

    monkeypatch.setattr(PolicyObjective, "prepare", noting)
    outcome, run = played(changed(DYNAMIC), tmp_path, stop_at=("train_prover", 4))  # the third step's commit
    assert outcome.status == "interrupted"
    kept = trained_on(run)
    # Trained on are three groups of each role; what else was sampled is recorded.
    assert [len(batch) for batch in batches] == [12, 12, 12]
    assert all(np.bincount(batch.role_ids_N).tolist() == [6, 6] for batch in batches)
    assert len(kept) > 36


def test_a_sampler_that_is_not_the_trainer_is_weighted_over_the_steps_of_a_batch(tmp_path: Path) -> None:
    weighted = {"training.importance": "truncated"}
    steps = {"training.minibatches": 2, "training.steps": 6, "models.precision": "bfloat16"}
    _, run = played(changed({**SHORT, **weighted, **steps}), tmp_path)
    told = prover_steps(run)
    assert len(told) == 6
    for step in told:
        assert step["start_ratio_mean"] == pytest.approx(1.0, abs=0.02)
        assert step["start_ratio_max"] != 1.0  # bfloat16 and float32 differ
        assert step["start_outside"] == 0.0


def test_rae_goes_with_rollouts_sampled_ahead(tmp_path: Path) -> None:
    ahead = {**RAE, "rollout.prefetch": {"kind": "fresh", "batches": 1}, "training.importance": "truncated"}
    experiment = changed(ahead)
    outcome, run = played(experiment, tmp_path, stop_at=("train_prover", 5))
    assert outcome.status == "interrupted"
    outcome, run = played(experiment, tmp_path, resume=True)
    assert outcome.status == "complete"
    steps = prover_steps(run)
    assert {step["rollouts"] for step in steps} == {16.0}
    assert max(step["staleness_max"] for step in steps) >= 1.0
    assert all(step["start_ratio_max"] > 0.0 for step in steps)  # of all rows, stale or not
    kept = trained_on(run)
    assert len({rollout.id for rollout in kept}) == len(kept) == 16 * experiment.training.steps


def test_where_nothing_has_a_signal_the_batch_is_what_it_would_have_been_and_the_user_is_told(tmp_path: Path) -> None:
    hopeless = {**DYNAMIC, **ONE_ANSWER, "verifier.loss": "cross_entropy", "training.dynamic_sampling": 2}
    _, run, notices = told(changed({**hopeless, "training.steps": 2}), tmp_path)
    for step in prover_steps(run):
        assert (step["refills"], step["groups_sampled"], step["groups_missing"]) == (2.0, 18.0, 6.0)
        assert step["skipped"] == 1.0
    assert run.events.read_text().count("event=short") == 2
    (notice,) = [message for message in notices if "dynamic_sampling" in message]  # once, not for every batch
    assert "6 groups of batch 0" in notice
