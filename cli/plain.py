"""The observer for a stderr that is no terminal: a line per phase and round, and one every few seconds in between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from cli.board import Board
from pvg.reporting.formats import clock, compact, duration, metric_text, phase_label
from pvg.telemetry.observer import PhaseInfo, Progress

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
    return [f"{name}={metric_text(name, metrics[name]).replace(' ', '')}" for name in names if name in metrics]
