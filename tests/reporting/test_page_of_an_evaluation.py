"""The ROC chart of the page: an area behind each line where there are intervals, and none where there are not."""

from __future__ import annotations

from page_checks import Page

from pvg.evaluation.report import Detection, EvaluationReport, FlawDetection, NumberRecord, RoundEvaluation
from pvg.reporting.evaluation import evaluation_section
from pvg.reporting.table import page

NUMBER = NumberRecord(value=0.5, low=0.4, high=0.6, n=10, problems=5)
BAND = [(0.0, 0.0, None, None), (0.25, 0.5, 0.25, 0.75), (0.5, 0.75, 0.5, 1.0), (1.0, 1.0, None, None)]
AREA = (
    "M250 250L500 0L500 500L250 750Z"  # of a drawing 1000 wide and high: the upper ends, and back along the lower ones
)


def flaws(source: str, band: list[tuple[float, float, float | None, float | None]]) -> FlawDetection:
    curve = [(0.0, 0.0), (0.25, 0.5), (1.0, 1.0)]
    return FlawDetection(source=source, solutions=10, soundness=NUMBER, auc=NUMBER, roc=curve, band=band)


def page_of(*sources: FlawDetection) -> Page:
    detection = Detection(
        threshold=0.0, completeness=NUMBER, helpful_accuracy=NUMBER, accepted_correct=NUMBER, sources=list(sources)
    )
    report = EvaluationReport(
        status="complete", run="r", experiment="e", config_hash="", code_version="", machine="", created="",
        rounds_finished=1, rounds_planned=1, settings={"confidence": 0.95},
        rounds=[RoundEvaluation(round=0, detection=detection)],
    )  # fmt: skip
    return Page(page("evaluation", [], [evaluation_section(report)]))


def areas(page: Page) -> list[tuple[str, str]]:
    shapes = [(str(a.get("class")), str(a.get("d"))) for name, a in page.tags if name == "path"]
    return [shape for shape in shapes if shape[0].startswith("range")]


def test_an_area_lies_behind_each_line_that_has_intervals() -> None:
    page = page_of(flaws("base", BAND), flaws("round-000", []), flaws("attack-cgc", BAND))
    assert areas(page) == [("range run-0", AREA), ("range run-2", AREA)]
    assert "a separate interval at each false-positive rate" in page.text
    assert len([a for _, a in page.tags if a.get("data-name") in {"base", "round-000", "attack-cgc"}]) == 3


def test_a_sentence_below_a_table_says_how_to_read_it() -> None:
    text = page_of(flaws("base", BAND)).text
    assert "soundness: wrong sneaky solutions (flaws) that are rejected." in text
    assert "tax: the accuracy" not in text  # there is no such table


def test_without_intervals_there_is_no_area_and_no_word_of_one() -> None:
    page = page_of(flaws("base", []), flaws("round-000", [(0.0, 0.0, None, None), (1.0, 1.0, None, None)]))
    assert areas(page) == []
    assert "Areas" not in page.text
    assert "ROC of round 0" in page.text
