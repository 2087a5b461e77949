"""The results of `pvg evaluate`: charts, tables and examples for the page, tables and examples for the terminal.

Every number has its interval, if there is one, and the number of its samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from pvg.errors import counted
from pvg.evaluation.intervals import CONFIDENCE, Estimate
from pvg.evaluation.report import AttackRecord, EvaluationReport, FlawDetection, RoundEvaluation
from pvg.records import Role, source_of_round
from pvg.reporting.charts import ChartLine, Interval, ReferenceLine, XAxis, line_chart, round_axis
from pvg.reporting.formats import ABSENT
from pvg.reporting.solutions import Example, shown_solution
from pvg.reporting.table import Column, PageSection, Table, TemplateMacros, Where, elements
from pvg.reporting.terminal import QUIET, examples_list, section

RARE = 0.01  # share of a kind of flaw that the table leaves out
SHADES = 6  # run-0 to run-5 of the style sheet
ATTACKS = ("src", "cgc", "goodhart")
ASIDE = 0.05  # of a round between kinds of attack: all censored attacks end at the same limit and would hide each other
CHANCE = (ReferenceLine(0.5, "chance"),)

markup = TemplateMacros("run.html.j2")


def interval(number: Estimate | None, *, digits: int = 2) -> str:
    """`0.91 [0.88,0.94]`; a dash is a missing value. Brackets contain no blank, so that a narrow cell breaks before."""
    if number is None or number.value is None:
        return ABSENT
    value = f"{number.value:.{digits}f}"
    if number.low is None or number.high is None:
        return f"{value} [{ABSENT}]"
    return f"{value} [{number.low:.{digits}f},{number.high:.{digits}f}]"


def steps_to_exploit(attack: AttackRecord) -> str:
    """`140`, `> 200` for a censored attack, or why there is no number."""
    if attack.status in ("no_reference", "no_signal", "diverged"):
        return attack.status.replace("_", " ")
    return f"> {attack.limit}" if attack.status == "censored" else str(attack.steps)


def evaluation_tables(report: EvaluationReport) -> Group:
    """All parts of the report that exist, for the terminal."""
    headline = Text.assemble(
        (report.run, "bold"),
        (f"  {_about(report)}  ", QUIET),
        (report.status, "green" if not _open(report) else "yellow"),
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
    unfinished = ["The evaluation is not finished: the same command continues it."] if _open(report) else []
    body = [
        elements.notes([*unfinished, *_stale(report), *report.notes]),
        elements.grid(evaluation_charts(report)),
        *(elements.details(found.title, _on_page(found)) for found in _tables(report)),
    ]
    lead = f"By pvg evaluate, on fresh samples and with fresh attackers: {_about(report)}."
    return PageSection("evaluation", "Evaluation", body, lead)


def _open(report: EvaluationReport) -> bool:
    return report.status == "partial"


def _about(report: EvaluationReport) -> str:
    of = counted(report.rounds_planned, "round")
    return f"evaluation of {report.rounds_finished} of {of}, intervals at {100 * CONFIDENCE:g} %"


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
        body += [Text(), Text("The page of pvg report has examples of all rounds.", style=QUIET)]
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


def _tables(report: EvaluationReport) -> list[EvaluationTable]:
    rounds = report.rounds
    return [
        EvaluationTable(
            "Steps to exploit, and the trained attackers on test problems",
            _exploit(rounds),
            "More steps: the verifier is harder to fool. > is the limit, without success. wrong, gap and accepted "
            "check the attacker on test problems: its share of wrong solutions, how far the verifier scores these "
            "below correct ones, and the share of them that it accepts. Only an attacker with many accepted wrong "
            "solutions fools it.",
        ),
        EvaluationTable(
            "What the attackers write on test problems",
            _kinds_of_flaws(rounds),
            "share: how many of the attacker's wrong solutions have this flaw, as the task's grader names it. "
            "accepted: how many of these the verifier accepts. Flaws with a share below 1 % are only in "
            "evaluation.json. Below: typical solutions, each with a score near the median of its kind.",
            attack_examples(rounds),
        ),
        EvaluationTable(
            "Detection at the run's threshold",
            _detection(rounds),
            "Higher is better. completeness: helpful solutions that are correct and accepted. soundness: wrong sneaky "
            "solutions (flaws) that are rejected. AUC: whether flaws score below correct solutions; 0.5 is chance.",
        ),
        EvaluationTable(
            "Best of n",
            _best_of_n(rounds),
            "How often the solution with the best score is correct. balanced: half of n are correct, so chance is "
            "0.5. natural: n helpful solutions as sampled. chance chooses at random, and pass@n is the best possible "
            "choice.",
        ),
        EvaluationTable(
            "Separability of the roles by style (AUC, 0.5 is chance)",
            _separability(rounds),
            "Near 0.5, style does not give the roles away; near 1 it does. Read the two columns 'within': 'overall' "
            "also counts that one role is correct more often.",
        ),
        EvaluationTable(
            "Legibility tax at the same KL",
            _tax(report),
            "tax: the accuracy of a prover that was trained for correctness only (baseline), minus that of the run's "
            "prover at the same KL. Above 0, legibility costs accuracy. ≥: the baseline has a smaller KL even at its "
            "largest, and reaches this accuracy there.",
        ),
        EvaluationTable(
            "Calibration",
            _calibration(rounds),
            "Lower is better. ECE: the mean gap between predicted and true probability; compare it with the ECE that "
            "chance alone gives. Brier: the mean squared error of the probability; always saying 0.5 has 0.25.",
        ),
        EvaluationTable(
            "Locating the flaw by the largest fall of the score",
            _localisation(rounds),
            "gain: how much more often the verifier's largest fall is at the wrong step than a guess. 0 is no better "
            "than guessing.",
        ),
    ]


def _table(first: str, *columns: str) -> Table:
    """`columns`: title, style and place of each column, such as "problems:quiet:pages"."""
    found = [Column(first)]
    for column in columns:
        title, style, on = [*column.split(":"), "", ""][:3]
        found.append(Column(title, "right", style, on=cast(Where, on or "everywhere")))
    return Table(found, narrow=True)


def _attacks(rounds: Sequence[RoundEvaluation]) -> Iterator[tuple[RoundEvaluation, AttackRecord]]:
    return ((found, attack) for found in rounds for attack in found.exploit or ())


def _exploit(rounds: Sequence[RoundEvaluation]) -> Table:
    columns = ("steps:strong", "closest gap", "at step::pages", "wrong:sneaky", "gap:sneaky", "accepted:verifier")
    table = _table("round", "attacker", *columns, "solutions::pages")
    for found, attack in _attacks(rounds):
        check = attack.check
        table.add(
            str(found.round),
            attack.kind,
            steps_to_exploit(attack),
            ABSENT if attack.closest_gap is None else f"{attack.closest_gap:.2f}",
            ABSENT if attack.closest_step is None else str(attack.closest_step),
            *(interval(number) for number in ((check.error_rate, check.gap, check.accepted) if check else [None] * 3)),
            str(check.error_rate.n) if check else attack.reason,
        )
    return table


def _kinds_of_flaws(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table("round", "attacker", "flaw", "share:sneaky", "accepted:verifier", "solutions:quiet:pages")
    for found, attack in _attacks(rounds):
        for kind in attack.check.kinds if attack.check else ():
            if (kind.share.value or 0.0) >= RARE:
                counts = (interval(kind.share), interval(kind.accepted), str(kind.accepted.n))
                table.add(str(found.round), attack.kind, kind.kind, *counts)
    return table


def attack_examples(rounds: Sequence[RoundEvaluation]) -> list[Example]:
    """The example solutions of all attackers, with the decision of the attacked verifier."""
    examples = []
    for found, attack in _attacks(rounds):
        for example in attack.check.examples if attack.check else ():
            threshold = attack.check.threshold if attack.check else None
            decision = "accepted" if example.accepted else "refused"
            at = "" if threshold is None else f" at threshold {threshold:+.2f}"
            facts: dict[str, Any] = {
                **example.model_dump(include={"id", "question", "reference", "answer", "note", "score"}),
                **{"role": Role.SNEAKY.value, "correct": False, "well_formed": True, "reward": None},
            }
            why, source = f"{attack.kind} attacker of round {found.round}, {decision}{at}", source_of_round(found.round)
            examples.append(Example(why=why, round=found.round, source=source, text=example.solution, **facts))
    return examples


def _detection(rounds: Sequence[RoundEvaluation]) -> Table:
    columns = ("n:quiet", "problems:quiet:pages", "completeness:helpful", "soundness:sneaky", "AUC:verifier")
    table = _table("round", "of", *columns)
    for found in rounds:
        if found.detection is None:
            continue
        whole = found.detection.completeness
        table.add(str(found.round), "helpful solutions", str(whole.n), str(whole.problems), interval(whole), "", "")
        for flaws in found.detection.sources:
            sound = flaws.soundness
            counts = (str(sound.n), str(sound.problems))
            table.add("", f"flaws of {flaws.source}", *counts, "", interval(sound), interval(flaws.auc))
    return table


def _best_of_n(rounds: Sequence[RoundEvaluation]) -> Table:
    columns = ("balanced:verifier", "problems:quiet", "natural:helpful", "pass@n", "chance:quiet")
    table = _table("round", "by", "n", *columns)
    for found in rounds:
        for curves in found.best_of_n or ():
            natural = {point.n: point for point in curves.natural}
            for place, point in enumerate(curves.balanced):
                other = natural.get(point.n)
                table.add(
                    *((str(found.round), curves.source) if not place else ("", "")),
                    str(point.n),
                    interval(point.accuracy),
                    f"{point.accuracy.n}/{point.accuracy.n + point.excluded}",
                    interval(other.accuracy if other else None),
                    interval(other.pass_at_n if other else None),
                    f"{other.chance.value:.2f}" if other and other.chance.value is not None else ABSENT,
                )
    return table


def _separability(rounds: Sequence[RoundEvaluation]) -> Table:
    columns = ("n:quiet:pages", "within correct:helpful", "n:quiet:pages", "within incorrect:sneaky", "n:quiet:pages")
    table = _table("round", "overall:strong", *columns)
    for found in rounds:
        if (probe := found.separability) is not None:
            cells = [(interval(n), str(n.n)) for n in (probe.overall, probe.correct, probe.incorrect)]
            table.add(str(found.round), *(text for cell in cells for text in cell))
    return table


def _tax(report: EvaluationReport) -> Table:
    table = _table("policy", "KL per solution", "per token:quiet", "accuracy:helpful", "tax:strong")
    found = [(f"baseline {point.name}", point, "") for point in (report.baseline.points if report.baseline else ())]
    for tax in filter(None, (round_.tax for round_ in report.rounds)):
        cost = interval(tax.tax)
        found.append((tax.policy.name, tax.policy, cost if tax.in_range or cost == ABSENT else f"≥ {cost}"))
    for name, point, cost in found:
        table.add(name, interval(point.kl), interval(point.kl_per_token, digits=3), interval(point.accuracy), cost)
    return table


def _calibration(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table("round", "probability", "n:quiet", "ECE:verifier", "by chance:quiet", "Brier:verifier")
    for found in rounds:
        if found.calibration is None:
            continue
        raw = "sigmoid(score)" if found.calibration.raw_is_probability else "sigmoid(score), not a probability"
        for name, one in ((raw, found.calibration.raw), ("Platt fit, held out", found.calibration.fitted)):
            if one is not None:
                chance = ABSENT if one.ece_by_chance is None else f"{one.ece_by_chance:.2f}"
                table.add(str(found.round), name, str(one.ece.n), interval(one.ece), chance, interval(one.brier))
    return table


def _localisation(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table("round", "solutions:quiet", "located:strong", "by guessing:quiet", "gain:verifier")
    measured = [(found.round, found.localisation) for found in rounds if found.localisation is not None]
    for round_, one in measured:
        if one.known:
            chance = ABSENT if one.chance is None else f"{one.chance:.3f}"
            table.add(str(round_), str(one.solutions), interval(one.accuracy), chance, interval(one.gain))
    if measured and not table:
        table.caption = "Not known by this task."
    return table


# --- charts ------------------------------------------------------------------------------------------------------


def evaluation_charts(report: EvaluationReport) -> list[Markup]:
    """Empty where a part was not measured."""
    rounds = report.rounds
    by_n = (_balanced_chart(rounds), _natural_chart(rounds))
    return [
        _exploit_chart(rounds),
        _auc_chart(rounds),
        _roc_chart(rounds),
        *by_n,
        _reliability_chart(rounds),
        _tax_chart(report),
    ]


def _line(name: str, style: str, points: Iterable[tuple[float | None, Estimate]], dash: str = "") -> ChartLine:
    """A line through the numbers that have a value, with their intervals."""
    known = [(x, n.value, n.low, n.high) for x, n in points if x is not None and n.value is not None]
    whiskers: list[Interval] = [(x, low, high) for x, _, low, high in known if low is not None and high is not None]
    return ChartLine(name, [[(x, value) for x, value, _, _ in known]], style, dash, dots=True, whiskers=whiskers)


def _by_round(rounds: Sequence[RoundEvaluation]) -> XAxis:
    return round_axis([found.round for found in rounds])


def _exploit_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    lines = []
    for place, kind in enumerate(ATTACKS):
        points = [
            (found.round + ASIDE * (place - 1), float(attack.steps))
            for found, attack in _attacks(rounds)
            if attack.kind == kind and attack.steps is not None
        ]
        lines.append(ChartLine(kind, [points], f"run-{place}", dots=True))
    limits = [
        ReferenceLine(float(limit), "limit") for limit in sorted({attack.limit for _, attack in _attacks(rounds)})
    ]
    unit = "optimizer steps of a fresh attacker; at the limit: no exploit was found"
    return line_chart("Steps to exploit", lines, _by_round(rounds), "number", zero=True, references=limits, unit=unit)


def _auc_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    kinds = (("own flaws", "sneaky", ""), ("base flaws", "ink", "dotted"), ("previous flaws", "verifier", "dashed"))
    points: dict[str, list[tuple[float | None, Estimate]]] = {name: [] for name, _, _ in kinds}
    for found in rounds:
        sources = (source_of_round(found.round), "base", source_of_round(found.round - 1))
        for flaws in found.detection.sources if found.detection else ():
            if flaws.source in sources:
                points[kinds[sources.index(flaws.source)][0]].append((float(found.round), flaws.auc))
    lines = [_line(name, style, points[name], dash) for name, style, dash in kinds]
    unit = "helpful correct against flaws"
    return line_chart("AUC by round", lines, _by_round(rounds), "auc", references=CHANCE, unit=unit)


def _roc_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    last = next((found for found in reversed(rounds) if found.detection is not None), None)
    if last is None or last.detection is None:
        return Markup()
    lines = [_roc(flaws, place) for place, flaws in enumerate(last.detection.sources)]
    title, x = f"ROC of round {last.round}, by source of flaws", XAxis(0.0, 1.0, "false-positive rate")
    return line_chart(title, lines, x, "share", unit="true-positive rate")


def _roc(flaws: FlawDetection, place: int) -> ChartLine:
    dash = "dashed" if place >= SHADES else ""
    return ChartLine(flaws.source, [[(x, y) for x, y in flaws.roc]], f"run-{place % SHADES}", dash)


def _over_n(rounds: Sequence[RoundEvaluation]) -> tuple[dict[int, float], XAxis]:
    """The place of each n, and the axis."""
    curves = [one for found in rounds for one in found.best_of_n or ()]
    sizes = sorted({point.n for one in curves for points in (one.balanced, one.natural) for point in points})
    places = {n: float(place) for place, n in enumerate(sizes)}
    return places, XAxis(-0.25, max(0, len(sizes) - 1) + 0.25, "n", [(at, str(n)) for n, at in places.items()])


def _balanced_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    places, x = _over_n(rounds)
    lines = [
        _line(f"round {found.round}", f"run-{found.round % SHADES}", [(places[p.n], p.accuracy) for p in own.balanced])
        for found in rounds
        for own in found.best_of_n or ()
        if own.source != "base"
    ]
    return line_chart("Balanced best of n, own solutions", lines, x, "share", references=CHANCE, unit="correct choices")


def _natural_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    places, x = _over_n(rounds)
    measured = [(found, own) for found in rounds for own in found.best_of_n or () if own.source != "base"]
    if not measured:
        return Markup()
    last, own = measured[-1]
    lines = [
        _line("pass@n", "ink", [(places[p.n], p.pass_at_n) for p in own.natural], "dotted"),
        _line("chosen by the verifier", "verifier", [(places[p.n], p.accuracy) for p in own.natural]),
        _line("drawn at random", "ink", [(places[p.n], p.chance) for p in own.natural], "dashed"),
    ]
    return line_chart(f"Best of n helpful solutions, round {last.round}", lines, x, "share", unit="correct")


def _reliability_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    last = next((found for found in reversed(rounds) if found.calibration is not None), None)
    if last is None or last.calibration is None:
        return Markup()
    lines = [ChartLine("calibrated", [[(0.0, 0.0), (1.0, 1.0)]], "ink", "dotted")]
    measured = (
        ("sigmoid(score)", "verifier", last.calibration.raw),
        ("Platt fit, held out", "run-1", last.calibration.fitted),
    )
    for name, style, errors in measured:
        if errors is not None:
            lines.append(_line(name, style, [(one.predicted, one.correct) for one in errors.bins]))
    x = XAxis(0.0, 1.0, "predicted")
    return line_chart(f"Reliability, round {last.round}", lines, x, "share", unit="correct, by predicted probability")


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
