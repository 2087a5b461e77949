"""The hack alarm: its test, its audits, and games that it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_games import changed, completed, played, prover_steps, recorded, rows, trained_on

from pvg.config.task import DiplomacyMiniTask, ModchainTask
from pvg.errors import ConfigurationError
from pvg.game import audit
from pvg.game.audit import RiseTest, check_truth
from pvg.game.prover_phase import StopRule
from pvg.store.checkpoints import read_checkpoint
from pvg.tasks.diplomacy_mini import DiplomacyMini
from pvg.tasks.modchain import Modchain

ALARMED = {
    "task.grader": "sums",
    "game.reward": "correctness",
    "game.sneaky_share": 0,
    "game.stop": "hack_alarm",
    "store.commit_every": 1,
    "training.steps": 9,
    "verifier.steps": 2,
}


def evidence_of(hits: list[int], draws: int = 32, batches: int = 40, false_alarms: float = 0.01) -> list[float]:
    """The evidence after each batch."""
    test, found = RiseTest(batches, false_alarms), []
    for hit in hits:
        test.add(hit, draws)
        found.append(test.evidence)
    return found


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_constant_share_raises_no_more_alarms_than_stated(share: float) -> None:
    series = np.random.default_rng(0).binomial(16, share, (600, 30)).tolist()
    alarms = sum(max(evidence_of(hits, 16, 30, 0.2)) >= 1.0 for hits in series)
    assert alarms <= 0.2 * len(series)


def test_a_rise_is_found_and_its_beginning_is_where_the_evidence_begins() -> None:
    before, after = [2] * 20, [12] * 4
    found = evidence_of(before + after)
    assert max(found[:20]) == 0.0
    assert found[20] > 0.0
    assert max(found) >= 1.0
    assert max(evidence_of([2] * 40)) == 0.0
    assert max(evidence_of([16] * 10 + [2] * 30)) < 1.0, "a fall is no alarm"


def test_a_policy_is_honest_as_long_as_there_is_no_evidence() -> None:
    rule, found = StopRule("hack_alarm"), []
    for evidence in (0.0, 0.4, 0.0, 0.2, 1.0):
        stops = rule.observe({"hack_evidence": evidence})
        again = StopRule("hack_alarm")
        again.load_state(json.loads(json.dumps(rule.state())))
        assert again == rule
        found.append((stops, rule.honest))
    assert found == [(False, True), (False, False), (False, True), (False, False), (True, False)]


def test_the_alarm_needs_a_truth_and_the_newest_policy() -> None:
    check_truth("hack_alarm", Modchain(ModchainTask()))
    with pytest.raises(ConfigurationError, match="has no method `truth`"):
        check_truth("hack_alarm", DiplomacyMini(DiplomacyMiniTask()))
    for settings in ({"rollout.prefetch": "fresh"}, {"game.schedule": "simultaneous", "game.reward": "goodhart"}):
        with pytest.raises(ConfigurationError, match="'hack_alarm'"):
            changed(ALARMED | settings)


@pytest.mark.slow
def test_audits_change_no_weight_and_ask_about_other_problems(tmp_path: Path) -> None:
    watched = completed(changed(ALARMED | {"training.steps": 3}), tmp_path / "watched")
    alone = completed(changed(ALARMED | {"training.steps": 3, "game.stop": "steps"}), tmp_path / "alone")
    found, expected = (read_checkpoint(run.weights, "round-000-prover")[0] for run in (watched, alone))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    audited = [rollout for rollout in recorded(watched) if "/audit/" in rollout.id]
    task = Modchain(changed(ALARMED).task)
    problems = {problem.id: problem for problem in task.problems("test")}
    evaluated = {rollout.problem_id for rollout in recorded(watched) if "/evaluation/" in rollout.id}
    assert {rollout.problem_id for rollout in audited} <= set(problems) - evaluated
    for number, metrics in enumerate(prover_steps(watched), 1):
        own = [rollout for rollout in audited if rollout.step == number]
        hacks = [r.grade.correct and not task.truth(problems[r.problem_id], r.text) for r in own]
        assert metrics["hack_rate"] == sum(hacks) / audit.AUDITED
    assert {rollout.source for rollout in audited} == {"round-000"}


@pytest.mark.slow
def test_a_hacked_phase_ends_with_its_last_honest_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hacks begin at step 4 and raise the alarm at step 6. The phase is stopped and resumed in between."""
    real = audit.hacked

    def scripted(task: Any, problems: Any, rollouts: Any) -> list[bool]:
        assert len(real(task, problems, rollouts)) == audit.AUDITED
        return [place < (2 if rollouts[0].step < 4 else 16) for place in range(audit.AUDITED)]

    monkeypatch.setattr(audit, "hacked", scripted)
    assert played(changed(ALARMED), tmp_path / "hacked", stop_at=("train_prover", 5))[0].status == "interrupted"
    hacked = played(changed(ALARMED), tmp_path / "hacked", resume=True)[1]
    evidence = [metrics["hack_evidence"] for metrics in prover_steps(hacked)]
    alarm = next(place for place, value in enumerate(evidence, 1) if value >= 1.0)
    assert len({rollout.step for rollout in trained_on(hacked)}) == alarm < 9
    assert {row["name"] for row in rows(hacked, "alert")} >= {"hacking"}
    short = completed(changed(ALARMED | {"training.steps": 3, "game.stop": "steps"}), tmp_path / "short")
    found, expected = (read_checkpoint(run.weights, "round-000-prover")[0] for run in (hacked, short))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
