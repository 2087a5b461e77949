"""`pvg study NAME`: play several experiments with several seeds, and compare the results."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from pvg.errors import EXIT_CHECK_FAILED, UsageError, counted
from pvg_cli import completion
from pvg_cli.boundary import EXIT_STOPPED, emit, handled, say
from pvg_cli.options import DebugOption, JsonOption, RunsOption, SetOption, check_output, write_output

if TYPE_CHECKING:
    from pvg.study.plan import Cell, StudyPlan
    from pvg.study.playing import CellProgress, StudyFolder
    from pvg.study.results import StudyResults

PVG = [sys.executable, "-P", "-m", "pvg"]  # the command that starts this pvg, for any PATH and current folder


def study(  # noqa: PLR0917  (each is an option)
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|FILE",
            autocompletion=completion.studies,
            help="A study in ./studies or of pvg, or a TOML file. Without it: list the studies.",
            show_default=False,
        ),
    ] = None,
    overrides: SetOption = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", min=1, max=10_000, metavar="N", help="Use seeds 0 to N-1 instead of the seeds in the file."
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes", "-p", min=1, max=4096, metavar="N", help="The number of games that run at the same time."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            max=1024,
            metavar="N",
            help="Threads per game. Default: 1 for small models, otherwise cores divided by processes.",
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables as Markdown to FILE.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write the values of all seeds to FILE, one per line, as CSV."),
    ] = None,
    only_table: Annotated[
        bool,
        typer.Option("--only-table", help="Play no games. Show the tables and write the page from the results so far."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show arms, seeds and the remaining work, and stop.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Play each experiment (arm) of a study with each seed, and compare the results, with intervals.

    Ctrl-C stops the games at commit points. The same command resumes the study, and keeps complete games.
    """
    from pvg.study.plan import load_study
    from pvg.study.playing import StudyFolder, progress_of, refuse_other_settings
    from pvg.study.results import csv_text
    from pvg.study.text import MARKDOWN_MARK, markdown_text

    if only_table and dry_run:
        raise UsageError("--only-table and --dry-run cannot be used together.", "Use one of them.")
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
        _show_plan(plan, now, as_json)
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
    from pvg.config.load import known_files
    from pvg.study.plan import read_study
    from pvg_cli.output import names_table, stdout

    paths = known_files("studies")
    about = {name: read_study(path).about for name, path in paths.items()}
    if as_json:
        emit({"studies": [{"name": name, "path": str(path), "about": about[name]} for name, path in paths.items()]})
    else:
        stdout().print(names_table(about, "To play one", "pvg study NAME"))


def _show_plan(plan: StudyPlan, now: dict[str, CellProgress], as_json: bool) -> None:
    from pvg.study.text import plan_cautions
    from pvg_cli.output import stdout
    from pvg_cli.study_display import plan_table

    if not as_json:
        stdout().print(plan_table(plan, now))
        return
    cells = []
    for cell in plan.cells:
        found = now[cell.name]
        facts = {"arm": cell.arm, "seed": cell.seed, "run": str(cell.run.path), "hash": cell.experiment.hash()}
        progress = {"status": found.status, "reason": found.reason, "steps": cell.steps, "steps_done": found.done}
        cells.append(facts | progress)
    facts = {"study": plan.name, "folder": str(plan.folder), "processes": plan.processes, "threads": plan.threads}
    emit({**facts, "steps": plan.steps, "warnings": plan_cautions(plan), "cells": cells})


class StopRequests:
    """The number of signals so far, which `play_cells` reads."""

    requests = 0

    def count(self, number: int, frame: FrameType | None) -> None:
        self.requests += 1


def _play(plan: StudyPlan, todo: list[Cell], now: dict[str, CellProgress]) -> bool:
    """Play the remaining games under the display. False if the user stopped the study."""
    from pvg.study.playing import play_cells
    from pvg.study.text import plan_cautions
    from pvg.telemetry.cpu import precision_warnings
    from pvg_cli.output import stderr
    from pvg_cli.study_display import StudyDisplay

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
    from pvg.reporting.table import write_page
    from pvg.study.results import collect, write_results
    from pvg.study.text import study_page
    from pvg_cli.report import own_page

    results = collect(plan, command)
    write_results(folder.results, results)
    write_page(own_page(folder.page), study_page(results))
    return results


def _print_result(results: StudyResults, folder: StudyFolder, command: str, *, as_json: bool, finished: bool) -> None:
    """Print the tables and the next commands, and set the exit code."""
    from pvg_cli.output import stdout
    from pvg_cli.study_display import results_text

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
