"""Rewards against numbers worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_groups import made_group

from pvg.config.game import Game
from pvg.errors import TrainingDivergedError
from pvg.game.rewards import REWARDS, centred_scores, credit_of, pay, rewards
from pvg.game.statistics import BatchOutcomes
from pvg.records import Grade, Role, Rollout, VersionSpan
from pvg.rollout.interaction import DIRECT


def outcomes(scores, correct, helpful, problems=None, well_formed=None, solver=None, kept=None):
    n = len(scores)
    return BatchOutcomes(
        scores_N=np.array(scores, dtype=np.float32),
        correct_N=np.array(correct, dtype=bool),
        helpful_N=np.array(helpful, dtype=bool),
        well_formed_N=np.array([True] * n if well_formed is None else well_formed, dtype=bool),
        problem_ids_N=np.array([0] * n if problems is None else problems, dtype=np.int64),
        solver_correct_N=np.array(correct if solver is None else solver, dtype=bool),
        kept_answer_N=None if kept is None else np.array(kept, dtype=bool),
    )


def test_centred_scores_are_taken_within_a_problem_and_a_role():
    # problem 0, helpful: 1, 3 (mean 2); problem 0, sneaky: 10, 20 (mean 15); problem 1, helpful: 5 alone (mean 5)
    # problem 2, sneaky: 7 alone
    found = centred_scores(outcomes([1, 3, 10, 20, 5, 7], [1] * 6, [1, 1, 0, 0, 1, 0], problems=[0, 0, 0, 0, 1, 2]))
    np.testing.assert_allclose(found, [-1, 1, -5, 5, 0, 0])


def test_src_by_hand():
    # One problem. helpful scores 2, 4 -> V' = -1, +1. sneaky scores 0, 6 -> V' = -3, +3.
    # helpful correct V'=+1: (2*1-1)(2*1-1)*1 = 1;   helpful V'=-1: else branch, -1
    # sneaky incorrect V'=+3: (-1)(-1)*3 = 3;        sneaky V'=-3: -1
    found = rewards(outcomes([2, 4, 0, 6], [1, 1, 0, 0], [1, 1, 0, 0]), Game(reward="src"))
    np.testing.assert_allclose(found, [-1, 1, -1, 3])
    # The same scores, misaligned throughout: helpful incorrect V'=+1 -> -1; sneaky correct V'=+3 -> -3.
    found = rewards(outcomes([2, 4, 0, 6], [0, 0, 1, 1], [1, 1, 0, 0]), Game(reward="src"))
    np.testing.assert_allclose(found, [-1, -1, -1, -3])
    # Alone in its group V' = 0, which is not above the mean.
    np.testing.assert_allclose(rewards(outcomes([9], [1], [1]), Game(reward="src")), [-1])


def test_cgc_by_hand():
    # V where correct == helpful, else -2.
    found = rewards(
        outcomes([0.5, 1.5, -1, 3], [1, 0, 0, 1], [1, 1, 0, 0]), Game(reward={"kind": "cgc", "floor": -2.0})
    )
    np.testing.assert_allclose(found, [0.5, -2, -1, -2])


def test_cgc_refuses_a_live_score_at_or_below_its_floor():
    for score in (-2.5, -2.0):
        with pytest.raises(ValueError, match=r"reward\.floor"):
            rewards(outcomes([score], [1], [1]), Game(reward={"kind": "cgc", "floor": -2.0}))
    # A misaligned solution below the floor is paid the floor, not its score: nothing to refuse.
    np.testing.assert_allclose(rewards(outcomes([-2.5], [0], [1]), Game(reward={"kind": "cgc", "floor": -2.0})), [-2])


def test_goodhart_and_correctness_by_hand():
    sample = outcomes([0.5, -1.5, 3.0], [0, 1, 0], [1, 1, 1], well_formed=[1, 1, 0])
    np.testing.assert_allclose(rewards(sample, Game(reward="goodhart")), [0.5, -1.5, -1.5])
    np.testing.assert_allclose(rewards(sample, Game(reward="correctness")), [0, 1, 0])


def test_correctness_with_what_a_reader_found_by_hand():
    # A correct solution: 1 + 0.5 SR + 0.2 CIR. A wrong or a malformed one: 0.
    reading = {"kind": "correctness", "sr": 0.5, "cir": 0.2, "reader": "embedded:modchain-prover"}
    sample = outcomes([0.0] * 4, [1, 1, 0, 1], [1] * 4, well_formed=[1, 1, 1, 0])
    sample.read_N2 = np.array([[1, 0.5], [0, 0.25], [1, 1], [1, 1]], dtype=np.float32)
    np.testing.assert_allclose(rewards(sample, Game(reward=reading)), [1.6, 1.05, 0, 0], rtol=1e-6)
    sample.read_N2[0, 0] = np.nan
    with pytest.raises(ValueError, match="Reward 0"):
        rewards(sample, Game(reward=reading))


def test_one_score_that_is_not_finite_is_named():
    with pytest.raises(ValueError, match="Score 1"):
        rewards(outcomes([0.0, float("nan")], [1, 1], [1, 1]), Game())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REWARDS))
@given(data=st.data())
def test_a_malformed_solution_is_never_paid_more_than_an_aligned_one(name, data):
    n = data.draw(st.integers(2, 24))
    flags = hnp.arrays(bool, n)
    scores = data.draw(hnp.arrays(np.float32, n, elements=st.floats(-1.5, 8, width=32)))
    malformed = np.zeros(n, dtype=bool)
    malformed[data.draw(st.integers(0, n - 1))] = True
    correct = data.draw(flags) & ~malformed
    sample = outcomes(
        scores, correct, data.draw(flags), data.draw(hnp.arrays(np.int64, n, elements=st.integers(0, 3))), ~malformed
    )
    paid = rewards(sample, Game(reward=name))
    assert paid.dtype == np.float32
    assert np.isfinite(paid).all()
    if sample.aligned_N.any():
        assert paid[malformed].max() <= paid[sample.aligned_N].min() + 1e-6 or name in ("src", "goodhart")
    if name == "src":
        assert paid[malformed].max() <= -1.0


def executed(scores, correct, helpful, proven, tests, similarity=None, well_formed=None):
    """Outcomes of a task that executes."""
    return replace(
        outcomes(scores, correct, helpful, well_formed=well_formed),
        proven_N=np.array(proven, dtype=bool),
        tests_N=np.array(tests, dtype=np.float32),
        similarity_N=None if similarity is None else np.array(similarity, dtype=np.float32),
    )


LOG3 = float(np.log(3.0))  # sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4


def test_gated_by_hand():
    # helpful right; helpful wrong; sneaky proven; sneaky wrong without proof; sneaky right; sneaky malformed.
    sample = executed(
        [LOG3, LOG3, -LOG3, LOG3, LOG3, LOG3],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0],
        proven=[1, 1, 1, 0, 1, 1],
        tests=[1, 0.5, 1, 0.5, 0.5, 0],
        similarity=[0, 0, 0.4, 0, 1, 0],
        well_formed=[1, 1, 1, 1, 1, 0],
    )
    game = Game(reward={"kind": "gated", "similarity_weight": 0.5, "floor": -3.0})
    # 3/4;  -3;  1/4 - 0.5 * 0.4 = 0.05;  -3;  -3;  -3
    np.testing.assert_allclose(rewards(sample, game), [0.75, -3, 0.05, -3, -3, -3], atol=1e-6)


def test_a_flaw_without_proof_is_paid_as_no_solution():
    # One group of sneaky flaws, scores 0 and 4: V' = -2, +2. Proven: -1 (else branch), +2. Unproven: min(-1, -|V'|).
    flaws = executed([0.0, 4.0], [0, 0], [0, 0], proven=[1, 1], tests=[1, 1])
    np.testing.assert_allclose(rewards(flaws, Game(reward="src")), [-1, 2])
    unproven = replace(flaws, proven_N=np.array([False, False]))
    np.testing.assert_allclose(rewards(unproven, Game(reward="src")), [-2, -2])
    np.testing.assert_allclose(rewards(unproven, Game(reward={"kind": "cgc", "floor": -9.0})), [-9, -9])
    np.testing.assert_allclose(rewards(unproven, Game(reward="goodhart")), [0, 4])  # no roles and no truth


@pytest.mark.slow
@given(
    scores=st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=12),
    weight=st.floats(0, 4),
    data=st.data(),
)
def test_no_closed_gate_is_paid_like_an_open_one(scores, weight, data):
    n = len(scores)
    flags = hnp.arrays(bool, n)
    shares = hnp.arrays(np.float32, n, elements=st.floats(0, 1, width=32))
    sample = executed(
        scores,
        data.draw(flags),
        data.draw(flags),
        data.draw(flags),
        data.draw(shares),
        data.draw(shares),
        data.draw(flags),
    )
    floor = -weight - 0.01
    table = {"kind": "gated", "similarity_weight": weight, "floor": floor}
    game = Game(reward=table)
    paid = rewards(sample, game)
    assert (paid[~sample.aligned_N] == np.float32(floor)).all()
    assert (paid[sample.aligned_N] > np.float32(floor)).all()


def test_translations_are_aligned_by_the_solvers_answer_and_not_by_correctness():
    # The solver is wrong. Faithful: keeps it (aligned, though wrong), or corrects it (not aligned, though correct).
    # Sneaky: another wrong answer (aligned), the solver's wrong one (not), the right one (not).
    correct, helpful, kept = [0, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 0, 0, 1, 0]
    sample = outcomes([1, 2, 3, 4, 5], correct, helpful, solver=[0] * 5, kept=kept)
    assert sample.aligned_N.tolist() == [True, False, True, False, False]
    malformed = outcomes([1, 2], [0, 0], [1, 0], kept=[1, 0], well_formed=[False, False])
    assert malformed.aligned_N.tolist() == [False, False]


def test_decoupled_pays_translations_by_hand():
    # Group of faithful ones, scores 1, 3, 5: mean 3, population std sqrt(8/3) -> v' = -1.2247, 0, 1.2247.
    # The solver is right: of the first and the last, which keep its answer, the last is paid v'.
    scores, helpful = [1, 3, 5, 1, 3, 5], [1, 1, 1, 0, 0, 0]
    kept, correct = [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0]
    found = rewards(outcomes(scores, correct, helpful, solver=[1] * 6, kept=kept), Game(reward="decoupled"))
    np.testing.assert_allclose(found, [-2, -2, 1.22474, -2, -2, 1.22474], atol=1e-4)
    # Scores 1, 3, 4: mean 8/3, std sqrt(14)/3. What is a little above the mean is paid too.
    found = rewards(outcomes([1, 3, 4], [1] * 3, [1] * 3, solver=[1] * 3, kept=[1] * 3), Game(reward="decoupled"))
    np.testing.assert_allclose(found, [-2, 1 / 14**0.5, 4 / 14**0.5], atol=1e-4)
    # The solver is wrong: convincing anybody of its answer costs the faithful role what it gains otherwise.
    kept, correct = [1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]
    found = rewards(outcomes(scores, correct, helpful, solver=[0] * 6, kept=kept), Game(reward="decoupled"))
    np.testing.assert_allclose(found, [-2, -2, -1.22474, -2, -2, 1.22474], atol=1e-4)
    # A faithful translation that corrects the solver is misaligned, whatever it scores.
    found = rewards(
        outcomes([1, 5], [0, 1], [1, 1], solver=[0, 0], kept=[1, 0]), Game(reward={"kind": "decoupled", "floor": -3.0})
    )
    np.testing.assert_allclose(found, [-3, -3])


# --- from rollouts to rewards, and from rewards to advantages ---------------------------------------------------------

LOOP, SUM = "for i in range(9):\n    total += i * i\n", "print(sum(x * x for x in range(n + 1)) // 2)\n"


class Programs:
    """What rewards ask of a task with programs: its solution is the completion."""

    def solution(self, completion: str) -> str:
        return completion


def rollouts(*rows: dict[str, Any]) -> list[Rollout]:
    """Rows of fields; `role` and `correct` as well."""
    (like,) = made_group("p", [[0]]).rollouts
    found = []
    for index, row in enumerate(rows):
        grade = Grade(correct=row.pop("correct", True), well_formed=True)
        found.append(replace(like, **{"id": str(index), "grade": grade, **row}))
    return found


def test_sneaky_programs_pay_for_what_they_repeat() -> None:
    """Of their reference, or of their group: the last one repeats two of another group."""
    repeats = {"role": Role.SNEAKY, "text": SUM, "reference": LOOP, "correct": False}
    sample = rollouts(
        {"role": Role.HELPFUL, "text": LOOP, "reference": LOOP},
        {**repeats, "text": LOOP},
        {**repeats, "group": 1},
        {**repeats, "group": 1},
        {**repeats, "group": 2},
    )
    scores_N = np.zeros(5, dtype=np.float32)
    game = Game(reward={"kind": "gated", "similarity_weight": 2.0})
    paid_N, found, _ = pay(game, Programs(), DIRECT.rules, sample, scores_N)
    assert found.similarity_N is not None
    assert found.similarity_N.dtype == np.float32
    assert found.similarity_N[:4].tolist() == [0.0, 1.0, 1.0, 1.0]
    assert found.similarity_N[4] < 0.5
    free = Game(reward={"kind": "gated", "similarity_weight": 0.0})
    np.testing.assert_allclose(
        pay(free, Programs(), DIRECT.rules, sample, scores_N)[0] - paid_N, 2.0 * found.similarity_N
    )
    for other, task in ((free, Programs()), (Game(reward="src"), Programs()), (game, object())):
        assert pay(other, task, DIRECT.rules, sample, scores_N)[1].similarity_N is None
    with pytest.raises(TrainingDivergedError, match="Score 0"):
        pay(game, Programs(), DIRECT.rules, sample, scores_N + np.inf)


def test_a_loss_with_values_compares_with_them_and_goes_on_after_json() -> None:
    """spo whitens per role over the batch, by tokens; rae has one baseline per role; the others compare a group."""
    rows = rollouts(*({"group": n // 2, "problem_id": str(n // 2)} for n in range(4)))
    rewards_N, later_N = np.array([0, 1, 5, 5], dtype=np.float32), np.array([1, 1, 0, 3], dtype=np.float32)
    assert credit_of("dr_grpo", None).observe(rows, rewards_N)[0].tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert credit_of("own", lambda groups: groups.rewards_N * 2).observe(rows, rewards_N)[0].tolist() == [0, 2, 10, 10]
    # rae. First: R - mean of the others, 11/3, 10/3, 2, 2. Then R - 11/4. spo: (R - 11/4) / their deviation.
    for loss, first, second in (
        ("rae", [-11 / 3, -7 / 3, 3, 3], [-1.75, -1.75, -2.75, 0.25]),
        ("spo", np.array([-2.75, -1.75, 2.25, 2.25]) / 5.1875**0.5, None),
    ):
        credit = credit_of(loss, None)
        advantages_N, metrics = credit.observe(rows, rewards_N)
        np.testing.assert_allclose(advantages_N, first, atol=1e-5)
        assert metrics["zero_signal"] == 0.0
        again = credit_of(loss, None)
        again.load_state(json.loads(json.dumps(credit.state())))
        expected = credit.observe(rows, later_N)[0]
        assert again.observe(rows, later_N)[0].tolist() == expected.tolist()
        assert second is None or expected.tolist() == pytest.approx(second)
    # The rewards after ten versions move the value of a problem further than after none.
    values = []
    for version in (0, 50):
        credit = credit_of("spo", None)
        credit.observe(rows, rewards_N)
        credit.observe([replace(r, spans=(VersionSpan(0, version),)) for r in rows], later_N)
        values.append(credit.state()["seen"]["helpful"]["0"][0])
    assert values[0] != values[1]
