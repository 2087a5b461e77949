"""The display of `pvg study`: the panel while games run, the list of studies, the plan, and the results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import cast

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
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
from pvg.study.text import (
    cautions,
    plan_cautions,
    result_sections,
    threads_each,
)
from pvg.telemetry.catalogue import METRICS
from pvg_cli.output import WIDEST, LivePanel, PlainLines, Screen, framed, is_live, progress_row

NUMBERS = 3  # measures shown per game
LEAST_ROOM, NUMBER_ROOM = 42, 18  # columns for the name and place of a cell, and for a number
SECONDS_BETWEEN_LINES = 30.0
WORKED_ON = ("playing", "evaluating")
STATES = {
    "waiting": ("○", QUIET),
    "playing": ("●", "cyan"),
    "evaluating": ("●", "cyan"),
    "complete": ("✓", "green"),
    "failed": ("✗", "red"),
    "stopped": ("◐", "yellow"),
}


class StudyBoard:
    """The state of every game. `clock` returns seconds; tests replace it."""

    def __init__(
        self, plan: StudyPlan, now: Mapping[str, CellProgress], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self.cells = {cell.name: cell for cell in plan.cells}
        self.now = dict(now)
        self.state = {name: "complete" if s.status == "complete" else "waiting" for name, s in now.items()}
        self.clock = clock
        self.started = clock()
        self.stopping = False
        self._done_at_start = self.steps_done
        self._began: dict[str, float] = {}  # when the current process started to work on a cell
        self._played_s = 0.0  # seconds of finished processes

    def update(self, cell: Cell, progress: CellProgress, state: str | None = None) -> None:
        self.now[cell.name] = progress
        if state is None:
            return
        if self.state[cell.name] == "playing":
            self._played_s += self._seconds(cell.name)
        self.state[cell.name] = state
        self._began.pop(cell.name, None)
        if state in WORKED_ON:
            self._began[cell.name] = self.clock()

    def _seconds(self, name: str) -> float:
        """Seconds that the current process has worked on the cell."""
        return self.clock() - self._began[name] if name in self._began else 0.0

    @property
    def steps_done(self) -> int:
        return sum(min(self.now[name].done, cell.steps) for name, cell in self.cells.items())

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def eta(self) -> float | None:
        """Remaining seconds of the games, from the mean time of a step so far. It assumes that the steps of all arms
        take equally long. None before the first step."""
        open_cells = [cell for name, cell in self.cells.items() if self.state[name] not in ("failed", "complete")]
        steps_left = sum(max(0, cell.steps - self.now[cell.name].done) for cell in open_cells)
        done = self.steps_done - self._done_at_start
        if not steps_left or done <= 0:
            return None
        playing = [name for name in self._began if self.state[name] == "playing"]
        played_s = self._played_s + sum(self._seconds(name) for name in playing)
        return played_s * steps_left / done / min(self.plan.processes, len(open_cells))

    def time_left(self) -> str:
        """The remaining time as text; empty if unknown."""
        eta = self.eta()
        return "" if eta is None else f"{duration(eta)} left" + " of the games" * (self.plan.evaluate is not None)

    def count(self, state: str) -> int:
        return sum(found == state for found in self.state.values())

    def numbers(self) -> list[StudyMeasure]:
        """The measures that can be read from the committed rounds of a run."""
        return [measure for measure in self.plan.measures if f"round/{measure.name}" in METRICS][:NUMBERS]

    def number(self, cell: Cell, measure: StudyMeasure) -> str:
        rounds = self.now[cell.name].rounds
        value = rounds[-1].get(measure.name) if rounds else None
        return metric_text(measure.name, value)

    def place(self, cell: Cell) -> str:
        """The round and phase of the cell, or its state."""
        found = self.now[cell.name]
        if self.state[cell.name] != "playing" or not found.phase:
            return self.state[cell.name]
        return f"round {found.round} {phase_label(found.phase)}"


class StudyWatcher:
    """A `StudyObserver` that shows a study: a live panel on a terminal, lines elsewhere."""

    def __init__(self, board: StudyBoard, console: Console) -> None:
        self.board = board
        self._console = console
        self._screen: Screen = (
            LivePanel(console, self.render, refresh_per_second=4)
            if is_live(console)
            else PlainLines(console, self._stamp, board.clock, SECONDS_BETWEEN_LINES)
        )

    def __enter__(self) -> StudyWatcher:
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.__exit__()

    def began(self, cell: Cell, job: Job, progress: CellProgress) -> None:
        self.board.update(cell, progress, "playing" if job == "train" else "evaluating")
        what = {"train": "resumes" if progress.status == "unfinished" else "starts", "evaluate": "is evaluated"}[job]
        self._screen.line(f"{cell.name} {what}")

    def progressed(self, cell: Cell, progress: CellProgress) -> None:
        self.board.update(cell, progress)

    def ended(self, cell: Cell, how: Ended, progress: CellProgress, seconds: float) -> None:
        board = self.board
        board.update(cell, progress, how)
        if how == "failed":
            self._screen.note(f"{cell.name} failed: {progress.reason}", "✗", "red")
        elif how == "complete":
            numbers = [f"{m.name}={board.number(cell, m).replace(' ', '')}" for m in board.numbers()]
            self._screen.line("  ".join([f"{cell.name} complete after {duration(seconds)}", *numbers]))
        else:
            self._screen.line(f"{cell.name} stopped at a commit point")

    def waited(self) -> None:
        self._screen.tick(lambda: "still playing")

    def stopping(self, running: int) -> None:
        self.board.stopping = True
        self._screen.line(f"stopping {running} at their next commit point; the same signal again ends them at once")

    def render(self) -> RenderableType:
        return draw(self.board, min(self._console.width, WIDEST))

    def _stamp(self) -> str:
        """The time, the finished games, and the remaining time."""
        board = self.board
        left = board.time_left()
        done = f"{board.count('complete')}/{len(board.cells)}{', ' if left else ''}{left}"
        return f"{duration(board.elapsed):>11}  [{done}]"


def draw(board: StudyBoard, width: int) -> Panel:
    """The panel for the current state of the board."""
    hint = (
        "stopping at commit points; Ctrl-C again quits at once" if board.stopping else "Ctrl-C stops at commit points"
    )
    parts: list[RenderableType] = [_progress(board), Text(), _grid(board)]
    if playing := [cell for name, cell in board.cells.items() if board.state[name] in WORKED_ON]:
        parts += [Text(), _playing(board, playing, width)]
    title = Text.assemble(("pvg study ", "bold"), (board.plan.name, "bold cyan"))
    return framed(parts, width, title, hint, stopping=board.stopping)


def _progress(board: StudyBoard) -> RichTable:
    facts = Text.assemble(
        (f"{board.count('complete')}", "bold"),
        (f"/{counted(len(board.cells), 'game')}  {board.steps_done:,}/{board.plan.steps:,} steps", QUIET),
    )
    if failed := board.count("failed"):
        facts.append(f"  {failed} failed", style="red")
    if left := board.time_left():
        facts.append(f"  {left}", style=QUIET)
    facts.append(f"  {duration(board.elapsed)}", style=QUIET)
    return progress_row(max(1, board.plan.steps), board.steps_done, facts)


def _grid(board: StudyBoard) -> RichTable:
    """A row per arm and a mark per seed."""
    table = RichTable.grid(padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=40)
    for _ in board.plan.seeds:
        table.add_column(justify="right", width=4)
    table.add_row(Text("arm", style=QUIET), *(Text(str(seed), style=QUIET) for seed in board.plan.seeds))
    for arm in board.plan.arms:
        cells = [board.plan.cell(arm, seed) for seed in board.plan.seeds]
        table.add_row(arm.name, *(_mark(board, cell) for cell in cells))
    return table


def _mark(board: StudyBoard, cell: Cell) -> Text:
    state = board.state[cell.name]
    if state == "playing":
        return Text(f"{100 * board.now[cell.name].done // max(1, cell.steps)}%", style="cyan")
    return Text(*STATES[state])


def _playing(board: StudyBoard, playing: list[Cell], width: int) -> RichTable:
    """The games that run, with as many numbers as fit."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=40)
    table.add_column(no_wrap=True, style=QUIET)
    numbers = board.numbers()[: max(1, (width - LEAST_ROOM) // NUMBER_ROOM)]
    for _ in numbers:
        table.add_column(no_wrap=True, justify="right")
    table.add_row(
        Text("playing", style=QUIET),
        Text(""),
        *(Text(metric_display(measure.name).label, style=QUIET) for measure in numbers),
    )
    for cell in playing:
        table.add_row(cell.name, board.place(cell), *(board.number(cell, measure) for measure in numbers))
    return table


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
        marks = [TableCell(*MARKS[_state_of(now[cell.name])]) for cell in cells]
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
    if evaluate.rounds == "all":
        which = ""
    elif evaluate.rounds == "last":
        which = " (its last round)"
    else:
        which = f" (rounds {', '.join(map(str, evaluate.rounds))})"
    return f", each game evaluated afterwards{which}"


def _state_of(progress: CellProgress) -> str:
    return "failed" if progress.reason else progress.status


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
        parts += section("Failed", failures_table(results))
    if sentences := cautions(results):
        parts += section("Cautions", Group(*(Text(f"- {sentence}", overflow="fold") for sentence in sentences)))
    parts.append(Text())
    for command, what in commands.items():
        parts.append(Text.assemble("  ", (command, "bold cyan"), (f"\n      {what}", QUIET), overflow="fold"))
    return Group(*parts)


def failures_table(results: StudyResults) -> Table:
    table = Table([Column("game", style="badge bad", wrap=False), Column("why")])
    for cell in results.failed:
        table.add(f"{cell.arm} seed {cell.seed}", cell.reason)
    return table
