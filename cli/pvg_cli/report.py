"""`pvg report RUN|REPORT...`: show runs, complete or not, or benchmark reports, and write their pages to a file.

`pvg view` shows one run in the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Argument, Option

from pvg.errors import StateError, UsageError, user_paths
from pvg_cli import completion
from pvg_cli.boundary import emit, say
from pvg_cli.options import PAGE_MARK, DebugOption, JsonOption, RunsOption, refuse_foreign

if TYPE_CHECKING:
    from pvg.reporting.run_summary import RunState, RunSummary
    from pvg.store.run_directory import RunDirectory

Read = TypeVar("Read")
PAGE = Path("report.html")  # in the current folder; for several runs
EXAMPLES = 2  # solutions per role


def report(
    targets: Annotated[
        list[str], Argument(metavar="RUN|REPORT", help="Runs, or reports of pvg bench.", autocompletion=completion.runs)
    ],
    runs: RunsOption = Path("runs"),
    examples: Annotated[int, Option(min=0, help="The number of example solutions per role.")] = EXAMPLES,
    html: Annotated[Path | None, Option(metavar="FILE", help="The page. Default: report.html, in the run.")] = None,
    no_html: Annotated[bool, Option("--no-html", help="Do not write a page.")] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write the page of a run to a file, or one page of several runs, and show them here.

    One run has a second page, rollouts.html, to search and filter all its solutions. Both pages open without a network.
    Several runs share one page, with their curves in the same plots and a table of differences. Reports of pvg bench
    are shown on the terminal only.
    """
    if html is not None and no_html:
        raise UsageError("--html and --no-html cannot be used together.", "Use one of them.")
    with user_paths():
        reports = [Path(target) for target in targets if Path(target).is_file()]
        if html is not None and html.is_dir():
            raise UsageError(f"The page {html} cannot be written: it is a folder.", "Give a file: --html FILE")
    if reports and len(reports) < len(targets):
        raise UsageError("Runs and benchmark reports cannot be shown together.", "Give either runs or reports.")
    if reports and html is not None:
        raise UsageError("Reports of pvg bench have no page.", "Leave --html out.")
    if reports:
        _show_reports(reports, as_json)
        return
    directories = opened(targets, runs)
    page = None if no_html else place_of_page(directories, html)
    if len(directories) > 1:
        show_runs(directories, page, as_json)
    else:
        show_run(directories[0], page, as_json, examples)


def own_page(page: Path, remedy: str = "Move it away.") -> Path:
    """`page`, whose name pvg has chosen. Raises StateError for a link, a FIFO, a socket or a device, to which
    `write_page` writes if the user names it: to open a FIFO waits for its reader."""
    if page.is_symlink() or (page.exists() and not page.is_file() and not page.is_dir()):
        raise StateError(f"{page} is not a regular file.", remedy)
    return page


def _elsewhere(runs: Sequence[RunDirectory]) -> str:
    """What to type if the page cannot be written where it belongs. `pvg view` and `pvg compare` say it too."""
    command = " ".join(["pvg report", *(run.argument for run in runs)])
    return f"Write the page elsewhere: {command} --html FILE. Or write none: {command} --no-html"


@user_paths()
def place_of_page(runs: Sequence[RunDirectory], html: Path | None = None) -> Path:
    """The file of the page. Raises UsageError if pvg did not write that file. In the folder of a run, every page is
    pvg's."""
    page = html or own_page(PAGE if len(runs) > 1 else runs[0].report, _elsewhere(runs))
    if page.resolve().parent not in [run.path.resolve() for run in runs]:
        for each in (page, _beside(page)):
            refuse_foreign(each, PAGE_MARK, _elsewhere(runs))
    return page


def _beside(page: Path) -> Path:
    """The file of the page with all solutions."""
    return page.with_name("rollouts.html" if page.name == PAGE.name else f"{page.stem}-rollouts.html")


@user_paths()
def opened(targets: list[str], runs: Path) -> list[RunDirectory]:
    """The runs that a command names. Raises UsageError for an unknown name, and for one that is given twice."""
    from pvg.store.run_directory import RunDirectory

    for target in targets:
        for folder in (runs / target, Path(target)):
            if (folder / "study.json").is_file():  # a study has its own command and page
                raise UsageError(
                    f"{target} is a study, not a run; its page is {folder / 'study.html'}.",
                    f"To see its tables: pvg study {shlex.quote(folder.name)} --only-table. To see a run: pvg view RUN",
                )
    directories = [RunDirectory.open(target, runs) for target in targets]
    places = [directory.path.resolve() for directory in directories]
    if twice := next((target for target, place in zip(targets, places, strict=True) if places.count(place) > 1), None):
        raise UsageError(f"The run {twice!r} is given twice.", "Give each run once.")
    return directories


def show_run(run: RunDirectory, page: Path | None, as_json: bool, examples: int = EXAMPLES) -> None:
    """Print a run, and write its page and the one with all its solutions."""
    from pvg.evaluation.report import report_of
    from pvg.reporting import terminal
    from pvg.reporting.evaluation import evaluation_tables
    from pvg.reporting.follow import state_of
    from pvg.reporting.run_summary import read_run
    from pvg.reporting.solutions import choose_examples
    from pvg_cli.output import stdout

    summary = read_run(run)
    chosen = _or_warn(lambda: choose_examples(run, examples) if examples else []) or []
    found = _or_warn(lambda: report_of(run))
    state = state_of(run)
    rollouts = None if page is None else _write_pages(run, summary, examples, page, state)
    if as_json:
        pages = {"html": page and str(page), "rollouts_html": rollouts and str(rollouts)}
        evaluation = None if found is None else found.plain()
        emit({**summary.plain(), "evaluation": evaluation, "examples": [each.plain() for each in chosen], **pages})
    else:
        stdout().print(terminal.report(summary, chosen, state=state))
        if found is not None:
            stdout().print("\n", evaluation_tables(found), sep="")
        _print_page(page)
        if rollouts is not None:
            say(f"All solutions: {rollouts}")


def _write_pages(run: RunDirectory, summary: RunSummary, examples: int, page: Path, state: RunState) -> Path | None:
    """Write the page of a run, and the page with all its solutions beside it. Returns the second one; None if the run
    has no solutions yet, or if the page goes to a device such as /dev/stdout."""
    from pvg.reporting.run_page import collect, run_page
    from pvg.reporting.table import write_page

    device = page.exists() and not page.is_file() and not page.is_dir()
    rollouts, text = (None, None) if device else _rollouts_page(run, summary, page)
    data = replace(collect(run, summary, examples), rollouts=rollouts.name if rollouts else "", state=state)
    write_page(page, run_page(data), _elsewhere([run]))
    if rollouts is not None and text is not None:
        write_page(rollouts, text, _elsewhere([run]))
    return rollouts


def _rollouts_page(run: RunDirectory, summary: RunSummary, page: Path) -> tuple[Path | None, str | None]:
    """The file of the page with all solutions, and its text; None for both without solutions."""
    from pvg.reporting.solutions import rollouts_file, stored_rollouts

    beside = own_page(_beside(page), _elsewhere([run]))
    stored = stored_rollouts(run, summary)
    return (beside, rollouts_file(stored, run, summary, page.name)) if stored.count else (None, None)


def _or_warn(read: Callable[[], Read]) -> Read | None:
    """What `read` gives. If its file is damaged: None after a warning, so that the rest of the run is shown."""
    try:
        return read()
    except StateError as error:
        say(f"warning: {error}")
        return None


def show_runs(directories: list[RunDirectory], page: Path | None, as_json: bool) -> None:
    """Print runs side by side, and write their page."""
    from pvg.reporting.run_page import compared_runs, final_metrics, setting_differences, several_page, several_text
    from pvg.reporting.table import write_page
    from pvg_cli.output import stdout

    runs = compared_runs(directories)
    if page is not None:
        write_page(page, several_page(runs), _elsewhere(directories))
    if as_json:
        found = [{"name": run.name, **run.summary.plain(), "final": final_metrics(run.summary)} for run in runs]
        settings = setting_differences([run.plain for run in runs])
        emit({"runs": found, "settings": settings, "html": page and str(page)})
    else:
        stdout().print(several_text(runs))
        _print_page(page)


def _show_reports(paths: list[Path], as_json: bool) -> None:
    from pvg.bench.report import read_report
    from pvg_cli.bench_tables import report_text
    from pvg_cli.output import stdout

    reports = [read_report(path) for path in paths]
    if as_json:
        emit({"reports": [found.plain() for found in reports]})
        return
    for path, found in zip(paths, reports, strict=True):
        others = [shlex.quote(str(other)) for other in paths if other != path]
        here = shlex.quote(str(path))
        commands = {f"pvg compare {here} {others[0] if others else 'OTHER'}": "the differences, with intervals"}
        stdout().print(report_text(found, path, commands))


def _print_page(page: Path | None) -> None:
    """Say on stderr where the page is, so that stdout contains only the report."""
    if page is not None:
        say(f"Page: {page}")
