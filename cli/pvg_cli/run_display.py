"""The display of a run while it plays. All numbers come from the run itself; the remaining time is an estimate."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pvg.errors import one_line, shortened
from pvg.reporting.formats import (
    HOME_PHASES,
    SHOWN,
    compact,
    duration,
    metric_display,
    metric_text,
    phase_label,
    seconds_to_come,
    trend,
)
from pvg.reporting.terminal import HELPFUL, QUIET, SNEAKY, percent_short, rounds_table
from pvg.telemetry.events import PhaseInfo, Progress, Sample
from pvg_cli.display import Display, framed, progress_row

if TYPE_CHECKING:
    from pvg.reporting.run_summary import RunSummary

HISTORY = 600  # points kept per metric; a sparkline shows fewer
RATE_WINDOW = 20  # reports that the rate is averaged over, so that one slow step does not change the estimate much
ROOMY = 34  # lines of a terminal that has room for blank lines
SAMPLES_S = 3.0  # how long solutions stay, so that a person can read them
PHASES = ("mint", "train_verifier", "train_prover", "checkpoint")
PLAY_PHASES = ("train_prover", "checkpoint")  # of self-play
LIVE = SHOWN["live"]
LINE_METRICS, ROUND_METRICS = LIVE["line_metrics"], LIVE["round_metrics"]


class RunDisplay(Display):
    """An `Observer` that shows a run. Enter it before the run starts.

    `effort`: how long mint and verifier take in a round, relative to round 0. `phases`: those of a round, in order;
    none for work that says its parts itself.
    """

    EVERY_S = 10.0  # so that the log of an hour stays readable
    REFRESH_PER_S = 8.0

    def __init__(
        self,
        run: str,
        rounds: int,
        console: Console,
        *,
        effort: Callable[[int], int] = lambda round_: 1,
        phases: tuple[str, ...] = PHASES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self.run, self.rounds, self.effort, self.phases = run, rounds, effort, phases
        self.info: PhaseInfo | None = None
        self.done = 0
        self.series: dict[str, deque[float]] = {}
        self.newest: dict[str, float] = {}  # the last value of each metric that this phase has reported
        self.rounds_done: dict[int, dict[str, float]] = {}
        self.phase_seconds: dict[tuple[int, str], float] = {}
        self.alerts: list[tuple[str, str]] = []
        self.workers: Mapping[str, float] = {}
        self._phase_began = self._began
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._at_home: set[str] = set()
        self.samples: tuple[Sequence[Sample], str, float] = (), "", -math.inf  # solutions, their step, since when

    # --- what the run reports --------------------------------------------------------------------------------------

    def phase_started(self, info: PhaseInfo) -> None:
        with self._lock:
            self.info, self.done, self.rounds = info, info.done, info.rounds
            self._phase_began = self._clock()
            self._marks.clear()
            self._marks.append((self._phase_began, info.done))
            self.newest.clear()
        resumed = f", {compact(info.done)} done before" if info.done else ""
        self.line(f"{self._place()} begins: {_total(info)}{resumed}")

    def progressed(self, progress: Progress) -> None:
        with self._lock:
            self.done = progress.done
            self._marks.append((self._clock(), progress.done))
            if progress.samples and self._clock() - self.samples[2] >= SAMPLES_S:
                self.samples = progress.samples, f"{self._place()}, step {progress.done}", self._clock()
            self.newest |= progress.metrics
            self.workers = progress.workers
            self._record(progress.metrics, self.info.phase if self.info else "")
        self.tick(self._progress_text)

    def phase_finished(self, info: PhaseInfo, metrics: Mapping[str, float]) -> None:
        with self._lock:
            took = self.phase_seconds[info.round, info.phase] = self._clock() - self._phase_began
            self.done = info.total
            # Skip the metrics that a step of this phase has reported already.
            self._record({name: value for name, value in metrics.items() if name not in self.newest}, info.phase)
        self.line("  ".join([f"{self._place()} done in {duration(took)}", *_metric_texts(metrics, LINE_METRICS)]))

    def round_finished(self, round_: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.rounds_done[round_] = dict(metrics)
        done = f"round {round_} done ({round_ + 1} of {self.rounds})"
        self.line("  ".join([done, *_metric_texts(metrics, ROUND_METRICS)]))

    def alerted(self, name: str, message: str) -> None:
        with self._lock:
            self.alerts.append((name, message))
        self.line(f"ALERT {name}: {message}")

    def noticed(self, message: str) -> None:
        self.note(message)

    def stop_requested(self) -> None:
        """The user pressed Ctrl-C once, after a phase has begun or in another process of torchrun."""
        self.is_stopping = True
        where = "when the start is done" if self.starting else "at the next commit point"
        self.noticed(f"Stopping {where}. Ctrl-C again quits at once.")

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
        """Add to the curves. A metric with a home phase follows that phase alone, from its first value there."""
        for name, value in metrics.items():
            series = self.series.setdefault(name, deque(maxlen=HISTORY))
            if HOME_PHASES.get(name) == phase and name not in self._at_home:
                self._at_home.add(name)
                series.clear()
            if name not in self._at_home or HOME_PHASES[name] == phase:
                series.append(float(value))

    # --- what follows from it --------------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """Whether no phase has begun."""
        return self.info is None

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
        return max(0.0, left - (self._clock() - self._marks[-1][0]))

    def game_eta(self) -> float | None:
        """Remaining seconds of the whole game; None until each kind of phase has finished once."""
        phase_eta = self.phase_eta()
        if self.info is None or self.info.phase not in self.phases or phase_eta is None:
            return None
        place = (self.info.round, self.info.phase)
        later = seconds_to_come(self.phase_seconds, place, self.phases, self.rounds, self.effort)
        return None if later is None else phase_eta + later

    # --- lines -----------------------------------------------------------------------------------------------------

    def _progress_text(self) -> str:
        done, *facts = self._progress_facts()
        names = ("loss", *LINE_METRICS) if self._warming else LINE_METRICS
        return "  ".join([f"{self._place()} {done}", *facts, *_metric_texts(self.newest, names)])

    def _progress_facts(self) -> list[str]:
        """`13/100 steps`, and where they are known the rate and the remaining time of the phase."""
        total = f"/{_total(self.info)}" if self.info else ""
        rate, eta = self.rate(), self.phase_eta()
        facts = [f"{compact(self.done)}{total}", f"{compact(rate)}/s" if rate else ""]
        if errors := self.newest.get("unanswered"):  # by the target of `pvg attack`
            facts.append(f"{compact(errors)} without an answer")
        return [fact for fact in [*facts, f"{duration(eta)} left" if eta else ""] if fact]

    @property
    def _warming(self) -> bool:
        return self.info is not None and self.info.phase == "warmup"

    def _place(self) -> str:
        info = self.info
        if info is None:
            return "start"
        label = phase_label(info.phase)
        if info.parts:
            return f"part {info.part} of {info.parts}, {info.label}: {label}"
        return label if len(self.phases) == 1 else f"round {info.round} {label}"

    # --- the panel -------------------------------------------------------------------------------------------------

    def render(self, width: int) -> RenderableType:
        inner = width - 4
        parts: list[RenderableType] = [self._header(), self._progress(), self._numbers(inner)]
        if self.samples[0]:
            parts.append(self._solutions(inner))
        if self.workers:
            parts.append(_workers(self.workers))
        if self.rounds_done:
            parts.append(rounds_table(self.rounds_done))
        if self.alerts:
            parts.append(self._alerts())
        if self.starting:
            hint = "stopping; Ctrl-C again quits at once" if self.is_stopping else "Ctrl-C stops"
        else:
            hint = "stopping at the next commit point" if self.is_stopping else "Ctrl-C stops at a commit point"
        title = Text.assemble(("pvg ", "bold"), (self.run, "bold cyan"))
        return framed(parts, width, title, hint, self.is_stopping, tight=self._console.height < ROOMY)

    def _header(self) -> Table:
        """Round, phase, and the elapsed time."""
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column()
        row.add_column(justify="right", no_wrap=True)
        text, info = Text(), self.info
        if info is not None and info.parts:
            text = Text.assemble((f"part {info.part} of {info.parts}", "bold"), (f"   {info.label}", "cyan"))
        elif info is not None:
            place = f"round {info.round} ({info.round + 1} of {self.rounds})   " if len(self.phases) > 1 else ""
            text = Text.assemble((place, QUIET), (phase_label(info.phase), "bold"))
        row.add_row(text, Text(duration(self.elapsed), style=QUIET))
        return row

    def _progress(self) -> Table:
        """A bar over the phase's units, the rate and the remaining time."""
        if self.info is None:
            return progress_row(0, 0, Text("starting", style=QUIET))
        in_all = [] if (game := self.game_eta()) is None else [f"{duration(game)} left in all"]
        return progress_row(
            max(1, self.info.total), self.done, Text("  ".join([*self._progress_facts(), *in_all]), style=QUIET)
        )

    def _numbers(self, width: int) -> Table:
        spark = max(6, width // 2 - 30)
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(2):
            table.add_column(no_wrap=True, style=QUIET, width=17)
            table.add_column(no_wrap=True, justify="right", width=8)
            table.add_column(no_wrap=True, ratio=1)
        which = "warmup_numbers" if self._warming else "play_numbers" if self.phases == PLAY_PHASES else "numbers"
        for left, left_style, right, right_style in LIVE[which]:
            table.add_row(*self._number(left, left_style, spark), *self._number(right, right_style, spark))
        return table

    def _number(self, name: str, style: str, width: int) -> tuple[Text, Text, Text]:
        if (value := self.latest(name)) is None and (
            other := self.latest(LIVE["otherwise"].get(name, name))
        ) is not None:
            name, value = LIVE["otherwise"][name], other
        return (
            Text(metric_display(name).label),
            Text(metric_text(name, value), style="bold" if value is not None else QUIET),
            Text(trend(name, list(self.series.get(name, ()))[-4 * width :], width), style=style),
        )

    def _solutions(self, width: int) -> Table:
        """What each role wrote, and the verdicts. A long text is cut in its middle, because it ends with the answer."""
        samples, place, _ = self.samples
        room = width - 10
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(no_wrap=True, width=8)
        table.add_column(no_wrap=True, ratio=1)
        table.add_row("", Text(f"solutions of {place}", style=QUIET))
        for each in samples:
            verdict = f"{each.grade}, {'accepted' if each.accepted else 'refused'}, score {each.score:+.2f}"
            question = shortened(one_line(each.question), room - len(verdict) - 2)
            said = Text.assemble((question, QUIET), "  ", (verdict, "green" if each.grade == "correct" else "red"))
            table.add_row(Text(each.role, style=HELPFUL if each.role == "helpful" else SNEAKY), said)
            table.add_row("", Text(shortened(one_line(each.text), room)))
        return table

    def _alerts(self) -> Text:
        name, message = self.alerts[-1]
        count = f"  ({len(self.alerts)} so far)" if len(self.alerts) > 1 else ""
        return Text.assemble(
            ("▲ ", "yellow"),
            (name, "bold yellow"),
            (f"  {message}{count}", "yellow"),
            no_wrap=True,
            overflow="ellipsis",
        )


def _total(info: PhaseInfo) -> str:
    """All units of a phase: `1 measure`, `2.4k rollouts`."""
    one = {"matches": "match"}.get(info.unit, info.unit.removesuffix("s"))
    return f"{compact(info.total)} {one if info.total == 1 else info.unit}"


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


def _metric_texts(metrics: Mapping[str, float], names: tuple[str, ...]) -> list[str]:
    """`name=value` for each of the names that has a value; values without blanks."""
    if "legal" in metrics:  # of self-play, where the reward says what the policy learns
        names = ("reward_mean", *names)
    measured = [name for name in names if not math.isnan(metrics.get(name, math.nan))]
    return [f"{name}={metric_text(name, metrics[name]).replace(' ', '')}" for name in measured]
