"""Watching a study: every cell with its state, the work done, the time left. A panel on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.display import WIDEST
from cli.output import stderr
from pvg.reporting.formats import clock, duration, metric_display, metric_text, phase_label
from pvg.reporting.terminal import QUIET
from pvg.study.cells import CellProgress
from pvg.study.measures import StudyMeasure
from pvg.study.plan import Cell, StudyPlan
from pvg.study.playing import Ended, Job
from pvg.telemetry.catalogue import METRICS

NUMBERS = 3  # measures shown of each cell
LEAST_ROOM, NUMBER_ROOM = 42, 18  # columns of a cell's name and place, and of a number
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
    """What is known of every cell. `clock` gives seconds and is replaced in tests."""

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
        self._began: dict[str, float] = {}  # of the cells that a process works on
        self._played_s = 0.0  # of processes that play no more
        self._evaluated_s: list[float] = []
        self._from_the_start: set[str] = set()  # cells whose evaluation no earlier process has begun

    def update(self, cell: Cell, standing: CellProgress, state: str | None = None) -> None:
        self.now[cell.name] = standing
        if state is None:
            return
        before, self.state[cell.name] = self.state[cell.name], state
        seconds = self._seconds(cell.name)
        if before == "playing":
            self._played_s += seconds
        elif before == "evaluating" and state == "complete" and cell.name in self._from_the_start:
            self._evaluated_s.append(seconds)
        self._began.pop(cell.name, None)
        if state in WORKED_ON:
            self._began[cell.name] = self.clock()
        if state == "evaluating" and not cell.run.evaluation.exists():
            self._from_the_start.add(cell.name)

    def _seconds(self, name: str) -> float:
        """For how long the cell has been worked on by the process that does so now."""
        return self.clock() - self._began[name] if name in self._began else 0.0

    @property
    def steps_done(self) -> int:
        return sum(min(self.now[name].done, cell.steps) for name, cell in self.cells.items())

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def eta(self) -> float | None:
        """Seconds to go, at what a step and an evaluation have taken a process so far; steps of all arms count alike.
        None until a step was done. Without the evaluations as long as none was seen to its end (`games_only`)."""
        open_cells = [cell for name, cell in self.cells.items() if self.state[name] not in ("failed", "complete")]
        steps_left = sum(max(0, cell.steps - self.now[cell.name].done) for cell in open_cells)
        done = self.steps_done - self._done_at_start
        if (steps_left and done <= 0) or (not steps_left and self.games_only):
            return None
        playing = [name for name in self._began if self.state[name] == "playing"]
        played_s = self._played_s + sum(self._seconds(name) for name in playing)
        left_s = played_s * steps_left / done if steps_left else 0.0
        if self._evaluated_s:
            mean_s = sum(self._evaluated_s) / len(self._evaluated_s)
            for cell in open_cells:
                so_far = self._seconds(cell.name) if self.state[cell.name] == "evaluating" else 0.0
                left_s += max(0.0, mean_s - so_far)
        return left_s / max(1, min(self.plan.processes, len(open_cells)))

    @property
    def games_only(self) -> bool:
        """Whether the time left leaves out evaluations of which nobody knows yet how long they take."""
        return self.plan.evaluate is not None and not self._evaluated_s

    def time_left(self) -> str:
        """For people; empty while nothing is known."""
        eta = self.eta()
        if eta is None or all(state in ("complete", "failed") for state in self.state.values()):
            return ""
        return f"{duration(eta)} left" + (" of the games" if self.games_only else "")

    def count(self, state: str) -> int:
        return sum(found == state for found in self.state.values())

    def numbers(self) -> list[StudyMeasure]:
        """The measures that the committed rounds of a run tell by themselves."""
        return [measure for measure in self.plan.measures if f"round/{measure.name}" in METRICS][:NUMBERS]

    def number(self, cell: Cell, measure: StudyMeasure) -> str:
        rounds = self.now[cell.name].rounds
        value = rounds[-1].get(measure.name) if rounds else None
        return metric_text(measure.name, value)

    def place(self, cell: Cell) -> str:
        """Where in its game the cell is."""
        found = self.now[cell.name]
        if self.state[cell.name] != "playing" or not found.phase:
            return self.state[cell.name]
        return f"round {found.round} {phase_label(found.phase)}"


class StudyLines:
    """The observer for a stderr that is no terminal."""

    def __init__(self, board: StudyBoard, stream: TextIO) -> None:
        self.board = board
        self._stream = stream
        self._last_line = board.clock()

    def __enter__(self) -> StudyLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def began(self, cell: Cell, job: Job, standing: CellProgress) -> None:
        self.board.update(cell, standing, "playing" if job == "train" else "evaluating")
        what = {"train": "resumes" if standing.status == "unfinished" else "begins", "evaluate": "is evaluated"}[job]
        self._line(f"{cell.name} {what}")

    def progressed(self, cell: Cell, standing: CellProgress) -> None:
        self.board.update(cell, standing)

    def ended(self, cell: Cell, how: Ended, standing: CellProgress, seconds: float) -> None:
        self.board.update(cell, standing, how)
        board = self.board
        if how == "complete":
            told = [f"{m.name}={board.number(cell, m).replace(' ', '')}" for m in board.numbers()]
            words = "  ".join([f"complete after {duration(seconds)}", *told])
        else:
            words = f"FAILED: {standing.reason}" if how == "failed" else "stopped at a commit point"
        self._line(f"{cell.name} {words}")

    def waited(self) -> None:
        if self.board.clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._line("still playing")

    def stopping(self, running: int) -> None:
        self.board.stopping = True
        self._line(f"stopping {running} at their next commit point; the same signal again ends them at once")

    def _line(self, text: str) -> None:
        board = self.board
        self._last_line = board.clock()
        left = board.time_left()
        done = f"{board.count('complete')}/{len(board.cells)}{', ' if left else ''}{left}"
        print(f"{clock(board.elapsed):>5}  [{done}]  {text}", file=self._stream, flush=True)


class StudyDisplay:
    """The observer that draws: a grid of cells, and the playing ones with their numbers."""

    def __init__(self, board: StudyBoard, console: Console) -> None:
        self.board = board
        self._console = console
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> StudyDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def began(self, cell: Cell, job: Job, standing: CellProgress) -> None:
        self.board.update(cell, standing, "playing" if job == "train" else "evaluating")

    def progressed(self, cell: Cell, standing: CellProgress) -> None:
        self.board.update(cell, standing)

    def ended(self, cell: Cell, how: Ended, standing: CellProgress, seconds: float) -> None:
        self.board.update(cell, standing, how)
        if how == "failed":
            self._console.print(Text.assemble(("✗ ", "red"), f"{cell.name} failed: {standing.reason}"))

    def waited(self) -> None: ...

    def stopping(self, running: int) -> None:
        self.board.stopping = True

    def render(self) -> RenderableType:
        return draw(self.board, min(self._console.width, WIDEST))


def watcher_for(board: StudyBoard) -> StudyDisplay | StudyLines:
    """The live display on a terminal, plain lines elsewhere."""
    console = stderr()
    if console.is_terminal and not console.is_dumb_terminal:
        return StudyDisplay(board, console)
    return StudyLines(board, sys.stderr)


def draw(board: StudyBoard, width: int) -> Panel:
    """The panel for the board's present state."""
    hint = "stopping at commit points; Ctrl-C again ends at once" if board.stopping else "Ctrl-C stops at commit points"
    parts: list[RenderableType] = [_progress(board), Text(), _grid(board)]
    if playing := [cell for name, cell in board.cells.items() if board.state[name] in WORKED_ON]:
        parts += [Text(), _playing(board, playing, width)]
    return Panel(
        Padding(Group(*parts), (1, 2)),
        box=ROUNDED,
        width=width,
        border_style=QUIET,
        title=Text.assemble(("pvg study ", "bold"), (board.plan.name, "bold cyan")),
        title_align="left",
        subtitle=Text(hint, style="yellow" if board.stopping else QUIET),
        subtitle_align="right",
        padding=0,
    )


def _progress(board: StudyBoard) -> Table:
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    facts = Text.assemble(
        (f"{board.count('complete')}", "bold"),
        (f"/{len(board.cells)} games  {board.steps_done:,}/{board.plan.steps:,} steps", QUIET),
    )
    if failed := board.count("failed"):
        facts.append(f"  {failed} failed", style="red")
    if left := board.time_left():
        facts.append(f"  {left}", style=QUIET)
    facts.append(f"  {clock(board.elapsed)}", style=QUIET)
    row.add_row(
        ProgressBar(
            total=max(1, board.plan.steps), completed=board.steps_done, complete_style="cyan", finished_style="green"
        ),
        facts,
    )
    return row


def _grid(board: StudyBoard) -> Table:
    """A row per arm, a mark per seed."""
    table = Table.grid(padding=(0, 1))
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


def _playing(board: StudyBoard, playing: list[Cell], width: int) -> Table:
    """The cells that play, with as many numbers as there is room for."""
    table = Table.grid(padding=(0, 2, 0, 0))
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
