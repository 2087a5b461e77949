"""The display of `pvg study`: the panel while games run, the plan, and the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from pvg.errors import counted
from pvg.reporting.formats import duration, metric_display, metric_text, phase_label
from pvg.reporting.table import Column, Table, TableCell
from pvg.reporting.terminal import QUIET, section
from pvg.study.measures import StudyMeasure
from pvg.study.plan import Cell, StudyEvaluation, StudyPlan
from pvg.study.playing import CellProgress, Ended, Job
from pvg.study.results import StudyResults
from pvg.study.text import cautions, plan_cautions, result_sections, threads_each
from pvg.telemetry.catalogue import METRICS
from pvg_cli.display import Display, framed, progress_row
from pvg_cli.output import next_commands

NUMBERS = 2  # measures shown per game


class StudyDisplay(Display):
    """A `StudyObserver` that shows a study."""

    def __init__(
        self,
        plan: StudyPlan,
        now: Mapping[str, CellProgress],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self.plan = plan
        self._now = dict(now)
        self._working: dict[str, Job] = {}  # the games that run
        self._done_at_start = self.steps_done

    @property
    def steps_done(self) -> int:
        return sum(min(self._now[cell.name].done, cell.steps) for cell in self.plan.cells)

    @property
    def complete(self) -> int:
        return sum(found.status == "complete" for found in self._now.values())

    def seconds_left(self) -> float | None:
        """Seconds of playing that remain at the rate so far, without evaluations. None before the first step."""
        open_cells = [cell for cell in self.plan.cells if not self._now[cell.name].reason]
        left = sum(cell.steps - self._now[cell.name].done for cell in open_cells)
        done = self.steps_done - self._done_at_start
        return self.elapsed * left / done if done > 0 and left > 0 else None

    # --- what the observer reports -----------------------------------------------------------------------------------

    def began(self, cell: Cell, job: Job, progress: CellProgress) -> None:
        self._now[cell.name] = progress
        self._working[cell.name] = job
        what = {"train": "resumes" if progress.status == "unfinished" else "starts", "evaluate": "is evaluated"}[job]
        self.line(f"{cell.name} {what}")

    def progressed(self, cell: Cell, progress: CellProgress) -> None:
        self._now[cell.name] = progress

    def ended(self, cell: Cell, how: Ended, progress: CellProgress, seconds: float) -> None:
        self._now[cell.name] = progress
        self._working.pop(cell.name, None)
        if how == "failed":
            self.note(f"{cell.name} failed: {progress.reason}", "✗", "red")
        elif how == "complete":
            numbers = [f"{m.name}={self._number(cell, m).replace(' ', '')}" for m in self._numbers()]
            self.line("  ".join([f"{cell.name} complete after {duration(seconds)}", *numbers]))
        else:
            self.line(f"{cell.name} stopped at a commit point")

    def waited(self) -> None:
        self.tick(lambda: "still playing")

    def stopping(self, running: int) -> None:
        self.is_stopping = True
        self.line(f"stopping {running} at their next commit point; the same signal again ends them at once")

    # --- drawing -----------------------------------------------------------------------------------------------------

    def render(self, width: int) -> RenderableType:
        hint = "Ctrl-C stops at commit points"
        if self.is_stopping:
            hint = "stopping at commit points; Ctrl-C again quits at once"
        failed = sum(bool(found.reason) for found in self._now.values())
        facts = Text.assemble(
            f"{self.complete}/{counted(len(self.plan.cells), 'game')}",
            (f"  {self.steps_done:,}/{self.plan.steps:,} steps", QUIET),
            (f"  {failed} failed" if failed else "", "red"),
            (f"  {self._left()}  {duration(self.elapsed)}", QUIET),
        )
        bar = progress_row(max(1, self.plan.steps), self.steps_done, facts)
        title = Text.assemble(("pvg study ", "bold"), (self.plan.name, "bold cyan"))
        return framed([bar, self._playing()], width, title, hint, self.is_stopping)

    def _playing(self) -> RichTable:
        """The games that run."""
        table = RichTable.grid(padding=(0, 2, 0, 0))
        table.add_row("playing", "", *(metric_display(measure.name).label for measure in self._numbers()), style=QUIET)
        for cell in self.plan.cells:
            if job := self._working.get(cell.name):
                found = self._now[cell.name]
                place = f"round {found.round} {phase_label(found.phase)}" if job == "train" else "evaluating"
                share = f"{100 * found.done // max(1, cell.steps)}%"
                table.add_row(f"{cell.name} {share}", place, *(self._number(cell, each) for each in self._numbers()))
        return table

    def _numbers(self) -> list[StudyMeasure]:
        """The measures that can be read from the committed rounds of a run."""
        return [measure for measure in self.plan.measures if f"round/{measure.name}" in METRICS][:NUMBERS]

    def _number(self, cell: Cell, measure: StudyMeasure) -> str:
        rounds = self._now[cell.name].rounds
        return metric_text(measure.name, rounds[-1].get(measure.name) if rounds else None)

    def _left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{duration(seconds)} left"

    def stamp(self) -> str:
        done = ", ".join(filter(None, [f"{self.complete}/{len(self.plan.cells)}", self._left()]))
        return f"{super().stamp()}  [{done}]"


# --- tables ----------------------------------------------------------------------------------------------------------

MARKS = {  # state -> mark and style of a table's cell
    "complete": ("✓", "better"),
    "played": ("◐", "verifier"),
    "unfinished": ("◐", "verifier"),
    "new": ("○", "quiet"),
    "damaged": ("✗", "badge bad"),
    "failed": ("✗", "badge bad"),
}


def plan_table(plan: StudyPlan, now: Mapping[str, CellProgress]) -> Group:
    """Arms and seeds with their progress, and the remaining work."""
    seeds = [Column(f"seed {seed}" if not place else str(seed), wrap=False) for place, seed in enumerate(plan.seeds)]
    table = Table(
        [Column("arm", style="strong"), *seeds, Column("steps each", "right"), Column("settings", style="quiet")]
    )
    for arm in plan.arms:
        cells = [plan.cell(arm, seed) for seed in plan.seeds]
        found = [now[cell.name] for cell in cells]
        marks = [TableCell(*MARKS["failed" if each.reason else each.status]) for each in found]
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        table.add(arm.name, *marks, f"{cells[0].steps:,}", settings)
    threads, at_a_time = threads_each(plan.threads), counted(plan.processes, "game")
    left = sum(cell.steps - now[cell.name].done for cell in plan.cells)
    complete = sum(progress.status == "complete" for progress in now.values())
    counts = ((len(plan.arms), "arm"), (len(plan.seeds), "seed"), (len(plan.cells), "game"))
    return Group(
        headline(plan.name, "{} x {} = {}".format(*(counted(*count) for count in counts))),
        Text(),
        table,
        Text(),
        Text.assemble(
            (f"{complete} complete. ", QUIET),
            (f"{left:,}", "bold"),
            (f" of {plan.steps:,} optimizer steps remain, {at_a_time} at a time, {threads}", QUIET),
            (f"{_evaluation(plan.evaluate)}.", QUIET),
        ),
        Text(f"The runs would be in {plan.folder}.", style=QUIET),
        *(Text(f"warning: {sentence}", style="yellow") for sentence in plan_cautions(plan)),
    )


def _evaluation(evaluate: StudyEvaluation | None) -> str:
    if evaluate is None:
        return ""
    rounds = evaluate.rounds if isinstance(evaluate.rounds, str) else ", ".join(map(str, evaluate.rounds))
    return f", each game evaluated afterwards (rounds: {rounds})"


def headline(name: str, rest: str) -> Text:
    return Text.assemble((name, "bold"), (f"  {rest}", QUIET))


def results_text(results: StudyResults, commands: Mapping[str, str]) -> Group:
    """The results of a study, and the next commands."""
    seconds = sum(cell.seconds or 0.0 for cell in results.cells)
    complete = f"{results.complete} of {counted(len(results.cells), 'game')} complete"
    parts: list[RenderableType] = [headline(results.name, f"{complete}  {duration(seconds)} of playing")]
    for found in result_sections(results):
        parts += section(found.title, Group(cast(Table, found.body[0]), Text(found.lead, style=QUIET)))
    if results.failed:
        failed = [(f"{cell.arm} seed {cell.seed}", cell.reason) for cell in results.failed]
        columns = [Column("game", style="badge bad", wrap=False), Column("why")]
        parts += section("Failed", Table(columns, list(failed)))
    if sentences := cautions(results):
        parts += section("Cautions", Group(*(Text(f"- {sentence}", overflow="fold") for sentence in sentences)))
    return Group(*parts, Text(), *next_commands(commands))
