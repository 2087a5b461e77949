"""The display of a run on the terminal: its state (`RunBoard`), its drawing, and the observer that updates it.

All numbers come from the observer's calls. Only the remaining time is an estimate.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pvg.reporting.formats import (
    HOME_PHASES,
    compact,
    duration,
    metric_display,
    metric_text,
    phase_label,
    seconds_to_come,
    short_seconds,
    total_budget,
    trend,
)
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, VERIFIER, BudgetBar, percent_short, rounds_table
from pvg.telemetry.events import PhaseInfo, Progress
from pvg_cli.output import WIDEST, LivePanel, PlainLines, Screen, framed, is_live, progress_row

if TYPE_CHECKING:
    from pvg.reporting.run_summary import RunSummary

HISTORY = 600  # points kept per metric; a sparkline shows fewer
RATE_WINDOW = 20  # reports that the rate is averaged over, so that one slow step does not change the estimate much
BUDGET_WINDOW = 10  # steps that the time budget is averaged over
PHASES = ("mint", "train_verifier", "train_prover", "checkpoint")
PLAY_PHASES = ("train_prover", "checkpoint")  # of self-play
# The most important numbers, in two columns: a metric and its colour, on the left and on the right.
NUMBERS = (
    ("helpful_accuracy", HELPFUL, "verifier_auc", VERIFIER),
    ("sneaky_error_rate", SNEAKY, "pair_accuracy", VERIFIER),
    ("fooled_rate", SNEAKY, "score_gap", VERIFIER),
    ("malformed", QUIET, "tokens_per_s", "blue"),
)
PLAY_NUMBERS = (  # self-play has one role and no verifier
    ("reward_mean", HELPFUL, "entropy", QUIET),
    ("legal", HELPFUL, "tokens_per_s", "blue"),
)
WARMUP_NUMBERS = (("loss", HELPFUL, "grad_norm", QUIET),)  # in the warm start there are no solutions yet
LINE_METRICS = (
    *("held_out_loss_before", "held_out_loss_after", "helpful_accuracy", "sneaky_error_rate", "fooled_rate"),
    *("verifier_auc", "pair_accuracy", "legal", "tokens_per_s"),
)
ROUND_METRICS = (
    "helpful_accuracy",
    "sneaky_error_rate",
    "fooled_rate",
    "fooled_rate_previous",
    "fooled_rate_base",
    "verifier_auc",
    "verifier_auc_previous",
)
SECONDS_BETWEEN_LINES = 10.0  # so that the log of an hour stays readable


@dataclass
class RunBoard:
    """Collects what an observer reports. `clock` returns seconds; tests replace it."""

    experiment: str
    run: str
    rounds: int
    clock: Callable[[], float] = time.monotonic
    effort: Callable[[int], int] = lambda round_: 1  # how long mint and verifier take in a round, relative to round 0
    phases: tuple[str, ...] = PHASES  # the phases of a round, in order; none for work that says its parts itself
    info: PhaseInfo | None = None
    done: int = 0
    series: dict[str, deque[float]] = field(default_factory=dict)
    rounds_done: dict[int, dict[str, float]] = field(default_factory=dict)
    phase_seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    newest: dict[str, float] = field(default_factory=dict)  # last value of each metric that this phase has reported

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.phase_began = self.started
        self.workers: Mapping[str, float] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._at_home: set[str] = set()
        self._budgets: deque[dict[str, float]] = deque(maxlen=BUDGET_WINDOW)

    # --- what the observer reports ---------------------------------------------------------------------------------

    def start_phase(self, info: PhaseInfo) -> None:
        self.info, self.done, self.rounds = info, info.done, info.rounds
        self.phase_began = self.clock()
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
        self.workers = progress.workers
        self._record(progress.metrics, self.info.phase if self.info else "")

    def finish_phase(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        self.phase_seconds[info.round, info.phase] = self.clock() - self.phase_began
        self.done = info.total
        # Skip the metrics that a step of this phase has reported already.
        self._record({name: value for name, value in metrics.items() if name not in self.newest}, info.phase)

    def finish_round(self, round_: int, metrics: Mapping[str, float]) -> None:
        self.rounds_done[round_] = dict(metrics)

    def alert(self, name: str, message: str) -> None:
        self.alerts.append((name, message))

    def recall(self, summary: RunSummary) -> None:
        """Load what a run recorded before it stopped, so that its curves continue."""
        self.rounds_done |= summary.rounds
        self.alerts += [(alert.name, alert.message) for alert in summary.alerts]
        for step in summary.steps:
            self._record(step.metrics, step.phase)
        of_steps = set(self.series)
        for phase in summary.phases:
            if phase.finished:
                at_the_end = {name: value for name, value in phase.metrics.items() if name not in of_steps}
                self._record(at_the_end, phase.phase)

    def _record(self, metrics: Mapping[str, float], phase: str) -> None:
        for name, value in metrics.items():
            series = self.series.setdefault(name, deque(maxlen=HISTORY))
            if HOME_PHASES.get(name) == phase and name not in self._at_home:
                self._at_home.add(name)
                series.clear()
            if name not in self._at_home or HOME_PHASES[name] == phase:
                series.append(float(value))

    # --- what is shown ---------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.clock() - self.started

    def latest(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        return next((value for value in reversed(self.series.get(name, ())) if math.isfinite(value)), None)

    def rate(self) -> float | None:
        """Units of work per second over the last reports; None before the second report."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None

    def phase_eta(self) -> float | None:
        """Remaining seconds of the phase at the current rate."""
        rate = self.rate()
        if self.info is None or rate is None:
            return None
        left = max(0, self.info.total - self.done) / rate
        return max(0.0, left - (self.clock() - self._marks[-1][0]))

    def game_eta(self) -> float | None:
        """Remaining seconds of the whole game; None until each kind of phase has finished once."""
        phase_eta = self.phase_eta()
        if self.info is None or self.info.phase not in self.phases or phase_eta is None:
            return None
        place = (self.info.round, self.info.phase)
        later = seconds_to_come(self.phase_seconds, place, self.phases, self.rounds, self.effort)
        return None if later is None else phase_eta + later

    def budget(self) -> dict[str, float]:
        """Mean seconds per step by part, over the last steps. The largest part is first, `unaccounted` last."""
        totals = total_budget(self._budgets)
        return {part: seconds / len(self._budgets) for part, seconds in totals.items()}


# --- drawing ---------------------------------------------------------------------------------------------------------


def draw(board: RunBoard, width: int, *, stopping: bool = False) -> Panel:
    """The panel for the current state of the board, `width` columns wide."""
    inner = width - 6
    parts: list[RenderableType] = [_header(board), _progress(board), _numbers(board, inner)]
    budget = board.budget()
    if budget:
        parts.append(BudgetBar(budget, f"time per step {short_seconds(sum(budget.values()))}"))
    if board.workers:
        parts.append(_workers(board.workers))
    if board.rounds_done:
        parts.append(rounds_table(board.rounds_done))
    if board.alerts:
        parts.append(_alerts(board))
    spaced: list[RenderableType] = []
    for part in parts:
        if spaced:
            spaced.append(Text())
        spaced.append(part)
    if board.info is None:
        hint = "stopping; Ctrl-C again quits at once" if stopping else "Ctrl-C stops"
    else:
        hint = "stopping at the next commit point" if stopping else "Ctrl-C stops at a commit point"
    title = Text.assemble(("pvg ", "bold"), (board.run, "bold cyan"))
    return framed(spaced, width, title, hint, stopping=stopping)


def _header(board: RunBoard) -> Table:
    """Round, phase, and the elapsed time."""
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column()
    row.add_column(justify="right", no_wrap=True)
    text, info = Text(), board.info
    if info is not None and info.parts:
        text = Text.assemble((_part_number(info), "bold"), (f"   {info.label}", "cyan"))
    elif info is not None:
        place = f" ({info.round + 1} of {board.rounds})   " if len(board.phases) > 1 else ""
        text = Text.assemble((f"round {info.round}{place}" if place else "", QUIET), (phase_label(info.phase), "bold"))
    row.add_row(text, Text(duration(board.elapsed), style=QUIET))
    return row


def _total(info: PhaseInfo) -> str:
    """All units of a phase: `1 measure`, `2.4k rollouts`."""
    one = {"matches": "match"}.get(info.unit, info.unit.removesuffix("s"))
    return f"{compact(info.total)} {one if info.total == 1 else info.unit}"


def _part_number(info: PhaseInfo) -> str:
    return f"part {info.part} of {info.parts}"


def _progress(board: RunBoard) -> Table:
    """A bar over the phase's units, the rate and the remaining time."""
    info = board.info
    if info is None:
        return progress_row(0, 0, Text("starting", style=QUIET))
    rate = board.rate()
    facts = Text.assemble((f"{compact(board.done)}", "bold"), (f"/{_total(info)}", QUIET))
    if rate is not None:
        facts.append(f"  {compact(rate)}/s", style=QUIET)
    eta, game = board.phase_eta(), board.game_eta()
    in_all = f"{duration(game)} in total" if game is not None else ""
    left = ", ".join(filter(None, [f"{duration(eta)} left" if eta else "", in_all]))
    if left:
        facts.append(f"  {left}", style=QUIET)
    return progress_row(max(1, info.total), board.done, facts)


def _numbers(board: RunBoard, width: int) -> Table:
    spark = max(6, width // 2 - 30)
    table = Table.grid(expand=True, padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True, style=QUIET, width=17)
        table.add_column(no_wrap=True, justify="right", width=8)
        table.add_column(no_wrap=True, ratio=1)
    warming = board.info is not None and board.info.phase == "warmup"
    numbers = WARMUP_NUMBERS if warming else PLAY_NUMBERS if board.phases == PLAY_PHASES else NUMBERS
    for left, left_style, right, right_style in numbers:
        table.add_row(*_number(board, left, left_style, spark), *_number(board, right, right_style, spark))
    return table


def _number(board: RunBoard, name: str, style: str, width: int) -> tuple[Text, Text, Text]:
    value = board.latest(name)
    return (
        Text(metric_display(name).label),
        Text(metric_text(name, value), style="bold" if value is not None else QUIET),
        Text(trend(name, list(board.series.get(name, ()))[-4 * width :], width), style=style),
    )


def _workers(load: Mapping[str, float]) -> Text:
    up, restarts = round(load["up"]), round(load["restarts"])
    text = Text.assemble(("workers ", QUIET), (f"{up}", "bold"))
    if "busy" in load:
        text.append(f"  busy {percent_short(load['busy'])}", style=QUIET)
        if up > 1:
            text.append(f" ({percent_short(load['busy_least'])} to {percent_short(load['busy_most'])})", style=QUIET)
    if restarts:
        text.append(f"  {restarts} replaced", style="yellow")
    return text


def _alerts(board: RunBoard) -> Text:
    name, message = board.alerts[-1]
    count = f"  ({len(board.alerts)} so far)" if len(board.alerts) > 1 else ""
    return Text.assemble(
        ("▲ ", "yellow"), (name, "bold yellow"), (f"  {message}{count}", "yellow"), overflow="ellipsis"
    )


# --- the observer ---------------------------------------------------------------------------------------------------


class RunWatcher:
    """An `Observer` that shows a run: a live panel on a terminal, lines elsewhere. Enter it before the run starts."""

    def __init__(self, board: RunBoard, console: Console, refresh_per_second: float = 8.0) -> None:
        self.board = board
        self.stopping = False
        self._lock = threading.Lock()  # the refresh thread reads while the run writes
        self._console = console
        self._screen: Screen = (
            LivePanel(console, self.render, refresh_per_second)
            if is_live(console)
            else PlainLines(console, lambda: f"{duration(board.elapsed):>11}", board.clock, SECONDS_BETWEEN_LINES)
        )

    @property
    def starting(self) -> bool:
        """Whether no phase has begun."""
        return self.board.info is None

    @property
    def live(self) -> bool:
        """Whether a panel shows the run. Otherwise lines do."""
        return isinstance(self._screen, LivePanel)

    def __enter__(self) -> RunWatcher:
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.__exit__()

    def phase_started(self, info: PhaseInfo) -> None:
        with self._lock:
            self.board.start_phase(info)
        resumed = f", {compact(info.done)} done before" if info.done else ""
        self._screen.line(f"{self._place()} begins: {_total(info)}{resumed}")

    def progressed(self, progress: Progress) -> None:
        with self._lock:
            self.board.progress(progress)
        self._screen.tick(self._progress_text)

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.board.finish_phase(info, metrics)
        took = duration(self.board.phase_seconds[info.round, info.phase])
        self._screen.line("  ".join([f"{self._place()} done in {took}", *_metric_texts(metrics, LINE_METRICS)]))

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.board.finish_round(round_, metrics)
        done = f"round {round_} done ({round_ + 1} of {self.board.rounds})"
        self._screen.line("  ".join([done, *_metric_texts(metrics, ROUND_METRICS)]))

    def alerted(self, name: str, message: str) -> None:
        with self._lock:
            self.board.alert(name, message)
        self._screen.line(f"ALERT {name}: {message}")

    def noticed(self, message: str) -> None:
        self._screen.note(message)

    def stop_requested(self) -> None:
        """The user pressed Ctrl-C once, after a phase has begun or in another process of torchrun."""
        self.stopping = True
        where = "when the start is done" if self.starting else "at the next commit point"
        self.noticed(f"Stopping {where}. Ctrl-C again quits at once.")

    def render(self) -> RenderableType:
        with self._lock:
            width = min(self._console.width, WIDEST)
            return draw(self.board, width, stopping=self.stopping)

    def _progress_text(self) -> str:
        board = self.board
        total = f"/{_total(board.info)}" if board.info else ""
        parts = [f"{self._place()} {compact(board.done)}{total}"]
        if (rate := board.rate()) is not None:
            parts.append(f"{compact(rate)}/s")
        if eta := board.phase_eta():
            parts.append(f"{duration(eta)} left")
        warming = board.info is not None and board.info.phase == "warmup"
        return "  ".join(parts + _metric_texts(board.newest, ("loss", *LINE_METRICS) if warming else LINE_METRICS))

    def _place(self) -> str:
        info = self.board.info
        if info is None:
            return "start"
        label = phase_label(info.phase)
        if info.parts:
            return f"{_part_number(info)}, {info.label}: {label}"
        return label if len(self.board.phases) == 1 else f"round {info.round} {label}"


def _metric_texts(metrics: Mapping[str, float], names: tuple[str, ...]) -> list[str]:
    """`name=value` for each of the names that has a value; values without blanks."""
    if "legal" in metrics:  # of self-play, where the reward says what the policy learns
        names = ("reward_mean", *names)
    measured = [name for name in names if not math.isnan(metrics.get(name, math.nan))]
    return [f"{name}={metric_text(name, metrics[name]).replace(' ', '')}" for name in measured]
