"""Cross-play: every round's verifier with the stored test samples of every round's prover."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import orjson
import pytest
from evaluation_drill import evaluated_experiment, own_files

sys.path.insert(0, str(Path(__file__).parent.parent / "game"))
sys.path.insert(0, str(Path(__file__).parent.parent / "store"))
from store_samples import rollout
from test_runner import changed, evaluated, played

from pvg.config.experiment import Experiment
from pvg.evaluation import measures
from pvg.evaluation.opened_run import ScoredRollouts
from pvg.evaluation.report import CrossPlay, report_of
from pvg.records import Grade, Problem, Role
from pvg.store.run_directory import RunDirectory
from pvg.verifier.calibration import matthews
from pvg.verifier.intervals import Estimate, draws

H, S = Role.HELPFUL, Role.SNEAKY


def with_rounds(rounds: int, **sections: dict) -> Experiment:
    game = {"rounds": rounds, "test": {"problems": 16, "samples": 2}}
    return changed(evaluated_experiment(), game=game, **sections)


def crossed(run: RunDirectory, experiment: Experiment) -> dict[int, dict[str, CrossPlay]]:
    """The cells by verifier's round and prover; nothing was sampled for them."""
    outcome, observer = evaluated(run, experiment, parts=("cross",))
    assert (outcome.status, outcome.report.status) == ("complete", "complete")
    assert set(observer.phases) == {"measures"}
    assert list((run.evaluation / "samples").iterdir()) == []
    assert outcome.report == report_of(run)
    return {found.round: {one.source: one for one in found.cross or ()} for found in outcome.report.rounds}


def metrics_of(run: RunDirectory) -> list[Mapping[str, float | None]]:
    """The metrics of the rounds in metrics.jsonl."""
    lines = [orjson.loads(line) for line in run.metrics.read_bytes().splitlines()]
    return [line["metrics"] for line in lines if line["kind"] == "round"]


def equal(found: Estimate, metric: float | None) -> bool:
    return found.value == metric if metric is not None else found.value is None


HEADS: dict[str, dict[str, dict]] = {
    "one model": {},
    "ensemble": {"verifier": {"ensemble": {"kind": "mean", "size": 2}}},
    "generative": {
        "models": {"verifier": {"source": "embedded:modchain-critic"}},
        "verifier": {"head": {"kind": "generative", "votes": 4, "tokens": 2}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=[pytest.mark.drill] * (head != "one model")) for head in HEADS]
)
def test_the_diagonal_equals_the_metrics_of_the_rounds(tmp_path: Path, head: str) -> None:
    experiment = with_rounds(2, **HEADS[head])
    run = played(tmp_path, "tiny", experiment)
    before = own_files(run)
    cells = crossed(run, experiment)
    assert [list(row) for row in cells.values()] == [["base", "round-000", "round-001"]] * 2
    measured = metrics_of(run)
    assert len(measured) == 2
    for n, metrics in enumerate(measured):
        own, base = cells[n][f"round-{n:03d}"], cells[n]["base"]
        assert equal(own.fooled_rate, metrics["fooled_rate"])
        assert equal(own.auc, metrics["verifier_auc"])
        assert equal(own.matthews, metrics["verifier_mcc"])
        assert equal(base.fooled_rate, metrics["fooled_rate_base"])
        assert equal(base.auc, metrics["verifier_auc_base"])
        assert (own.auc.n, own.matthews.n, own.matthews.problems) == (64, 64, 16)
        assert own.auc.low is not None
        assert own.auc.low < own.auc.value < own.auc.high
    assert equal(cells[1]["round-000"].fooled_rate, measured[1]["fooled_rate_previous"])
    assert cells[0]["round-001"].auc != cells[1]["round-001"].auc
    assert own_files(run) == before


@pytest.mark.slow
def test_a_run_of_one_round_has_the_base_prover_and_its_own(tmp_path: Path) -> None:
    experiment = with_rounds(1)
    run = played(tmp_path, "tiny", experiment)
    (row,) = crossed(run, experiment).values()
    assert list(row) == ["base", "round-000"]
    assert equal(row["round-000"].auc, metrics_of(run)[0]["verifier_auc"])


PROBLEMS = [Problem(f"p{place}", "", "") for place in range(12)]
WEIGHTS_BP = draws(len(PROBLEMS), 200, 0)


def samples(*rows: tuple[Role, bool, float]) -> ScoredRollouts:
    """For each problem solutions by role, whether they are correct, and their score plus noise."""
    generator, found, scores = np.random.Generator(np.random.PCG64(0)), [], []
    for problem, (role, correct, score) in product(PROBLEMS, rows):
        found.append(replace(rollout(0), problem_id=problem.id, role=role, grade=Grade(correct, True)))
        scores.append(score + generator.normal())
    return ScoredRollouts(found, np.array(scores, dtype=np.float32), PROBLEMS)


def test_the_interval_of_the_correlation_is_of_resampled_problems() -> None:
    own = samples((H, True, 1.0), (H, False, 0.0), (S, True, 0.5), (S, False, 0.0))
    found = measures.cross("base", own, 0.5, WEIGHTS_BP)["matthews"]
    accepted_N, replicates = own.scores_N >= 0.5, []
    for weights_P in WEIGHTS_BP.astype(int):
        rows = np.repeat(np.arange(len(accepted_N)), weights_P[own.problems_N])
        replicates.append(matthews(accepted_N[rows], own.correct_N[rows]))
    assert found.value == matthews(accepted_N, own.correct_N)
    assert [found.low, found.high] == pytest.approx(np.quantile(replicates, [0.025, 0.975]))
    assert found.low < found.value < found.high


@pytest.mark.parametrize(
    ("own", "missing"),
    [
        (samples((H, True, 1.0), (S, True, 0.0)), {"fooled_rate", "auc", "matthews"}),  # nothing is wrong
        (samples((H, False, 0.0), (S, False, 0.0)), {"auc", "matthews"}),  # nothing is correct
        (samples((H, True, 1.0), (H, False, 0.0)), {"fooled_rate"}),  # nothing is sneaky
    ],
)
def test_numbers_without_samples_of_a_kind_have_no_value(own: ScoredRollouts, missing: set[str]) -> None:
    found = CrossPlay.model_validate(measures.cross("base", own, 0.5, WEIGHTS_BP)).plain()
    assert {name for name in ("fooled_rate", "auc", "matthews") if found[name]["value"] is None} == missing
    assert found["matthews"]["n"] == 24
