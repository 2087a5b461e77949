"""The display of `pvg serve`: the newest line of the server's log."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Self

from rich.console import Console, RenderableType
from rich.spinner import Spinner
from rich.text import Text

from pvg.errors import shortened
from pvg.reporting.formats import duration
from pvg.servers.command import ServerSpec
from pvg.servers.process import VllmServer
from pvg_cli.display import Display
from pvg_cli.output import QUIET, stdout

LOOK_S = 2.0  # between two looks at the log
USES = {"generate": "for sampling", "pooling": "for scoring"}


class ServeDisplay(Display):
    """Shows a server's start and its end; `watch` then follows the server until it ends."""

    def __init__(self, spec: ServerSpec, log: Path, command: str, console: Console, as_json: bool) -> None:
        super().__init__(console)
        self.spec = spec
        self.is_ready = False
        self._now = "starting"
        self._shown = ""  # the last line about the server's work
        self._log, self._command = log, command
        self._on_stdout = not self.live and not as_json
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        found = self.spec.interpreter
        dtype = self.spec.command[self.spec.command.index("--dtype") + 1]
        for text in (
            f"{self.spec.model}, {dtype}, {USES[self.spec.runner]}, at {self.spec.url}",
            f"vLLM {found.vllm} for the {found.device.upper()}, {found.origin}: {found.python}",
            f"log: {self._log}",
        ):
            self._console.print(Text(text), soft_wrap=True)
        return super().__enter__()

    def progressed(self, line: str) -> None:
        self._now = shortened(line)
        self.tick(lambda: self._now)

    def ready(self, server: VllmServer) -> None:
        self.is_ready = True
        text = Text.assemble("\n", ("ready: ", "bold green"), server.url, (f"  after {duration(self.elapsed)}", QUIET))
        text.append("\n\nTo train with it, type in another terminal:\n", QUIET).append(
            f"  {self._command}", "bold cyan"
        )
        (stdout() if self._on_stdout else self._console).print(text, soft_wrap=True)
        self._began = time.monotonic()

    def stopped(self) -> None:
        self._now = "stopping"
        self.line("stopping")

    async def watch(self, server: VllmServer) -> None:
        """Follow the server's log until it ends by itself, which raises ServerFailedError."""
        ended = asyncio.ensure_future(server.ended())
        try:
            while not ended.done():
                if line := server.newest_line():
                    self._now = shortened(line)
                self.tick(self._change)
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

    def render(self, width: int) -> RenderableType:
        limit = "" if self.is_ready else f" of at most {duration(self.spec.startup_s)}"
        self._spinner.update(
            text=Text.assemble(self._now, (f"   {duration(self.elapsed)}{limit}   Ctrl-C stops", QUIET))
        )
        return self._spinner
