"""`pvg view [RUN]`: look at a run, on the terminal and as a page; with --live as a page that follows the run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from pvg.errors import UsageError
from pvg_cli import completion
from pvg_cli.boundary import emit, say, stopped
from pvg_cli.options import DebugOption, JsonOption, RunsOption

if TYPE_CHECKING:
    from pvg.reporting.live_page import LivePage
    from pvg.store.run_directory import RunDirectory

PORT = 8765  # always the same one, so that a forwarded port stays valid


def view(
    run: Annotated[
        str | None,
        Argument(metavar="RUN", help="Its name or folder. Default: the newest run.", autocompletion=completion.runs),
    ] = None,
    runs: RunsOption = Path("runs"),
    live: Annotated[bool, Option("--live", help="Follow the run on a page that this machine serves.")] = False,
    port: Annotated[int | None, Option(min=0, max=65535, help=f"0: any free one. Default: {PORT}, if free.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Look at a run, finished or not: its rounds and some solutions here, everything else on a page in its folder.

    With --live, a page follows the run until Ctrl-C: its curves, and all its solutions. It only reads the run. pvg
    opens no browser, and without --live no port. With --live --json, the document is printed when the page is ready.
    """
    from pvg.reporting.follow import newest_run, state_of
    from pvg_cli.report import opened, place_of_page, show_run

    if port is not None and not live:
        raise UsageError("Only the live page has a port.", "Add --live, or leave out --port.")
    directory = newest_run(runs) if run is None else opened([run], runs)[0]
    if run is None:
        say(f"{directory.name} is the newest run in {runs}.")
    if live:
        _follow(directory, port, as_json)
        return
    show_run(directory, place_of_page([directory]), as_json)
    if state_of(directory) in ("running", "silent"):
        say(f"It is not finished. To follow it: pvg view {directory.argument} --live")


def _follow(directory: RunDirectory, port: int | None, as_json: bool) -> None:
    """Serve the live page until Ctrl-C."""
    import asyncio

    from pvg.reporting.live_page import LivePage
    from pvg.servers.process import PortInUseError
    from pvg_cli.driving import cancelled_at_signals, killed_document

    ready = False
    killed = killed_document(directory.name, "Call pvg view again.", as_json)

    async def work(attach: Callable[[], None]) -> None:
        nonlocal ready
        attach()
        candidates = [PORT, 0] if port is None else [port]
        for candidate in candidates:
            try:
                async with LivePage.start(directory, candidate) as page:
                    ready = True
                    _announce(page, directory, as_json)
                    await asyncio.Event().wait()  # until Ctrl-C
            except PortInUseError as error:
                if not error.taken or candidate == candidates[-1]:
                    raise

    try:
        with cancelled_at_signals(lambda: b"" if ready else killed) as attach:
            asyncio.run(work(attach))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise stopped("Stopped. The run is not affected.", document=as_json and not ready) from None


def _announce(page: LivePage, directory: RunDirectory, as_json: bool) -> None:
    import socket

    forward = f"ssh -N -L {page.port}:127.0.0.1:{page.port} {shlex.quote(socket.gethostname())}"
    if as_json:
        emit({"url": page.url, "run": directory.name, "path": str(directory.path), "forward": forward})
    say(f"The page of {directory.name}: {page.url}")
    say(f"From another machine: {forward}    (then open the same address there)")
    say("Ctrl-C ends this page. It does not affect the run.")
