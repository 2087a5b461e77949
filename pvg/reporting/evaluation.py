"""What `pvg evaluate` found, as terminal tables: numbers with the intervals that they have, and what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pvg.evaluation.report import Attack, Calibrated, EvaluationReport, Number, RoundEvaluation
from pvg.reporting.axes import Across
from pvg.reporting.charts import Line, Reference, line_chart
from pvg.reporting.formats import ABSENT
from pvg.reporting.html import Html, Piece, Section, details, grid, table, tag
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, VERIFIER, section


def interval(number: Number | None, *, digits: int = 2) -> str:
    """`0.91 [0.88,0.94]`, with a dash for what there is not. No blank in the brackets: a narrow cell breaks before."""
    if number is None or number.value is None:
        return ABSENT
    value = f"{number.value:.{digits}f}"
    if number.low is None or number.high is None:
        return f"{value} [{ABSENT}]"
    return f"{value} [{number.low:.{digits}f},{number.high:.{digits}f}]"


def _value(number: Number) -> str:
    return ABSENT if number.value is None else f"{number.value:.2f}"


def steps_to_exploit(attack: Attack) -> str:
    """`140`, `> 200` for a censored attack, or why there is no number."""
    words = {"no_reference": "no reference", "no_signal": "no signal", "diverged": "diverged"}
    if attack.status in words:
        return words[attack.status]
    return f"> {attack.limit}" if attack.status == "censored" else str(attack.steps)


def evaluation_tables(report: EvaluationReport) -> Group:
    """All parts that are there, in the order of the report."""
    parts: list[RenderableType] = [_headline(report)]
    rounds = report.rounds
    for title, body in (
        ("Steps to exploit, and the trained attackers on test problems", _exploit(rounds)),
        ("Detection at the run's threshold", _detection(rounds)),
        ("Best of n", _best_of_n(rounds)),
        ("Telling helpful from sneaky by style (AUC, 0.5 is not at all)", _separability(rounds)),
        ("Legibility tax at the same KL", _tax(report)),
        ("Calibration", _calibration(rounds)),
        ("Locating the flaw by the largest fall of the score", _localisation(rounds)),
    ):
        if body is not None:
            parts += section(title, body)
    remarks = [
        *(f"{part}: computed from other settings or samples, not shown." for part in report.stale),
        *report.notes,
    ]
    if remarks:
        parts += section("Notes", Text("\n".join(remarks), style="yellow"))
    return Group(*parts)


def _headline(report: EvaluationReport) -> Text:
    colour = "green" if report.status == "complete" else "yellow"
    percent = 100 * float(report.settings["confidence"])
    return Text.assemble(
        (report.run, "bold"),
        (f"  evaluation of {report.rounds_finished} of {report.rounds_planned} rounds  ", QUIET),
        (f"intervals at {percent:g}%  ", QUIET),
        (report.status, colour),
    )


def _table(*columns: tuple[str, str]) -> Table:
    # Two blanks between columns, as in the rounds table: most of them fit into 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.header_style = table.border_style = QUIET
    for place, (heading, style) in enumerate(columns):
        table.add_column(heading, style=style, justify="right" if place else "left", overflow="fold")
    return table


def _exploit(rounds: Sequence[RoundEvaluation]) -> Table | None:
    table = _table(("round", ""), ("attacker", ""), ("steps", "bold"), ("closest", ""), ("wrong", SNEAKY),
                   ("gap", SNEAKY), ("accepted", VERIFIER))  # fmt: skip
    for found in rounds:
        for attack in found.exploit or ():
            check = attack.check
            table.add_row(
                str(found.round),
                attack.kind,
                steps_to_exploit(attack),
                ABSENT if attack.closest_gap is None else f"{attack.closest_gap:.2f}",
                interval(check.error_rate if check else None),
                interval(check.gap if check else None),
                interval(check.accepted if check else None),
            )
    return table if table.row_count else None


def _detection(rounds: Sequence[RoundEvaluation]) -> Table | None:
    table = _table(("round", ""), ("of", ""), ("n", QUIET), ("completeness", HELPFUL), ("soundness", SNEAKY),
                   ("AUC", VERIFIER))  # fmt: skip
    for found in rounds:
        if found.detection is None:
            continue
        complete = found.detection.completeness
        table.add_row(str(found.round), "helpful solutions", str(complete.n), interval(complete), "", "")
        for flaws in found.detection.sources:
            name = f"flaws of {flaws.source}"
            table.add_row("", name, str(flaws.soundness.n), "", interval(flaws.soundness), interval(flaws.auc))
    return table if table.row_count else None


def _best_of_n(rounds: Sequence[RoundEvaluation]) -> Table | None:
    table = _table(("round", ""), ("by", ""), ("n", ""), ("balanced", VERIFIER), ("of", QUIET),
                   ("natural", HELPFUL), ("pass@n", ""), ("chance", QUIET))  # fmt: skip
    for found in rounds:
        for curves in found.best_of_n or ():
            natural = {point.n: point for point in curves.natural}
            for place, point in enumerate(curves.balanced):
                other = natural.get(point.n)
                table.add_row(
                    str(found.round) if not place else "",
                    curves.source if not place else "",
                    str(point.n),
                    interval(point.accuracy),
                    f"{point.accuracy.n}/{point.accuracy.n + point.excluded}",
                    interval(other.accuracy if other else None),
                    interval(other.pass_at_n if other else None),
                    _value(other.chance) if other else ABSENT,
                )
    return table if table.row_count else None


def _separability(rounds: Sequence[RoundEvaluation]) -> Table | None:
    table = _table(("round", ""), ("overall", "bold"), ("within correct", HELPFUL), ("within incorrect", SNEAKY))
    for found in rounds:
        if found.separability is not None:
            probe = found.separability
            table.add_row(str(found.round), *map(interval, (probe.overall, probe.correct, probe.incorrect)))
    return table if table.row_count else None


def _tax(report: EvaluationReport) -> Table | None:
    table = _table(("policy", ""), ("KL per solution", ""), ("per token", QUIET), ("accuracy", HELPFUL),
                   ("tax", "bold"))  # fmt: skip
    for point in report.baseline.points if report.baseline else ():
        table.add_row(
            point.name, interval(point.kl), interval(point.kl_per_token, digits=3), interval(point.accuracy), ""
        )
    for found in report.rounds:
        if found.tax is None:
            continue
        policy, low, high = found.tax.policy, *found.tax.kl_range
        cost = interval(found.tax.tax) if found.tax.in_range else f"KL not in [{low:.2f}, {high:.2f}]"
        table.add_row(
            policy.name, interval(policy.kl), interval(policy.kl_per_token, digits=3), interval(policy.accuracy), cost
        )
    return table if table.row_count else None


def _calibration(rounds: Sequence[RoundEvaluation]) -> Table | None:
    table = _table(
        ("round", ""), ("probability", ""), ("n", QUIET), ("ECE", VERIFIER), ("by chance", QUIET), ("Brier", VERIFIER)
    )
    for found in rounds:
        if found.calibration is None:
            continue
        raw_name = "sigmoid(score)" if found.calibration.raw_is_probability else "sigmoid(score), no probability"
        for name, one in ((raw_name, found.calibration.raw), ("Platt fit, held out", found.calibration.fitted)):
            if one is not None:
                chance = ABSENT if one.ece_by_chance is None else f"{one.ece_by_chance:.2f}"
                table.add_row(str(found.round), name, str(one.ece.n), interval(one.ece), chance, interval(one.brier))
    return table if table.row_count else None


def _localisation(rounds: Sequence[RoundEvaluation]) -> RenderableType | None:
    there = [(found.round, found.localisation) for found in rounds if found.localisation is not None]
    if there and not any(one.known for _, one in there):
        return Text("Not known by this task.", style=QUIET)
    table = _table(("round", ""), ("solutions", QUIET), ("located", "bold"), ("by guessing", QUIET), ("gain", VERIFIER))
    for round_, one in there:
        chance = ABSENT if one.chance is None else f"{one.chance:.3f}"
        table.add_row(str(round_), str(one.solutions), interval(one.accuracy), chance, interval(one.gain))
    return table if table.row_count else None


# What `pvg evaluate` found of a run, as tables and charts. Numbers stand with the intervals that they have.

SHADES = 6  # run-0 to run-5 of the style sheet
KINDS = ("src", "cgc", "goodhart")
ASIDE = 0.05  # of a round: censored attacks of all kinds end at one limit, and would hide each other


def evaluation_section(report: EvaluationReport | None) -> Section:
    """The whole evaluation; nothing for a run that has none."""
    if report is None:
        return Section("evaluation", "Evaluation", [])
    rounds = report.rounds
    percent = 100 * float(report.settings["confidence"])
    body = [
        _notes(report),
        grid(_exploit_chart(rounds), _auc_chart(rounds), _roc_chart(rounds), _balanced_chart(rounds),
             _natural_chart(rounds), _reliability_chart(rounds), _tax_chart(report)),
        _part("Steps to exploit", _exploit_table(rounds)),
        _part("Detection", _detection_table(rounds)),
        _part("Best of n", _best_of_n_table(rounds)),
        _part("Separability of the roles by style", _separability_table(rounds)),
        _part("Legibility tax", _tax_table(report)),
        _part("Calibration", _calibration_table(rounds)),
        _part("Flaw localisation", _localisation_table(rounds)),
    ]  # fmt: skip
    lead = (
        f"By pvg evaluate, on fresh samples and with fresh attackers; {report.rounds_finished} of "
        f"{report.rounds_planned} rounds, intervals at {percent:g} %."
    )
    return Section("evaluation", "Evaluation", body, lead)


def _notes(report: EvaluationReport) -> Html | None:
    partial = ["Not all that was asked for is there yet: the same command goes on."] * (report.status == "partial")
    stale = [f"{part} was computed from other settings or samples and is not shown." for part in report.stale]
    found = [*partial, *stale, *report.notes]
    return tag("ul", *(tag("li", note) for note in found), class_="notes") if found else None


def _part(title: str, found: Html | None) -> Html | None:
    return details(title, found) if found is not None else None


# --- charts ------------------------------------------------------------------------------------------------------


def _by_round(rounds: Sequence[RoundEvaluation]) -> Across:
    numbers = [found.round for found in rounds] or [0]
    every = -(-len(numbers) // 12)
    ticks = tuple((float(n), str(n)) for place, n in enumerate(numbers) if place % every == 0)
    return Across(min(numbers) - 0.25, max(numbers) + 0.25, "round", ticks)


def _line(name: str, style: str, points: Iterable[tuple[float, Number]], dash: str = "") -> Line:
    """A line through the numbers that have a value, with their intervals."""
    there = [(x, n.value, n.low, n.high) for x, n in points if n.value is not None]
    whiskers = [(x, low, high) for x, _, low, high in there if low is not None and high is not None]
    piece = [(x, value) for x, value, _, _ in there]
    return Line(name, [piece] if piece else [], style, dash, dots=True, whiskers=whiskers)


def _exploit_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    lines = []
    censored: list[tuple[float, float]] = []
    for place, kind in enumerate(KINDS):
        points = []
        for found in rounds:
            for attack in found.exploit or ():
                if attack.kind == kind and attack.steps is not None:
                    points.append((found.round + ASIDE * (place - 1), float(attack.steps)))
                    censored += [points[-1]] * (attack.status == "censored")
        lines.append(Line(kind, [points] if points else [], f"run-{place}", dots=True))
    kinds = [line.name for line in lines if line.values]
    limits = sorted({attack.limit for found in rounds for attack in found.exploit or ()})
    note = "Points at the limit are censored: no exploit was found within it." if censored else ""
    references = [Reference(float(limit), "limit") for limit in limits]
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


def _auc_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    def of(pick: Callable[[int, str], bool]) -> list[tuple[float, Number]]:
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
    reference = [Reference(0.5, "chance")]
    return line_chart(
        "AUC by round", lines, _by_round(rounds), "auc", references=reference, unit="helpful correct against flaws"
    )


def _roc_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    last = next((found for found in reversed(rounds) if found.detection is not None), None)
    if last is None or last.detection is None:
        return None
    lines = [
        Line(flaws.source, [[(x, y) for x, y in flaws.roc]] if flaws.roc else [], f"run-{place % SHADES}",
             "dashed" if place >= SHADES else "",
             spread=[(x, low, high) for x, _, low, high in flaws.band if low is not None and high is not None])
        for place, flaws in enumerate(last.detection.sources)
    ]  # fmt: skip
    x = Across(0.0, 1.0, "false-positive rate", _shares())
    areas = "Areas: an interval at each false-positive rate by itself; they hold the whole curve less often."
    title, note = f"ROC of round {last.round}, by source of flaws", areas if any(line.spread for line in lines) else ""
    return line_chart(title, lines, x, "share", unit="true-positive rate", note=note)


def _shares() -> tuple[tuple[float, str], ...]:
    return tuple((n / 4, f"{25 * n} %") for n in range(5))


def _sizes(rounds: Sequence[RoundEvaluation]) -> list[int]:
    curves = [one for found in rounds for one in found.best_of_n or ()]
    return sorted({p.n for one in curves for p in one.balanced} | {p.n for one in curves for p in one.natural})


def _over_n(rounds: Sequence[RoundEvaluation]) -> Across:
    sizes = _sizes(rounds)
    return Across(-0.25, max(0, len(sizes) - 1) + 0.25, "n", tuple((float(i), str(n)) for i, n in enumerate(sizes)))


def _balanced_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    places = {n: float(place) for place, n in enumerate(_sizes(rounds))}
    lines = [
        _line(
            f"round {found.round}", f"run-{found.round % SHADES}", [(places[p.n], p.accuracy) for p in curves.balanced]
        )
        for found in rounds
        for curves in found.best_of_n or ()
        if curves.source != "base"
    ]
    reference = [Reference(0.5, "chance")]
    return line_chart(
        "Balanced best of n",
        lines,
        _over_n(rounds),
        "share",
        references=reference,
        unit="correct choices, own solutions",
    )


def _natural_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    places = {n: float(place) for place, n in enumerate(_sizes(rounds))}
    last = next((found for found in reversed(rounds) if found.best_of_n), None)
    own = next((curves for curves in (last.best_of_n or () if last else ()) if curves.source != "base"), None)
    if last is None or own is None:
        return None
    lines = [
        _line("pass@n", "ink", [(places[p.n], p.pass_at_n) for p in own.natural], "dotted"),
        _line("chosen by the verifier", "verifier", [(places[p.n], p.accuracy) for p in own.natural]),
        _line("drawn at random", "ink", [(places[p.n], p.chance) for p in own.natural], "dashed"),
    ]
    return line_chart(
        f"Best of n helpful solutions, round {last.round}", lines, _over_n(rounds), "share", unit="correct"
    )


def _reliability_chart(rounds: Sequence[RoundEvaluation]) -> Html | None:
    last = next((found for found in reversed(rounds) if found.calibration is not None), None)
    if last is None or last.calibration is None:
        return None

    def line(name: str, style: str, found: Calibrated | None) -> Line:
        return _line(name, style, [(b.predicted, b.correct) for b in found.bins] if found else [])

    lines = [
        Line("calibrated", [[(0.0, 0.0), (1.0, 1.0)]], "ink", "dotted"),
        line("sigmoid(score)", "verifier", last.calibration.raw),
        line("Platt fit, held out", "run-1", last.calibration.fitted),
    ]
    x = Across(0.0, 1.0, "predicted", _shares())
    return line_chart(f"Reliability, round {last.round}", lines, x, "share", unit="correct, by predicted probability")


def _tax_chart(report: EvaluationReport) -> Html | None:
    """Accuracy over KL: the baseline's trajectory, and where the rounds' provers lie."""
    if report.baseline is None:
        return None
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
    low = min([0.0, *kls])
    ticks = tuple((low + (high - low) * i / 4, f"{low + (high - low) * i / 4:.3g}") for i in range(5))
    x = Across(low, high, "KL to the start, nats per solution", ticks)
    return line_chart("Accuracy at a KL", lines, x, "share", unit="helpful accuracy on test problems")


# --- tables ------------------------------------------------------------------------------------------------------


def _rows(head: Sequence[str], rows: Sequence[Sequence[Piece]]) -> Html | None:
    return table(head, rows, "figures") if rows else None


def _exploit_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    head = ["round", "attacker", "steps", "closest gap", "at step", "wrong", "gap", "accepted", "solutions"]
    return _rows(head, [_attack_row(found.round, attack) for found in rounds for attack in found.exploit or ()])


def _attack_row(round_: int, attack: Attack) -> list[Piece]:
    check = attack.check
    return [
        str(round_),
        attack.kind,
        steps_to_exploit(attack),
        ABSENT if attack.closest_gap is None else f"{attack.closest_gap:.2f}",
        ABSENT if attack.closest_step is None else str(attack.closest_step),
        interval(check.error_rate if check else None),
        interval(check.gap if check else None),
        interval(check.accepted if check else None),
        str(check.error_rate.n) if check else attack.reason,
    ]


def _detection_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    head = ["round", "of", "n", "problems", "completeness", "soundness", "AUC"]
    rows: list[list[Piece]] = []
    for found in rounds:
        if found.detection is None:
            continue
        whole = found.detection.completeness
        rows.append([str(found.round), "helpful solutions", str(whole.n), str(whole.problems), interval(whole), "", ""])
        for flaws in found.detection.sources:
            sound = flaws.soundness
            rows.append(
                [
                    "",
                    f"flaws of {flaws.source}",
                    str(sound.n),
                    str(sound.problems),
                    "",
                    interval(sound),
                    interval(flaws.auc),
                ]
            )
    return _rows(head, rows)


def _best_of_n_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    head = ["round", "by", "n", "balanced", "problems", "natural", "pass@n", "chance"]
    rows: list[list[Piece]] = []
    for found in rounds:
        for curves in found.best_of_n or ():
            natural = {point.n: point for point in curves.natural}
            for point in curves.balanced:
                other = natural.get(point.n)
                rows.append(
                    [
                        str(found.round),
                        curves.source,
                        str(point.n),
                        interval(point.accuracy),
                        f"{point.accuracy.n} of {point.accuracy.n + point.excluded}",
                        *(
                            interval(n)
                            for n in ((other.accuracy, other.pass_at_n, other.chance) if other else (None,) * 3)
                        ),
                    ]
                )
    return _rows(head, rows)


def _separability_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    head = ["round", "overall", "n", "within correct", "n", "within incorrect", "n"]
    rows = []
    for found in rounds:
        if (probe := found.separability) is not None:
            cells = [(interval(n), str(n.n)) for n in (probe.overall, probe.correct, probe.incorrect)]
            rows.append([str(found.round), *(piece for cell in cells for piece in cell)])
    return _rows(head, rows)


def _tax_table(report: EvaluationReport) -> Html | None:
    head = ["policy", "KL, nats per solution", "per token", "accuracy", "tax"]
    points = report.baseline.points if report.baseline else []
    rows: list[list[Piece]] = [
        [f"baseline {p.name}", interval(p.kl), interval(p.kl_per_token, digits=4), interval(p.accuracy), ""]
        for p in points
    ]
    for found in report.rounds:
        if (cost := found.tax) is not None:
            p, (low, high) = cost.policy, cost.kl_range
            told = interval(cost.tax) if cost.in_range else f"KL out of the baseline's range [{low:.2f}, {high:.2f}]"
            rows.append([p.name, interval(p.kl), interval(p.kl_per_token, digits=4), interval(p.accuracy), told])
    return _rows(head, rows)


def _calibration_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    rows: list[list[Piece]] = []
    for found in rounds:
        if found.calibration is None:
            continue
        raw = "sigmoid(score)" if found.calibration.raw_is_probability else "sigmoid(score), no probability"
        for name, one in ((raw, found.calibration.raw), ("Platt fit, held out", found.calibration.fitted)):
            if one is not None:
                chance = ABSENT if one.ece_by_chance is None else f"{one.ece_by_chance:.3f}"
                rows.append([str(found.round), name, str(one.ece.n), interval(one.ece), chance, interval(one.brier)])
    return _rows(["round", "probability", "n", "ECE", "ECE by chance", "Brier"], rows)


def _localisation_table(rounds: Sequence[RoundEvaluation]) -> Html | None:
    there = [(found.round, found.localisation) for found in rounds if found.localisation is not None]
    if there and not any(one.known for _, one in there):
        return tag("p", "Not known by this task.", class_="empty")
    rows = [
        [
            str(round_),
            str(one.solutions),
            interval(one.accuracy),
            ABSENT if one.chance is None else f"{one.chance:.3f}",
            interval(one.gain),
        ]
        for round_, one in there
    ]
    return _rows(["round", "solutions", "located", "by guessing", "gain"], rows)
