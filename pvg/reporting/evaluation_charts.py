"""The charts of an evaluation on a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from pvg.evaluation.report import CalibrationErrors, EvaluationReport, NumberRecord, RoundEvaluation
from pvg.reporting.charts import ChartLine, ReferenceLine, XAxis, line_chart, round_axis

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
