"""The results of `pvg evaluate`: charts, tables and examples for the page, tables and examples for the terminal.

Every number has its interval, if there is one, and the number of its samples.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from pvg.errors import counted
from pvg.evaluation.report import AttackCheck, AttackRecord, BestOfNCurves, EvaluationReport, PolicyDistance
from pvg.records import BASE_SOURCE, Role, source_of_round
from pvg.reporting.charts import ChartLine, HeatCell, Interval, ReferenceLine, XAxis, line_chart, round_axis
from pvg.reporting.formats import ABSENT, change_text, percent
from pvg.reporting.solutions import Example, shown_solution
from pvg.reporting.table import Column, PageSection, Table, TableCell, TemplateMacros, Where, chart, elements
from pvg.reporting.terminal import FEW, QUIET, examples_list, section
from pvg.verifier.intervals import CONFIDENCE, Estimate

RARE = 0.01  # share of a kind of flaw that the table leaves out
SHADES = 6  # run-0 to run-5 of the style sheet
ATTACKS = ("src", "cgc", "goodhart")
ASIDE = 0.05  # of a round between kinds of attack: all censored attacks end at the same limit and would hide each other
CHANCE = (ReferenceLine(0.5, "chance"),)

TABLES: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["tables"]

markup = TemplateMacros("run.html.j2")


def evaluation_tables(report: EvaluationReport) -> Group:
    """All parts of the report that exist, for the terminal."""
    headline = Text.assemble(
        (report.run, "bold"),
        (f"  {_about(report)}  ", QUIET),
        (report.status, "green" if report.status == "complete" else "yellow"),
    )
    parts: list[RenderableType] = [headline]
    for found in _tables(report):
        if body := _on_terminal(found):
            parts += section(found.title, Group(*body))
    if remarks := [*_stale(report), *report.notes]:
        parts += section("Notes", Text("\n".join(remarks), style="yellow"))
    return Group(*parts)


def evaluation_section(report: EvaluationReport | None) -> PageSection:
    """The whole evaluation. Empty for a run without one."""
    if report is None:
        return PageSection("evaluation", "Evaluation", [])
    unfinished = (
        ["The evaluation is not finished: the same command continues it."] if report.status == "partial" else []
    )
    body = [
        elements.notes([*unfinished, *_stale(report), *report.notes]),
        elements.grid([chart(report) for chart in CHARTS]),  # each is empty where its part was not measured
        *_cross_maps(report),
        *folded_tables(report),
    ]
    lead = f"By pvg evaluate, on fresh samples and with fresh attackers: {_about(report)}."
    return PageSection("evaluation", "Evaluation", body, lead)


def folded_tables(report: EvaluationReport) -> list[Markup]:
    return [elements.details(found.title, _on_page(found)) for found in _tables(report)]


def _about(report: EvaluationReport) -> str:
    fields = {name: value for found in report.rounds for name, value in found if value is not None}
    parts = ", ".join(name.replace("_", "-") for name in fields if name not in ("round", "verifier_version"))
    rounds = ", ".join(str(found.round) for found in report.rounds)
    return f"{parts or 'no part'} of round {rounds or '–'}; intervals at {100 * CONFIDENCE:g} %, by problem"


def _stale(report: EvaluationReport) -> list[str]:
    return [f"{part}: computed from other settings or samples, not shown." for part in report.stale]


def _on_terminal(found: EvaluationTable) -> list[RenderableType]:
    """The table and the examples of the newest round; the page has those of all rounds."""
    body: list[RenderableType] = []
    if found.table:
        body += [found.table, Text(found.reading, style=QUIET)]
    elif found.table.caption:
        body.append(Text(found.table.caption, style=QUIET))
    newest = max((example.round for example in found.examples), default=0)
    if examples := [example for example in found.examples if example.round == newest]:
        body += [Text(), examples_list(examples)]
    if len(examples) < len(found.examples):
        body += [Text(), Text("The page of pvg view has examples of all rounds.", style=QUIET)]
    return body


def _on_page(found: EvaluationTable) -> list[object]:
    body: list[object] = []
    if found.table:
        body += [found.table, elements.note(found.reading)]
    elif found.table.caption:
        body.append(elements.empty(found.table.caption))
    for example in found.examples:
        side = shown_solution(example, None)
        side = replace(side, score=f"{example.why}, {side.score}")
        body.append(markup.pairing(example.question, example.reference, [side]))
    return body


# --- tables ------------------------------------------------------------------------------------------------------


class EvaluationTable(NamedTuple):
    """A table, how to read it, and examples of what it measures. Empty without measurements."""

    title: str
    table: Table
    reading: str
    examples: Sequence[Example] = ()


FORMS: dict[str, Callable[[float], str]] = {"%": percent, "pp": partial(change_text, "share")}
Value = Estimate | float | str | None  # of a cell
Rows = Iterator[Sequence[Value]]


def _tables(report: EvaluationReport) -> Iterator[EvaluationTable]:
    for spec in TABLES:
        parts = [[*column.split(":"), "", "", ""][:4] for column in spec["columns"]]
        columns = [
            Column(title, "right" if place else "left", style, on=cast(Where, where or "everywhere"))
            for place, (title, style, where, _) in enumerate(parts)
        ]
        table = Table(columns, narrow=True)
        for row in ROWS[spec["rows"]](report):
            table.add(*(_cell(value, part[3] or "2") for value, part in zip(row, parts, strict=True)))
        if spec["rows"] == "localisation" and not table and any(found.localisation for found in report.rounds):
            table.caption = "Not known by this task."
        examples = attack_examples(report) if spec["rows"] == "kinds" else []
        yield EvaluationTable(spec["title"], table, spec["reading"], examples)


def _cell(value: Value, form: str) -> str | TableCell:
    """A number of few samples is greyed."""
    text = estimate_text(value, form)
    return TableCell(text, "quiet") if isinstance(value, Estimate) and value.n < FEW else text


def estimate_text(value: Value, form: str = "%") -> str:
    """`91.4 % [88,94]`. `form`: % for a share, pp for a difference of shares, otherwise the number of digits. A dash is
    a missing value. Brackets contain no blank, so that a narrow cell breaks before."""
    if isinstance(value, Estimate):
        ends = [end for end in (value.low, value.high) if end is not None]
        reach = [f"{100 * end:.{int(abs(end) < 0.1)}f}" if form in FORMS else f"{end:.{form}f}" for end in ends]
        return ABSENT if value.value is None else f"{estimate_text(value.value, form)} [{','.join(reach) or ABSENT}]"
    if isinstance(value, float):
        return FORMS[form](value) if form in FORMS else f"{value:.{form}f}"
    return ABSENT if value is None else str(value)


def _attacks(report: EvaluationReport) -> Iterator[tuple[int, AttackRecord]]:
    return ((found.round, attack) for found in report.rounds for attack in found.exploit or ())


def _checks(report: EvaluationReport) -> Iterator[tuple[int, AttackRecord, AttackCheck]]:
    return ((round_, attack, attack.check) for round_, attack in _attacks(report) if attack.check)


def _exploit(report: EvaluationReport) -> Rows:
    for round_, attack in _attacks(report):
        steps: Value = attack.steps
        if attack.status in ("no_reference", "no_signal", "diverged"):
            steps = attack.status.replace("_", " ")
        elif attack.status == "censored":
            steps = f"> {attack.limit}" if answers(attack) else "no answer"
        check = attack.check
        fooled: Sequence[Value] = (check.accepted, check.accepted.n) if check else (None, "")
        last = (check.error_rate, check.gap, check.error_rate.n) if check else (None, None, attack.reason)
        yield round_, attack.kind, *fooled, steps, attack.closest_gap, attack.closest_step, *last


def answers(attack: AttackRecord) -> bool:
    """Whether the attack says something about the verifier. One whose solutions were never wrong often enough, or that
    could not learn, could not succeed."""
    return attack.status == "found" or (attack.status == "censored" and attack.closest_gap is not None)


def _kinds_of_flaws(report: EvaluationReport) -> Rows:
    for round_, attack, check in _checks(report):
        for kind in check.kinds:
            if (kind.share.value or 0.0) >= RARE:
                yield round_, attack.kind, kind.kind, kind.share, kind.accepted, kind.accepted.n


def attack_examples(report: EvaluationReport) -> list[Example]:
    """The example solutions of all attackers, with the decision of the attacked verifier."""
    examples = []
    for round_, attack, check in _checks(report):
        for example in check.examples:
            decision = "accepted" if example.accepted else "refused"
            facts: dict[str, Any] = {
                **example.model_dump(include={"id", "question", "reference", "answer", "note", "score"}),
                **{"role": Role.SNEAKY.value, "correct": False, "well_formed": True, "reward": None},
            }
            why = f"{attack.kind} attacker of round {round_}, {decision} at threshold {check.threshold:+.2f}"
            source = source_of_round(round_)
            examples.append(Example(why=why, round=round_, source=source, text=example.solution, **facts))
    return examples


def _detection(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        if found.detection:
            helpful = found.detection.accepted_helpful
            yield found.round, "correct helpful solutions", helpful.n, helpful.problems, helpful, "", ""
            for flaws in found.detection.sources:
                fooled = flaws.fooled_rate
                yield "", f"flaws of {flaws.source}", fooled.n, fooled.problems, "", fooled, flaws.auc


def _best_of_n(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        for curves in found.best_of_n or ():
            natural = {point.n: point for point in curves.natural}
            for place, point in enumerate(curves.balanced):
                first = ("", "") if place else (found.round, curves.source)
                problems = f"{point.accuracy.n}/{point.accuracy.n + point.excluded}"
                other = natural.get(point.n)
                last = (other.accuracy, other.pass_at_n, other.chance.value) if other else [None] * 3
                yield *first, point.n, point.accuracy, problems, *last


def _separability(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        if probe := found.separability:
            yield found.round, *(x for one in (probe.overall, probe.correct, probe.incorrect) for x in (one, one.n))


def _tax(report: EvaluationReport) -> Rows:
    found: list[tuple[str, PolicyDistance, Value]] = []
    found += [(f"baseline {point.name}", point, "") for point in (report.baseline.points if report.baseline else ())]
    for tax in filter(None, (round_.tax for round_ in report.rounds)):
        bound = not tax.in_range and tax.tax.value is not None
        found.append((tax.policy.name, tax.policy, f"≥ {estimate_text(tax.tax, 'pp')}" if bound else tax.tax))
    yield from ((name, point.kl, point.kl_per_token, point.accuracy, cost) for name, point, cost in found)


def _calibration(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        if (fits := found.calibration) is not None:
            raw = "sigmoid(score)" if fits.raw_is_probability else "sigmoid(score), not a probability"
            for name, one in ((raw, fits.raw), ("Platt fit, held out", fits.fitted)):
                if one is not None:
                    yield found.round, name, one.ece.n, one.ece, one.ece_by_chance, one.brier


def _localisation(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        if (one := found.localisation) and one.known:
            yield found.round, one.solutions, one.accuracy, one.chance, one.gain


def _prover(source: str) -> str:
    """ "base", or the number of the round."""
    return source if source == BASE_SOURCE else str(int(source.removeprefix("round-")))


def _cross(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        for place, one in enumerate(found.cross or ()):
            rate, whole = one.fooled_rate, one.matthews
            head = "" if place else found.round
            yield head, _prover(one.source), rate, rate.n, one.auc, whole, whole.n, whole.problems


def _legibility(report: EvaluationReport) -> Rows:
    for found in report.rounds:
        for place, one in enumerate(found.legibility or ()):
            values = (one.measures.get(name) for name in ("accuracy", "cir", "sr", "transfer", "alone", "characters"))
            yield "" if place else found.round, _prover(one.name), one.traces, *values


ROWS: dict[str, Callable[[EvaluationReport], Rows]] = {
    "exploit": _exploit,
    "kinds": _kinds_of_flaws,
    "detection": _detection,
    "best_of_n": _best_of_n,
    "separability": _separability,
    "tax": _tax,
    "calibration": _calibration,
    "localisation": _localisation,
    "cross": _cross,
    "legibility": _legibility,
}


# --- charts ------------------------------------------------------------------------------------------------------


def _line(name: str, style: str, points: Iterable[tuple[float | None, Estimate]], dash: str = "") -> ChartLine:
    """A line through the numbers that have a value, with their intervals."""
    known = [(x, n.value, n.low, n.high) for x, n in points if x is not None and n.value is not None]
    whiskers: list[Interval] = [(x, low, high) for x, _, low, high in known if low is not None and high is not None]
    return ChartLine(name, [[(x, value) for x, value, _, _ in known]], style, dash, dots=True, whiskers=whiskers)


def _by_round(report: EvaluationReport) -> XAxis:
    return round_axis([found.round for found in report.rounds])


def _fooled_chart(report: EvaluationReport) -> Markup:
    """The flaws of new attackers, and of the rounds' own provers, that the verifier accepts. An attack that could not
    succeed has no point: a fooled rate of 0 would be no answer."""
    attacks, lines = list(_checks(report)), []
    for place, kind in enumerate(ATTACKS):
        own = [(round_, check.accepted) for round_, each, check in attacks if each.kind == kind and answers(each)]
        points = [(round_ + ASIDE * (place - 1), share) for round_, share in own]
        lines.append(_line(f"new {kind} attackers", f"run-{place}", points))
    detected = [(found.round, found.detection.sources) for found in report.rounds if found.detection]
    same = [(n, each) for n, sources in detected for each in sources if each.source == source_of_round(n)]
    shares = [(float(n), each.fooled_rate) for n, each in same]
    lines.append(_line("the round's own prover", "sneaky", shares, "dashed"))
    silent = sum(not answers(attack) for _, attack in _attacks(report))
    note = f"{counted(silent, 'attack')} could not succeed, and so gave no answer." if silent else ""
    return line_chart(
        "Fooled rate", lines, _by_round(report), "share", unit="flaws that the verifier accepts", note=note
    )


def _auc_chart(report: EvaluationReport) -> Markup:
    measured = [(found.round, found.detection.sources) for found in report.rounds if found.detection]
    lines = []
    for name, style, dash, source in (
        ("own flaws", "sneaky", "", source_of_round),
        ("base flaws", "ink", "dotted", lambda _: BASE_SOURCE),
        ("previous flaws", "verifier", "dashed", lambda round_: source_of_round(round_ - 1)),
    ):
        points = [(float(n), flaws.auc) for n, sources in measured for flaws in sources if flaws.source == source(n)]
        lines.append(_line(name, style, points, dash))
    unit = "helpful correct against flaws"
    return line_chart("AUC by round", lines, _by_round(report), "auc", references=CHANCE, unit=unit)


def _roc_chart(report: EvaluationReport) -> Markup:
    measured = [(found.round, found.detection.sources) for found in report.rounds if found.detection]
    if not measured:
        return Markup()
    last, sources = measured[-1]
    lines = [
        ChartLine(flaws.source, [flaws.roc], f"run-{place % SHADES}", "dashed" if place >= SHADES else "")
        for place, flaws in enumerate(sources)
    ]
    x = XAxis(0.0, 1.0, "false-positive rate", style="share")
    return line_chart(f"ROC of round {last}, by source of flaws", lines, x, "share", unit="true-positive rate")


def _own_curves(report: EvaluationReport) -> tuple[list[tuple[int, BestOfNCurves]], dict[int, float], XAxis]:
    """Best of n by the rounds' own solutions, the place of each n, and the axis."""
    curves = [(found.round, one) for found in report.rounds for one in found.best_of_n or ()]
    sizes = sorted({point.n for _, one in curves for points in (one.balanced, one.natural) for point in points})
    places = {n: float(place) for place, n in enumerate(sizes)}
    x = XAxis(-0.25, max(0, len(sizes) - 1) + 0.25, "n", [(at, str(n)) for n, at in places.items()])
    return [(round_, one) for round_, one in curves if one.source != BASE_SOURCE], places, x


def _balanced_chart(report: EvaluationReport) -> Markup:
    measured, places, x = _own_curves(report)
    lines = [
        _line(f"round {round_}", f"run-{round_ % SHADES}", [(places[p.n], p.accuracy) for p in own.balanced])
        for round_, own in measured
    ]
    return line_chart("Balanced best of n, own solutions", lines, x, "share", references=CHANCE, unit="correct choices")


def _natural_chart(report: EvaluationReport) -> Markup:
    measured, places, x = _own_curves(report)
    if not measured:
        return Markup()
    last, own = measured[-1]
    lines = [
        _line("pass@n", "ink", [(places[p.n], p.pass_at_n) for p in own.natural], "dotted"),
        _line("chosen by the verifier", "verifier", [(places[p.n], p.accuracy) for p in own.natural]),
        _line("drawn at random", "ink", [(places[p.n], p.chance) for p in own.natural], "dashed"),
    ]
    return line_chart(f"Best of n helpful solutions, round {last}", lines, x, "share", unit="correct")


def _reliability_chart(report: EvaluationReport) -> Markup:
    measured = [(found.round, found.calibration) for found in report.rounds if found.calibration]
    if not measured:
        return Markup()
    last, fits = measured[-1]
    lines = [ChartLine("calibrated", [[(0.0, 0.0), (1.0, 1.0)]], "ink", "dotted")]
    for name, style, errors in (
        ("sigmoid(score)", "verifier", fits.raw),
        ("Platt fit, held out", "run-1", fits.fitted),
    ):
        if errors is not None:
            lines.append(_line(name, style, [(one.predicted, one.correct) for one in errors.bins]))
    x = XAxis(0.0, 1.0, "predicted", style="share")
    return line_chart(f"Reliability, round {last}", lines, x, "share", unit="correct, by predicted probability")


def _tax_chart(report: EvaluationReport) -> Markup:
    """Accuracy over KL: the baseline's trajectory, and the rounds' provers."""
    if report.baseline is None or not report.baseline.points:
        return Markup()
    trajectory = sorted((p.kl.value, p.accuracy) for p in report.baseline.points if p.kl.value is not None)
    provers = [(found.tax.policy, found.round) for found in report.rounds if found.tax]
    lines = [_line("correctness baseline", "ink", trajectory)]
    lines += [_line(f"round {n}", f"run-{n % SHADES}", [(p.kl.value, p.accuracy)]) for p, n in provers]
    kls = [x for line in lines for piece in line.pieces for x, _ in piece]
    x = XAxis(min([0.0, *kls]), 1.05 * max([1e-9, *kls]), "KL to the start, nats per solution")
    return line_chart("Accuracy at a KL", lines, x, "share", unit="helpful accuracy on test problems")


# The heat maps of cross-play: title, unit, field, and look: form, value without colour, colours above and below it.
CROSS_MAPS: Sequence[tuple[str, str, str, tuple[str, float, str, str]]] = (
    ("Fooled rate", "flaws that the verifier accepts", "fooled_rate", ("%", 0.0, "sneaky", "sneaky")),
    ("AUC", "correct against incorrect solutions; 0.5 is chance", "auc", ("2", 0.5, "verifier", "sneaky")),
    ("Matthews correlation", "of accepted with correct; 0 is chance", "matthews", ("2", 0.0, "verifier", "sneaky")),
)
CROSS_READING = """
Below the outlined diagonal a verifier meets provers that it was trained on. On the diagonal it meets the prover that \
was trained against it. Above the diagonal it meets later provers that it has not seen."""


def _cross_maps(report: EvaluationReport) -> list[Markup]:
    """Heat maps of the measured verifiers (rows) and all stored provers (columns)."""
    measured = [(found.round, found.cross) for found in report.rounds if found.cross]
    if not measured:
        return []

    def cell(round_: int, source: str, value: Estimate, form: str, zero: float, above: str, below: str) -> HeatCell:
        off = ((zero if value.value is None else value.value) - zero) / (1.0 - zero)
        of = f"{counted(value.n, 'solution')} of {counted(value.problems, 'problem')}"
        hint = f"verifier of round {round_}, prover {source}: {estimate_text(value, form)}, {of}"
        number, style = estimate_text(value.value, form), above if off > 0 else below
        return HeatCell(number, style, abs(off), hint, source == source_of_round(round_))

    columns = [_prover(one.source) for one in measured[0][1]]
    maps = []
    for title, unit, name, look in CROSS_MAPS:
        rows = [(str(n), [cell(n, one.source, getattr(one, name), *look) for one in row]) for n, row in measured]
        drawn = chart.heat(title, columns, rows, "prover of round", "verifier of round")
        maps.append(chart.figure(title, drawn, unit))
    heading = elements.subheading("Cross-play of checkpoints", "On the test samples that the game stored.")
    return [heading, chart.heats(maps), elements.note(CROSS_READING)]


CHARTS = (_fooled_chart, _auc_chart, _roc_chart, _balanced_chart, _natural_chart, _reliability_chart, _tax_chart)
