"""The server of `pvg view --live`: the page of one run, and the page with all its solutions.

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
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from pvg.evaluation.report import REPORT_FILE
from pvg.inputs import LOOPBACK
from pvg.reporting.follow import RunSituation, progress_of, situation
from pvg.reporting.run_page import DRAWN_TASKS, RunData, collect, run_page
from pvg.reporting.run_summary import RunSummary, committed_state, read_run
from pvg.reporting.solutions import rollouts_file, rollouts_kind, stored_rollouts
from pvg.reporting.table import CHARTS, LIVE_SCRIPT, PageKind, elements, policy_of
from pvg.servers.process import LocalServer
from pvg.store.run_directory import RunDirectory

INTERVAL_S = 1.0  # between two drawings of the page
SHARE = 20.0  # times what a drawing takes is the time until the next, so that watching costs 1 / SHARE of a core
EXAMPLES = 2  # per round
ROLLOUTS = "rollouts.html"  # the address of the page with all solutions
LIVE = PageKind(
    scripts=(*CHARTS, "page.js", LIVE_SCRIPT),
    policy="connect-src 'self'; base-uri 'none'",
    sheets=("live.css",),
    links=((ROLLOUTS, "All rollouts"),),
    footer="pvg view --live serves this page from this machine. It loads nothing from elsewhere.",
)


class LiveRun:
    """A run and its pages. Call it from one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._page = ""
        self._solutions = ""
        self._drawn_s = self._cost_s = 0.0  # when the page was drawn, and how long that took
        self._files: tuple[object, ...] = ()  # what the page was made of
        self._state: dict[str, Any] = {}
        self._summary: RunSummary | None = None
        self._situation = RunSituation("waiting")
        self._data: RunData | None = None
        self._collected: tuple[object, ...] = ()

    def page(self) -> str:
        """The report as it is now. It is drawn again if the run has changed and the last drawing is old enough."""
        files = tuple(map(_signature, (self.run.state, self.run.metrics, self.run.evaluation / REPORT_FILE)))
        if files[:1] != self._files[:1]:
            self._state, self._solutions = committed_state(self.run, []), ""
        before, self._situation = self._situation, situation(self.run, self._state)
        urgent = not self._page or before.state != self._situation.state
        if urgent or (
            files != self._files and time.monotonic() - self._drawn_s >= max(INTERVAL_S, SHARE * self._cost_s)
        ):
            began = time.monotonic()
            self._files = files
            self._page = self._draw()
            self._drawn_s = time.monotonic()
            self._cost_s = self._drawn_s - began
        return self._page

    def solutions(self) -> str:
        """The page with all solutions of the last commit."""
        self.page()
        if not self._solutions:
            summary = self._summary or read_run(self.run)
            self._solutions = rollouts_file(stored_rollouts(self.run, summary), self.run, summary, "/")
        return self._solutions

    def _draw(self) -> str:
        """Scores and solutions are read again when a phase ends, and nothing of a run that was removed."""
        now = self._situation
        if self._summary is None or now.state != "removed":
            self._summary = read_run(self.run)
        summary = self._summary
        key = (summary.phase, len(summary.rounds), summary.status, self._files[2:])
        if self._data is None or (key != self._collected and now.state != "removed"):
            self._data, self._collected = collect(self.run, summary, EXAMPLES), key
        data = replace(self._data, summary=summary, state=now.state, rollouts=ROLLOUTS)
        progress = progress_of(summary)
        solutions = sum(int(shard["rows"]) for shard in self._state.get("shards", ()))
        live = elements.now(summary, now, progress, solutions, self.run.argument)
        sheets = (*LIVE.sheets, "board.css") if data.experiment.task.kind in DRAWN_TASKS else LIVE.sheets
        return run_page(data, [live], replace(LIVE, sheets=sheets))


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file has been written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LivePage:
    """Use `LivePage.start`."""

    url: str
    port: int

    def __init__(self, run: RunDirectory) -> None:
        self._live = LiveRun(run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pvg-view")

    @classmethod
    @asynccontextmanager
    async def start(cls, run: RunDirectory, port: int) -> AsyncIterator[LivePage]:
        """Serve until the block ends. Port 0 is any free one. Raises PortInUseError."""
        server = cls(run)
        routes = [web.get("/", server._page), web.get(f"/{ROLLOUTS}", server._rollouts)]
        try:
            async with LocalServer.start(routes, port, _error, browsers=True) as local:
                server.port, server.url = local.port, f"http://{LOOPBACK}:{local.port}/"
                yield server
        finally:
            server._thread.shutdown(cancel_futures=True)

    async def _work(self, function: Callable[[], str]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _page(self, request: web.Request) -> web.Response:
        text = await self._work(self._live.page)
        tag = hashlib.sha256(text.encode()).hexdigest()
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers={**HEADERS, "ETag": f'"{tag}"'})
        answer = _html(text, LIVE)
        answer.etag = tag
        return answer

    async def _rollouts(self, _: web.Request) -> web.Response:
        return _html(await self._work(self._live.solutions), rollouts_kind("/"))


def _error(text: str, status: int) -> web.Response:
    return web.Response(text=text, status=status)


def _html(text: str, kind: PageKind) -> web.Response:
    answer = web.Response(
        text=text,
        content_type="text/html",
        headers={**HEADERS, "Content-Security-Policy": f"{policy_of(kind)}; frame-ancestors 'none'"},
    )
    answer.enable_compression()
    return answer
