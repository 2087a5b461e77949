"""The results of `pvg evaluate`: tables and examples for the terminal and the page (its charts: evaluation_charts).

Every number has its interval, if there is one, and the number of its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.text import Text

from pvg.errors import counted
from pvg.evaluation.intervals import CONFIDENCE
from pvg.evaluation.report import (
    AttackCheck,
    AttackRecord,
    CalibrationErrors,
    EvaluationReport,
    FlawExample,
    NumberRecord,
    RoundEvaluation,
)
from pvg.records import Role, source_of_round
from pvg.reporting.charts import ChartLine, ReferenceLine, XAxis, line_chart, round_axis
from pvg.reporting.formats import ABSENT
from pvg.reporting.solutions import Example, shown_solution
from pvg.reporting.table import Column, PageSection, Table, TemplateMacros, Where, elements
from pvg.reporting.terminal import QUIET, examples_list, section

# The charts of an evaluation on a page.


SHADES = 6  # run-0 to run-5 of the style sheet
KINDS = ("src", "cgc", "goodhart")
ASIDE = 0.05  # of a round between kinds of attack: all censored attacks end at the same limit and would hide each other


def evaluation_charts(report: EvaluationReport) -> list[Markup]:
    """Empty where a part was not measured."""
    rounds = report.rounds
    return [_exploit_chart(rounds), _auc_chart(rounds), _roc_chart(rounds), _balanced_chart(rounds),
            _natural_chart(rounds), _reliability_chart(rounds), _tax_chart(report)]  # fmt: skip


def _by_round(rounds: Sequence[RoundEvaluation]) -> XAxis:
    return round_axis([found.round for found in rounds])


def _line(name: str, style: str, points: Iterable[tuple[float, NumberRecord]], dash: str = "") -> ChartLine:
    """A line through the numbers that have a value, with their intervals."""
    there = [(x, n.value, n.low, n.high) for x, n in points if n.value is not None]
    whiskers = [(x, low, high) for x, _, low, high in there if low is not None and high is not None]
    piece = [(x, value) for x, value, _, _ in there]
    return ChartLine(name, [piece] if piece else [], style, dash, dots=True, whiskers=whiskers)


def _exploit_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    lines = []
    censored: list[tuple[float, float]] = []
    for place, kind in enumerate(KINDS):
        points = []
        for found in rounds:
            for attack in found.exploit or ():
                if attack.kind == kind and attack.steps is not None:
                    points.append((found.round + ASIDE * (place - 1), float(attack.steps)))
                    censored += [points[-1]] * (attack.status == "censored")
        lines.append(ChartLine(kind, [points] if points else [], f"run-{place}", dots=True))
    kinds = [line.name for line in lines if line.values]
    limits = sorted({attack.limit for found in rounds for attack in found.exploit or ()})
    note = "Points at the limit are censored: no exploit was found within it." if censored else ""
    references = [ReferenceLine(float(limit), "limit") for limit in limits]
    return line_chart(
        "Steps to exploit",
        lines,
        _by_round(rounds),
        "number",
        zero=True,
        references=references,
        unit="optimizer steps of a fresh attacker" + (f" ({kinds[0]})" if len(kinds) == 1 else ""),
        note=note,
    )


def _auc_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    def of(pick: Callable[[int, str], bool]) -> list[tuple[float, NumberRecord]]:
        return [
            (float(found.round), flaws.auc)
            for found in rounds
            for flaws in (found.detection.sources if found.detection else ())
            if pick(found.round, flaws.source)
        ]

    lines = [
        _line("own flaws", "sneaky", of(lambda r, source: source == f"round-{r:03d}")),
        _line("base flaws", "ink", of(lambda r, source: source == "base"), "dotted"),
        _line("previous flaws", "verifier", of(lambda r, source: source == f"round-{r - 1:03d}"), "dashed"),
    ]
    reference = [ReferenceLine(0.5, "chance")]
    return line_chart(
        "AUC by round", lines, _by_round(rounds), "auc", references=reference, unit="helpful correct against flaws"
    )


def _roc_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    last = next((found for found in reversed(rounds) if found.detection is not None), None)
    if last is None or last.detection is None:
        return Markup()
    lines = [
        ChartLine(flaws.source, [[(x, y) for x, y in flaws.roc]] if flaws.roc else [], f"run-{place % SHADES}",
             "dashed" if place >= SHADES else "",
             spread=[(x, low, high) for x, _, low, high in flaws.band if low is not None and high is not None])
        for place, flaws in enumerate(last.detection.sources)
    ]  # fmt: skip
    x = XAxis(0.0, 1.0, "false-positive rate")
    areas = "Areas: a separate interval at each false-positive rate; the whole curve is inside less often."
    title, note = f"ROC of round {last.round}, by source of flaws", areas if any(line.spread for line in lines) else ""
    return line_chart(title, lines, x, "share", unit="true-positive rate", note=note)


def _sizes(rounds: Sequence[RoundEvaluation]) -> list[int]:
    curves = [one for found in rounds for one in found.best_of_n or ()]
    return sorted({p.n for one in curves for p in one.balanced} | {p.n for one in curves for p in one.natural})


def _over_n(rounds: Sequence[RoundEvaluation]) -> XAxis:
    sizes = _sizes(rounds)
    return XAxis(-0.25, max(0, len(sizes) - 1) + 0.25, "n", tuple((float(i), str(n)) for i, n in enumerate(sizes)))


def _balanced_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    places = {n: float(place) for place, n in enumerate(_sizes(rounds))}
    lines = [
        _line(
            f"round {found.round}", f"run-{found.round % SHADES}", [(places[p.n], p.accuracy) for p in curves.balanced]
        )
        for found in rounds
        for curves in found.best_of_n or ()
        if curves.source != "base"
    ]
    reference = [ReferenceLine(0.5, "chance")]
    return line_chart(
        "Balanced best of n",
        lines,
        _over_n(rounds),
        "share",
        references=reference,
        unit="correct choices, own solutions",
    )


def _natural_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    places = {n: float(place) for place, n in enumerate(_sizes(rounds))}
    last = next((found for found in reversed(rounds) if found.best_of_n), None)
    own = next((curves for curves in (last.best_of_n or () if last else ()) if curves.source != "base"), None)
    if last is None or own is None:
        return Markup()
    lines = [
        _line("pass@n", "ink", [(places[p.n], p.pass_at_n) for p in own.natural], "dotted"),
        _line("chosen by the verifier", "verifier", [(places[p.n], p.accuracy) for p in own.natural]),
        _line("drawn at random", "ink", [(places[p.n], p.chance) for p in own.natural], "dashed"),
    ]
    return line_chart(
        f"Best of n helpful solutions, round {last.round}", lines, _over_n(rounds), "share", unit="correct"
    )


def _reliability_chart(rounds: Sequence[RoundEvaluation]) -> Markup:
    last = next((found for found in reversed(rounds) if found.calibration is not None), None)
    if last is None or last.calibration is None:
        return Markup()

    def line(name: str, style: str, found: CalibrationErrors | None) -> ChartLine:
        return _line(name, style, [(b.predicted, b.correct) for b in found.bins] if found else [])

    lines = [
        ChartLine("calibrated", [[(0.0, 0.0), (1.0, 1.0)]], "ink", "dotted"),
        line("sigmoid(score)", "verifier", last.calibration.raw),
        line("Platt fit, held out", "run-1", last.calibration.fitted),
    ]
    x = XAxis(0.0, 1.0, "predicted")
    return line_chart(f"Reliability, round {last.round}", lines, x, "share", unit="correct, by predicted probability")


def _tax_chart(report: EvaluationReport) -> Markup:
    """Accuracy over KL: the baseline's trajectory, and the rounds' provers."""
    if report.baseline is None or not report.baseline.points:
        return Markup()
    trajectory = sorted((p.kl.value, p.accuracy) for p in report.baseline.points if p.kl.value is not None)
    provers = [(found.tax.policy, found.round) for found in report.rounds if found.tax]
    kls = [kl for kl, _ in trajectory] + [p.kl.value for p, _ in provers if p.kl.value is not None]
    high = max([*kls, 1e-9])
    lines = [_line("correctness baseline", "ink", trajectory)]
    lines += [
        _line(f"round {round_}", f"run-{round_ % SHADES}", [(p.kl.value, p.accuracy)])
        for p, round_ in provers
        if p.kl.value is not None
    ]
    x = XAxis(min([0.0, *kls]), 1.05 * high, "KL to the start, nats per solution")
    return line_chart("Accuracy at a KL", lines, x, "share", unit="helpful accuracy on test problems")


RARE = 0.01  # share of a kind of flaw that the table leaves out
markup = TemplateMacros("run.html.j2")


def interval(number: NumberRecord | None, *, digits: int = 2) -> str:
    """`0.91 [0.88,0.94]`; a dash is a missing value. Brackets contain no blank, so that a narrow cell breaks before."""
    if number is None or number.value is None:
        return ABSENT
    value = f"{number.value:.{digits}f}"
    if number.low is None or number.high is None:
        return f"{value} [{ABSENT}]"
    return f"{value} [{number.low:.{digits}f},{number.high:.{digits}f}]"


def steps_to_exploit(attack: AttackRecord) -> str:
    """`140`, `> 200` for a censored attack, or why there is no number."""
    reasons = {"no_reference": "no reference", "no_signal": "no signal", "diverged": "diverged"}
    if attack.status in reasons:
        return reasons[attack.status]
    return f"> {attack.limit}" if attack.status == "censored" else str(attack.steps)


def evaluation_tables(report: EvaluationReport) -> Group:
    """All parts of the report that exist, for the terminal."""
    parts: list[RenderableType] = [_headline(report)]
    for found in _tables(report):
        if body := _on_terminal(found):
            parts += section(found.long_title, Group(*body))
    remarks = [
        *(f"{part}: computed from other settings or samples, not shown." for part in report.stale),
        *report.notes,
    ]
    if remarks:
        parts += section("Notes", Text("\n".join(remarks), style="yellow"))
    return Group(*parts)


def _headline(report: EvaluationReport) -> Text:
    colour = "green" if report.status == "complete" else "yellow"
    percent = 100 * CONFIDENCE
    return Text.assemble(
        (report.run, "bold"),
        (f"  evaluation of {report.rounds_finished} of {counted(report.rounds_planned, 'round')}  ", QUIET),
        (f"intervals at {percent:g}%  ", QUIET),
        (report.status, colour),
    )


def evaluation_section(report: EvaluationReport | None) -> PageSection:
    """The whole evaluation. Empty for a run without one."""
    if report is None:
        return PageSection("evaluation", "Evaluation", [])
    percent = 100 * CONFIDENCE
    body = [_notes(report), elements.grid(evaluation_charts(report))]
    for found in _tables(report):
        body.append(elements.details(found.title, _on_page(found)))
    lead = (
        f"By pvg evaluate, on fresh samples and with fresh attackers; {report.rounds_finished} of "
        f"{counted(report.rounds_planned, 'round')}, intervals at {percent:g} %."
    )
    return PageSection("evaluation", "Evaluation", body, lead)


def _on_terminal(found: EvaluationTable) -> list[RenderableType]:
    """The table and the examples of the newest round; the page has those of all rounds."""
    body: list[RenderableType] = []
    if found.table:
        body += [found.table, Text(found.reading, style=QUIET)]
    elif found.table.caption:
        body.append(Text(found.table.caption, style=QUIET))
    newest = max((example.round for example in found.examples), default=0)
    examples = [example for example in found.examples if example.round == newest]
    if examples:
        body += [Text()] if body else []
        body.append(examples_list(examples))
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


def _notes(report: EvaluationReport) -> Markup:
    partial = ["The evaluation is not finished: the same command continues it."] * (report.status == "partial")
    stale = [f"{part} was computed from other settings or samples and is not shown." for part in report.stale]
    return elements.notes([*partial, *stale, *report.notes])


# --- tables ------------------------------------------------------------------------------------------------------


class EvaluationTable(NamedTuple):
    """A table with its titles on the page and on the terminal, how to read it, and examples of what it measures. Empty
    without measurements."""

    title: str
    long_title: str
    table: Table
    reading: str
    examples: Sequence[Example] = ()


def _tables(report: EvaluationReport) -> list[EvaluationTable]:
    rounds = report.rounds
    return [
        EvaluationTable(
            "Steps to exploit",
            "Steps to exploit, and the trained attackers on test problems",
            _exploit(rounds),
            "More steps: the verifier is harder to fool. > is the limit, without success. wrong, gap and accepted "
            "check the attacker on test problems: its share of wrong solutions, how far the verifier scores these "
            "below correct ones, and the share of them that it accepts. Only an attacker with many accepted wrong "
            "solutions fools it.",
        ),
        EvaluationTable(
            "What the attackers write",
            "What the attackers write on test problems",
            _kinds_of_flaws(rounds),
            "share: how many of the attacker's wrong solutions have this flaw, as the task's grader names it. "
            "accepted: how many of these the verifier accepts. Flaws with a share below 1 % are only in "
            "evaluation.json. Below: typical solutions, each with a score near the median of its kind.",
            attack_examples(rounds),
        ),
        EvaluationTable(
            "Detection",
            "Detection at the run's threshold",
            _detection(rounds),
            "Higher is better. completeness: helpful solutions that are correct and accepted. soundness: wrong sneaky "
            "solutions (flaws) that are rejected. AUC: whether flaws score below correct solutions; 0.5 is chance.",
        ),
        EvaluationTable(
            "Best of n",
            "Best of n",
            _best_of_n(rounds),
            "How often the solution with the best score is correct. balanced: half of n are correct, so chance is "
            "0.5. natural: n helpful solutions as sampled. chance chooses at random, and pass@n is the best possible "
            "choice.",
        ),
        EvaluationTable(
            "Separability of the roles by style",
            "Separability of the roles by style (AUC, 0.5 is chance)",
            _separability(rounds),
            "Near 0.5, style does not give the roles away; near 1 it does. Read the two columns 'within': 'overall' "
            "also counts that one role is correct more often.",
        ),
        EvaluationTable(
            "Legibility tax",
            "Legibility tax at the same KL",
            _tax(report),
            "tax: the accuracy of a prover that was trained for correctness only (baseline), minus that of the run's "
            "prover at the same KL. Above 0, legibility costs accuracy. ≥: the baseline has a smaller KL even at its "
            "largest, and reaches this accuracy there.",
        ),
        EvaluationTable(
            "Calibration",
            "Calibration",
            _calibration(rounds),
            "Lower is better. ECE: the mean gap between predicted and true probability; compare it with the ECE that "
            "chance alone gives. Brier: the mean squared error of the probability; always saying 0.5 has 0.25.",
        ),
        EvaluationTable(
            "Flaw localisation",
            "Locating the flaw by the largest fall of the score",
            _localisation(rounds),
            "gain: how much more often the verifier's largest fall is at the wrong step than a guess. 0 is no better "
            "than guessing.",
        ),
    ]


def _table(*columns: Column) -> Table:
    """Two blanks between columns, as in the rounds table: most of these tables fit into 80 columns."""
    return Table([Column("round"), *columns], narrow=True)


def _number_column(title: str, style: str = "", *, short: str | None = None, on: Where = "everywhere") -> Column:
    return Column(title, "right", style, short, on=on)


def _exploit(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table(
        _number_column("attacker"),
        _number_column("steps", "strong"),
        _number_column("closest gap", short="closest"),
        _number_column("at step", on="pages"),
        _number_column("wrong", "sneaky"),
        _number_column("gap", "sneaky"),
        _number_column("accepted", "verifier"),
        _number_column("solutions", on="pages"),
    )
    for found in rounds:
        for attack in found.exploit or ():
            check = attack.check
            table.add(
                str(found.round),
                attack.kind,
                steps_to_exploit(attack),
                ABSENT if attack.closest_gap is None else f"{attack.closest_gap:.2f}",
                ABSENT if attack.closest_step is None else str(attack.closest_step),
                interval(check.error_rate if check else None),
                interval(check.gap if check else None),
                interval(check.accepted if check else None),
                str(check.error_rate.n) if check else attack.reason,
            )
    return table


def _kinds_of_flaws(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table(
        Column("attacker"),
        Column("flaw"),
        _number_column("share", "sneaky"),
        _number_column("accepted", "verifier"),
        _number_column("solutions", "quiet", on="pages"),
    )
    for found in rounds:
        for attack in found.exploit or ():
            for kind in attack.check.kinds if attack.check else ():
                if (kind.share.value or 0.0) >= RARE:
                    counts = (interval(kind.share), interval(kind.accepted), str(kind.accepted.n))
                    table.add(str(found.round), attack.kind, kind.kind, *counts)
    return table


def attack_examples(rounds: Sequence[RoundEvaluation]) -> list[Example]:
    """The example solutions of all attackers, with the decision of the attacked verifier."""
    return [
        _example(found.round, attack.kind, attack.check, example)
        for found in rounds
        for attack in found.exploit or ()
        if attack.check is not None
        for example in attack.check.examples
    ]


def _example(round_: int, kind: str, check: AttackCheck, example: FlawExample) -> Example:
    decision = "accepted" if example.accepted else "refused"
    threshold = "" if check.threshold is None else f" at threshold {check.threshold:+.2f}"
    return Example(
        why=f"{kind} attacker of round {round_}, {decision}{threshold}",
        id=example.id,
        role=Role.SNEAKY.value,
        round=round_,
        source=source_of_round(round_),
        question=example.question,
        text=example.solution,
        reference=example.reference,
        answer=example.answer,
        correct=False,
        well_formed=True,
        note=example.note,
        score=example.score,
        reward=None,
    )


def _detection(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table(
        _number_column("of"),
        _number_column("n", "quiet"),
        _number_column("problems", "quiet", on="pages"),
        _number_column("completeness", "helpful"),
        _number_column("soundness", "sneaky"),
        _number_column("AUC", "verifier"),
    )
    for found in rounds:
        if found.detection is None:
            continue
        whole = found.detection.completeness
        counts = (str(whole.n), str(whole.problems))
        table.add(str(found.round), "helpful solutions", *counts, interval(whole), "", "")
        for flaws in found.detection.sources:
            sound = flaws.soundness
            counts = (str(sound.n), str(sound.problems))
            table.add("", f"flaws of {flaws.source}", *counts, "", interval(sound), interval(flaws.auc))
    return table


def _best_of_n(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table(
        _number_column("by"),
        _number_column("n"),
        _number_column("balanced", "verifier"),
        _number_column("problems", "quiet", short="of"),
        _number_column("natural", "helpful"),
        _number_column("pass@n"),
        _number_column("chance", "quiet", on="pages"),
        _number_column("chance", "quiet", on="terminal"),  # without its interval: there is little room
    )
    for found in rounds:
        for curves in found.best_of_n or ():
            natural = {point.n: point for point in curves.natural}
            for place, point in enumerate(curves.balanced):
                other = natural.get(point.n)
                table.add(
                    str(found.round) if not place else "",
                    curves.source if not place else "",
                    str(point.n),
                    interval(point.accuracy),
                    f"{point.accuracy.n}/{point.accuracy.n + point.excluded}",
                    interval(other.accuracy if other else None),
                    interval(other.pass_at_n if other else None),
                    interval(other.chance if other else None),
                    f"{other.chance.value:.2f}" if other and other.chance.value is not None else ABSENT,
                )
    return table


def _separability(rounds: Sequence[RoundEvaluation]) -> Table:
    samples = _number_column("n", "quiet", on="pages")
    table = _table(
        _number_column("overall", "strong"),
        samples,
        _number_column("within correct", "helpful"),
        samples,
        _number_column("within incorrect", "sneaky"),
        samples,
    )
    for found in rounds:
        if (probe := found.separability) is not None:
            cells = [(interval(n), str(n.n)) for n in (probe.overall, probe.correct, probe.incorrect)]
            table.add(str(found.round), *(text for cell in cells for text in cell))
    return table


def _tax(report: EvaluationReport) -> Table:
    columns = [
        Column("policy"),
        _number_column("KL, nats per solution", short="KL per solution"),
        _number_column("per token", "quiet"),
        _number_column("accuracy", "helpful"),
        _number_column("tax", "strong"),
    ]
    table = Table(columns, narrow=True)
    for point in report.baseline.points if report.baseline else ():
        kls = (interval(point.kl), interval(point.kl_per_token, digits=3))
        table.add(f"baseline {point.name}", *kls, interval(point.accuracy), "")
    for found in report.rounds:
        if found.tax is not None:
            policy, cost = found.tax.policy, interval(found.tax.tax)
            if not found.tax.in_range and cost != ABSENT:
                cost = f"≥ {cost}"
            kls = (interval(policy.kl), interval(policy.kl_per_token, digits=3))
            table.add(policy.name, *kls, interval(policy.accuracy), cost)
    return table


def _calibration(rounds: Sequence[RoundEvaluation]) -> Table:
    table = _table(
        _number_column("probability"),
        _number_column("n", "quiet"),
        _number_column("ECE", "verifier"),
        _number_column("ECE by chance", "quiet", short="by chance"),
        _number_column("Brier", "verifier"),
    )
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
    table = _table(
        _number_column("solutions", "quiet"),
        _number_column("located", "strong"),
        _number_column("by guessing", "quiet"),
        _number_column("gain", "verifier"),
    )
    for found in rounds:
        if (one := found.localisation) is not None and one.known:
            chance = ABSENT if one.chance is None else f"{one.chance:.3f}"
            table.add(str(found.round), str(one.solutions), interval(one.accuracy), chance, interval(one.gain))
    if not table and any(found.localisation is not None for found in rounds):
        table.caption = "Not known by this task."
    return table
