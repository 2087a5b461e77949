"""The display of `pvg serve`: what the server does at its start with a clock, then its load.

On a terminal both are drawn in place. Elsewhere they are lines, at most one every 30 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pvg.errors import shortened
from pvg.reporting.formats import compact, duration
from pvg.reporting.terminal import QUIET
from pvg.servers.command import ServerSpec
from pvg.servers.control import ServerLoad
from pvg.servers.pool import ServerFault
from pvg.servers.process import VllmServer
from pvg_cli.output import LivePanel, PlainLines, Screen, is_live, stdout

LOOK_S = 2.0  # between two reads of /metrics
LINE_S = 30.0  # minimum time between two lines without a terminal
WIDEST = 100


class ServeWatcher:
    """Shows a server's start and its end; `watch` then follows the server until it ends."""

    def __init__(
        self, spec: ServerSpec, log: Path, commands: Mapping[str, str], console: Console, as_json: bool
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self.began = time.monotonic()
        self.doing = ""  # the newest line of the start
        self.figures: tuple[ServerLoad, ServerLoad] | None = None  # the second last reading, and the last one
        self.silent = ""  # why the last reading failed
        self._log = log
        self._commands = commands
        self._console = console
        self._as_json = as_json
        self._stopping = False
        self._shown = ""  # the last line about the server's work
        self._screen: Screen = (
            LivePanel(console, self.render, refresh_per_second=4)
            if is_live(console)
            else PlainLines(console, lambda: f"{duration(self.elapsed):>11}", time.monotonic, LINE_S)
        )

    def __enter__(self) -> ServeWatcher:
        self._console.print(introduction(self.spec, self._log))
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.__exit__()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def progressed(self, doing: str) -> None:
        is_first, self.doing = not self.doing, doing
        if is_first:
            self._screen.line(doing)
        else:
            self._screen.tick(lambda: doing)

    def ready(self, server: VllmServer) -> None:
        self.is_ready = True
        on_stdout = not is_live(self._console) and not self._as_json
        where = stdout() if on_stdout else self._console
        where.print(announcement(server.url, self.elapsed, self._commands), soft_wrap=True)
        self.began = time.monotonic()

    def stopped(self) -> None:
        self._stopping = True
        self._screen.line("stopping")

    async def watch(self, server: VllmServer) -> None:
        """Read the server's metrics until it ends by itself, which raises ServerFailedError."""
        ended = asyncio.ensure_future(server.ended())
        try:
            last = await _look(server)
            while not ended.done():
                await asyncio.wait([ended], timeout=LOOK_S)
                found = await _look(server) if not ended.done() else "ended"
                if isinstance(found, ServerLoad):
                    self.silent = ""
                    self.figures = (last if isinstance(last, ServerLoad) else found, found)
                else:
                    self.silent = found
                self._screen.tick(self._change)
                last = found
            await ended
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ended, return_exceptions=True)

    def _change(self) -> str:
        """What the server does, if it differs from the last line."""
        text = activity_text(self).plain
        if text == self._shown:
            return ""
        self._shown = text
        return text

    def render(self) -> RenderableType:
        if self._stopping:
            return Text("\n  ● stopping", style="yellow")
        if self.is_ready:
            return Group(Text(), activity(self))
        doing = Text(f"  {shortened(self.doing, WIDEST)}", style=QUIET)
        return Group(Text(), doing, Text(), clock_row(self, min(self._console.width, WIDEST)))


async def _look(server: VllmServer) -> ServerLoad | str:
    try:
        return await server.current_load()
    except ServerFault as fault:
        return fault.what


# --- drawing ---------------------------------------------------------------------------------------------------------


def introduction(spec: ServerSpec, log: Path) -> Table:
    """The model, the address, vLLM and the log."""
    found = spec.interpreter
    table = Table.grid(padding=(0, 2))
    table.add_column(style=QUIET, no_wrap=True)
    table.add_column(overflow="fold")
    dtype = spec.command[spec.command.index("--dtype") + 1]
    table.add_row("model", Text.assemble((spec.model, "bold cyan"), f"  {dtype}, {_RUNNERS[spec.runner]}"))
    place = f"http://{spec.host}:{spec.port}" if ":" not in spec.host else f"http://[{spec.host}]:{spec.port}"
    table.add_row("address", Text(place))
    table.add_row("vLLM", Text(f"{found.vllm} for the {found.device.upper()}, {found.origin}"))
    table.add_row("python", Text(_short(found.python)))
    table.add_row("log", Text(_short(log)))
    return table


_RUNNERS = {"generate": "for sampling", "pooling": "for scoring"}


def _short(path: Path) -> str:
    """The path relative to the current folder, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def clock_row(shown: ServeWatcher, width: int) -> Table:
    """A pulsing bar with the elapsed time and the time limit. The duration of a start is unknown before it ends."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=max(10, width - 56))
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=None, pulse=True, width=max(10, width - 56))
    limit = Text.assemble(
        (duration(shown.elapsed), "bold"),
        (f" of at most {duration(shown.spec.startup_s)}", QUIET),
        ("  Ctrl-C stops", QUIET),
    )
    row.add_row(bar, limit)
    return row


def announcement(url: str, seconds: float, commands: Mapping[str, str]) -> Text:
    """The address and the next commands. The terminal wraps long commands, so that they can be copied."""
    text = Text.assemble("\n", ("ready: ", "bold green"), (url, "bold"), (f"  after {duration(seconds)}", QUIET))
    for command, what in commands.items():
        text.append_text(Text.assemble("\n\n", (f"{what}:", QUIET), "\n  ", (command, "bold cyan")))
    return text


def activity(shown: ServeWatcher) -> Text:
    return Text.assemble("  ", activity_text(shown), (f"   up {duration(shown.elapsed)}   Ctrl-C stops", QUIET))


def activity_text(shown: ServeWatcher) -> Text:
    """Requests and tokens per second at the last reading."""
    if shown.silent:
        return Text(f"▲ no answer: {shown.silent}", style="yellow")
    if shown.figures is None:
        return Text("○ idle", style=QUIET)
    before, now = shown.figures
    sampled, read = now.rates(before)
    if not (now.running or now.waiting or sampled or read):
        return Text(f"○ idle, {compact(now.generated or now.read)} tokens so far", style=QUIET)
    parts: list[str | tuple[str, str]] = [("● ", "green"), (f"{now.running}", "bold"), " running  "]
    parts += [(f"{now.waiting}", "bold"), " waiting  "]
    parts += [(compact(sampled), "bold"), " tokens/s"] if sampled else [(compact(read), "bold"), " tokens read/s"]
    return Text.assemble(*parts)
