"""The display of `pvg serve`: the newest line of the server's log. A terminal has it in place.
Elsewhere lines are at least 30 seconds apart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.spinner import Spinner
from rich.text import Text

from pvg.errors import shortened
from pvg.reporting.formats import duration
from pvg.reporting.terminal import QUIET
from pvg.servers.command import ServerSpec
from pvg.servers.process import VllmServer
from pvg_cli.output import LivePanel, PlainLines, Screen, is_live, stdout

LOOK_S = 2.0  # between two looks at the log
LINE_S = 30.0  # minimum time between two lines without a terminal
USES = {"generate": "for sampling", "pooling": "for scoring"}


class ServeWatcher:
    """Shows a server's start and its end; `watch` then follows the server until it ends."""

    def __init__(
        self, spec: ServerSpec, log: Path, commands: Mapping[str, str], console: Console, as_json: bool
    ) -> None:
        self.spec = spec
        self.is_ready = False
        self._began = time.monotonic()
        self._now = "starting"
        self._log = log
        self._commands = commands
        self._console = console
        self._as_json = as_json
        self._shown = ""  # the last line about the server's work
        self._spinner = Spinner("dots")
        self._screen: Screen = (
            LivePanel(console, self.render, refresh_per_second=4)
            if is_live(console)
            else PlainLines(console, lambda: f"{duration(self.elapsed):>11}", time.monotonic, LINE_S)
        )

    def __enter__(self) -> ServeWatcher:
        found = self.spec.interpreter
        dtype = self.spec.command[self.spec.command.index("--dtype") + 1]
        self._print(f"{self.spec.model}, {dtype}, {USES[self.spec.runner]}, at {self.spec.url}")
        self._print(f"vLLM {found.vllm} for the {found.device.upper()}, {found.origin}: {found.python}")
        self._print(f"log: {self._log}")
        self._screen.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.__exit__()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def progressed(self, line: str) -> None:
        self._now = shortened(line)
        self._screen.tick(lambda: self._now)

    def ready(self, server: VllmServer) -> None:
        self.is_ready = True
        on_stdout = not is_live(self._console) and not self._as_json
        where = stdout() if on_stdout else self._console
        text = Text.assemble("\n", ("ready: ", "bold green"), server.url, (f"  after {duration(self.elapsed)}", QUIET))
        for command, what in self._commands.items():
            text.append_text(Text.assemble("\n\n", (f"{what}:", QUIET), "\n  ", (command, "bold cyan")))
        where.print(text, soft_wrap=True)
        self._began = time.monotonic()

    def stopped(self) -> None:
        self._now = "stopping"
        self._screen.line("stopping")

    async def watch(self, server: VllmServer) -> None:
        """Follow the server's log until it ends by itself, which raises ServerFailedError."""
        ended = asyncio.ensure_future(server.ended())
        try:
            while not ended.done():
                if line := server.newest_line():
                    self._now = shortened(line)
                self._screen.tick(self._change)
                await asyncio.wait([ended], timeout=LOOK_S)
            await ended
        finally:
            ended.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ended, return_exceptions=True)

    def _change(self) -> str:
        """What the server does, if it differs from the last line."""
        text = "" if self._now == self._shown else self._now
        self._shown = self._now
        return text

    def render(self) -> RenderableType:
        limit = "" if self.is_ready else f" of at most {duration(self.spec.startup_s)}"
        text = Text.assemble(self._now, (f"   {duration(self.elapsed)}{limit}   Ctrl-C stops", QUIET))
        self._spinner.update(text=text)
        return self._spinner

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
