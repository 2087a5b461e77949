"""The display of `pvg serve`: the stages of the start with a clock, then the load of the server.

On a terminal both are drawn in place. Elsewhere each stage is a line, and so is a change of the server's work, at most
every 30 seconds.
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

from pvg.reporting.formats import compact, duration
from pvg.reporting.terminal import QUIET
from pvg.servers.command import ServerSpec
from pvg.servers.control import ServerLoad
from pvg.servers.pool import ServerFault
from pvg.servers.process import ALL_STAGES, READY, StartStage, VllmServer
from pvg_cli.output import LivePanel, PlainLines, Screen, is_live, stdout

LOOK_S = 2.0  # between two reads of /metrics
LINE_S = 30.0  # minimum time between two lines without a terminal
WIDEST = 100
SKIPPED = ("compiling", "capturing CUDA graphs")  # stages that only some servers have; shown when they start


class ServeWatcher:
    """Shows the stages of a server's start and its end; `watch` then follows the server until it ends."""

    def __init__(
        self, spec: ServerSpec, log: Path, commands: Mapping[str, str], console: Console, as_json: bool
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self.began = time.monotonic()
        self.stages: list[tuple[StartStage, float]] = []  # each with the second at which it began
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

    def progressed(self, stage: StartStage) -> None:
        if self.stages and self.stages[-1][0].name == stage.name:
            self.stages[-1] = (stage, self.stages[-1][1])
            return
        self.stages.append((stage, self.elapsed))
        if stage.name != READY:
            self._screen.line(stage.name + (f" ({stage.detail})" if stage.detail else ""))

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
        return Group(Text(), stages_table(self), Text(), clock_row(self, min(self._console.width, WIDEST)))


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


def stages_table(shown: ServeWatcher) -> Table:
    """The finished stages with their times, the current stage, and the next ones."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=3)
    table.add_column(no_wrap=True, min_width=30)
    table.add_column(no_wrap=True, justify="right", min_width=6)
    table.add_column(style=QUIET, overflow="ellipsis")
    started = {stage.name: (stage, began) for stage, began in shown.stages}
    order = [began for _, began in shown.stages] + [shown.elapsed]
    for name in ALL_STAGES[:-1]:
        if name in started:
            stage, began = started[name]
            place = [stage.name for stage, _ in shown.stages].index(name)
            is_now = place == len(shown.stages) - 1
            mark, style = ("●", "bold cyan") if is_now else ("✓", "green")
            took = duration(order[place + 1] - began)
            table.add_row(Text(f" {mark}", style=style), Text(name, style="bold" if is_now else ""), took, stage.detail)
        elif name not in SKIPPED and shown.stages and ALL_STAGES.index(name) > shown.stages[-1][0].place:
            table.add_row(Text(" ○", style=QUIET), Text(name, style=QUIET), "", "")
    return table


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
