"""`pvg watch RUN`: serve a live page that follows a run, and all of its stored solutions."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pvg_cli.boundary import emit, say, stopped
from pvg_cli.options import DebugOption, JsonOption, RunArgument, RunsOption

if TYPE_CHECKING:
    from pvg.reporting.watch_server import WatchServer
    from pvg.store.run_directory import RunDirectory

PORT = 8765  # always the same one, so that a forwarded port stays valid


def watch(
    run: RunArgument,
    runs: RunsOption = Path("runs"),
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=0,
            max=65535,
            help=f"The port on 127.0.0.1. 0: any free one. Default: {PORT}, or a free one if that is taken.",
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Serve a live page of a run until Ctrl-C: its curves while it trains, and all of its solutions.

    The page only reads the run. With --json, the document is printed when the server is ready.
    """
    import asyncio

    from pvg.reporting.watch_server import WatchServer
    from pvg.servers.process import PortInUseError
    from pvg.store.run_directory import RunDirectory
    from pvg_cli.driving import cancelled_at_signals, killed_document

    directory = RunDirectory.open(run, runs)
    ready = False
    killed = killed_document(directory.name, "Call pvg watch again.", as_json)

    async def work(attach: Callable[[], None]) -> None:
        nonlocal ready
        attach()
        candidates = [PORT, 0] if port is None else [port]
        for candidate in candidates:
            try:
                async with WatchServer.start(directory, candidate) as server:
                    ready = True
                    _announce(server, directory, as_json)
                    await asyncio.Event().wait()  # until Ctrl-C
            except PortInUseError as error:
                if not error.taken or candidate == candidates[-1]:
                    raise

    try:
        with cancelled_at_signals(lambda: b"" if ready else killed) as attach:
            asyncio.run(work(attach))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise stopped("Stopped. The run is not affected.", document=as_json and not ready) from None


def _announce(server: WatchServer, directory: RunDirectory, as_json: bool) -> None:
    import socket

    forward = f"ssh -N -L {server.port}:127.0.0.1:{server.port} {shlex.quote(socket.gethostname())}"
    if as_json:
        emit({"url": server.url, "run": directory.name, "path": str(directory.path), "forward": forward})
    say(f"Watching {directory.name}: {server.url}")
    say(f"From another machine: {forward}    (then open the same address there)")
    say("Ctrl-C ends this page. It does not affect the run.")
