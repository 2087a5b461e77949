"""The parts of an evaluation: from scored samples to the numbers of the report, as plain data.

Everything here is a pure function of arrays and settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation import best_of_n as best
from pvg.evaluation import calibration as calibrated
from pvg.evaluation import localisation as located
from pvg.evaluation import separability as separate
from pvg.evaluation.detection import auc_of, band, roc, wins
from pvg.evaluation.intervals import Estimate, Float64, mean_of, ratio, share_of
from pvg.evaluation.logistic import sigmoid
from pvg.evaluation.samples import Scored
from pvg.sections import Evaluate, Verifier

NOTHING = Estimate(None, None, None, 0, 0).plain()


def best_of_n(sources: Mapping[str, Scored], section: Evaluate, weights_BP: Float64) -> list[dict[str, Any]]:
    """Per source the balanced curve over both roles' solutions, and the natural one over the helpful ones."""
    return [
        {
            "source": name,
            "balanced": _balanced(samples, section, weights_BP),
            "natural": _natural(samples, section, weights_BP),
        }
        for name, samples in sources.items()
    ]


def _balanced(samples: Scored, section: Evaluate, weights_BP: Float64) -> list[dict[str, Any]]:
    points = []
    for n in best.sizes(2 * section.samples):
        values = best.by_problem(samples.scores_N, samples.correct_N, samples.problems_N, n, best.balanced)
        point = best.curve_point(values, weights_BP, section.confidence)
        points.append({"n": n, "accuracy": point.plain(), "excluded": len(values) - point.n})
    return points


def _natural(samples: Scored, section: Evaluate, weights_BP: Float64) -> list[dict[str, Any]]:
    mask = samples.helpful_N
    scores_N, correct_N, problems_N = samples.scores_N[mask], samples.correct_N[mask], samples.problems_N[mask]
    size = weights_BP.shape[1]
    total_P = np.bincount(problems_N, minlength=size)
    right_P = np.bincount(problems_N, weights=correct_N.astype(np.float64), minlength=size).astype(np.int64)
    chance = mean_of(correct_N.astype(np.float64), problems_N, weights_BP, section.confidence)
    points = []
    for n in best.sizes(section.samples):
        values = best.by_problem(scores_N, correct_N, problems_N, n, best.natural)
        ceilings = [
            best.pass_at(int(right), int(total), n) if total >= n else None
            for right, total in zip(right_P, total_P, strict=True)
        ]
        point = best.curve_point(values, weights_BP, section.confidence)
        points.append(
            {
                "n": n,
                "accuracy": point.plain(),
                "pass_at_n": best.curve_point(ceilings, weights_BP, section.confidence).plain(),
                "chance": chance.plain(),
                "excluded": len(values) - point.n,
            }
        )
    return points


def completeness(own: Scored, threshold: float, section: Evaluate) -> dict[str, Any]:
    """What is said of the round's own helpful solutions: completeness, and its two factors."""
    confidence, helpful, solved = section.confidence, own.helpful_N, own.helpful_N & own.correct_N
    accepted = own.scores_N >= threshold
    return {
        "threshold": threshold,
        "completeness": share_of((accepted & own.correct_N)[helpful], own.problems_N[helpful], confidence).plain(),
        "helpful_accuracy": share_of(own.correct_N[helpful], own.problems_N[helpful], confidence).plain(),
        "accepted_correct": share_of(accepted[solved], own.problems_N[solved], confidence).plain(),
    }


def detection(
    name: str, own: Scored, samples: Scored, threshold: float, section: Evaluate, weights_BP: Float64
) -> dict[str, Any]:
    """Soundness, ROC with its band, and AUC of one source's flaws; the positives are the round's own correct helpful
    solutions."""
    solved, mask = own.helpful_N & own.correct_N, samples.flaws_N
    positives_N, places_N = own.scores_N[solved], own.problems_N[solved]
    negatives_M, places_M = samples.scores_N[mask], samples.problems_N[mask]
    counts = wins(positives_N, places_N, negatives_M, places_M, weights_BP.shape[1])
    cuts = band(positives_N, places_N, negatives_M, places_M, weights_BP, section.confidence)
    return {
        "source": name,
        "solutions": len(samples.rollouts),
        "soundness": share_of(negatives_M < threshold, places_M, section.confidence).plain(),
        "auc": auc_of(counts, weights_BP, section.confidence).plain(),
        "roc": [list(point) for point in roc(positives_N, negatives_M)],
        "band": [[rate, found.value, found.low, found.high] for rate, found in cuts],
    }


def separability(
    own: Scored, solutions: Sequence[NDArray[np.int32]], section: Evaluate, weights_BP: Float64
) -> dict[str, Any]:
    """The probe's AUC over all solutions of the round's prover, and within the correct and the incorrect ones,
    these by pairs of one problem.

    `solutions`: the tokens of each, int32 [C], as the verifier reads them."""
    fold_P = separate.folds_of([problem.id for problem in own.pool], section.folds)
    rows_NF = separate.features(solutions, section.ngrams)
    strata = {"overall": np.ones(len(rows_NF), dtype=bool), "correct": own.correct_N, "incorrect": ~own.correct_N}
    within_P = np.arange(len(fold_P))  # a role's correct solutions are of easier problems than the other's, say
    found = {
        name: separate.probe(
            rows_NF[mask],
            own.helpful_N[mask],
            own.problems_N[mask],
            fold_P,
            weights_BP,
            section.confidence,
            pairs_P=None if name == "overall" else within_P,
        )
        if mask.any()
        else Estimate(None, None, None, 0, 0)
        for name, mask in strata.items()
    }
    return {name: estimate.plain() for name, estimate in found.items()}


def calibration(own: Scored, verifier: Verifier, section: Evaluate, weights_BP: Float64) -> dict[str, Any]:
    """Raw sigmoid(score) and the cross-fitted Platt probability, over all solutions of the round's prover."""
    fold_P = separate.folds_of([problem.id for problem in own.pool], section.folds)
    fitted_N = calibrated.cross_fitted(own.scores_N, own.correct_N, own.problems_N, fold_P)
    slope, offset = calibrated.platt(own.scores_N, own.correct_N)
    return {
        "raw_is_probability": verifier.loss == "cross_entropy" and verifier.ensemble == 1,
        "raw": _calibrated(sigmoid(own.scores_N), own, section, weights_BP),
        "fitted": None if fitted_N is None else _calibrated(fitted_N, own, section, weights_BP),
        "slope": slope,
        "offset": offset,
    }


def _calibrated(predicted_N: Float64, own: Scored, section: Evaluate, weights_BP: Float64) -> dict[str, Any]:
    confidence = section.confidence
    bins = calibrated.reliability(predicted_N, own.correct_N, own.problems_N, section.bins, confidence)
    error, by_chance = calibrated.ece(predicted_N, own.correct_N, own.problems_N, section.bins, weights_BP, confidence)
    return {
        "ece": error.plain(),
        "ece_by_chance": by_chance,
        "brier": calibrated.brier(predicted_N, own.correct_N, own.problems_N, weights_BP, confidence).plain(),
        "bins": [{"predicted": found.predicted, "correct": found.correct.plain()} for found in bins],
    }


def localisation(
    prefixes: Sequence[Sequence[float]],
    flaws: Sequence[int],
    problems: Sequence[int],
    section: Evaluate,
    weights_BP: Any,
) -> dict[str, Any]:
    """How often the largest fall of the score is at the first wrong step, against guessing, and by which step it is."""
    if not flaws:
        return {"known": True, "accuracy": NOTHING, "chance": None, "gain": NOTHING, "solutions": 0}
    credits_N = np.array([located.credit(np.array(s), flaw) for s, flaw in zip(prefixes, flaws, strict=True)])
    steps_N = np.array([len(s) - 1 for s in prefixes], dtype=np.int64)
    problems_N = np.array(problems, dtype=np.int64)
    size = weights_BP.shape[1]
    accuracy = mean_of(credits_N, problems_N, weights_BP, section.confidence)
    gains_P = np.bincount(problems_N, weights=credits_N - 1.0 / steps_N, minlength=size).astype(np.float64)
    counts_P = np.bincount(problems_N, minlength=size).astype(np.float64)
    gain = ratio(gains_P, counts_P, weights_BP, section.confidence, len(flaws))
    return {
        "known": True,
        "accuracy": accuracy.plain(),
        "chance": located.chance(steps_N),
        "gain": gain.plain(),
        "solutions": len(flaws),
    }
