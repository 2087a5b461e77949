"""Where measures are read from."""

from __future__ import annotations

import pytest
from run_samples import begin, commit, state, step, tell

from pvg.errors import StateError
from pvg.study.measures import DEFAULT_MEASURES, MEASURES, MeasuredValue, RunFacts, measures_named, read_facts
from pvg.telemetry.catalogue import METRICS


@pytest.fixture
def facts(empty_folder) -> RunFacts:  # type: ignore[no-untyped-def]
    run = begin(empty_folder)
    tell(
        run,
        step("train_prover", 1, kl=0.1),
        step("train_prover", 2, kl=0.2),
        step("train_prover", 3, loss=0.2),
        step("train_prover", 1, round_=1, kl=0.3),
        {"kind": "phase", "round": 0, "phase": "train_prover", "seconds": 7.0, "metrics": {}},
    )
    rounds = [
        {"helpful_accuracy": 0.75, "base_helpful_accuracy": 0.5, "fooled_rate": None},
        {"helpful_accuracy": 0.875, "base_helpful_accuracy": 0.5, "fooled_rate": 0.25},
    ]
    commit(run, state("complete", rounds=rounds))
    return read_facts(run)


def read(name: str, facts: RunFacts) -> list[MeasuredValue | None]:
    return MEASURES[name].read(facts)


def test_rounds_steps_and_the_whole_run(facts: RunFacts) -> None:
    assert read("helpful_accuracy", facts) == [MeasuredValue(0.75), MeasuredValue(0.875)]
    assert read("fooled_rate", facts) == [None, MeasuredValue(0.25)]  # a share of nothing
    assert read("accuracy_gain", facts) == [MeasuredValue(0.25), MeasuredValue(0.375)]
    assert read("verifier_auc", facts) == [None, None]
    assert read("kl", facts) == [MeasuredValue(0.2), MeasuredValue(0.3)]
    assert read("prover_steps", facts) == [MeasuredValue(3), MeasuredValue(1)]
    assert read("seconds", facts) == [MeasuredValue(8.0)]  # 7 s of the first round's phase, and the second's step


def test_every_metric_of_a_round_is_a_measure_and_every_name_is_its_own() -> None:
    assert {metric.short for metric in METRICS.values() if metric.where == "round"} <= MEASURES.keys()
    assert all(name == measure.name and measure.meaning.endswith(".") for name, measure in MEASURES.items())
    assert [measure.name for measure in measures_named(DEFAULT_MEASURES)] == list(DEFAULT_MEASURES)


def evaluated(facts: RunFacts, *rounds: object) -> RunFacts:
    return RunFacts(facts.summary, {"rounds": list(rounds)})


def test_evaluations_are_read_by_round_and_by_path(facts: RunFacts) -> None:
    second = {
        "round": 1,
        "exploit": [
            {"kind": "cgc", "status": "found", "steps": 7},
            {"kind": "src", "status": "censored", "steps": 200},
        ],
        "best_of_n": [
            {"source": "base", "balanced": [{"n": 4, "accuracy": {"value": 0.1}}]},
            {"source": "round-001", "balanced": [{"n": 4, "accuracy": {"value": 0.3}, "excluded": 5}, {"n": 16}]},
        ],
        "detection": {
            "sources": [
                {"source": "base", "fooled_rate": {"value": 0.9}},
                {"source": "round-001", "auc": {"value": 0.8}},
                {"source": "attack-cgc", "fooled_rate": {"value": 0.7}},
            ]
        },
        "calibration": None,
        "tax": {"tax": {"value": None}},
        "legibility": [
            {"name": "round-001", "measures": {"sr": {"value": 0.6}}},
            {"name": "base", "measures": {"sr": {"value": 0.2}}},
        ],
    }
    first = {"round": 0, "exploit": [{"kind": "src", "status": "found", "steps": 40}]}
    told = evaluated(facts, second, first)  # in whatever order
    assert read("steps_to_exploit_src", told) == [MeasuredValue(40), MeasuredValue(200, censored=True)]
    assert read("steps_to_exploit_cgc", told) == [None, MeasuredValue(7)]
    assert read("best_of_n", told) == [None, MeasuredValue(0.3)]
    assert read("best_of_n_excluded", told) == [None, MeasuredValue(5)]
    assert "4" in MEASURES["best_of_n"].label
    assert read("detection_fooled_rate_base", told) == [None, MeasuredValue(0.9)]
    assert read("detection_fooled_rate", told) == [None, None]
    assert read("attack_fooled_rate_cgc", told) == [None, MeasuredValue(0.7)]
    assert read("attack_fooled_rate_src", told) == [None, None]
    assert read("detection_auc", told) == [None, MeasuredValue(0.8)]
    assert read("sr", told) == [None, MeasuredValue(0.6)]
    assert read("cir", told) == [None, None]
    assert read("calibration_error", told) == read("legibility_tax", told) == [None, None]
    assert read("steps_to_exploit_src", evaluated(facts, second)) == [None, MeasuredValue(200, censored=True)]


def test_the_worst_auc_is_over_the_writers_that_the_verifier_has_learnt_from(facts: RunFacts) -> None:
    aucs = {"base": 0.9, "round-000": 0.7, "round-001": 0.4, "attack-cgc": 0.3}

    def row(number: int, **changed: float | None) -> dict[str, object]:
        known = aucs | {name.replace("_", "-"): auc for name, auc in changed.items()}
        sources = [{"source": name, "auc": {"value": auc}} for name, auc in known.items()]
        return {"round": number, "detection": {"sources": sources}}

    assert read("detection_auc_worst", evaluated(facts, row(0), row(1))) == [MeasuredValue(0.9), MeasuredValue(0.7)]
    assert read("detection_auc_worst", evaluated(facts, row(1, base=0.6))) == [None, MeasuredValue(0.6)]
    assert read("detection_auc_worst", evaluated(facts, row(1, round_000=None))) == [None, None]


@pytest.mark.parametrize("status", ["no_reference", "no_signal", "diverged"])
def test_an_attack_that_could_not_be_judged_is_no_value(status: str, facts: RunFacts) -> None:
    attack = {"kind": "src", "status": status, "steps": None}
    assert read("steps_to_exploit_src", evaluated(facts, {"round": 0, "exploit": [attack]})) == [None, None]


def test_without_an_evaluation_there_is_nothing_and_a_torn_one_is_told(facts: RunFacts, empty_folder) -> None:  # type: ignore[no-untyped-def]
    assert read("detection_auc", facts) == [None, None]
    run = begin(empty_folder, "second")
    run.evaluation.mkdir()
    (run.evaluation / "evaluation.json").write_text('{"rounds": [')
    with pytest.raises(StateError, match=r"evaluation.json is not an evaluation"):
        read_facts(run)
