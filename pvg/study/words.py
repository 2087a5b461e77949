"""The results as short text: figures, and sentences on what they can and cannot say. The terminal, Markdown and the
page share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pvg.reporting.figures import ABSENT, Style, styled
from pvg.study.results import CellRecord, MeasureRecord, StudyResults
from pvg.study.statistics import LEAST_FOR_INTERVAL, LEVEL, Comparison, Summary, Trend, least_p, seeds_needed


def value_text(measure: MeasureRecord, value: float | None) -> str:
    return styled(cast(Style, measure.style), value)


def change_text(measure: MeasureRecord, value: float | None) -> str:
    """A difference, with its sign; of shares in percentage points."""
    if value is None:
        return ABSENT
    if measure.style == "share":
        return f"{100 * value + 0.0:+.1f} pp"
    if measure.style in ("auc", "score", "number"):
        return f"{value + 0.0:+.{3 if measure.style == 'auc' else 2}f}"
    return f"{'+' if value >= 0 else '-'}{value_text(measure, abs(value))}"


def middle_text(measure: MeasureRecord, summary: Summary) -> str:
    """The mean; with censored values the median, which may lie among them."""
    if not summary.censored:
        return value_text(measure, summary.mean)
    return f"median {value_text(measure, summary.median)}" if summary.median is not None else "median not found"


def spread_text(measure: MeasureRecord, summary: Summary) -> str:
    """The 95 % interval of the mean, or what there is in its place."""
    if summary.n == 0:
        return "no value"
    if summary.censored:
        return f"{100 * summary.censored:.0f} % not found"
    if summary.low is not None and summary.high is not None:
        return _from_to(value_text(measure, summary.low), value_text(measure, summary.high))
    return ABSENT


def range_text(measure: MeasureRecord, summary: Summary) -> str:
    if summary.n == 0:
        return ABSENT
    low = "not found" if summary.minimum is None else value_text(measure, summary.minimum)
    high = "not found" if summary.maximum is None else value_text(measure, summary.maximum)
    return low if low == high else _from_to(low, high)


def _from_to(low: str, high: str) -> str:
    """Two figures with their unit once."""
    for unit in (" %", " pp", " s"):
        if low.endswith(unit) and high.endswith(unit):
            return f"{low.removesuffix(unit)} to {high}"
    return f"{low} to {high}"


def rounds_text(measure: MeasureRecord, rounds: Sequence[Summary]) -> str:
    """The middle of every round, as long as they fit."""
    if len(rounds) < 2:
        return ""
    told = [middle_text(measure, summary).replace(" %", "").replace("median ", "") for summary in rounds]
    if len(told) > 6:
        told = [*told[:2], "…", *told[-2:]]
    return " → ".join(told)


def interval_text(measure: MeasureRecord, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ABSENT
    return _from_to(change_text(measure, low), change_text(measure, high))


def signs_text(up: int, down: int, equal: int) -> str:
    """Seeds that are higher, lower, neither."""
    return f"{up}↑ {down}↓" + (f" {equal}=" if equal else "")


def p_text(p: float | None) -> str:
    if p is None:
        return ABSENT
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1g}"


def comparison_cells(measure: MeasureRecord, found: Comparison) -> list[str]:
    """Difference, interval, signs, p, adjusted p."""
    if not found.n:
        return [ABSENT] * 5
    difference = "by rank" if found.test == "signed ranks" else change_text(measure, found.difference)
    return [
        difference,
        interval_text(measure, found.low, found.high),
        signs_text(found.up, found.down, found.equal),
        p_text(found.p),
        p_text(found.p_adjusted),
    ]


def trend_cells(measure: MeasureRecord, found: Trend) -> list[str]:
    """Last less first, its interval, signs, tau, p."""
    if not found.n:
        return [ABSENT] * 5
    return [
        change_text(measure, found.change),
        interval_text(measure, found.low, found.high),
        signs_text(found.up, found.down, found.flat),
        ABSENT if found.tau is None else f"{found.tau:+.2f}",
        p_text(found.p),
    ]


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def threads_each(threads: int) -> str:
    """The threads of each game; `threads` is its `models.threads`."""
    return f"{counted(threads, 'thread')} each" if threads else "threads by the size of the model"


def cell_text(cell: CellRecord) -> str:
    return f"{cell.arm} seed {cell.seed}"


def cautions(results: StudyResults) -> list[str]:
    """What a reader must know before believing a figure: one sentence each."""
    found = []
    missing = [cell for cell in results.cells if cell.status not in ("played", "complete")]
    unevaluated = [cell for cell in results.cells if cell.status == "played"]
    for cells, what, which in (
        (missing, "not there", "every figure"),
        (unevaluated, "not evaluated", "what an evaluation measures"),
    ):
        if cells:
            names = ", ".join(cell_text(cell) for cell in cells[:4]) + (" and others" if len(cells) > 4 else "")
            found.append(f"{len(cells)} of {len(results.cells)} games are {what} ({names}): {which} is of the rest.")
    most = max((result.summary.n for result in results.results), default=0)
    if 0 < most < LEAST_FOR_INTERVAL:
        found.append(
            f"With {counted(most, 'seed')} there is no interval worth the name; "
            "it takes three, and a table that is to convince somebody takes five or more."
        )
    if any(result.summary.censored for result in results.results):
        found.append(
            "Values that were not found within their limit count as larger than all others: they have a place in "
            "medians and ranks, and none in means."
        )
    found += _on_p_values(results)
    machines = {cell.machine for cell in results.cells if cell.machine}
    versions = {cell.code_version for cell in results.cells if cell.code_version}
    if len(machines) > 1:
        found.append(f"The games were played on different machines or threads ({'; '.join(sorted(machines))}).")
    if len(versions) > 1:
        found.append(f"The games were played by different versions of pvg: {', '.join(sorted(versions))}.")
    return found


def _on_p_values(results: StudyResults) -> list[str]:
    pairs = max((found.comparison.n for found in results.comparisons), default=0)
    if not pairs or not results.family:
        return []
    least, family = least_p(pairs), results.family
    said = f"With {counted(pairs, 'pair')} no p value can be below {least:.3g}"
    if least > LEVEL:
        said += f": no difference can be called significant at {LEVEL}, however large"
    elif min(1.0, least * family) > LEVEL:
        said += f": after Holm's adjustment over {family} comparisons none can reach {LEVEL}"
    else:
        return []
    needed = f"{seeds_needed(1)} seeds could for one comparison"
    if family > 1:
        needed += f", {seeds_needed(family)} for the {family} of this table"
    return [f"{said}. {needed}. Read the differences and the signs."]
