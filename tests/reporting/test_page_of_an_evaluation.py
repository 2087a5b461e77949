"""The evaluation on the page and on the terminal."""

from __future__ import annotations

from io import StringIO

from page_checks import Page
from rich.console import Console

from pvg.evaluation.intervals import Estimate
from pvg.evaluation.report import (
    AttackCheck,
    AttackRecord,
    Detection,
    EvaluationReport,
    FlawDetection,
    FlawExample,
    KindOfFlaw,
    PolicyDistance,
    RoundEvaluation,
    TaxRecord,
)
from pvg.reporting.evaluation import evaluation_section, evaluation_tables
from pvg.reporting.table import page

NUMBER = Estimate(value=0.5, low=0.4, high=0.6, n=10, problems=5)


def flaws(source: str) -> FlawDetection:
    curve = [(0.0, 0.0), (0.25, 0.5), (1.0, 1.0)]
    return FlawDetection(source=source, solutions=10, soundness=NUMBER, auc=NUMBER, roc=curve)


def page_of(*sources: FlawDetection) -> Page:
    detection = Detection(
        threshold=0.0, completeness=NUMBER, helpful_accuracy=NUMBER, accepted_correct=NUMBER, sources=list(sources)
    )
    return shown(report_of(RoundEvaluation(round=0, detection=detection)))


def report_of(*rounds: RoundEvaluation) -> EvaluationReport:
    return EvaluationReport(
        status="complete", run="r", experiment="e", config_hash="", code_version="", machine="", created="",
        rounds_finished=1, rounds_planned=1, settings={"confidence": 0.95}, rounds=list(rounds),
    )  # fmt: skip


def shown(report: EvaluationReport) -> Page:
    return Page(page("evaluation", [], [evaluation_section(report)]))


def printed(report: EvaluationReport, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width).print(evaluation_tables(report))
    return " ".join(out.getvalue().split())


def attacked(round_: int, *kinds: str) -> RoundEvaluation:
    """A round with one attacker, with an example of each kind; without kinds, one of a task without notes."""
    examples = [
        FlawExample(
            id=f"id-{round_}-{note}", question=f"{round_}+1+2?", reference="3", solution="0+1=1;1+2=4;A4", answer="4",
            note=note, score=1.5, accepted=True,
        )
        for note in (kinds or ("",))
    ]  # fmt: skip
    found = [KindOfFlaw(kind=kind.split(" in ")[0], share=NUMBER, accepted=NUMBER) for kind in kinds]
    check = AttackCheck(error_rate=NUMBER, gap=NUMBER, accepted=NUMBER, threshold=0.25, kinds=found, examples=examples)
    attack = AttackRecord(kind="cgc", status="found", limit=9, window=2, reference=NUMBER, steps=4, check=check)
    return RoundEvaluation(round=round_, exploit=[attack])


def test_each_source_of_flaws_has_a_curve() -> None:
    page = page_of(flaws("base"), flaws("round-000"), flaws("attack-cgc"))
    (roc,) = [chart for chart in page.charts if chart["x"]["label"] == "false-positive rate"]
    assert [line["name"] for line in roc["series"]] == ["base", "round-000", "attack-cgc"]


def test_a_tax_outside_of_the_baselines_kls_is_a_lower_bound_or_has_no_value() -> None:
    policy = PolicyDistance(name="round-000", kl=NUMBER, kl_per_token=NUMBER, accuracy=NUMBER)
    absent = Estimate(value=None, low=None, high=None, n=10, problems=5)
    for tax, in_range, says in (
        (NUMBER, True, " 0.50 [0.40,0.60] tax:"),
        (NUMBER, False, " ≥ 0.50 [0.40,0.60] tax:"),
        (absent, False, " – tax:"),
    ):
        found = TaxRecord(policy=policy, tax=tax, in_range=in_range, kl_range=(0.0, 1.0))
        assert says in printed(report_of(RoundEvaluation(round=0, tax=found)))


def test_the_page_shows_the_kinds_of_flaws_and_examples_of_all_rounds_with_the_wrong_step_marked() -> None:
    page = shown(report_of(attacked(0, "extra step"), attacked(1, "wrong sum in step 2")))
    assert "extra step" in page.text
    for round_ in (0, 1):
        assert f"cgc attacker of round {round_}, accepted at threshold +0.25, score +1.500" in page.text
    assert "1+1+2?" in page.text
    assert "wrong: answer 4, wrong sum in step 2" in page.text
    assert [a["title"] for name, a in page.tags if name == "mark"] == ["wrong sum in step 2"]


def test_a_task_without_notes_shows_its_examples_without_a_table_of_kinds() -> None:
    report = report_of(attacked(0))
    for text in (printed(report), shown(report).text):
        assert "0+1=1;1+2=4;A4" in text
        assert "as the task's grader names it" not in text
    assert "What the attackers write" not in printed(report_of(RoundEvaluation(round=0)))
