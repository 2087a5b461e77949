"""What an attacker writes: the kinds of its flaws on test problems, and typical ones, with the verifier's decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pvg.evaluation.intervals import CONFIDENCE, share_of
from pvg.evaluation.samples import ScoredRollouts
from pvg.records import Rollout, flaw_kind

MOST_KINDS = 8  # the rarer ones count together: some graders' notes differ between nearly all solutions
OTHER_KINDS, NO_NOTE = "other kinds", "no note"
MOST_EXAMPLES = 3


def written_flaws(fresh: ScoredRollouts, threshold: float) -> dict[str, Any]:
    """`kinds`: of the flaws, the most frequent first, each with its share of the flaws and the share of it that the
    verifier accepts; empty for a task whose grader writes no notes. `examples`: typical flaws. `threshold`: of the
    verifier."""
    flaws_F = np.flatnonzero(fresh.flaws_N)
    rollouts = [fresh.rollouts[place] for place in flaws_F.tolist()]
    kinds = [flaw_kind(rollout.grade.note) or NO_NOTE for rollout in rollouts]
    scores_F, problems_F = fresh.scores_N[flaws_F], fresh.problems_N[flaws_F]
    accepted_F = scores_F >= threshold
    found = []
    if set(kinds) - {NO_NOTE}:
        names_F = _merged(kinds)
        for name in _by_frequency(names_F.tolist(), last=OTHER_KINDS):
            of_kind_F = names_F == name
            accepted = share_of(accepted_F[of_kind_F], problems_F[of_kind_F], CONFIDENCE)
            share = share_of(of_kind_F, problems_F, CONFIDENCE)
            found.append({"kind": name, "share": share.plain(), "accepted": accepted.plain()})
    examples = [
        _example(rollouts[place], float(scores_F[place]), bool(accepted_F[place]))
        for place in _typical(rollouts, kinds, scores_F)
    ]
    return {"threshold": threshold, "kinds": found, "examples": examples}


def _by_frequency(names: Sequence[str], last: str = "") -> list[str]:
    """The different names, the most frequent first; `last` at the end."""
    counts = Counter(names)
    return sorted(counts, key=lambda name: (name == last, -counts[name], name))


def _merged(kinds: Sequence[str]) -> NDArray[np.str_]:
    """The kind of each flaw, with the rarer ones merged."""
    kept = set(_by_frequency(kinds)[:MOST_KINDS])
    return np.array([kind if kind in kept else OTHER_KINDS for kind in kinds])


def _typical(rollouts: Sequence[Rollout], kinds: Sequence[str], scores_F: NDArray[np.float32]) -> list[int]:
    """The places of typical flaws, of different problems: of each kind in turn, the most frequent kind first, the flaw
    with the score nearest to the kind's median."""
    ranked = []
    for kind in _by_frequency(kinds):
        places = [place for place, other in enumerate(kinds) if other == kind]
        middle = float(np.median(scores_F[places]))
        ranked.append(sorted(places, key=lambda place: (abs(float(scores_F[place]) - middle), place)))
    turns = [place for turn in zip_longest(*ranked) for place in turn if place is not None]
    found: dict[str, int] = {}
    for place in turns:
        found.setdefault(rollouts[place].problem_id, place)
    return list(found.values())[:MOST_EXAMPLES]


def _example(rollout: Rollout, score: float, accepted: bool) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "question": rollout.question,
        "reference": rollout.reference,
        "solution": rollout.solution,
        "answer": rollout.grade.answer,
        "note": rollout.grade.note,
        "score": score,
        "accepted": accepted,
    }
