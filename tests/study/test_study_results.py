"""The document, its schema, the words, the Markdown and the page of a study."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import orjson
import pytest
from evaluation_samples import attack
from page_checks import check
from study_samples import SMALL, evaluate, finish, folder_of, small

from pvg.reporting.formats import change_text
from pvg.study.measures import MeasuredValue
from pvg.study.plan import StudyPlan
from pvg.study.playing import note_failure
from pvg.study.results import StudyResults, collect, csv_text, write_results
from pvg.study.text import cautions, markdown_text, plan_cautions, study_page

OTHERS = [attack(kind, 200, found=False) for kind in ("cgc", "goodhart")]
SEVEN = SMALL.replace("seeds = 2", "seeds = 7")


def played(text: str = SEVEN, leave_out: int = 0) -> StudyPlan:
    """A study whose src is 10 pp above cgc in every seed, and rises by 20 pp a round."""
    plan = small(text)
    folder_of(plan)
    for cell in plan.cells[: len(plan.cells) - leave_out]:
        first = 0.3 + 0.01 * cell.seed + (0.1 if cell.arm == "src" else 0.0)
        later = 0.2 if cell.arm == "src" else 0.0
        finish(cell, {"helpful_accuracy": first, "fooled_rate": None}, {"helpful_accuracy": first + later})
    return plan


def results_of(plan: StudyPlan) -> StudyResults:
    return collect(plan, "pvg study small.toml")


def test_means_comparisons_and_trends_come_from_the_runs() -> None:
    results = results_of(played())
    src = results.result("src", "helpful_accuracy")
    assert (src.summary.n, src.summary.mean) == (7, pytest.approx(0.63))
    assert [summary.mean for summary in src.rounds] == [pytest.approx(0.43), pytest.approx(0.63)]
    assert src.series[3] == [MeasuredValue(pytest.approx(0.43)), MeasuredValue(pytest.approx(0.63))]
    assert src.trend is not None
    assert (src.trend.up, src.trend.tau, src.trend.p) == (7, 1.0, 2 / 128)
    nothing = results.result("src", "fooled_rate")
    assert (nothing.summary.n, nothing.values, nothing.trend.n if nothing.trend else None) == (0, {}, 0)
    seconds = results.result("cgc", "seconds")
    assert (seconds.summary.mean, seconds.trend) == (4.0, None)
    (accuracy,) = [found for found in results.comparisons if found.measure == "helpful_accuracy"]
    assert accuracy.arm == "src"
    assert (accuracy.comparison.up, accuracy.comparison.p) == (7, 2 / 128)
    assert accuracy.comparison.difference == pytest.approx(0.3)
    assert accuracy.comparison.p_adjusted == 2 / 128  # fooled_rate has no pair, and seconds are no hypothesis
    assert accuracy.comparison.p_adjusted_arms == 2 / 128
    assert src.trend.p_adjusted_arms == 4 / 128  # over two arms: cgc has a p of 1
    assert (results.family, results.complete, results.failed) == (1, 14, [])


@pytest.mark.slow
def test_a_seed_without_a_value_in_the_first_or_the_last_round_has_no_trend() -> None:
    plan = small(SMALL.replace("seeds = 2", "seeds = 7"))
    folder_of(plan)
    for cell in plan.cells:
        last = 0.1 if cell.seed < 5 else None  # a verifier whose flaws have vanished
        finish(cell, *({"fooled_rate": rate} for rate in (0.3, 0.6, last)))
    trend = results_of(plan).result("src", "fooled_rate").trend
    assert trend is not None
    assert (trend.n, trend.up, trend.down, trend.difference) == (5, 0, 5, pytest.approx(-0.2))


def test_the_document_follows_its_schema_and_comes_back_alike(tmp_path: Path) -> None:
    results = results_of(played(leave_out=1))
    write_results(tmp_path / "study.json", results)
    jsonschema.validate(orjson.loads((tmp_path / "study.json").read_bytes()), StudyResults.model_json_schema())
    assert StudyResults.model_validate_json((tmp_path / "study.json").read_bytes()) == results


def test_what_is_missing_is_counted_and_told() -> None:
    plan = played(leave_out=3)
    note_failure(plan.cells[-1], folder_of(plan), "It broke.")
    results = results_of(plan)
    assert results.result("src", "helpful_accuracy").summary.n == 5
    (accuracy,) = [found for found in results.comparisons if found.measure == "helpful_accuracy"]
    assert accuracy.comparison.n == 5
    assert [(cell.arm, cell.seed, cell.reason) for cell in results.failed] == [("src", 6, "It broke.")]
    told = " ".join(cautions(results))
    assert "3 of 14 games are missing (src seed 5, cgc seed 6, src seed 6): all figures use only the others" in told
    assert "5 seeds cannot show a significant difference between arms: the smallest possible p value is 0.0625." in told


def test_a_game_that_is_not_evaluated_counts_where_no_evaluation_is_needed() -> None:
    text = SMALL.replace('"seconds"', '"detection_auc"').replace("threads = 1", "threads = 1\nevaluate = true")
    plan = small(text)
    for cell in plan.cells:
        finish(cell, {"helpful_accuracy": 0.5})
        evaluate(cell, {}, config_hash="of another game")
    results = results_of(plan)
    assert results.result("cgc", "helpful_accuracy").summary.n == 2
    assert results.result("cgc", "detection_auc").summary.n == 0
    assert "4 of 4 games are not evaluated (cgc seed 0, src seed 0, cgc seed 1, src seed 1)" in cautions(results)[0]


THREE_ARMS = (
    SMALL.replace("seeds = 2", "seeds = 6").replace('"fooled_rate", ', '"verifier_auc", ')
    + """
[[arm]]
name = "goodhart"
set = { game.reward = "goodhart" }
"""
)


def test_holms_correction_covers_the_arms_of_a_measure_and_in_another_column_all_comparisons() -> None:
    plan = small(THREE_ARMS)
    for cell in plan.cells:
        high = {"cgc": 0.0, "src": 0.1, "goodhart": 0.1 if cell.seed else -0.3}[cell.arm]
        finish(cell, {"helpful_accuracy": 0.5 + high, "verifier_auc": 0.6 + (0.1 if cell.arm == "src" else 0.0)})
    results = results_of(plan)
    found = {(one.measure, one.arm): one.comparison for one in results.comparisons}
    src, goodhart = found["helpful_accuracy", "src"], found["helpful_accuracy", "goodhart"]
    # goodhart's differences are five of 0.1 and one of -0.3, with the sum 0.2. The five have sums of 0.5, 0.3, 0.1,
    # -0.1, -0.3, -0.5 in 1, 5, 10, 10, 5, 1 ways. With +0.3 these are 0.8, 0.6, 0.4, 0.2, 0.0, -0.2, and all but 0.0
    # are at least 0.2 from 0: 27 ways. With -0.3 as many.
    assert (src.p, goodhart.p) == (2 / 64, 54 / 64)
    assert (src.p_adjusted_arms, goodhart.p_adjusted_arms) == (4 / 64, 54 / 64)  # Holm: 2 x 2/64, 1 x 54/64
    # all four: 2/64 twice (x 4 = 8/64 for both), 54/64 and 1
    assert (src.p_adjusted, goodhart.p_adjusted, results.family) == (8 / 64, 1.0, 4)
    told = " ".join(cautions(results))
    assert "6 seeds cannot show a significant difference between arms: the smallest possible p value is 0.0312" in told
    assert "0.0625 with Holm's correction over 2 arms. At least 7 seeds are necessary for p <= 0.05. Read the" in told


def test_a_plan_says_what_its_seeds_cannot_show() -> None:
    difference, trend = plan_cautions(small(THREE_ARMS))
    assert "0.0625 with Holm's correction over 2 arms. At least 7 seeds" in difference
    assert "trend over the rounds" in trend
    assert "0.0938 with Holm's correction over 3 arms. At least 7 seeds" in trend
    assert plan_cautions(small(THREE_ARMS, seeds=7)) == []
    (trend,) = plan_cautions(small(THREE_ARMS.replace('reference = "cgc"\n', "")))
    assert "trend over the rounds" in trend
    assert plan_cautions(small(THREE_ARMS.replace('reference = "cgc"\n', ""), overrides=["game.rounds=1"])) == []


def test_censored_values_reach_the_tables() -> None:
    text = SMALL.replace('"seconds"', '"steps_to_exploit_src"').replace("threads = 1", "threads = 1\nevaluate = true")
    plan = small(text.replace("seeds = 2", "seeds = 3"))
    for cell in plan.cells:
        found = cell.arm == "cgc" and cell.seed < 2
        finish(cell, {"helpful_accuracy": 0.5}, {"helpful_accuracy": 0.6})
        last = {"exploit": [attack("src", 40 + cell.seed if found else 200, found=found), *OTHERS]}
        first = attack("src", (10, 45, 60)[cell.seed], found=True)
        evaluate(cell, {"exploit": [first, *OTHERS]}, last)
    results = results_of(plan)
    summary = results.result("cgc", "steps_to_exploit_src").summary
    assert (summary.mean, summary.median, summary.censored) == (None, 41, pytest.approx(1 / 3))
    (attack_,) = [found.comparison for found in results.comparisons if found.measure == "steps_to_exploit_src"]
    assert (attack_.test, attack_.up, attack_.equal, attack_.difference) == ("signed ranks", 2, 1, None)
    text = markdown_text(results)
    assert "| steps to exploit, src | cgc | 3 of 3 | median 41 | 33 % not found | 40 to not found |" in text
    assert "| steps to exploit, src | src | 3 of 3 | median not found | 100 % not found | not found |" in text
    assert "no median is a number" not in text
    lines = [line for line in csv_text(results).splitlines() if "exploit_src" in line]
    assert lines[1].startswith("small,cgc,0,steps_to_exploit_src,1,40.0,0,")
    assert lines[-1].startswith("small,src,2,steps_to_exploit_src,1,200.0,1,")
    page = check(study_page(results))
    assert "count as larger than all others" in page.text
    (label,) = [str(found["aria-label"]) for _, found in page.tags if "Steps to" in str(found.get("aria-label"))]
    assert label == "Steps to exploit, src: cgc ends at 41, src ends at 200"
    (steps,) = [chart for chart in page.charts if chart["references"]]
    assert [line["y"] for line in steps["series"]] == [[45.0, 41.0], [45.0, 200.0]]  # medians in every round
    assert [(band["low"], band["high"]) for band in steps["intervals"]] == [
        ([10.0, 40.0], [60.0, 200.0]),
        ([10.0, 200.0], [60.0, 200.0]),
    ]


# --- words and pages -------------------------------------------------------------------------------------------------


def test_figures_read_well() -> None:
    results = results_of(played())
    assert change_text("share", 0.1234) == "+12.3 pp"
    assert change_text("seconds", -0.5) == "-500 ms"
    text = markdown_text(results)
    assert "| helpful accuracy | src | 7 of 7 | 63.0 % | 61.0 to 65.0 % | 60.0 to 66.0 % |" in text
    assert "| helpful accuracy | src | +30.0 pp | +30.0 pp | 7↑ 0↓ | 0.016 | 0.016 | 0.016 |" in text
    assert "| helpful accuracy | src | +20.0 pp | +20.0 pp | 7↑ 0↓ | +1.00 | 0.016 | 0.031 |" in text
    assert "`pvg study small.toml`, seeds 0, 1, 2, 3, 4, 5, 6" in text
    assert "| helpful accuracy | src | 43.0 % (40.0 to 46.0 %) | 63.0 % (60.0 to 66.0 %) |" in text
    assert not [line for line in text.splitlines() if line.startswith("|") and line.count("|") not in (5, 7, 9, 10)]


def test_the_page_is_whole_offline_and_says_what_made_it() -> None:
    plan = played(leave_out=1)
    note_failure(plan.cells[-1], folder_of(plan), "It <b>broke</b>.")
    page = check(study_page(results_of(plan)))
    assert page.anchors() == {"table", "rounds", "curves", "comparisons", "trends", "arms", "games", "made"}
    for said in ("+30.0 pp", "pvg study small.toml", "[[arm]]", "It <b>broke</b>.", "1 of 14 games"):
        assert said in page.text, said
    bands = [one for chart in page.charts for one in chart["intervals"]]
    assert len(bands) == 2  # helpful accuracy, of either arm


def test_two_seeds_and_different_machines_are_told() -> None:
    plan = small()
    for place, cell in enumerate(plan.cells):
        finish(cell, {"helpful_accuracy": 0.5}, machine=f"machine {place % 2}", code_version=f"v{place % 2}")
    told = " ".join(cautions(results_of(plan)))
    assert "With 2 seeds there is no useful interval" in told
    assert "different machines or threads (machine 0; machine 1)" in told
    assert "different versions of pvg: v0, v1" in told
