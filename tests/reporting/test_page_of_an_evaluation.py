"""The evaluation on the page and on the terminal."""

from __future__ import annotations

import re
from io import StringIO
from xml.etree import ElementTree

from page_checks import Page
from rich.console import Console

from pvg.evaluation.report import (
    AttackCheck,
    AttackRecord,
    CrossPlay,
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
from pvg.verifier.intervals import Estimate

NUMBER = Estimate(value=0.5, low=0.4, high=0.6, n=10, problems=5)


def flaws(source: str) -> FlawDetection:
    curve = [(0.0, 0.0), (0.25, 0.5), (1.0, 1.0)]
    return FlawDetection(source=source, solutions=10, fooled_rate=NUMBER, auc=NUMBER, roc=curve)


def page_of(*sources: FlawDetection) -> Page:
    detection = Detection(threshold=0.0, helpful_accuracy=NUMBER, accepted_helpful=NUMBER, sources=list(sources))
    return shown(report_of(RoundEvaluation(round=0, detection=detection)))


def report_of(*rounds: RoundEvaluation) -> EvaluationReport:
    return EvaluationReport(
        status="complete", run="r", experiment="e", config_hash="", code_version="", machine="", created="",
        rounds_finished=1, rounds_planned=1, settings={"confidence": 0.95}, rounds=list(rounds),
    )  # fmt: skip


def shown(report: EvaluationReport) -> Page:
    return Page(html_of(report))


def html_of(report: EvaluationReport) -> str:
    return page("evaluation", [], [evaluation_section(report)])


def printed(report: EvaluationReport, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width).print(evaluation_tables(report))
    return " ".join(out.getvalue().split())


def test_the_head_says_which_rounds_and_parts_were_evaluated() -> None:
    """Not how many rounds the game has: one of five was evaluated here, by its attackers alone."""
    report = report_of(attacked(3, "wrong sum")).model_copy(update={"rounds_finished": 5, "rounds_planned": 5})
    for text in (printed(report), html_of(report)):
        assert "exploit of round 3;" in text
        assert "of 5" not in text


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


def attempt(round_: int, status: str, closest_gap: float | None, accepted: float) -> RoundEvaluation:
    share = Estimate(value=accepted, low=0.0, high=1.0, n=100, problems=20)
    check = AttackCheck(error_rate=NUMBER, gap=NUMBER, accepted=share, threshold=0.0, kinds=[], examples=[])
    attack = AttackRecord.model_validate(
        {"kind": "cgc", "status": status, "limit": 9, "window": 2, "reference": NUMBER, "steps": 9,
         "closest_gap": closest_gap, "check": check}
    )  # fmt: skip
    return RoundEvaluation(round=round_, exploit=[attack])


def test_the_first_chart_is_the_fooled_rate_and_an_attack_that_could_not_succeed_has_no_point() -> None:
    attempts = attempt(0, "found", 0.0, 0.99), attempt(1, "censored", 0.4, 0.25), attempt(2, "censored", None, 0.0)
    page = shown(report_of(*attempts))
    (fooled,) = page.charts
    assert fooled["y"]["style"] == "share"
    assert fooled["series"][0]["y"] == [0.99, 0.25]
    assert "1 attack could not succeed" in page.text
    text = printed(report_of(*attempts), 140)
    assert text.count("no answer") == 1 + 1  # of the table, and of how to read it
    assert "25.0 % [0.0,100] 100 > 9" in text


def test_each_source_of_flaws_has_a_curve() -> None:
    page = page_of(flaws("base"), flaws("round-000"), flaws("attack-cgc"))
    (roc,) = [chart for chart in page.charts if chart["x"]["label"] == "false-positive rate"]
    assert [line["name"] for line in roc["series"]] == ["base", "round-000", "attack-cgc"]


def test_a_tax_outside_of_the_baselines_kls_is_a_lower_bound_or_has_no_value() -> None:
    policy = PolicyDistance(name="round-000", kl=NUMBER, kl_per_token=NUMBER, accuracy=NUMBER)
    absent = Estimate(value=None, low=None, high=None, n=10, problems=5)
    for tax, in_range, says in (
        (NUMBER, True, " +50.0 pp [40,60] tax:"),
        (NUMBER, False, " ≥ +50.0 pp [40,60] tax:"),
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


def crossed(round_: int, *rates: float | None) -> RoundEvaluation:
    """A verifier's cells with the base prover and the provers of rounds 0, 1, ... by their fooled rates."""
    row = []
    for place, rate in enumerate(rates):
        flaws = Estimate(value=rate, low=None, high=None, n=0 if rate is None else 10, problems=5)
        source = f"round-{place - 1:03d}" if place else "base"
        row.append(CrossPlay(source=source, fooled_rate=flaws, auc=NUMBER, matthews=NUMBER))
    return RoundEvaluation(round=round_, cross=row)


def heat_maps(report: EvaluationReport) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg class=.heat.*?</svg>", html_of(report), re.S)]


def test_cross_play_is_a_heat_map_of_verifiers_and_provers() -> None:
    maps = heat_maps(report_of(crossed(0, 0.25, 0.5, 1.0), crossed(1, 0.0, None, 0.75)))
    assert len(maps) == 3
    labels = [text.text for text in maps[0].findall("text")]
    assert labels == ["prover of round", "verifier of round", "base", "0", "1", "0", "1"]
    cells = maps[0].findall("g")
    assert [cell.find("text").text for cell in cells] == ["25.0 %", "50.0 %", "100 %", "0.0 %", "–", "75.0 %"]
    boxes = [cell.find("rect").attrib for cell in cells]
    depths = [float(box["fill-opacity"]) for box in boxes]
    assert depths[4] == depths[3] == 0.0 < depths[0] < depths[1] < depths[5] < depths[2] < 1.0
    assert [box["x"] for box in boxes[:3]] == [box["x"] for box in boxes[3:]]
    assert sorted({float(box["x"]) for box in boxes}) == [float(box["x"]) for box in boxes[:3]]
    assert {box["y"] for box in boxes[:3]} != {box["y"] for box in boxes[3:]}
    assert [place for place, box in enumerate(boxes) if "outlined" in box["class"]] == [1, 5]
    assert "verifier of round 1, prover round-000: –, 0 solutions" in cells[4].find("title").text


def test_a_correlation_below_chance_has_another_colour_and_a_run_of_one_round_has_two_cells() -> None:
    found = crossed(0, 0.5, 0.5)
    low = Estimate(value=-0.5, low=-0.6, high=-0.4, n=10, problems=5)
    found.cross[0] = found.cross[0].model_copy(update={"matthews": low})
    *_, correlations = heat_maps(report_of(found))
    below, above = (cell.find("rect").attrib for cell in correlations.findall("g"))
    assert below["class"] != above["class"].removesuffix(" outlined")
    assert below["fill-opacity"] == above["fill-opacity"]


def test_cross_play_on_the_terminal_has_a_row_for_each_pair() -> None:
    text = printed(report_of(crossed(0, 0.25, 0.5, 1.0), crossed(1, 0.0, None, 0.75)))
    assert "0 base 25.0 % [–] 10 0.50 [0.40,0.60] 0.50 [0.40,0.60] 10" in text
    assert " 0 – 0 0.50 [0.40,0.60]" in text
    assert heat_maps(report_of(RoundEvaluation(round=0))) == []
