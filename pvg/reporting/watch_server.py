"""The server of `pvg watch`: the page of one run, and the page with all its solutions.

    async with WatchServer.start(run, port=0) as server:
        print(server.url)

| address | answer |
|---|---|
| `/` | the report, which loads itself again; 304 if it has the ETag that the browser names |
| `/rollouts.html` | the page with all solutions |

Invariants: it listens on 127.0.0.1 only, and answers only requests whose Host header names this machine. Otherwise a
page of another site could read the run with a DNS name that points here. It answers GET and HEAD only. One thread reads
the run, and only when a browser asks.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from aiohttp import web

from pvg.errors import MissingRequirementError, PvgError, counted, reason
from pvg.evaluation.report import REPORT_FILE
from pvg.reporting.follow import FollowedRun, RunProgress, RunSituation, RunState, progress_of
from pvg.reporting.formats import compact, duration, phase_label
from pvg.reporting.rollouts_file import page_fingerprint, rollouts_file, rollouts_kind, stored_rollouts
from pvg.reporting.run_page import DRAWN_TASKS, RunData, collect, run_page
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.table import CHARTS, LIVE_SCRIPT, PageKind, elements, policy_of
from pvg.store.run_directory import RunDirectory

# The page of `pvg watch`: the report of a run, drawn again while another process plays the run.


INTERVAL_S = 1.0  # between two looks at the run
SHARE = 20.0
EXAMPLES = 2  # per round
ROLLOUTS = "rollouts.html"  # the address of the page with all solutions
LIVE = PageKind(
    scripts=(*CHARTS, "page.js", LIVE_SCRIPT),
    policy="connect-src 'self'; base-uri 'none'",
    sheets=("watch.css",),
    links=((ROLLOUTS, "All rollouts"),),
    footer="pvg watch serves this page from this machine. It loads nothing from elsewhere.",
)


class LiveRun:
    """A run and its pages. Call it from one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self.followed = FollowedRun(run)
        self._page = ""
        self._solutions = ("", "")  # the fingerprint of the page with all solutions, and the page
        self._drawn_s = self._cost_s = 0.0  # when the page was drawn, and how long that took
        self._data: RunData | None = None
        self._collected: tuple[object, ...] = ()
        self._changed = True

    def page(self) -> str:
        """The report as it is now. It is drawn again if the run has changed and the last drawing is old enough."""
        state = self.followed.situation.state
        self._changed |= self.followed.update()
        urgent = state != self.followed.situation.state
        wait_s = max(INTERVAL_S, SHARE * self._cost_s)
        if not self._page or (self._changed and (urgent or time.monotonic() - self._drawn_s >= wait_s)):
            began = time.monotonic()
            self._page, self._changed = self._draw(), False
            self._drawn_s = time.monotonic()
            self._cost_s = self._drawn_s - began
        return self._page

    def solutions(self) -> str:
        """The page with all solutions of the last commit."""
        run, summary = self.followed.run, self.followed.summary
        fingerprint = page_fingerprint(run, summary, "/")
        if fingerprint != self._solutions[0]:
            page = rollouts_file(stored_rollouts(run, summary), run, summary, "/")
            self._solutions = fingerprint, page
        return self._solutions[1]

    def _draw(self) -> str:
        followed, summary, situation = self.followed, self.followed.summary, self.followed.situation
        progress = progress_of(summary, time.time(), followed.experiment.game.effort)
        now = elements.now(_texts(summary, situation, progress, followed.solutions), _share(situation, progress))
        drawn = followed.experiment.task.kind in DRAWN_TASKS
        kind = replace(LIVE, sheets=(*LIVE.sheets, "board.css")) if drawn else LIVE
        return run_page(self._report(summary, situation), [now], kind)

    def _report(self, summary: RunSummary, situation: RunSituation) -> RunData:
        """The data of the page. Scores and solutions are read again when a phase ends, the timeline of some steps only
        when nothing plays the run: both need whole files."""
        run, idle = self.followed.run, situation.ended
        key = (summary.phase, len(summary.rounds), summary.status, idle, _evaluated(run))
        if self._data is None or key != self._collected:
            self._data, self._collected = collect(run, summary, EXAMPLES, playing=not idle), key
        return replace(self._data, summary=summary, state=situation.state, rollouts=ROLLOUTS)


def _share(situation: RunSituation, progress: RunProgress | None) -> float:
    """The finished share of the phase."""
    if situation.state == "finished":
        return 1.0
    if progress is None or progress.step is None or not progress.of:
        return 0.0
    return min(1.0, progress.step / progress.of)


def _texts(
    summary: RunSummary, situation: RunSituation, progress: RunProgress | None, solutions: int
) -> dict[str, str]:
    """The sentences below the title."""
    place = "Nothing is recorded yet."
    if progress is not None and situation.state == "finished":
        place = f"{counted(len(summary.rounds), 'round')} done"
    elif progress is not None:
        of = "" if progress.of is None else f" of {compact(progress.of)}"
        step = "" if progress.step is None else f", step {compact(progress.step)}{of}"
        place = (
            f"round {progress.round} ({progress.round + 1} of {progress.rounds}), {phase_label(progress.phase)}{step}"
        )
    left = []
    if situation.state == "running" and progress is not None:
        if progress.phase_left_s is not None:
            left.append(f"{duration(progress.phase_left_s)} left in this phase")
        if progress.run_left_s is not None:
            left.append(f"{duration(progress.run_left_s)} in the whole run")
    return {
        "place": place,
        "left": ", ".join(left),
        "solutions": f"{counted(solutions, 'stored solution')}, {counted(len(summary.alerts), 'alert')}",
        "sign": _sign(situation, RunDirectory(summary.path)),
    }


def _sign(situation: RunSituation, run: RunDirectory) -> str:
    resume = f"pvg train --resume {run.argument}"
    who = "" if situation.process is None else f"process {situation.process} on {situation.host}"
    ago = "" if situation.quiet_s is None else f"last sign of life {duration(situation.quiet_s)} ago"
    sentences: dict[RunState, str] = {
        "waiting": "The run has not begun.",
        "running": who,
        "silent": f"{who} is there, but is silent: {ago}",
        "finished": "",
        "stopped": f"Continue it with: {resume}",
        "failed": "Its process ended before the run did. Its message is on its terminal and in events.log.",
        "died": f"{who} is gone and did not end the run: {ago}. Continue it with: {resume}",
        "removed": "The folder of the run is gone.",
    }
    return sentences[situation.state]


def _evaluated(run: RunDirectory) -> tuple[int, int] | None:
    """Changes when `pvg evaluate` has written."""
    try:
        found = (run.evaluation / REPORT_FILE).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


HOST = "127.0.0.1"
NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchServer:
    """Use `WatchServer.start`."""

    url: str
    port: int

    def __init__(self, run: RunDirectory) -> None:
        self._live = LiveRun(run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pvg-watch")

    @classmethod
    @asynccontextmanager
    async def start(cls, run: RunDirectory, port: int) -> AsyncIterator[WatchServer]:
        """Serve until the block ends. Port 0 is any free one. Raises MissingRequirementError if the port cannot be
        used."""
        server = cls(run)
        app = web.Application(middlewares=[_guard])
        app.on_response_prepare.append(_harden)
        app.add_routes(
            [
                web.get("/", server._page),
                web.get(f"/{ROLLOUTS}", server._rollouts),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, HOST, port).start()
            except OSError as error:
                raise PortInUseError(
                    f"Port {port} of {HOST} cannot be used: {reason(error)}.",
                    "Choose another port with --port, or 0 for any free one.",
                    taken=error.errno == errno.EADDRINUSE,
                ) from None
            server.port = int(runner.addresses[0][1])
            server.url = f"http://{HOST}:{server.port}/"
            yield server
        finally:
            await runner.cleanup()
            server._thread.shutdown(cancel_futures=True)

    async def _work(self, function: Callable[[], str]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _page(self, request: web.Request) -> web.Response:
        text = await self._work(self._live.page)
        tag = hashlib.sha256(text.encode()).hexdigest()
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={"ETag": f'"{tag}"'})
        answer = _html(text, LIVE)
        answer.etag = tag
        return answer

    async def _rollouts(self, _: web.Request) -> web.Response:
        return _html(await self._work(self._live.solutions), rollouts_kind("/"))


class PortInUseError(MissingRequirementError):
    """The port cannot be used. `taken`: another program listens on it."""

    def __init__(self, message: str, remedy: str, *, taken: bool) -> None:
        super().__init__(message, remedy)
        self.taken = taken


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        name = urlsplit(f"//{request.headers.get('Host', '')}").hostname
    except ValueError:
        name = None
    if name not in NAMES:
        raise web.HTTPForbidden(text="pvg watch answers only requests to 127.0.0.1 or localhost.")
    try:
        return await handler(request)
    except PvgError as error:
        raise web.HTTPInternalServerError(text=str(error)) from error


async def _harden(_: web.Request, answer: web.StreamResponse) -> None:
    answer.headers.update(HEADERS)


def _html(text: str, kind: PageKind) -> web.Response:
    answer = web.Response(
        text=text,
        content_type="text/html",
        headers={"Content-Security-Policy": f"{policy_of(kind)}; frame-ancestors 'none'"},
    )
    answer.enable_compression()
    return answer
