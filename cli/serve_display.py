"""What `pvg serve` shows: the stages of the start with a clock, then how busy the server is.

On a terminal both are drawn in place; elsewhere each stage is a line, and so is a change of what the server does, at
most every half minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.output import stderr, stdout
from pvg.reporting.formats import clock, compact, duration
from pvg.reporting.terminal import QUIET
from pvg.servers.command import ServerSpec
from pvg.servers.control import ServerLoad
from pvg.servers.pool import ServerFault
from pvg.servers.process import ALL_STAGES, READY, StartStage, VllmServer

LOOK_S = 2.0  # between two looks at /metrics
LINE_S = 30.0  # at least, between two lines without a terminal
WIDEST = 100
SKIPPED = ("compiling", "capturing CUDA graphs")  # stages that only some servers have: shown when they are there


def view(spec: ServerSpec, log: Path, commands: Mapping[str, str], as_json: bool) -> ServeView:
    console = stderr()
    kind = Drawn if console.is_terminal and not console.is_dumb_terminal else Lines
    return kind(spec, log, commands, console, as_json)


class ServeView:
    """Told of stages, of the ready server and of its end; `watch` then follows the server until it ends."""

    def __init__(
        self, spec: ServerSpec, log: Path, commands: Mapping[str, str], console: Console, as_json: bool
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self.began = time.monotonic()
        self.stages: list[tuple[StartStage, float]] = []  # each with the second it began
        self.figures: tuple[ServerLoad, ServerLoad] | None = None  # the look before, and the last one
        self.silent = ""  # why the last look showed nothing
        self._log = log
        self._commands = commands
        self._console = console
        self._as_json = as_json

    def __enter__(self) -> ServeView:
        self._console.print(introduction(self.spec, self._log))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def progressed(self, stage: StartStage) -> None:
        if self.stages and self.stages[-1][0].name == stage.name:
            self.stages[-1] = (stage, self.stages[-1][1])
        else:
            self.stages.append((stage, self.elapsed))

    def ready(self, server: VllmServer) -> None:
        self.is_ready = True
        self._announce(announcement(server.url, self.elapsed, self._commands))
        self.began = time.monotonic()

    def _announce(self, told: Text) -> None:
        self._console.print(told, soft_wrap=True)

    def stopped(self) -> None: ...

    async def watch(self, server: VllmServer) -> None:
        """Look at the server until it ends by itself, which is a ServerFailedError."""
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
                self.looked()
                last = found
            await ended
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ended, return_exceptions=True)

    def looked(self) -> None: ...


async def _look(server: VllmServer) -> ServerLoad | str:
    try:
        return await server.figures()
    except ServerFault as fault:
        return fault.what


class Drawn(ServeView):
    """Drawn in place on a terminal."""

    def __enter__(self) -> ServeView:
        super().__enter__()
        self._stack = ExitStack()
        self._stack.enter_context(_quiet_keys())
        self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=4, transient=True)
        self._stack.enter_context(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stopped(self) -> None:
        self._stopping = True

    _stopping = False

    def render(self) -> RenderableType:
        if self._stopping:
            return Text("\n  ● stopping", style="yellow")
        if self.is_ready:
            return Group(Text(), activity(self))
        return Group(Text(), stages_table(self), Text(), clock_row(self, min(self._console.width, WIDEST)))


class Lines(ServeView):
    """A line per stage, and one when the server's work has changed."""

    _last_line = -LINE_S
    _last_text = ""

    def progressed(self, stage: StartStage) -> None:
        known = bool(self.stages) and self.stages[-1][0].name == stage.name
        super().progressed(stage)
        if not known and stage.name != READY:
            self._line(stage.name + (f" ({stage.detail})" if stage.detail else ""))

    def _announce(self, told: Text) -> None:
        (self._console if self._as_json else stdout()).print(told, soft_wrap=True)

    def stopped(self) -> None:
        self._line("stopping")

    def looked(self) -> None:
        text = activity_text(self).plain
        if text != self._last_text and self.elapsed - self._last_line >= LINE_S:
            self._last_line, self._last_text = self.elapsed, text
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(f"{clock(self.elapsed):>7}  {text}", markup=False)


# --- drawing ---------------------------------------------------------------------------------------------------------


def introduction(spec: ServerSpec, log: Path) -> Table:
    """What is going to be served, by what, where."""
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


_RUNNERS = {"generate": "sampled from", "pooling": "a classifier of one score"}


def _short(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def stages_table(shown: ServeView) -> Table:
    """Stages done with what they took, the present one, and those to come."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=3)
    table.add_column(no_wrap=True, min_width=30)
    table.add_column(no_wrap=True, justify="right", min_width=6)
    table.add_column(style=QUIET, overflow="ellipsis")
    begun = {stage.name: (stage, began) for stage, began in shown.stages}
    order = [began for _, began in shown.stages] + [shown.elapsed]
    for name in ALL_STAGES[:-1]:
        if name in begun:
            stage, began = begun[name]
            place = [stage.name for stage, _ in shown.stages].index(name)
            is_now = place == len(shown.stages) - 1
            mark, style = ("●", "bold cyan") if is_now else ("✓", "green")
            took = duration(order[place + 1] - began)
            table.add_row(Text(f" {mark}", style=style), Text(name, style="bold" if is_now else ""), took, stage.detail)
        elif name not in SKIPPED and shown.stages and ALL_STAGES.index(name) > shown.stages[-1][0].place:
            table.add_row(Text(" ○", style=QUIET), Text(name, style=QUIET), "", "")
    return table


def clock_row(shown: ServeView, width: int) -> Table:
    """A bar of the time, against the time limit: how long a start takes is only known to its end."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=max(10, width - 44))
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=None, pulse=True, width=max(10, width - 44))
    limit = Text.assemble(
        (clock(shown.elapsed), "bold"), (f" of at most {clock(shown.spec.startup_s)}", QUIET), ("  Ctrl-C stops", QUIET)
    )
    row.add_row(bar, limit)
    return row


def announcement(url: str, seconds: float, commands: Mapping[str, str]) -> Text:
    """The server is ready; what to type next. Long commands are left to the terminal to wrap: they can be copied."""
    told = Text.assemble("\n", ("ready: ", "bold green"), (url, "bold"), (f"  after {duration(seconds)}", QUIET))
    for command, what in commands.items():
        told.append_text(Text.assemble("\n\n", (f"{what}:", QUIET), "\n  ", (command, "bold cyan")))
    return told


def activity(shown: ServeView) -> Text:
    return Text.assemble("  ", activity_text(shown), (f"   up {clock(shown.elapsed)}   Ctrl-C stops", QUIET))


def activity_text(shown: ServeView) -> Text:
    """Requests and tokens per second at the last look."""
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


@contextlib.contextmanager
def _quiet_keys() -> Iterator[None]:
    """Keep the terminal from echoing `^C` into what is drawn."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = termios.tcgetattr(sys.stdin)
    silent[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
