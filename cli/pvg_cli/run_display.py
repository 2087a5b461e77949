"""What a watched run has told so far: the state behind the live display and the plain lines. No drawing here.

Invariant: every number on the display comes from the observer's calls; nothing is extrapolated but the ETA.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pvg.reporting.figures import HOME, clock, compact, duration, figure, phase_label, shown, total_budget, trend
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, VERIFIER, BudgetBar, rounds_table
from pvg.telemetry.observer import PhaseInfo, Progress
from pvg_cli.output import silent_control_keys

if TYPE_CHECKING:
    from pvg.reporting.run_summary import RunSummary

HISTORY = 600  # points kept per metric: a sparkline shows fewer
RATE_WINDOW = 20  # the rate is taken over this many reports, so that one slow step does not swing the ETA
BUDGET_WINDOW = 10  # steps that the time budget is averaged over

PHASES = ("mint", "train_verifier", "train_prover", "checkpoint")


@dataclass
class Board:
    """Collects an observer's calls. `clock` gives seconds and is replaced in tests."""

    experiment: str
    run: str
    rounds: int
    clock: Callable[[], float] = time.monotonic
    phases: tuple[str, ...] = PHASES  # the phases of a round, in order
    once: bool = True  # each comes once in a round; false: some come again, and nobody knows how long all will take
    info: PhaseInfo | None = None
    done: int = 0
    series: dict[str, deque[float]] = field(default_factory=dict)
    rounds_done: dict[int, dict[str, float]] = field(default_factory=dict)
    phase_seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)  # value of each metric that a step of the phase has reported

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.phase_began = self.started
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._at_home: set[str] = set()
        self._budgets: deque[dict[str, float]] = deque(maxlen=BUDGET_WINDOW)

    # --- what the observer is told ---------------------------------------------------------------------------------

    def start_phase(self, info: PhaseInfo) -> None:
        self.info, self.done, self.rounds = info, info.done, info.rounds
        self.phase_began = self.clock()
        if not self.once:
            self.phase_seconds.pop((info.round, info.phase), None)
        self._marks.clear()
        self._marks.append((self.phase_began, info.done))
        self._budgets.clear()
        self.newest.clear()

    def progress(self, progress: Progress) -> None:
        self.done = progress.done
        self._marks.append((self.clock(), progress.done))
        if progress.budget:
            self._budgets.append(dict(progress.budget))
        self.newest |= progress.metrics
        self._record(progress.metrics, self.info.phase if self.info else "")

    def finish_phase(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self.phase_seconds[info.round, info.phase] = self.clock() - self.phase_began
        self.done = info.total
        # Metrics that a step has reported are not reported again.
        self._record({name: value for name, value in metrics.items() if name not in self.newest}, info.phase)

    def finish_round(self, round_: int, metrics: Mapping[str, float]) -> None:
        self.rounds_done[round_] = dict(metrics)

    def alert(self, name: str, message: str) -> None:
        self.alerts.append((name, message))

    def recall(self, summary: RunSummary) -> None:
        """Take in what a run told before it stopped, so that its lines go on where they ended."""
        self.rounds_done |= summary.rounds
        self.alerts += [(alert.name, alert.message) for alert in summary.alerts]
        for step in summary.steps:
            self._record(step.metrics, step.phase)
        of_steps = set(self.series)
        for phase in summary.phases:
            if phase.finished:
                told_at_the_end = {name: value for name, value in phase.metrics.items() if name not in of_steps}
                self._record(told_at_the_end, phase.phase)

    def _record(self, metrics: Mapping[str, float], phase: str) -> None:
        for name, value in metrics.items():
            series = self.series.setdefault(name, deque(maxlen=HISTORY))
            if HOME.get(name) == phase and name not in self._at_home:
                self._at_home.add(name)
                series.clear()
            if name not in self._at_home or HOME[name] == phase:
                series.append(float(value))

    # --- what is shown ---------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def latest(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        return next((value for value in reversed(self.series.get(name, ())) if math.isfinite(value)), None)

    def rate(self) -> float | None:
        """Units of work per second over the last reports; None before the second one."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None

    def phase_eta(self) -> float | None:
        """Seconds that the phase still takes at the present rate."""
        rate = self.rate()
        if self.info is None or rate is None:
            return None
        left = max(0, self.info.total - self.done) / rate
        return max(0.0, left - (self.clock() - self._marks[-1][0]))

    def game_eta(self) -> float | None:
        """Seconds that the whole game still takes, once every kind of phase has been timed.

        A phase of a later round is taken to last as long as the latest finished one of its kind.
        """
        phase_eta = self.phase_eta()
        if self.info is None or self.info.phase not in self.phases or phase_eta is None or not self.once:
            return None
        lasted: dict[str, float] = {}
        for (_, phase), seconds in self.phase_seconds.items():
            lasted[phase] = seconds
        now = self.phases.index(self.info.phase)
        to_come = [*self.phases[now + 1 :], *(self.phases * (self.rounds - self.info.round - 1))]
        if not all(phase in lasted for phase in to_come):
            return None
        return phase_eta + sum(lasted[phase] for phase in to_come)

    def budget(self) -> dict[str, float]:
        """Mean seconds per step by part, over the last steps; the largest first, `unaccounted` last."""
        totals = total_budget(self._budgets)
        return {part: seconds / len(self._budgets) for part, seconds in totals.items()}

    def phase_state(self, phase: str) -> str:
        """`done`, `now` or `next` in the current round."""
        if self.info is None:
            return "next"
        if (self.info.round, phase) in self.phase_seconds:
            return "done"
        if phase == self.info.phase:
            return "now"
        if (
            phase in self.phases
            and self.info.phase in self.phases
            and self.phases.index(phase) < self.phases.index(self.info.phase)
        ):
            return "done"
        return "next"


# The live display of a run: one calm panel that is redrawn in place and vanishes at the end.
#
#     with Display(Board("modchain", "modchain-2", rounds=3), console=console, refresh_per_second=8) as display:
#         await play(..., observer=display, ...)
#
# Whatever is worth keeping (notices) is printed above the panel and stays.

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
        self._stack = ExitStack()
        self._live = Live(
            get_renderable=self.render,
            console=console,
            refresh_per_second=refresh_per_second,
            transient=True,
        )

    def __enter__(self) -> Display:
        self._stack.enter_context(silent_control_keys())
        self._stack.enter_context(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

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
        Text(shown(name).label),
        Text(figure(name, value), style="bold" if value is not None else QUIET),
        Text(trend(name, list(board.series.get(name, ()))[-4 * width :], width), style=style),
    )


def _alerts(board: Board) -> Text:
    name, message = board.alerts[-1]
    count = f"  ({len(board.alerts)} so far)" if len(board.alerts) > 1 else ""
    return Text.assemble(
        ("▲ ", "yellow"), (name, "bold yellow"), (f"  {message}{count}", "yellow"), overflow="ellipsis"
    )


# The observer for a stderr that is no terminal: a line per phase and round, and one every few seconds in between.

SECONDS_BETWEEN_LINES = 10.0  # a log of an hour's run stays readable

LINE_METRICS = ("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc", "pair_accuracy", "tokens_per_s")
ROUND_METRICS = (
    "helpful_accuracy",
    "sneaky_error_rate",
    "fooled_rate",
    "fooled_rate_previous",
    "fooled_rate_base",
    "verifier_auc",
    "verifier_auc_previous",
)


class PlainLines:
    """An `Observer` that writes `time round phase ...` lines, no escape codes."""

    def __init__(self, board: Board, stream: TextIO) -> None:
        self.board = board
        self.stopping = False
        self._stream = stream
        self._last_line = board.clock()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def phase_started(self, info: PhaseInfo) -> None:
        self.board.start_phase(info)
        resumed = f", {compact(info.done)} done before" if info.done else ""
        self._line(f"{self._place()} begins: {compact(info.total)} {info.unit}{resumed}")

    def progressed(self, progress: Progress) -> None:
        self.board.progress(progress)
        if self.board.clock() - self._last_line < SECONDS_BETWEEN_LINES:
            return
        info, rate, eta = self.board.info, self.board.rate(), self.board.phase_eta()
        total = f"/{compact(info.total)} {info.unit}" if info else ""
        parts = [f"{self._place()} {compact(progress.done)}{total}"]
        if rate is not None:
            parts.append(f"{compact(rate)}/s")
        if eta is not None:
            parts.append(f"{duration(eta)} left")
        self._line("  ".join(parts + _metrics(self.board.newest, LINE_METRICS)))

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self.board.finish_phase(info, metrics)
        took = duration(self.board.phase_seconds[info.round, info.phase])
        self._line("  ".join([f"{self._place()} done in {took}", *_metrics(metrics, LINE_METRICS)]))

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        self.board.finish_round(round_, metrics)
        self._line(
            "  ".join([f"round {round_} done ({round_ + 1} of {self.board.rounds})", *_metrics(metrics, ROUND_METRICS)])
        )

    def alerted(self, name: str, message: str) -> None:
        self.board.alert(name, message)
        self._line(f"ALERT {name}: {message}")

    def noticed(self, message: str) -> None:
        self._line(message)

    def stop_requested(self) -> None:
        self._line("stopping at the next commit point; the same signal again quits at once")

    def _place(self) -> str:
        info = self.board.info
        if info is None:
            return "start"
        label = phase_label(info.phase)
        return label if len(self.board.phases) == 1 else f"round {info.round} {label}"

    def _line(self, text: str) -> None:
        self._last_line = self.board.clock()
        print(f"{clock(self.board.elapsed):>5}  {text}", file=self._stream, flush=True)


def _metrics(metrics: Mapping[str, float], names: tuple[str, ...]) -> list[str]:
    """`name=value` for those there are, values as people read them but without blanks."""
    return [f"{name}={figure(name, metrics[name]).replace(' ', '')}" for name in names if name in metrics]
