"""The row of a round, counted again from the rollouts of a real game and its verifiers' scores of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from small_games import changed, played, recorded, rows

from pvg.game.players import Players
from pvg.game.verifier_phase import read_verifier
from pvg.records import Role, Rollout
from pvg.store.checkpoints import read_checkpoint
from pvg.store.run_directory import RunDirectory
from pvg.store.run_players import verifier_weights_name
from pvg.tasks import open_task
from pvg.verifier.intervals import share_of

pytestmark = pytest.mark.slow

Scored = list[tuple[Rollout, float]]

# Enough test problems that no share is a half or nothing by accident.
SETTINGS = {"game.rounds": 2, "training.steps": 4, "game.test.problems": 24, "game.test.samples": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    outcome, run = played(changed(SETTINGS), tmp_path_factory.mktemp("rows"))
    assert outcome.status == "complete"
    return run


@pytest.fixture(scope="module")
def judged(run: RunDirectory) -> list[tuple[dict[str, Scored], float]]:
    """By round: its verifier's scores of each source's checkpoint samples, and its threshold."""
    experiment = run.experiment()
    samples: dict[str, list[Rollout]] = {}
    for rollout in recorded(run):
        if "/evaluation/" in rollout.id:
            samples.setdefault(rollout.source, []).append(rollout)
    assert {source: len(of) for source, of in samples.items()} == {"base": 192, "round-000": 192, "round-001": 192}
    players = Players(experiment, open_task(experiment.task))
    try:
        return [_judged(players, run, round_, samples) for round_ in (0, 1)]
    finally:
        asyncio.run(players.close())


def _judged(
    players: Players, run: RunDirectory, round_: int, samples: dict[str, list[Rollout]]
) -> tuple[dict[str, Scored], float]:
    name = verifier_weights_name(round_)
    verifier, threshold = read_verifier(players.open_verifier, lambda name: read_checkpoint(run.weights, name), name)

    async def scored() -> dict[str, Scored]:
        scorer = players.scorer(verifier)
        return {s: list(zip(of, (await scorer.score(of)).tolist(), strict=True)) for s, of in samples.items()}

    try:
        return asyncio.run(scored()), threshold
    finally:
        verifier.close()


def flaws(of: Scored) -> list[float]:
    return [s for r, s in of if r.role is Role.SNEAKY and r.grade.well_formed and not r.grade.correct]


def solutions(of: Scored) -> list[float]:
    return [s for r, s in of if r.role is Role.HELPFUL and r.grade.correct]


def fooled(of: Scored, threshold: float) -> float:
    return sum(score >= threshold for score in flaws(of)) / len(flaws(of))


def won(upper: Sequence[float], lower: Sequence[float]) -> float:
    """The share of pairs in which `upper` is above `lower`, a tie counting half."""
    return sum((u > v) + (u == v) / 2 for u in upper for v in lower) / (len(upper) * len(lower))


def auc(of: Scored) -> float:
    """Of correct against incorrect, whatever the role."""
    return won([s for r, s in of if r.grade.correct], [s for r, s in of if not r.grade.correct])


@pytest.mark.parametrize("round_", [0, 1])
def test_a_rounds_row_is_of_its_own_provers_samples_and_of_the_bases(
    run: RunDirectory, judged: list[tuple[dict[str, Scored], float]], round_: int
) -> None:
    row = rows(run, "round")[round_]["metrics"]
    of, threshold = judged[round_]
    own, base = of[f"round-{round_:03d}"], of["base"]
    helpful, sneaky = ([r for r, _ in own if r.role is role] for role in (Role.HELPFUL, Role.SNEAKY))
    expected = {
        "threshold": threshold,
        "helpful_accuracy": sum(r.grade.correct for r in helpful) / 96,
        "sneaky_error_rate": len(flaws(own)) / len(sneaky),
        "accepted_helpful": sum(score >= threshold for score in solutions(own)) / len(solutions(own)),
        "fooled_rate": fooled(own, threshold),
        "tested": 96,
        "solved": len(solutions(own)),
        "flaws": len(flaws(own)),
        "solutions": 192,
        "verifier_auc": auc(own),
        "base_helpful_accuracy": sum(r.grade.correct for r, _ in base if r.role is Role.HELPFUL) / 96,
        "base_sneaky_error_rate": len(flaws(base)) / 96,
        "fooled_rate_base": fooled(base, threshold),
        "verifier_auc_base": auc(base),
    }
    flawed = [r for r, _ in own if r.role is Role.SNEAKY and r.grade.well_formed and not r.grade.correct]
    places = np.unique([r.problem_id for r in flawed], return_inverse=True)[1]
    by_problem = share_of(np.array(flaws(own)) >= threshold, places)
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert (row["fooled_rate_low"], row["fooled_rate_high"]) == pytest.approx((by_problem.low, by_problem.high))
    assert row["fooled_rate_base"] != row["fooled_rate"]


def test_the_previous_provers_flaws_are_measured_by_this_rounds_verifier_against_this_rounds_solutions(
    run: RunDirectory, judged: list[tuple[dict[str, Scored], float]]
) -> None:
    first, second = (found["metrics"] for found in rows(run, "round"))
    (scores, threshold), (earlier, _) = judged[1], judged[0]
    own, before = scores["round-001"], scores["round-000"]
    assert [s for _, s in before] != [s for _, s in earlier["round-000"]]
    assert second["fooled_rate_previous"] == pytest.approx(fooled(before, threshold))
    assert second["verifier_auc_previous"] == pytest.approx(won(solutions(own), flaws(before)))
    assert second["fooled_rate_previous"] not in (0.0, 0.5, 1.0)
    assert second["verifier_auc_previous"] != 0.5
    assert not {"fooled_rate_previous", "verifier_auc_previous"} & first.keys()
