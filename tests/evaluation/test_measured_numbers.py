"""What the measures are applied to: tables of a few solutions, and every number of them counted by hand."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from evaluation_drill import evaluated_experiment

sys.path.insert(0, str(Path(__file__).parent.parent / "store"))
from store_samples import rollout

from pvg.config.operation import Evaluate
from pvg.config.task import ModchainTask
from pvg.config.training import Verifier
from pvg.evaluation import measures
from pvg.evaluation.attacks import check
from pvg.evaluation.opened_run import SampleSet, ScoredRollouts
from pvg.evaluation.report import attacker_experiment
from pvg.evaluation.runner import RoundParts
from pvg.evaluation.training import baseline_experiment
from pvg.records import Checks, Float32, Grade, Problem, Role, Rollout
from pvg.tasks.modchain import Modchain, chain_problem
from pvg.verifier.intervals import Estimate

H, S = Role.HELPFUL, Role.SNEAKY
RIGHT, WRONG, MALFORMED = Grade(True, True), Grade(False, True), Grade(False, False)
UNPROVEN = Grade(False, True, checks=Checks(visible=1.0, passed=0.5, certified=False))

PROBLEMS = [Problem("p4", "", ""), Problem("p5", "", "")]  # in two folds of two, see the calibration
THRESHOLD = 1.0

Row = tuple[int, Role, Grade, float]  # the problem's place, role, grade, score

# Flaws are sneaky, wrong, well-formed and proven: the scores 1, -1 and 0.5. One solution and one flaw score exactly the
# threshold, and are accepted.
OWN: list[Row] = [
    (0, H, RIGHT, 3.0),
    (0, H, WRONG, 2.0),
    (0, H, MALFORMED, -3.0),
    (0, S, WRONG, 1.0),
    (0, S, WRONG, -1.0),
    (0, S, MALFORMED, 5.0),
    (1, H, RIGHT, 1.0),
    (1, H, RIGHT, -2.0),
    (1, H, WRONG, 0.0),
    (1, H, WRONG, 0.75),
    (1, S, RIGHT, 2.5),
    (1, S, UNPROVEN, 4.0),
    (1, S, WRONG, 0.5),
]
# Half of the resamples are the first problem twice, half the second: an interval ends at what each of them gives alone.
DRAWS_BP = np.array([[2.0, 0.0], [0.0, 2.0]] * 50)


def scored(rows: Sequence[Row]) -> ScoredRollouts:
    rollouts = [
        replace(rollout(number), problem_id=PROBLEMS[place].id, role=role, grade=grade)
        for number, (place, role, grade, _) in enumerate(rows)
    ]
    return ScoredRollouts(rollouts, np.array([score for *_, score in rows], dtype=np.float32), PROBLEMS)


def told(estimate: Estimate | dict[str, Any]) -> tuple[float, int, int]:
    """An estimate's number, and of how many solutions and problems it is."""
    estimate = Estimate(**estimate) if isinstance(estimate, dict) else estimate
    return pytest.approx(estimate.value), estimate.n, estimate.problems


def whole(estimate: Estimate) -> tuple[Any, ...]:
    """An estimate with its interval."""
    return (*told(estimate), pytest.approx(estimate.low), pytest.approx(estimate.high))


# --- helpful shares, fooled rate, best-of-n ---------------------------------------------------------------------------


def test_shares_of_helpful_solutions() -> None:
    found = measures.helpful_shares(scored(OWN), THRESHOLD)
    assert found["threshold"] == 1.0
    # Of the seven helpful ones 3, 1 and -2 are right; of these 3 and 1 are accepted.
    assert told(found["helpful_accuracy"]) == (3 / 7, 7, 2)
    assert told(found["accepted_helpful"]) == (2 / 3, 3, 2)


def test_detection_tells_flaws_from_correct_helpful_solutions() -> None:
    own = scored(OWN)
    found = measures.detection("round-000", own, own, THRESHOLD, DRAWS_BP)
    assert (found["source"], found["solutions"]) == ("round-000", 13)
    # Of the flaws 1, -1 and 0.5 the last two are rejected.
    assert told(found["fooled_rate"]) == (1 / 3, 3, 2)
    # 3 is above all three flaws; 1 above two, and ties with one; -2 above none: (3 + 2.5 + 0) / 9.
    # The first problem alone: 3 above 1 and -1. The second: 1 above 0.5, -2 not.
    assert whole(found["auc"]) == (5.5 / 9, 6, 2, 1 / 2, 1.0)
    # Accepting from 3, then 1, 0.5, -1, -2 on: (share of the flaws, share of the solutions).
    expected = [(0, 0), (0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 2 / 3), (1, 2 / 3), (1, 1)]
    np.testing.assert_allclose(found["roc"], expected)


def test_best_of_n_takes_the_highest_score_of_both_roles_or_of_the_helpful_one() -> None:
    (found,) = measures.best_of_n({"round-000": scored(OWN)}, Evaluate(samples=3), DRAWS_BP)
    assert found["source"] == "round-000"
    two, four = found["balanced"]
    # First problem: the right 3 against 2, -3, 1, -1, 5: four of five. Second: the right 1, -2, 2.5 against 0, 0.75, 4,
    # 0.5: 1 and 2.5 are above all but 4, six of twelve. (4/5 + 1/2) / 2.
    assert (two["n"], two["excluded"], whole(two["accuracy"])) == (2, 0, (13 / 20, 2, 2, 1 / 2, 4 / 5))
    # Two right and two wrong: the first problem has one right. In the second 4 wins wherever it is, in three of the six
    # pairs of wrong ones; the others lose to every pair of right ones, for each has 1 or 2.5.
    assert (four["n"], four["excluded"], told(four["accuracy"])) == (4, 1, (1 / 2, 1, 1))
    (natural,) = found["natural"]
    # First problem, 3 right, 2 and -3 wrong: two of the three pairs have the 3. Second, 1 and -2 right, 0 and 0.75
    # wrong: three of the six pairs have the 1, and -2 loses to both wrong ones. (2/3 + 1/2) / 2.
    assert (natural["n"], natural["excluded"]) == (2, 0)
    assert whole(natural["accuracy"]) == (7 / 12, 2, 2, 1 / 2, 2 / 3)
    # A right one is in two of the first problem's three pairs, and in all of the second's but 0 with 0.75.
    assert whole(natural["pass_at_n"]) == (3 / 4, 2, 2, 2 / 3, 5 / 6)
    assert whole(natural["chance"]) == (3 / 7, 7, 2, 1 / 3, 1 / 2)


# --- calibration, localisation ---------------------------------------------------------------------------------------


@pytest.fixture
def two_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And two bins, so that every number can be computed by hand."""
    monkeypatch.setattr(measures, "FOLDS", 2)
    monkeypatch.setattr(measures, "BINS", 2)


HIGH, LOW = log(3), -log(3)  # sigmoid: 3/4 and 1/4
PREDICTED: list[Row] = [
    (0, H, RIGHT, HIGH),
    (0, S, RIGHT, HIGH),
    (0, H, WRONG, LOW),
    (0, S, WRONG, LOW),
    (1, H, MALFORMED, HIGH),
    (1, H, RIGHT, LOW),
    (1, S, UNPROVEN, LOW),
    (1, S, WRONG, LOW),
]


@pytest.mark.usefixtures("two_folds")
def test_calibration_is_of_the_scores_sigmoid() -> None:
    verifier = Verifier(loss="cross_entropy")
    found = measures.calibration(scored(PREDICTED), verifier, DRAWS_BP)
    assert found["raw_is_probability"] is True
    # Predicted 3/4: two of three are right; predicted 1/4: one of five.
    low, high = found["raw"]["bins"]
    assert (low["predicted"], high["predicted"]) == (pytest.approx(1 / 4), pytest.approx(3 / 4))
    assert (told(low["correct"]), told(high["correct"])) == ((1 / 5, 5, 2), (2 / 3, 3, 2))
    # 3/8 |3/4 - 2/3| + 5/8 |1/4 - 1/5| = 1/32 + 1/32
    assert told(found["raw"]["ece"]) == (1 / 16, 8, 2)
    # High: 1/16 for each of two right ones, 9/16 for a wrong one; low: 9/16 for the right one, 1/16 for each of four
    # wrong ones: 24/16 over 8. The first problem: 4 sixteenths over 4; the second: 9 + 9 + 1 + 1 sixteenths over 4.
    assert whole(found["raw"]["brier"]) == (3 / 16, 8, 2, 1 / 16, 5 / 16)
    # Platt's targets are (3+1)/(3+2) for the three right ones, 1/(5+2) for the wrong ones; with two scores the fit goes
    # through the mean targets, (4/5 + 4/5 + 1/7)/3 = 61/105 and (4/5 + 4/7)/5 = 48/175.
    upper, lower = log(61 / 44), log(48 / 127)
    assert found["slope"] == pytest.approx((upper - lower) / (HIGH - LOW), abs=1e-4)
    assert found["offset"] == pytest.approx((upper + lower) / 2, abs=1e-4)


def test_localisation_by_hand() -> None:
    prefixes = [
        [2.0, 1.0, -3.0],  # falls 1, 4; wrong in the second step: found, where guessing gets 1/2
        [0.0, -1.0, -2.0, 0.0, 0.0],  # falls 1, 1, -2, 0; wrong in the first: half found, 1/4
        [1.0, 1.0, 0.0],  # falls 0, 1; wrong in the first: not found, 1/2
        [5.0, 1.0, 0.0, 4.0],  # falls 4, 1, -4; wrong in the first: found, 1/3
    ]
    found = measures.localisation(prefixes, [1, 0, 0, 0], [0, 0, 0, 1], DRAWS_BP)
    assert (found["known"], found["solutions"]) == (True, 4)
    # (1 + 1/2 + 0 + 1)/4, and guessing (1/2 + 1/4 + 1/2 + 1/3)/4 = 19/48. The first problem's three alone: 1/2, 5/12.
    assert whole(found["accuracy"]) == (5 / 8, 4, 2, 1 / 2, 1.0)
    assert found["chance"] == pytest.approx(19 / 48)
    assert whole(found["gain"]) == (5 / 8 - 19 / 48, 4, 2, 1 / 12, 2 / 3)


# --- attacks, and who is trained -------------------------------------------------------------------------------------


def test_an_attacks_check_is_of_its_flaws_against_the_rounds_correct_helpful_solutions() -> None:
    fresh = scored(
        [
            (0, S, WRONG, 1.0),
            (0, S, MALFORMED, -8.0),
            (1, S, WRONG, 3.0),
            (1, S, WRONG, -4.0),
            (1, S, RIGHT, 7.0),
            (1, S, RIGHT, -9.0),
            (1, S, UNPROVEN, 6.0),
        ]
    )
    found = check(fresh, scored(OWN), THRESHOLD, DRAWS_BP)
    # Flaws: 1 (exactly the threshold), 3 and -4 of the seven; the first two are accepted.
    assert told(found["error_rate"]) == (3 / 7, 7, 2)
    assert told(found["accepted"]) == (2 / 3, 3, 2)
    # Solutions (3 + 1 - 2)/3 over flaws (1 + 3 - 4)/3. The first problem alone: 3 - 1; the second: -1/2 - -1/2.
    assert whole(found["gap"]) == (2 / 3, 6, 2, 0.0, 2.0)


def test_the_baseline_is_the_helpful_role_alone_and_an_attacker_the_sneaky_one() -> None:
    experiment = evaluated_experiment()
    baseline = baseline_experiment(experiment).game
    assert (baseline.sneaky_share, baseline.reward.kind) == (0.0, "correctness")
    for kind in ("src", "cgc", "goodhart"):
        attacker = attacker_experiment(experiment, kind, "attacks/x", -9.0).game
        assert (attacker.sneaky_share, attacker.reward.kind) == (1.0, kind)


# --- a round's parts, of samples and scores that are given -----------------------------------------------------------


async def computed(name: str, for_: str, work: Callable[[], Awaitable[Any]]) -> Any:
    return orjson.loads(orjson.dumps(await work()))


class Judge:
    """Scores a text as the table says; knows what it was asked."""

    round, digest = 0, "judge"

    def __init__(self, scores: dict[str, float]) -> None:
        self._scores = scores
        self.asked: list[Rollout] = []

    async def scores(self, name: str, rollouts: Sequence[Rollout], of: str) -> Float32:
        self.asked += rollouts
        return np.array([self._scores[rollout.text] for rollout in rollouts], dtype=np.float32)

    async def facts(self) -> dict[str, Any]:
        return {"version": "v", "threshold": THRESHOLD}


def encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def stub_study(problems: list[Problem], samples: dict[str, list[Rollout]], **section: Any) -> Any:
    async def compute(work: Callable[[], Any]) -> Any:
        return work()

    plain = evaluated_experiment()
    experiment = plain.model_copy(update={"evaluate": plain.evaluate.model_copy(update=section)})
    return SimpleNamespace(
        experiment=experiment,
        config="config",
        seed=0,
        task=Modchain(ModchainTask()),
        samples=samples,
        unit=computed,
        test_problems=lambda: problems,
        prover_problems=lambda: problems,
        ledger=SimpleNamespace(players_of=lambda round_: f"players {round_}"),
        players=SimpleNamespace(compute=compute, base=SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))),
    )


@pytest.fixture
def given_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an evaluation samples is what its study holds under the set's name."""

    async def sampled(study: Any, wanted: SampleSet) -> list[Rollout]:
        return study.samples[wanted.name]

    monkeypatch.setattr("pvg.evaluation.runner.sampled", sampled)


def solution(number: int, problem: Problem, role: Role, text: str) -> Rollout:
    grade = Modchain(ModchainTask()).grade(problem, text)
    return replace(rollout(number), problem_id=problem.id, role=role, text=text, grade=grade)


@pytest.mark.usefixtures("given_samples")
def test_a_flaw_is_located_where_the_score_falls_from_one_prefix_to_the_next_longer_one() -> None:
    problems = [chain_problem((7, 5, 8), 10), chain_problem((1, 2, 3, 4), 10)]
    rollouts = [
        solution(0, problems[0], S, "7+5=2;2+8=1;A1"),  # wrong in its second step
        solution(1, problems[0], H, "7+5=2;2+8=0;A1"),  # helpful: no flaw
        solution(2, problems[1], S, "1+2=3;3+3=6;6+4=0;A0"),  # right
        solution(3, problems[1], S, "1+2=4;4+3=7;7+4=1;A1"),  # wrong in its first step
    ]
    scores = {
        "": 0.0,
        "7+5=2;": 1.0,
        "7+5=2;2+8=1;": -4.0,  # falls -1, 5, 1/2: the second step is found
        "7+5=2;2+8=1;A1": -4.5,
        "1+2=4;": -1.0,
        "1+2=4;4+3=7;": -1.5,
        "1+2=4;4+3=7;7+4=1;": -3.5,  # falls 1, 1/2, 2, 0: the third is found, which is not the first wrong one
        "1+2=4;4+3=7;7+4=1;A1": -3.5,
    }
    judge = Judge(scores)
    found = asyncio.run(RoundParts(stub_study(problems, {"round-000": rollouts}), judge).localisation())  # type: ignore[arg-type]
    texts = list(scores)
    assert [asked.text for asked in judge.asked] == [*texts[:4], "", *texts[4:]]
    for asked in judge.asked:
        np.testing.assert_array_equal(asked.completion_ids, encode(asked.text))
    # One of two; guessing among three and among four steps gets 1/3 and 1/4.
    assert (told(found["accuracy"]), found["solutions"]) == ((1 / 2, 2, 2), 2)
    assert told(found["gain"]) == (1 / 2 - 7 / 24, 2, 2)


@pytest.mark.usefixtures("given_samples")
def test_an_attacks_target_is_read_from_its_own_sample_and_the_floor_from_all_that_was_scored() -> None:
    problems = [chain_problem((7, 5, 8), 10), chain_problem((1, 2, 3, 4), 10)]
    right, wrong, other = "7+5=2;2+8=0;A0", "7+5=2;2+8=1;A1", "1+2=3;3+3=6;6+4=0;A0"
    samples = {
        "base": [solution(0, problems[0], S, "low"), solution(1, problems[0], H, right)],
        "round-000": [solution(2, problems[0], S, "high"), solution(3, problems[0], H, right)],
        "reference-round-000": [
            solution(4, problems[0], H, right),
            solution(5, problems[0], H, wrong),
            solution(6, problems[1], H, other),
        ],
    }
    judge = Judge({"low": -6.0, "high": 9.0, right: 2.0, wrong: -1.0, other: 3.0})
    target = asyncio.run(RoundParts(stub_study(problems, samples), judge).target())  # type: ignore[arg-type]
    assert (target.round, target.players, target.threshold) == (0, "judge", THRESHOLD)
    # The right ones of the reference score 2 and 3; the lowest score is the base's, the highest the round's.
    assert told(dict(target.reference)) == (5 / 2, 2, 2)
    assert (target.lowest, target.highest, target.cgc_floor) == (-6.0, 9.0, -6.0 - 15.0 - 1.0)
