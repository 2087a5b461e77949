"""What `pvg evaluate` found, as terminal tables: numbers with the intervals that they have, and what they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pvg.evaluation.report import AttackRecord, EvaluationReport, NumberRecord, RoundEvaluation
from pvg.reporting.figures import ABSENT
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, VERIFIER, section


def interval(number: NumberRecord | None, *, digits: int = 2) -> str:
    """`0.91 [0.88,0.94]`, with a dash for what there is not. No blank in the brackets: a narrow cell breaks before."""
    if number is None or number.value is None:
        return ABSENT
    value = f"{number.value:.{digits}f}"
    if number.low is None or number.high is None:
        return f"{value} [{ABSENT}]"
    return f"{value} [{number.low:.{digits}f},{number.high:.{digits}f}]"


def _value(number: NumberRecord) -> str:
    return ABSENT if number.value is None else f"{number.value:.2f}"


def steps_to_exploit(attack: AttackRecord) -> str:
    """`140`, `> 200` for a censored attack, or why there is no number."""
    words = {"no_reference": "no reference", "no_signal": "no signal", "diverged": "diverged"}
    if attack.status in words:
        return words[attack.status]
    return f"> {attack.limit}" if attack.status == "censored" else str(attack.steps)


def evaluation_tables(report: EvaluationReport) -> Group:
    """All parts that are there, in the order of the report."""
    parts: list[RenderableType] = [_headline(report)]
    rounds = report.rounds
    for title, table in (
        ("Steps to exploit, and the trained attackers on test problems", _exploit(rounds)),
        ("Detection at the run's threshold", _detection(rounds)),
        ("Best of n", _best_of_n(rounds)),
        ("Telling helpful from sneaky by style (AUC, 0.5 is not at all)", _separability(rounds)),
        ("Legibility tax at the same KL", _tax(report)),
        ("Calibration", _calibration(rounds)),
        ("Locating the flaw by the largest fall of the score", _localisation(rounds)),
    ):
        if table is not None:
            parts += section(title, table)
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
