"""What `pvg study` prints: the studies there are, the plan of one, and its results."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.output import quiet_table
from pvg.reporting.formats import duration
from pvg.reporting.terminal import HEADING, QUIET, section
from pvg.study.cells import CellProgress
from pvg.study.plan import StudyEvaluation, StudyFile, StudyPlan
from pvg.study.results import StudyResults
from pvg.study.text import (
    cautions,
    comparison_cells,
    middle_text,
    range_text,
    rounds_text,
    spread_text,
    threads_each,
    trend_cells,
)

MARKS = {
    "complete": ("✓", "green"),
    "played": ("◐", "cyan"),
    "unfinished": ("◐", "cyan"),
    "new": ("○", QUIET),
    "damaged": ("✗", "red"),
    "failed": ("✗", "red"),
}


def studies_table(studies: Mapping[str, StudyFile]) -> Group:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, file in studies.items():
        table.add_row(name, file.about)
    return Group(table, Text(), Text.assemble(("Play one with: ", QUIET), ("pvg study NAME", "bold cyan")))


def plan_table(plan: StudyPlan, now: Mapping[str, CellProgress]) -> Group:
    """Arms and seeds with how far each is, and the work that is left."""
    table = quiet_table()
    table.add_column("arm", style="bold")
    table.add_column(f"seeds {', '.join(map(str, plan.seeds))}", no_wrap=True, max_width=24)
    table.add_column("steps each", justify="right")
    table.add_column("settings", style=QUIET, overflow="fold")
    for arm in plan.arms:
        cells = [plan.cell(arm, seed) for seed in plan.seeds]
        marks = Text.assemble(
            *((f"{mark} ", style) for mark, style in (MARKS[_state_of(now[cell.name])] for cell in cells))
        )
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        table.add_row(arm.name, marks, f"{cells[0].steps:,}", settings)
    threads = threads_each(plan.threads)
    left = sum(cell.steps - now[cell.name].done for cell in plan.cells)
    complete = sum(standing.status == "complete" for standing in now.values())
    return Group(
        headline(plan.name, f"{len(plan.arms)} arms x {len(plan.seeds)} seeds = {len(plan.cells)} games"),
        Text(),
        table,
        Text(),
        Text.assemble(
            (f"{complete} complete. ", QUIET),
            (f"{left:,}", "bold"),
            (f" of {plan.steps:,} optimizer steps to go, {plan.processes} at a time, {threads}", QUIET),
            (f"{_evaluation(plan.evaluate)}.", QUIET),
        ),
        Text(f"They would lie in {plan.folder}.", style=QUIET),
    )


def _evaluation(evaluate: StudyEvaluation | None) -> str:
    if evaluate is None:
        return ""
    return ", each game evaluated afterwards" + (" (its last round)" if evaluate.rounds == "last" else "")


def _state_of(standing: CellProgress) -> str:
    return "failed" if standing.reason else standing.status


def headline(name: str, rest: str) -> Text:
    return Text.assemble((name, "bold"), (f"  {rest}", QUIET))


def results_text(results: StudyResults, commands: Mapping[str, str]) -> Group:
    """Everything that stands at the end."""
    seconds = sum(cell.seconds or 0.0 for cell in results.cells)
    counted = f"{results.complete} of {len(results.cells)} games complete"
    parts: list[RenderableType] = [headline(results.name, f"{counted}  {duration(seconds)} of playing")]
    parts += section("Measures after the last round", means_table(results))
    if results.comparisons:
        parts += section(f"Against {results.reference}, paired by seed", comparisons_table(results))
    if any(result.trend is not None and result.trend.n for result in results.results):
        parts += section("Over the rounds", trends_table(results))
    if results.failed:
        parts += section("Failed", failures_table(results))
    if told := cautions(results):
        parts += section("Before believing it", Group(*(Text(f"- {sentence}", overflow="fold") for sentence in told)))
    parts.append(Text())
    for command, what in commands.items():
        parts.append(Text.assemble("  ", (command, "bold cyan"), (f"\n      {what}", QUIET), overflow="fold"))
    return Group(*parts)


def means_table(results: StudyResults) -> Table:
    table = quiet_table()
    for name, right in (("measure", False), ("arm", False), ("n", True), ("mean", True)):
        table.add_column(name, justify="right" if right else "left")
    for name in ("95 % interval", "range", "by round"):
        table.add_column(name, style=QUIET if name == "by round" else "")
    for measure in results.measures:
        for place, arm in enumerate(results.arms):
            found = results.result(arm.name, measure.name)
            table.add_row(
                Text(measure.label if not place else "", style=HEADING),
                arm.name,
                _count(found.summary.n, len(results.seeds)),
                Text(middle_text(measure, found.summary), style="bold"),
                spread_text(measure, found.summary),
                range_text(measure, found.summary),
                rounds_text(measure, found.rounds),
                end_section=place == len(results.arms) - 1,
            )
    return table


def _count(n: int, of: int) -> Text:
    return Text(str(n) if n == of else f"{n} of {of}", style="" if n == of else "yellow")


def comparisons_table(results: StudyResults) -> Table:
    table = quiet_table()
    for name in ("measure", "arm"):
        table.add_column(name)
    for name in ("difference", "95 % interval", "seeds", "p", f"p of {results.family}"):
        table.add_column(name, justify="right")
    measures = {measure.name: measure for measure in results.measures}
    before = ""
    for found in results.comparisons:
        measure = measures[found.measure]
        label = measure.label if found.measure != before else ""
        before = found.measure
        table.add_row(Text(label, style=HEADING), found.arm, *comparison_cells(measure, found.comparison))
    return table


def trends_table(results: StudyResults) -> Table:
    table = quiet_table()
    for name in ("measure", "arm"):
        table.add_column(name)
    for name in ("last - first", "95 % interval", "seeds", "tau", "p"):
        table.add_column(name, justify="right")
    for measure in results.measures:
        label = measure.label
        for arm in results.arms:
            found = results.result(arm.name, measure.name).trend
            if found is not None and found.n:
                table.add_row(Text(label, style=HEADING), arm.name, *trend_cells(measure, found))
                label = ""
    return table


def failures_table(results: StudyResults) -> Table:
    table = quiet_table()
    table.add_column("game", style="red", no_wrap=True)
    table.add_column("why", overflow="fold")
    for cell in results.failed:
        table.add_row(f"{cell.arm} seed {cell.seed}", cell.reason)
    return table
