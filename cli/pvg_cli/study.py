"""`pvg study NAME`: play several experiments with several seeds, and compare the results."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, cast

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from typer import Argument, Option

from pvg.config.load import known_files
from pvg.errors import EXIT_CHECK_FAILED, UsageError, counted
from pvg.reporting.formats import duration, metric_display, metric_text, phase_label
from pvg.reporting.table import Column, Table, TableCell, write_page
from pvg.reporting.terminal import QUIET, section
from pvg.study.measures import StudyMeasure
from pvg.study.plan import Cell, StudyEvaluation, StudyPlan, costs_of, load_study, read_study
from pvg.study.playing import CellProgress, Ended, Job, StudyFolder, play_cells, progress_of, refuse_other_settings
from pvg.study.results import StudyResults, collect, csv_text, write_results
from pvg.study.text import (
    MARKDOWN_MARK,
    cautions,
    interval_text,
    markdown_text,
    plan_cautions,
    result_sections,
    study_page,
    threads_each,
)
from pvg.telemetry.catalogue import METRICS
from pvg_cli import completion
from pvg_cli.boundary import EXIT_STOPPED, emit, handled, say
from pvg_cli.display import Display, framed, progress_row
from pvg_cli.options import DebugOption, JsonOption, RunsOption, SetOption, check_output, write_output
from pvg_cli.output import names_table, next_commands, stderr, stdout
from pvg_cli.report import own_page

STUDY_HELP = "A study in ./studies or of pvg, or a TOML file. Without it: list the studies."
PVG = [sys.executable, "-P", "-m", "pvg"]  # the command that starts this pvg, for any PATH and current folder


def study(  # noqa: PLR0917  (each is an option)
    name: Annotated[
        str | None,
        Argument(metavar="NAME|FILE", autocompletion=completion.studies, help=STUDY_HELP, show_default=False),
    ] = None,
    overrides: SetOption = None,
    seeds: Annotated[int | None, Option(min=1, max=10_000, metavar="N", help="Use seeds 0 to N-1.")] = None,
    processes: Annotated[
        int | None, Option("--processes", "-p", min=1, max=4096, metavar="N", help="Games at the same time.")
    ] = None,
    threads: Annotated[int | None, Option(min=1, max=1024, metavar="N", help="Of each game.")] = None,
    runs: RunsOption = Path("runs"),
    markdown: Annotated[Path | None, Option(metavar="FILE", help="Write the tables as Markdown to FILE.")] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", help="Write the values of all seeds, one per line.")] = None,
    only_table: Annotated[bool, Option("--only-table", help="Show the results so far, and play no games.")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Show arms, seeds and the remaining work, and stop.")] = False,
    gpu: Annotated[str | None, Option(metavar="NAME", help="With --dry-run: plan for one h100, a100, ...")] = None,
    price: Annotated[float | None, Option(min=0, metavar="N", help="With --dry-run: of a GPU-hour.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Play each experiment (arm) of a study with each seed, and compare the results, with intervals.

    Ctrl-C stops the games at commit points. The same command resumes the study, and keeps complete games.
    """

    if only_table and dry_run:
        raise UsageError("--only-table and --dry-run cannot be used together.", "Use one of them.")
    if (gpu or price is not None) and not dry_run:
        raise UsageError("--gpu and --price change only what --dry-run shows.", "Add --dry-run.")
    if name is None:
        _list(as_json)
        return
    command = _command(name, overrides or [], runs, seeds=seeds, processes=processes, threads=threads)
    plan = load_study(name, overrides or [], runs=runs, seeds=seeds, processes=processes, threads=threads)
    for note in plan.notes:
        say(note)
    folder = StudyFolder(plan.folder)
    refuse_other_settings(plan.cells)
    now = {cell.name: progress_of(cell, folder, plan.evaluate) for cell in plan.cells}
    if dry_run:
        _show_plan(plan, now, gpu or plan.gpu, price, as_json)
        return
    finished = True
    todo = [] if only_table else [cell for cell in plan.cells if now[cell.name].status != "complete"]
    check_output("--markdown", markdown, MARKDOWN_MARK)  # before hours of work
    check_output("--csv", csv, b"study,arm,seed,")
    with folder.lock():
        if todo:
            finished = _play(plan, todo, now)
        results = _write(plan, folder, command)
    if markdown is not None:
        write_output(markdown, markdown_text(results))
    if csv is not None:
        write_output(csv, csv_text(results))
    _print_result(results, folder, command, as_json=as_json, finished=finished)


def _command(name: str, overrides: list[str], runs: Path, **options: int | None) -> str:
    """The command that runs the same study again."""
    words = ["pvg", "study", name, *(word for setting in overrides for word in ("--set", setting))]
    words += [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    return shlex.join([*words, *(["--runs", str(runs)] if runs != Path("runs") else [])])


def _list(as_json: bool) -> None:
    paths = known_files("studies")
    about = {name: read_study(path).about for name, path in paths.items()}
    if as_json:
        emit({"studies": [{"name": name, "path": str(path), "about": about[name]} for name, path in paths.items()]})
    else:
        stdout().print(names_table(about, "To play one", "pvg study NAME"))


def _show_plan(
    plan: StudyPlan, now: dict[str, CellProgress], gpu: str | None, price: float | None, as_json: bool
) -> None:
    if price is not None and gpu is None:
        raise UsageError("--price needs a GPU, and the study names none.", "Add --gpu NAME, such as --gpu h100.")
    costs = [] if gpu is None else costs_of(plan, gpu, price, say)
    if not as_json:
        stdout().print(
            plan_table(plan, now), *([] if gpu is None else [cost_lines(gpu, costs, price, len(plan.seeds))])
        )
        return
    cells = []
    for cell in plan.cells:
        found = now[cell.name]
        facts = {"arm": cell.arm, "seed": cell.seed, "run": str(cell.run.path), "hash": cell.experiment.hash()}
        progress = {"status": found.status, "reason": found.reason, "steps": cell.steps, "steps_done": found.done}
        cells.append(facts | progress)
    facts = {"study": plan.name, "folder": str(plan.folder), "processes": plan.processes, "threads": plan.threads}
    facts |= {"gpu": gpu, "price": price, "costs": costs}
    emit({**facts, "steps": plan.steps, "warnings": plan_cautions(plan), "cells": cells})


class StopRequests:
    """The number of signals so far, which `play_cells` reads."""

    requests = 0

    def count(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1


def _play(plan: StudyPlan, todo: list[Cell], now: dict[str, CellProgress]) -> bool:
    """Play the remaining games under the display. False if the user stopped the study."""
    from pvg.telemetry.cpu import precision_warnings

    experiments = [cell.experiment for cell in todo]
    found = [warning for each in experiments for warning in (*each.warnings(), *precision_warnings(each))]
    for warning in dict.fromkeys(found):
        say(f"warning: {warning}.")
    for sentence in plan_cautions(plan):
        say(f"warning: {sentence}")
    say(f"{_work(plan, todo, now)}, {plan.processes} at a time.")
    stop = StopRequests()
    with StudyDisplay(plan, now, stderr()) as display, handled(stop.count, (signal.SIGINT, signal.SIGTERM)):
        return play_cells(plan, todo, pvg=PVG, observer=display, stop=stop)


def _work(plan: StudyPlan, todo: list[Cell], now: dict[str, CellProgress]) -> str:
    """The remaining work: games to play with their steps, and finished games to evaluate."""
    played = sum(now[cell.name].status == "played" for cell in todo)
    if played == len(todo):
        return f"{played} of {counted(len(plan.cells), 'game')} to evaluate"
    steps = sum(cell.steps - now[cell.name].done for cell in todo)
    others = f" and {played} to evaluate" if played else ""
    games = counted(len(plan.cells), "game")
    return f"{len(todo) - played} of {games} to play{others}, {counted(steps, 'optimizer step')}"


def _write(plan: StudyPlan, folder: StudyFolder, command: str) -> StudyResults:
    """Collect the results so far, and write them as JSON and as a page."""
    results = collect(plan, command)
    write_results(folder.results, results)
    write_page(own_page(folder.page), study_page(results))
    return results


def _print_result(results: StudyResults, folder: StudyFolder, command: str, *, as_json: bool, finished: bool) -> None:
    """Print the tables and the next commands, and set the exit code."""
    if as_json:
        status = "stopped" if not finished else "failed" if results.failed else "complete"
        emit({"status": status, "html": str(folder.page), **results.plain()})
    else:
        commands = {} if results.complete == len(results.cells) else {command: "resume; complete games are kept"}
        first = next((cell for cell in results.cells if cell.status == "complete"), None)
        if first is not None:
            commands[f"pvg view {shlex.quote(first.run)}"] = "one of the games"
        stdout().print(results_text(results, commands))
        say(f"Page: {folder.page}")
    if not finished:
        say(f"Stopped. To resume: {command}")
        raise typer.Exit(EXIT_STOPPED)
    if results.failed:
        raise typer.Exit(EXIT_CHECK_FAILED)


NUMBERS = 2  # measures shown per game


class StudyDisplay(Display):
    """A `StudyObserver` that shows a study."""

    def __init__(
        self,
        plan: StudyPlan,
        now: Mapping[str, CellProgress],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console, clock)
        self.plan = plan
        self._now = dict(now)
        self._working: dict[str, Job] = {}  # the games that run
        self._done_at_start = self.steps_done

    @property
    def steps_done(self) -> int:
        return sum(min(self._now[cell.name].done, cell.steps) for cell in self.plan.cells)

    @property
    def complete(self) -> int:
        return sum(found.status == "complete" for found in self._now.values())

    def seconds_left(self) -> float | None:
        """Seconds of playing that remain at the rate so far, without evaluations. None before the first step."""
        open_cells = [cell for cell in self.plan.cells if not self._now[cell.name].reason]
        left = sum(cell.steps - self._now[cell.name].done for cell in open_cells)
        done = self.steps_done - self._done_at_start
        return self.elapsed * left / done if done > 0 and left > 0 else None

    # --- what the observer reports -----------------------------------------------------------------------------------

    def began(self, cell: Cell, job: Job, progress: CellProgress) -> None:
        self._now[cell.name] = progress
        self._working[cell.name] = job
        what = {"train": "resumes" if progress.status == "unfinished" else "starts", "evaluate": "is evaluated"}[job]
        self.line(f"{cell.name} {what}")

    def progressed(self, cell: Cell, progress: CellProgress) -> None:
        self._now[cell.name] = progress

    def ended(self, cell: Cell, how: Ended, progress: CellProgress, seconds: float) -> None:
        self._now[cell.name] = progress
        self._working.pop(cell.name, None)
        if how == "failed":
            self.note(f"{cell.name} failed: {progress.reason}", "✗", "red")
        elif how == "complete":
            numbers = [f"{m.name}={self._number(cell, m).replace(' ', '')}" for m in self._numbers()]
            self.line("  ".join([f"{cell.name} complete after {duration(seconds)}", *numbers]))
        else:
            self.line(f"{cell.name} stopped at a commit point")

    def waited(self) -> None:
        self.tick(lambda: "still playing")

    def stopping(self, running: int) -> None:
        self.is_stopping = True
        self.line(f"stopping {running} at their next commit point; the same signal again ends them at once")

    # --- drawing -----------------------------------------------------------------------------------------------------

    def render(self, width: int) -> RenderableType:
        hint = "Ctrl-C stops at commit points"
        if self.is_stopping:
            hint = "stopping at commit points; Ctrl-C again quits at once"
        failed = sum(bool(found.reason) for found in self._now.values())
        facts = Text.assemble(
            f"{self.complete}/{counted(len(self.plan.cells), 'game')}",
            (f"  {self.steps_done:,}/{self.plan.steps:,} steps", QUIET),
            (f"  {failed} failed" if failed else "", "red"),
            (f"  {self._left()}  {duration(self.elapsed)}", QUIET),
        )
        bar = progress_row(max(1, self.plan.steps), self.steps_done, facts)
        title = Text.assemble(("pvg study ", "bold"), (self.plan.name, "bold cyan"))
        return framed([bar, self._playing()], width, title, hint, self.is_stopping)

    def _playing(self) -> RichTable:
        """The games that run."""
        table = RichTable.grid(padding=(0, 2, 0, 0))
        table.add_row("playing", "", *(metric_display(measure.name).label for measure in self._numbers()), style=QUIET)
        for cell in self.plan.cells:
            if job := self._working.get(cell.name):
                found = self._now[cell.name]
                place = f"round {found.round} {phase_label(found.phase)}" if job == "train" else "evaluating"
                share = f"{100 * found.done // max(1, cell.steps)}%"
                table.add_row(f"{cell.name} {share}", place, *(self._number(cell, each) for each in self._numbers()))
        return table

    def _numbers(self) -> list[StudyMeasure]:
        """The measures that can be read from the committed rounds of a run."""
        return [measure for measure in self.plan.measures if f"round/{measure.name}" in METRICS][:NUMBERS]

    def _number(self, cell: Cell, measure: StudyMeasure) -> str:
        rounds = self._now[cell.name].rounds
        return metric_text(measure.name, rounds[-1].get(measure.name) if rounds else None)

    def _left(self) -> str:
        seconds = self.seconds_left()
        return "" if seconds is None else f"{duration(seconds)} left"

    def stamp(self) -> str:
        done = ", ".join(filter(None, [f"{self.complete}/{len(self.plan.cells)}", self._left()]))
        return f"{super().stamp()}  [{done}]"


# --- tables ----------------------------------------------------------------------------------------------------------

MARKS = {  # state -> mark and style of a table's cell
    "complete": ("✓", "better"),
    "played": ("◐", "verifier"),
    "unfinished": ("◐", "verifier"),
    "new": ("○", "quiet"),
    "damaged": ("✗", "badge bad"),
    "failed": ("✗", "badge bad"),
}


def plan_table(plan: StudyPlan, now: Mapping[str, CellProgress]) -> Group:
    """Arms and seeds with their progress, and the remaining work."""
    seeds = [Column(f"seed {seed}" if not place else str(seed), wrap=False) for place, seed in enumerate(plan.seeds)]
    table = Table(
        [Column("arm", style="strong"), *seeds, Column("steps each", "right"), Column("settings", style="quiet")]
    )
    for arm in plan.arms:
        cells = [plan.cell(arm, seed) for seed in plan.seeds]
        found = [now[cell.name] for cell in cells]
        marks = [TableCell(*MARKS["failed" if each.reason else each.status]) for each in found]
        settings = ", ".join(f"{key}={value}" for key, value in arm.settings.items())
        table.add(arm.name, *marks, f"{cells[0].steps:,}", settings)
    threads, at_a_time = threads_each(plan.threads), counted(plan.processes, "game")
    left = sum(cell.steps - now[cell.name].done for cell in plan.cells)
    complete = sum(progress.status == "complete" for progress in now.values())
    counts = ((len(plan.arms), "arm"), (len(plan.seeds), "seed"), (len(plan.cells), "game"))
    return Group(
        headline(plan.name, "{} x {} = {}".format(*(counted(*count) for count in counts))),
        Text(),
        table,
        Text(),
        Text.assemble(
            (f"{complete} complete. ", QUIET),
            (f"{left:,}", "bold"),
            (f" of {plan.steps:,} optimizer steps remain, {at_a_time} at a time, {threads}", QUIET),
            (f"{_evaluation(plan.evaluate)}.", QUIET),
        ),
        Text(f"The runs would be in {plan.folder}.", style=QUIET),
        *(Text(f"warning: {sentence}", style="yellow") for sentence in plan_cautions(plan)),
    )


def cost_lines(gpu: str, costs: Sequence[Mapping[str, Any]], price: float | None, seeds: int) -> Group:
    """GPU-hours, money and memory of each arm with all its seeds (`costs_of`), and what these figures leave out."""
    titles = {"game_hours": "games, h", "evaluation_hours": "evaluations, h", "hours": "GPU-hours"}
    titles |= {} if price is None else {"money": f"at {price:g} an hour"}
    table = Table(
        [Column("arm", style="strong"), *(Column(title, "right") for title in titles.values()), Column("peak")]
    )
    for cost in costs:
        fits = f"{cost['peak_gb']:.1f} GB, {'fits' if cost['fits'] else 'does not fit'}"
        table.add(cost["arm"], *(f"{cost[name]:,.2f}" for name in titles), fits)
    table.add("all", *(f"{sum(cost[name] for cost in costs):,.2f}" for name in titles), "")
    notes = dict.fromkeys(note for cost in costs for note in cost["notes"])
    return Group(
        Text(f"\nAll seeds on one {gpu}, estimated from its data sheet; it may take twice as long (docs/gpu.md):\n"),
        table,
        *(Text(f"note: {note}", style="yellow") for note in notes),
        Text(interval_text(seeds), style=QUIET),
    )


def _evaluation(evaluate: StudyEvaluation | None) -> str:
    if evaluate is None:
        return ""
    rounds = evaluate.rounds if isinstance(evaluate.rounds, str) else ", ".join(map(str, evaluate.rounds))
    return f", each game evaluated afterwards (rounds: {rounds})"


def headline(name: str, rest: str) -> Text:
    return Text.assemble((name, "bold"), (f"  {rest}", QUIET))


def results_text(results: StudyResults, commands: Mapping[str, str]) -> Group:
    seconds = sum(cell.seconds or 0.0 for cell in results.cells)
    complete = f"{results.complete} of {counted(len(results.cells), 'game')} complete"
    parts: list[RenderableType] = [headline(results.name, f"{complete}  {duration(seconds)} of playing")]
    for found in result_sections(results):
        parts += section(found.title, Group(cast(Table, found.body[0]), Text(found.lead, style=QUIET)))
    if results.failed:
        failed = [(f"{cell.arm} seed {cell.seed}", cell.reason) for cell in results.failed]
        columns = [Column("game", style="badge bad", wrap=False), Column("why")]
        parts += section("Failed", Table(columns, list(failed)))
    if sentences := cautions(results):
        parts += section("Cautions", Group(*(Text(f"- {sentence}", overflow="fold") for sentence in sentences)))
    return Group(*parts, Text(), *next_commands(commands))
