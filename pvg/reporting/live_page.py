"""The live page of a run: the header and the sections of `pvg report`'s page, drawn anew while the run goes on.

A `LiveRun` follows one run. Each time something is new, its `revision` grows; a browser then asks for the parts that it
shows. A part is drawn once per revision, when the first browser asks for it.

Invariant: the time between two revisions is at least SHARE times the time that drawing took. So watching costs about
1 / SHARE of one core, however long the run is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pvg.errors import counted
from pvg.evaluation.report import REPORT_FILE
from pvg.reporting.follow import FollowedRun, RunProgress, RunSituation, RunState, progress_of, state_word
from pvg.reporting.formats import compact, duration, percent, phase_label
from pvg.reporting.rollouts import RolloutIndex
from pvg.reporting.run_page import DRAWN_TASKS, RunData, collect, run_header, run_sections
from pvg.reporting.run_summary import RunSummary
from pvg.reporting.table import (
    LIVE_SCRIPT,
    Column,
    PageKind,
    PageSection,
    Table,
    TableCell,
    TemplateMacros,
    elements,
    page,
)
from pvg.store.run_directory import RunDirectory

markup = TemplateMacros("watch.html.j2")
sections_markup = TemplateMacros("sections.html.j2")

INTERVAL_S = 1.0  # between two looks at the run
SHARE = 20.0
EXAMPLES = 2  # per round
ROLLOUTS = "rollouts"  # the address of the list of stored solutions
NAMED_WORKER = re.compile(r"w(\d+)_(?:up|busy|restarts)")
STALE_S = 30.0  # a sampler writes every 5 s; older readings of workers are marked


class LiveRun:
    """A run and its page. Call it from one thread at a time."""

    def __init__(self, run: RunDirectory) -> None:
        self.followed = FollowedRun(run)
        self.rollouts = RolloutIndex(run)
        # Not from 1: a browser that was connected to an earlier process must see that there is something new.
        self.revision = int(time.time())
        self._cost_s = 0.0  # of this revision
        self._since = 0.0
        self._changed = True
        self._parts: dict[str, dict[str, str]] = {}
        self._sections: dict[str, Callable[[], PageSection]] = {}
        self._data: RunData | None = None
        self._collected: tuple[object, ...] = ()
        self.update()

    def update(self) -> None:
        """Look at the run. Begins a revision if something is new and the last one is old enough."""
        began = time.perf_counter()
        state = self.followed.situation.state
        self._changed |= self.followed.update()
        urgent = state != self.followed.situation.state
        if self._changed and (urgent or time.monotonic() - self._since >= max(INTERVAL_S, SHARE * self._cost_s)):
            self.revision += 1
            self._since, self._changed, self._cost_s = time.monotonic(), False, 0.0
            self._parts.clear()
            self._sections.clear()
        self._cost_s += time.perf_counter() - began

    # --- what is sent ----------------------------------------------------------------------------------------------

    def event(self) -> dict[str, Any]:
        """The state of the run as JSON-compatible data: for the page, and for programs."""
        summary, situation, progress = self._now()
        newest = summary.steps[-1].metrics if summary.steps else {}
        workers = summary.workers[-1] if summary.workers else None
        return {
            "revision": self.revision,
            "run": summary.name,
            "state": situation.state,
            "ended": situation.ended,
            "process": situation.process,
            "progress": None if progress is None else progress.plain(),
            "solutions": self.followed.solutions,
            "rounds": [{"round": number, "metrics": summary.rounds[number]} for number in sorted(summary.rounds)],
            "metrics": newest,
            "workers": None if workers is None else {"time": workers.time, **workers.metrics},
            "alerts": len(summary.alerts),
            "title": self._title(situation, progress),
            "share": _share(situation, progress),
            "texts": _texts(summary, situation, progress, self.followed.solutions),
        }

    def part(self, name: str) -> dict[str, str] | None:
        """The title and the markup of a part of the page, empty if there is nothing to show; None for an unknown
        name."""
        if name not in self._parts:
            began = time.perf_counter()
            if name == "head":
                html, title = "\n".join(_html(piece) for piece in self._header()), ""
            else:
                build = self._all_sections().get(name)
                if build is None:
                    return None
                section = build()
                html, title = (str(sections_markup.inner(section)) if section.shown else ""), section.title
            self._parts[name] = {"title": title, "html": html}
            self._cost_s += time.perf_counter() - began
        return self._parts[name]

    def page(self) -> str:
        """The whole page as it is now. It is drawn once per visit, so it does not count as the cost of a revision."""
        sections = [replace(build(), part=name) for name, build in self._all_sections().items()]
        kind = live_kind(self.followed.experiment.task.kind in DRAWN_TASKS)
        _, situation, progress = self._now()
        return page(self._title(situation, progress), self._header(), sections, kind)

    def _header(self) -> list[object]:
        summary, situation, progress = self._now()
        title, *rest = run_header(self.data())
        texts = _texts(summary, situation, progress, self.followed.solutions)
        return [title, markup.now(texts, _share(situation, progress)), *rest]

    def _all_sections(self) -> dict[str, Callable[[], PageSection]]:
        if not self._sections:
            sections = run_sections(self.data())
            self._sections = {"workers": self._workers, **sections}
        return self._sections

    def _workers(self) -> PageSection:
        situation = self.followed.situation
        if situation.state not in (
            "running",
            "silent",
        ):  # there are no workers; the section about the machine tells what they did
            return PageSection("workers", "Workers", [])
        return workers_section(self.followed.summary, time.time(), silent=situation.state == "silent")

    def _now(self) -> tuple[RunSummary, RunSituation, RunProgress | None]:
        summary = self.followed.summary
        return summary, self.followed.situation, progress_of(summary, time.time(), self.followed.experiment.game.effort)

    def _title(self, situation: RunSituation, progress: RunProgress | None) -> str:
        name = self.followed.run.name
        if situation.state != "running" or progress is None:
            summary = self.followed.summary
            return f"{name}: {state_word(situation.state, summary.status, summary.damaged)[0]}"
        return f"{name}: round {progress.round}, {phase_label(progress.phase)}"

    def data(self) -> RunData:
        """The data of the page. Scores and solutions are read again when a phase ends, the timeline of some steps only
        when nothing plays the run: both need whole files."""
        summary, idle = self.followed.summary, self.followed.situation.ended
        key = (summary.phase, len(summary.rounds), summary.status, idle, _evaluated(self.followed.run))
        if self._data is None or key != self._collected:
            self._data, self._collected = self._collect(summary, idle), key
        return replace(self._data, summary=summary, state=self.followed.situation.state)

    def _collect(self, summary: RunSummary, idle: bool) -> RunData:
        run = self.followed.run
        found = collect(run, summary, EXAMPLES, playing=not idle, shards=self.rollouts.shards)
        return replace(found, rollouts=ROLLOUTS)


def live_kind(drawn: bool = False) -> PageKind:
    """What the live page may do: fetch its own parts and events, and follow its own links."""
    return PageKind(
        scripts=("page.js", LIVE_SCRIPT),
        policy="connect-src 'self'; form-action 'self'; base-uri 'none'",
        sheets=("watch.css", *(["board.css"] if drawn else [])),
        links=((ROLLOUTS, "All rollouts"),),
        footer="pvg watch serves this page from this machine. It loads nothing from elsewhere.",
    )


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
    """The sentences of the header, by the name of their element."""
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


def workers_section(summary: RunSummary, now: float, *, silent: bool = False) -> PageSection:
    """Each worker as its sampler saw it last. `silent`: the process that samples gives no sign of life."""
    if not summary.workers:
        return PageSection("workers", "Workers", [])
    newest = summary.workers[-1]
    metrics, age_s = newest.metrics, max(0.0, now - newest.time)
    stale = silent or age_s > STALE_S
    table = Table([Column("worker"), Column("state"), Column("busy", "right"), Column("replaced", "right")])
    for number in sorted({int(match[1]) for name in metrics if (match := NAMED_WORKER.fullmatch(name))}):
        up, busy, restarts = (metrics.get(f"w{number}_{name}") for name in ("up", "busy", "restarts"))
        state = TableCell("stale", "badge warn") if stale else TableCell("ready", "badge good")
        if up == 0.0:
            state = TableCell("down", "badge bad")
        shown = ["" if busy is None else percent(busy), "" if restarts is None else f"{restarts:.0f}"]
        table.add(f"worker {number}", state, *shown)
    lead = f"{counted(round(metrics.get('up', 0)), 'worker')} ready"
    if "busy" in metrics:
        lead += f", busy {percent(metrics['busy'])} of the time"
    if metrics.get("restarts"):
        lead += f", {counted(round(metrics['restarts']), 'replacement')}"
    lead += f". Measured {duration(age_s)} ago."
    return PageSection("workers", "Workers", [table or elements.note(lead)], lead)


def _html(piece: object) -> str:
    return str(piece.__html__()) if hasattr(piece, "__html__") else str(piece)


def _evaluated(run: RunDirectory) -> tuple[int, int] | None:
    """Changes when `pvg evaluate` has written."""
    try:
        found = (run.evaluation / REPORT_FILE).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
