"""Runs the work of a command under its display, and handles Ctrl-C.

The first SIGINT or SIGTERM asks the run to stop at its next commit point, or at once if no phase has begun. The second
ends the process at once. Nothing that was committed is lost, because a run survives SIGKILL at any instant. Work that
commits nothing (`pvg score`, `pvg serve --player verifier`) is cancelled by the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pvg.errors import StoppedAtStart
from pvg.telemetry.waits import runner
from pvg_cli import write
from pvg_cli.boundary import EXIT_STOPPED, SCHEMA_VERSION, error_document, handled, json_text
from pvg_cli.run_display import RunDisplay

if TYPE_CHECKING:
    from pvg.store.run_directory import RunDirectory

Result = TypeVar("Result")
SHOW_CURSOR = b"\x1b[?25h\n"
STOPPING = b"Stopping. Ctrl-C again quits at once.\n"

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def drive(
    work: Callable[[RunDisplay, asyncio.Event], Coroutine[Any, Any, Result]],
    display: RunDisplay,
    killed_document: bytes = b"",
) -> Result:
    """Run `work(observer, stop)` to its end under the display.

    If a second Ctrl-C ends the process, it writes `killed_document` to stdout: with --json, the one document. Raises
    StoppedAtStart if the first comes before a phase has begun.
    """
    switch = StopSwitch(display, killed_document)
    with display, handled(switch.handle, SIGNALS):
        loop, notice = runner()
        if notice:
            display.noticed(notice)
        with loop:
            return loop.run(switch.attached(work))


def drive_run(
    work: Callable[[RunDisplay, asyncio.Event], Coroutine[Any, Any, Result]],
    run: RunDirectory,
    display: RunDisplay,
    lock: AbstractContextManager[object],
    *,
    again: str,
    as_json: bool,
) -> Result:
    """`drive` on a run under its `lock`, which removes the folder of a run that has committed nothing. `again`: how to
    go on after a stop."""
    killed = killed_document(run.name, again, as_json)
    try:
        with lock:
            return drive(work, display, killed)
    except StoppedAtStart:
        if run.path.exists():
            raise StoppedAtStart(f"Stopped while {run.name!r} was starting.", again) from None
        raise StoppedAtStart(f"Stopped before {run.name!r} began. pvg removed its empty folder.") from None


def killed_document(run: str, remedy: str, as_json: bool) -> bytes:
    if not as_json:
        return b""
    error = error_document("Killed", f"A second Ctrl-C ended the work on {run!r} at once.", remedy, EXIT_STOPPED)
    return json_text({"schema_version": SCHEMA_VERSION, **error}) + b"\n"


class StopSwitch:
    """Turns SIGINT and SIGTERM into an asyncio event, if `handle` handles them.

    Before a phase has begun, the main thread imports torch or waits for models and servers, and would not see the event
    for a long time. So the handler raises StoppedAtStart there, which releases what the start has opened.

    A signal handler runs between any two instructions of the main thread, perhaps while the display holds its lock.
    So the handler draws nothing; the event loop does.
    """

    def __init__(self, display: RunDisplay, killed_document: bytes = b"") -> None:
        self.requested = False
        self._display = display
        self._killed_document = killed_document
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def attached(self, work: Callable[[RunDisplay, asyncio.Event], Coroutine[Any, Any, Result]]) -> Result:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self.requested:
            self._request()
        try:
            return await work(self._display, self._stop)
        finally:
            self._loop = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            _quit(self._killed_document)
        self.requested = self._display.is_stopping = True
        if self._display.starting:
            if not self._display.live:  # a panel draws it
                write(2, STOPPING)
            if self._loop is not None and self._stop is not None:
                # Python drops an exception that is raised inside `__del__`. Then the run stops at its first commit.
                self._loop.call_soon_threadsafe(self._stop.set)
            raise StoppedAtStart
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._request)

    def _request(self) -> None:
        if self._stop is not None and not self._stop.is_set():
            self._stop.set()
            self._display.stop_requested()


def _quit(killed_document: bytes) -> NoReturn:
    if killed_document:
        write(1, killed_document)
    if sys.stderr.isatty():
        write(2, SHOW_CURSOR)
    os._exit(EXIT_STOPPED)


@contextmanager
def cancelled_at_signals(
    killed_document: Callable[[], bytes] | None, remove_rest: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], None]]:
    """For work without commits and without a `RunDisplay`. Gives a function that the coroutine of the work calls first.
    From then on, the first SIGINT, SIGTERM or SIGHUP (the terminal closes) cancels its task. The second ends the
    process at once, also while it computes or waits for the reader of its output. Before and after the work, the first
    one raises KeyboardInterrupt.

    `killed_document`: gives that of `drive`. None: no later signal has an effect, because the work needs time to end.
    `remove_rest`: removes what a process that ends at once would leave.
    """
    task: asyncio.Task[Any] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    requested = False

    def attach() -> None:
        nonlocal task, loop
        task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested and killed_document is None:
            return
        if requested and killed_document is not None:
            remove_rest()
            _quit(killed_document())
        requested = True
        if task is None or loop is None or loop.is_closed():
            raise KeyboardInterrupt
        if killed_document is not None:
            write(2, STOPPING)
        loop.call_soon_threadsafe(task.cancel)

    # Signals that the shell made this process ignore stay ignored: SIGINT in the background, SIGHUP under nohup.
    numbers = (*SIGNALS, signal.SIGHUP)
    with handled(handle, [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]):
        yield attach
