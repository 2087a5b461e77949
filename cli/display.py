"""The live display of a run: one calm panel that is redrawn in place and vanishes at the end.

    with Display(Board("modchain", "modchain-2", rounds=3), console=console, refresh_per_second=8) as display:
        await play(..., observer=display, ...)

Whatever is worth keeping (notices) is printed above the panel and stays.
"""

from __future__ import annotations

import sys
import termios
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.board import Board
from pvg.reporting.formats import clock, compact, duration, metric_display, metric_text, phase_label, trend
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, VERIFIER, BudgetBar, rounds_table
from pvg.telemetry.observer import PhaseInfo, Progress

WIDEST = 120  # a wider panel is harder to read, not richer
COMFORTABLE_HEIGHT = 26  # rows below which the panel gives up its blank lines

MARKS = {"done": ("✓", HELPFUL), "now": ("●", "bold cyan"), "next": ("○", QUIET)}

# The numbers that matter, in two columns: a metric, the alternatives shown until it has a value, and its colour.
NUMBERS = (
    (("helpful_accuracy",), HELPFUL, ("verifier_auc",), VERIFIER),
    (("sneaky_error_rate",), SNEAKY, ("pair_accuracy",), VERIFIER),
    (("fooled_rate",), SNEAKY, ("score_gap",), VERIFIER),
    (("malformed",), QUIET, ("tokens_per_s",), "blue"),
)


class Display:
    """An `Observer` that draws. Enter it before the run starts and leave it when the run ends."""

    def __init__(self, board: Board, *, console: Console, refresh_per_second: float) -> None:
        self.board = board
        self.stopping = False
        self._lock = threading.Lock()  # the refresh thread reads while the run writes
        self._console = console
        self._terminal_before: list[Any] | None = None
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=refresh_per_second,
            transient=True,
        )

    def __enter__(self) -> Display:
        self._silence_control_keys()
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if self._terminal_before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal_before)

    def _silence_control_keys(self) -> None:
        """Keep the terminal from echoing `^C`: at the end of a full line it would scroll the panel by one."""
        if sys.stdin is None or not sys.stdin.isatty():
            return
        self._terminal_before = termios.tcgetattr(sys.stdin)
        silent = termios.tcgetattr(sys.stdin)
        silent[3] &= ~termios.ECHOCTL
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)

    # --- Observer --------------------------------------------------------------------------------------------------

    def phase_started(self, info: PhaseInfo) -> None:
        with self._lock:
            self.board.start_phase(info)

    def progressed(self, progress: Progress) -> None:
        with self._lock:
            self.board.progress(progress)

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.board.finish_phase(info, metrics)

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.board.finish_round(round_, metrics)

    def alerted(self, name: str, message: str) -> None:
        with self._lock:
            self.board.alert(name, message)

    def noticed(self, message: str) -> None:
        self._console.print(Text.assemble(("· ", "cyan"), message))

    def stop_requested(self) -> None:
        """Ctrl-C was pressed once."""
        self.noticed("Stopping at the next commit point. Ctrl-C again quits at once.")

    # --- drawing ---------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        with self._lock:
            width = min(self._console.width, WIDEST)
            roomy = self._console.height >= COMFORTABLE_HEIGHT + len(self.board.rounds_done)
            return draw(self.board, width, roomy=roomy, stopping=self.stopping)


def draw(board: Board, width: int, *, roomy: bool = True, stopping: bool = False) -> Panel:
    """The panel for the board's present state, `width` columns wide."""
    inner = width - 6
    parts: list[RenderableType] = [_header(board), _progress(board), _numbers(board, inner)]
    budget = board.budget()
    if budget:
        parts.append(BudgetBar(budget, f"time per step {duration(sum(budget.values()))}"))
    if board.rounds_done:
        parts.append(rounds_table(board.rounds_done))
    if board.alerts:
        parts.append(_alerts(board))
    spaced: list[RenderableType] = []
    for part in parts:
        if spaced and roomy:
            spaced.append(Text())
        spaced.append(part)
    hint = "stopping at the next commit point" if stopping else "Ctrl-C stops at a commit point"
    return Panel(
        Padding(Group(*spaced), (1, 2) if roomy else (0, 2)),
        box=ROUNDED,
        width=width,
        border_style=QUIET,
        title=Text.assemble(("pvg ", "bold"), (board.run, "bold cyan")),
        title_align="left",
        subtitle=Text(hint, style="yellow" if stopping else QUIET),
        subtitle_align="right",
        padding=0,
    )


def _header(board: Board) -> Table:
    """Round, phase chips, and the clock."""
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(no_wrap=True)
    row.add_column(justify="right", no_wrap=True)
    chips = Text()
    if board.info is not None and len(board.phases) > 1:
        number = board.info.round
        chips = Text.assemble(
            ("round ", QUIET), (str(number), "bold"), (f" ({number + 1} of {board.rounds})   ", QUIET)
        )
    for place, phase in enumerate(board.phases):
        mark, style = MARKS[board.phase_state(phase)]
        chips.append("  " if place else "")
        chips.append(f"{mark} {phase_label(phase)}", style=style)
    row.add_row(chips, Text(clock(board.elapsed), style=QUIET))
    return row


def _progress(board: Board) -> Table:
    """A bar over the phase's units, its rate and its ETA."""
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    info = board.info
    if info is None:
        row.add_row(ProgressBar(total=None, pulse=True), Text("starting", style=QUIET))
        return row
    rate = board.rate()
    facts = Text.assemble((f"{compact(board.done)}", "bold"), (f"/{compact(info.total)} {info.unit}", QUIET))
    if rate is not None:
        facts.append(f"  {compact(rate)}/s", style=QUIET)
    eta, game = board.phase_eta(), board.game_eta()
    if eta is not None:
        in_all = f", {duration(game)} in all" if game is not None else ""
        facts.append(f"  {duration(eta)} left{in_all}", style=QUIET)
    bar = ProgressBar(total=max(1, info.total), completed=board.done, complete_style="cyan", finished_style="green")
    row.add_row(bar, facts)
    return row


def _numbers(board: Board, width: int) -> Table:
    spark = max(6, width // 2 - 30)
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True, style=QUIET, width=17)
        table.add_column(no_wrap=True, justify="right", width=8)
        table.add_column(no_wrap=True, ratio=1)
    for left, left_style, right, right_style in NUMBERS:
        table.add_row(*_number(board, left[0], left_style, spark), *_number(board, right[0], right_style, spark))
    return table


def _number(board: Board, name: str, style: str, width: int) -> tuple[Text, Text, Text]:
    value = board.latest(name)
    return (
        Text(metric_display(name).label),
        Text(metric_text(name, value), style="bold" if value is not None else QUIET),
        Text(trend(name, list(board.series.get(name, ()))[-4 * width :], width), style=style),
    )


def _alerts(board: Board) -> Text:
    name, message = board.alerts[-1]
    count = f"  ({len(board.alerts)} so far)" if len(board.alerts) > 1 else ""
    return Text.assemble(
        ("▲ ", "yellow"), (name, "bold yellow"), (f"  {message}{count}", "yellow"), overflow="ellipsis"
    )
