"""`pvg compare A B`: what a change bought, or cost, between two benchmark reports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from cli.boundary import DebugOption, JsonOption, emit, guarded, say
from pvg.errors import EXIT_CHECK_FAILED, MissingRequirementError, UsageError

if TYPE_CHECKING:
    from pvg.bench.compare import ReportComparison
    from pvg.bench.report import BenchReport

MARKDOWN = "--markdown"
STDOUT = "-"


class FileOptional(TyperCommand):
    """Lets `--markdown` stand without its FILE, last or before another option: it then means stdout."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        given: list[str] = []
        for place, argument in enumerate(args):
            given.append(argument)
            if argument == MARKDOWN and (place + 1 == len(args) or args[place + 1].startswith("--")):
                given.append(STDOUT)
        return super().parse_args(ctx, given)


def register(app: typer.Typer) -> None:
    app.command("compare", cls=FileOptional)(compare)


@guarded
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="The report of before (a JSON file that pvg bench wrote).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The report of after.")],
    fail_above: Annotated[
        str | None,
        typer.Option(
            "--fail-above",
            metavar="SHARE",
            help="Exit 1 when a metric of B is worse by more than this (5% or 0.05), with its whole interval.",
        ),
    ] = None,
    markdown: Annotated[
        str | None,
        typer.Option(MARKDOWN, metavar="[FILE]", help="Write the comparison as Markdown, to stdout or into a file."),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say of every metric whether B is better than A, worse, or no difference is to be seen.

    The ratio of medians stands with a bootstrap interval, adjusted for the number of metrics, and with a rank test.
    """
    from cli.compare_table import comparison_text, failure_line, markdown_text
    from cli.output import stdout
    from pvg.bench.compare import compare_reports

    threshold = parse_share(fail_above) if fail_above is not None else None
    if as_json and markdown == STDOUT:
        raise UsageError("--json and --markdown both want stdout.", "Name a file: --markdown FILE.")
    comparison = compare_reports(_read(a), _read(b), paths=(str(a), str(b)), fail_above=threshold)
    if markdown == STDOUT:
        typer.echo(markdown_text(comparison), nl=False)
    elif markdown is not None:
        _write(Path(markdown), markdown_text(comparison), (a, b))
    if as_json:
        emit(comparison.plain())
    elif markdown != STDOUT:
        stdout().print(comparison_text(comparison))
    _end(comparison, failure_line(comparison))


def _end(comparison: ReportComparison, line: str) -> None:
    if comparison.failing:
        say(line, typer.colors.RED)
        raise typer.Exit(EXIT_CHECK_FAILED)


def parse_share(text: str) -> float:
    """`5%`, `5 %` and `0.05` are the same share. Raises UsageError for what is none, and for a bare 5: of what?"""
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100 or (value >= 1 and not percent):
        raise UsageError(f"--fail-above {text!r} is no share.", "Write 5% or 0.05.")
    return value


def _read(path: Path) -> BenchReport:
    """The report in the file; a run in its place is named as one."""
    from pvg.bench.report import read_report
    from pvg.store.run_directory import RunDirectory

    for folder in (path, Path("runs") / path):
        if folder.is_dir() and RunDirectory(folder).experiment_file.is_file():
            raise UsageError(f"{path} is a run, not a benchmark report.", f"Look at it with: pvg report {path}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a benchmark report.", "Give the JSON file that `pvg bench` wrote.")
    return read_report(path)


def _write(path: Path, text: str, reports: tuple[Path, Path]) -> None:
    from pvg.store.atomic import write_output

    if path.exists() and any(path.samefile(report) for report in reports):
        raise UsageError(f"--markdown {path} would overwrite a report.", "Name another file.")
    try:
        write_output(path, text.encode())
    except MissingRequirementError as error:  # its own remedy is for a run, which can be resumed
        raise MissingRequirementError(error.message, "Name another file.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", "Name another file.") from error
    say(f"Written to {path}.")
