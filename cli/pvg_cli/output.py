"""Printing for people: consoles, tables, TOML with colours, and the screen of a command that works for a long time.

Without a terminal pvg prints the same text without escape codes. A long command has one of two screens: `LivePanel`
on a terminal, `PlainLines` elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from pvg.errors import counted, system_module

if TYPE_CHECKING:
    from pvg.config.experiment import BatchArithmetic, Experiment

PIPE_WIDTH = 100  # columns, if the output is not a terminal and COLUMNS is not set
NARROWEST = 40  # columns; in a narrower output no table can be read
WIDEST = 120  # columns; a wider panel is harder to read
QUIET = "bright_black"


def console(stream: TextIO) -> Console:
    """A console on stdout or stderr. It replaces characters that the stream cannot encode, instead of raising."""
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else pipe_width(os.environ.get("COLUMNS", ""))
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def pipe_width(columns: str) -> int:
    """The width without a terminal, from the variable COLUMNS. `PIPE_WIDTH` if it is no number above 0."""
    wanted = int(columns) if columns.isascii() and columns.isdigit() else 0
    return max(NARROWEST, wanted) if wanted else PIPE_WIDTH


def stdout() -> Console:
    return console(sys.stdout)


def stderr() -> Console:
    return console(sys.stderr)


def print_paragraph(console: Console, text: str, indent: int, hanging: int = 0, strong: int = 0) -> None:
    """Print a text that is wrapped and indented. `hanging`: how much deeper its second and further lines begin;
    `strong`: how many of its first characters are bold."""
    first, later = " " * indent, " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(console.width, first, later, break_long_words=False, break_on_hyphens=False)
    wrapped = Text(wrapper.fill(text))
    wrapped.stylize("bold", indent, indent + strong)
    console.print(wrapped, soft_wrap=True)


def print_toml(text: str) -> None:
    """Print TOML: with colours on a terminal, unchanged in a pipe, so that a user can save the output and load it."""
    if sys.stdout.isatty():
        stdout().print(Syntax(text.rstrip(), "toml", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        sys.stdout.write(text)


def names_table(about: Mapping[str, str], use: str, command: str) -> Group:
    """Names with what each is about, and a hint: the command to `use` one."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in about.items():
        table.add_row(*row)
    return Group(table, Text(), Text.assemble((f"{use}: ", QUIET), (command, "bold cyan")))


def arithmetic_table(experiment: Experiment) -> RenderableType:
    """The numbers that follow from the settings, each with its derivation."""
    from pvg.reporting.table import Column, Table

    table = Table([Column("derived"), Column("", "right", "strong"), Column("from", style="quiet")])
    for label, value, origin in _arithmetic_rows(experiment, experiment.arithmetic()):
        table.add(label, f"{value:,}", origin)
    return table


def _arithmetic_rows(experiment: Experiment, numbers: BatchArithmetic) -> list[tuple[str, int, str]]:
    training, game, verifier = experiment.training, experiment.game, experiment.verifier
    grows = game.growing and numbers.mint_rollouts_per_round > 0  # self-play has no mint
    per_round = "in round 0" if grows else "per round"
    more = "; each later round adds as many" if grows else ""
    micro = f"at most {training.micro_batch_tokens:,} tokens each"
    pairs = f"{counted(verifier.steps, 'step')} x {verifier.pairs}"
    if verifier.ensemble.size > 1:
        pairs = f"{verifier.ensemble.size} members x {pairs}"
    prover = counted(training.steps, "step")
    if training.dynamic_sampling:
        prover += f", up to {1 + training.dynamic_sampling} times as many to fill batches up"
    players, schedule = "verifier + prover", game.schedule
    updates: list[tuple[str, int, str]] = []
    if schedule.kind == "simultaneous":
        players += " + updates"
        when = "each batch" if schedule.every == 1 else f"every {schedule.every:,} batches"
        origin = f"{counted(schedule.every, 'step')} after {when}"
        updates = [("steps of verifier updates per round", numbers.verifier_update_steps_per_round, origin)]
    return [
        ("rollouts per batch", numbers.rollouts_per_batch, f"{numbers.groups} groups x {numbers.group_size}"),
        ("optimizer steps per batch", numbers.optimizer_steps_per_batch, "training.minibatches"),
        ("rollouts per optimizer step", numbers.rollouts_per_optimizer_step, "batch / optimizer steps"),
        ("rollouts per micro-batch, about", numbers.micro_batch_rollouts, micro),
        ("accumulation steps, about", numbers.accumulation_steps, "micro-batches per optimizer step"),
        (
            "completion tokens per batch, at most",
            numbers.completion_tokens_per_batch,
            f"{numbers.rollouts_per_batch:,} rollouts x {experiment.rollout.max_tokens}",
        ),
        (
            f"mint rollouts {per_round}",
            numbers.mint_rollouts_per_round,
            f"{game.mint_problems:,} problems x {game.mint_samples}{more}",
        ),
        (f"verifier pairs {per_round}", numbers.verifier_pairs_per_round, pairs + more),
        ("prover rollouts per round", numbers.prover_rollouts_per_round, prover),
        *updates,
        ("optimizer steps in total", numbers.optimizer_steps, f"{counted(game.rounds, 'round')} x ({players})"),
    ]


# --- the screen of a long command ------------------------------------------------------------------------------------


def is_live(console: Console) -> bool:
    """Whether the console can redraw text in place."""
    return console.is_terminal and not console.is_dumb_terminal


class LivePanel:
    """The screen on a terminal: draws `render()` in place while entered, and removes the drawing at the end."""

    def __init__(self, console: Console, render: Callable[[], RenderableType], refresh_per_second: float) -> None:
        self._console = console
        self._live = Live(get_renderable=render, console=console, refresh_per_second=refresh_per_second, transient=True)
        self._stack = ExitStack()

    def __enter__(self) -> LivePanel:
        self._stack.enter_context(silent_control_keys())
        self._stack.enter_context(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def line(self, text: str) -> None:
        """An event. The panel shows its effect already, so nothing is printed."""

    def tick(self, text: Callable[[], str]) -> None:
        """A progress line. The panel shows the progress already."""

    def note(self, text: str, mark: str = "·", style: str = "cyan") -> None:
        """A message that stays above the panel."""
        self._console.print(Text.assemble((f"{mark} ", style), text))


class PlainLines:
    """The screen without a terminal: a line per event, and a progress line at most every `every_s` seconds.

    `stamp` gives the start of each line, `clock` the time in seconds.
    """

    def __init__(self, console: Console, stamp: Callable[[], str], clock: Callable[[], float], every_s: float) -> None:
        self._stream = console.file
        self._stamp = stamp
        self._clock = clock
        self._every_s = every_s
        self._last_s = clock()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def line(self, text: str) -> None:
        self._last_s = self._clock()
        print(f"{self._stamp()}  {text}", file=self._stream, flush=True)

    def tick(self, text: Callable[[], str]) -> None:
        """Print `text()`, unless the last line is less than `every_s` seconds old or `text()` is empty."""
        if self._clock() - self._last_s >= self._every_s and (said := text()):
            self.line(said)

    def note(self, text: str, mark: str = "", style: str = "") -> None:
        self.line(text)


Screen = LivePanel | PlainLines


@contextlib.contextmanager
def silent_control_keys() -> Iterator[None]:
    """Keep the terminal from echoing `^C`: at the end of a full line the echo would scroll the panel by one line."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    termios = system_module("termios")
    before = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def framed(parts: Sequence[RenderableType], width: int, title: Text, hint: str, *, stopping: bool) -> Panel:
    """The frame around what a command shows: a title at the top, what Ctrl-C does at the bottom."""
    return Panel(
        Padding(Group(*parts), (1, 2)),
        box=ROUNDED,
        width=width,
        border_style=QUIET,
        title=title,
        title_align="left",
        subtitle=Text(hint, style="yellow" if stopping else QUIET),
        subtitle_align="right",
        padding=0,
    )


def progress_row(total: int, done: int, facts: Text) -> Table:
    """A bar, and the facts at its right. The bar pulses if `total` is 0."""
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    if total:
        bar = ProgressBar(total=total, completed=done, complete_style="cyan", finished_style="green")
    else:
        bar = ProgressBar(total=None, pulse=True)
    row.add_row(bar, facts)
    return row
