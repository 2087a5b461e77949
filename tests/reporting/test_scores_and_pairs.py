"""Scores by kind and solutions side by side, read from committed shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_samples import begin, commit, rollout, state, tell

from pvg.records import Grade, Role, Rollout
from pvg.reporting.run_summary import read_run
from pvg.reporting.solutions import round_scores, solution_pairs
from pvg.store.run_directory import RunDirectory


def evaluated(tmp_path: Path, *rollouts: Rollout) -> RunDirectory:
    run = begin(tmp_path)
    tell(run, {"kind": "round", "round": 0, "metrics": {"threshold": 1.0}})
    commit(run, state("complete"), {"checkpoint-00000": list(rollouts)})
    return run


def of(name: str, role: Role, score: float | None, *, correct: bool, problem: str = "p", **changes: Any) -> Rollout:
    return rollout(name, role, correct=correct, score=score, problem_id=problem, **changes)


def test_scores_are_told_apart_by_role_and_grade(tmp_path: Path) -> None:
    malformed = Grade(False, False, None, "malformed")
    run = evaluated(
        tmp_path,
        of("a", Role.HELPFUL, 2.0, correct=True),
        of("b", Role.HELPFUL, 0.5, correct=True),
        of("c", Role.HELPFUL, -1.0, correct=False),
        of("d", Role.SNEAKY, 1.0, correct=False),
        of("e", Role.SNEAKY, 3.0, correct=True),
        of("f", Role.SNEAKY, 9.0, correct=False, grade=malformed),
        of("g", Role.SNEAKY, 9.0, correct=False, source="base"),
        of("h", Role.SNEAKY, None, correct=False),
    )
    (found,) = round_scores(run, read_run(run))
    assert {kind: list(scores) for kind, scores in found.kinds.items()} == {
        "helpful correct": [2.0, 0.5],
        "helpful wrong": [-1.0],
        "sneaky flaw": [1.0],
        "sneaky correct": [3.0],
    }
    assert found.fresh
    assert found.threshold == 1.0
    assert found.accepted("helpful correct") == 0.5
    assert found.accepted("sneaky flaw") == 1.0


def test_an_unfinished_round_speaks_by_its_newest_training_shard(tmp_path: Path) -> None:
    run = begin(tmp_path)
    shards = {
        "train_prover-00000": [of("old", Role.HELPFUL, 0.0, correct=True)],
        "train_prover-00001": [of("new", Role.HELPFUL, 4.0, correct=True)],
    }
    commit(run, state("train_prover"), shards)
    (found,) = round_scores(run, read_run(run))
    assert not found.fresh
    assert list(found.kinds["helpful correct"]) == [4.0]
    assert found.accepted("helpful correct") is None


def test_the_most_believed_flaw_stands_beside_a_right_solution_of_its_problem(tmp_path: Path) -> None:
    run = evaluated(
        tmp_path,
        of("alone", Role.SNEAKY, 9.0, correct=False, problem="r"),
        of("weak", Role.SNEAKY, 1.0, correct=False, problem="p"),
        of("strong", Role.SNEAKY, 2.0, correct=False, problem="q"),
        of("twin", Role.SNEAKY, 1.5, correct=False, problem="q"),
        of("wrong", Role.HELPFUL, 5.0, correct=False, problem="q"),
        of("right", Role.HELPFUL, 0.0, correct=True, problem="q"),
        of("other", Role.HELPFUL, 0.0, correct=True, problem="p"),
    )
    found = [[side.id for side in pair] for pair in solution_pairs(run, 3)]
    assert found == [["right", "strong"], ["other", "weak"], ["alone"]]
    assert len(solution_pairs(run, 1)) == 1


def test_without_flaws_helpful_solutions_stand_alone(tmp_path: Path) -> None:
    run = evaluated(tmp_path, of("a", Role.HELPFUL, 2.0, correct=True))
    ((alone,),) = solution_pairs(run, 2)
    assert alone.role == "helpful"
    assert solution_pairs(begin(tmp_path, "empty"), 2) == []
