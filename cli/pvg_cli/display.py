"""What a command shows while it works for a long time: a panel on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pvg.reporting.formats import duration
from pvg_cli.output import QUIET

WIDEST = 120  # columns; a wider panel is harder to read
ECHO = 2  # columns at the right that stay free: the terminal's echo of ^C at the end of a full line would scroll it


def is_live(console: Console) -> bool:
    """Whether the console can redraw text in place."""
    return console.is_terminal and not console.is_dumb_terminal


class Display:
    """While entered: on a terminal draws `render()` in place, and removes the drawing at the end. Elsewhere prints a
    line per event, and a progress line at most every EVERY_S seconds. `clock` returns seconds."""

    EVERY_S = 30.0
    REFRESH_PER_S = 4.0

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_stopping = False
        self._console, self._clock = console, clock
        self._began = self._last_s = clock()
        self._lock = threading.Lock()  # a thread draws the panel while the work changes what it shows
        self.live = is_live(console)  # a panel shows the work; otherwise lines do
        self._panel: Live | None = None

    def __enter__(self) -> Self:
        if self.live:
            rate = self.REFRESH_PER_S
            self._panel = Live(
                get_renderable=self.drawn, console=self._console, refresh_per_second=rate, transient=True
            )
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._panel is not None:
            self._panel.stop()

    @property
    def elapsed(self) -> float:
        return self._clock() - self._began

    def drawn(self) -> RenderableType:
        with self._lock:
            return self.render(min(self._console.width - ECHO, WIDEST))

    def render(self, width: int) -> RenderableType:
        """What the panel shows."""
        raise NotImplementedError

    def stamp(self) -> str:
        """The start of each line."""
        return f"{duration(self.elapsed):>11}"

    def line(self, text: str) -> None:
        """An event. A panel shows its effect already."""
        if not self.live:
            self._last_s = self._clock()
            print(f"{self.stamp()}  {text}", file=self._console.file, flush=True)

    def tick(self, text: Callable[[], str]) -> None:
        """A progress line, unless the last line is younger than EVERY_S seconds or `text()` is empty."""
        if not self.live and self._clock() - self._last_s >= self.EVERY_S and (said := text()):
            self.line(said)

    def note(self, text: str, mark: str = "·", style: str = "cyan") -> None:
        """A message that stays above the panel."""
        if self.live:
            self._console.print(Text.assemble((f"{mark} ", style), text))
        else:
            self.line(text)


def framed(
    parts: Sequence[RenderableType], width: int, title: Text, hint: str, stopping: bool, *, tight: bool = False
) -> Panel:
    """The frame around what a command shows, with a blank line between its parts, or `tight` without. `hint`: what
    Ctrl-C does."""
    spaced = [line for part in parts for line in (Text(), part)]
    return Panel(
        Padding(Group(*parts), (0, 1)) if tight else Padding(Group(*spaced[1:]), 1),
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
    bar = ProgressBar(total or None, done, pulse=not total, complete_style="cyan", finished_style="green")
    row.add_row(bar, facts)
    return row
