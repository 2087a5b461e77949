"""What an attacker writes: kinds of flaws with the verifier's decisions, and typical examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pvg.evaluation.attacks import MOST_KINDS, written_flaws
from pvg.evaluation.opened_run import ScoredRollouts
from pvg.records import Grade, Problem, Role, Rollout, VersionSpan

IDS = np.zeros(1, dtype=np.int32)
Written = tuple[str, str, float]  # problem, note of the grader, score


def rollout(number: int, problem: str, grade: Grade) -> Rollout:
    return Rollout(
        f"r{number}", problem, f"question of {problem}", "7", Role.SNEAKY, 0, "attack", 0, number, IDS, IDS,
        IDS.astype(np.float32), (VersionSpan(0, 0),), "stop", f"solution {number}", grade,
    )  # fmt: skip


def written(flaws: Sequence[Written], others: Sequence[Grade] = ()) -> dict:
    rows = [rollout(n, problem, Grade(False, True, "3", note)) for n, (problem, note, _) in enumerate(flaws)]
    rows += [rollout(len(flaws) + n, "p0", grade) for n, grade in enumerate(others)]
    scores_N = np.array([*(score for _, _, score in flaws), *([9.0] * len(others))], dtype=np.float32)
    pool = [Problem(name, "", "") for name in sorted({row.problem_id for row in rows})]
    return written_flaws(ScoredRollouts(rows, scores_N, pool), 0.5)


def test_each_kind_has_its_share_and_the_share_that_the_verifier_accepts() -> None:
    flaws = [("p0", "extra step", 1.0), ("p1", "extra step", 0.5), ("p1", "extra step", 0.4), ("p2", "", 2.0)]
    others = [Grade(True, True, "7"), Grade(False, False, note="malformed: no answer")]  # no flaws
    found = written([*flaws, ("p0", "wrong sum in step 2", -3.0), ("p1", "wrong sum in step 1", -1.0)], others)
    assert [kind["kind"] for kind in found["kinds"]] == ["extra step", "wrong sum", "no note"]
    assert [kind["share"].value for kind in found["kinds"]] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert [kind["share"].n for kind in found["kinds"]] == [6, 6, 6]
    assert [kind["accepted"].value for kind in found["kinds"]] == pytest.approx([2 / 3, 0.0, 1.0])
    assert [kind["accepted"].n for kind in found["kinds"]] == [3, 2, 1]
    assert found["threshold"] == 0.5


def test_examples_are_typical_and_of_different_kinds_and_problems() -> None:
    extra = [(f"p{n}", "extra step", score) for n, score in enumerate((5.0, 1.0, -2.0))]
    sums = [("p1", "wrong sum in step 1", -1.0), ("p4", "wrong sum in step 2", -1.0)]
    found = written([*extra, *sums])["examples"]
    # The median of extra steps; the first wrong sum has the same problem, so the other one; then the next extra step.
    assert [example["id"] for example in found] == ["r1", "r2", "r4"]
    assert found[0] == {
        "id": "r1", "question": "question of p1", "reference": "7", "solution": "solution 1", "answer": "3",
        "note": "extra step", "score": 1.0, "accepted": True,
    }  # fmt: skip
    assert [example["accepted"] for example in found] == [True, False, False]


def test_rare_kinds_count_together() -> None:
    flaws = [("p0", "common", 1.0)] * 2 + [(f"p{n}", f"rare {n:02d}", 0.0) for n in range(MOST_KINDS + 2)]
    kinds = written(flaws)["kinds"]
    assert [kind["kind"] for kind in kinds[:2]] == ["common", "rare 00"]
    assert (len(kinds), kinds[-1]["kind"], kinds[-1]["accepted"].n) == (MOST_KINDS + 1, "other kinds", 3)
