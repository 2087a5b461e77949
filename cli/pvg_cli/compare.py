"""`pvg compare A B`: the differences between two benchmark reports, or two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pvg.errors import EXIT_CHECK_FAILED, UsageError, user_paths
from pvg_cli import write_utf8
from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, JsonOption, check_output, write_output
from pvg_cli.report import opened, place_of_page, show_runs

if TYPE_CHECKING:
    from pvg.bench.report import BenchReport


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run, or the report before a change (JSON of pvg bench).")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another run, or the report after the change.")],
    fail_above: Annotated[
        str | None,
        typer.Option(
            "--fail-above",
            metavar="SHARE",
            help="Exit with code 1 if a metric of B is worse by more than SHARE (5% or 0.05) with its whole interval.",
        ),
    ] = None,
    markdown: Annotated[
        str | None,
        typer.Option(
            "--markdown", metavar="[FILE]", help="Write the comparison as Markdown to FILE. Without FILE: to stdout."
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare two runs: their rounds and settings side by side, here and on one page, report.html in this folder. Or
    two benchmark reports: which metrics are better or worse in B than in A?

    The table of benchmark reports shows ratios of medians with bootstrap intervals, which are adjusted for the number
    of metrics, and the p value of a rank test.
    """
    if _is_run(a) and _is_run(b):
        if fail_above is not None or markdown is not None:
            raise UsageError("--fail-above and --markdown are for reports of pvg bench.", "Leave them out.")
        both = opened([str(a), str(b)], Path("runs"))
        show_runs(both, place_of_page(both), as_json)
        return
    from pvg.bench.compare import compare_reports
    from pvg_cli.compare_table import MARKDOWN_MARK, comparison_text, failure_line, markdown_text
    from pvg_cli.output import stdout

    threshold = parse_share(fail_above) if fail_above is not None else None
    if as_json and markdown == "":
        raise UsageError("--json and --markdown cannot both write to stdout.", "Give a file: --markdown FILE")
    file = Path(markdown) if markdown else None
    check_output("--markdown", file, MARKDOWN_MARK, a, b)
    comparison = compare_reports(_read(a), _read(b), paths=(str(a), str(b)), fail_above=threshold)
    if markdown == "":
        write_utf8(markdown_text(comparison).encode())
    elif file is not None:
        write_output(file, markdown_text(comparison))
    if as_json:
        emit(comparison.plain())
    elif markdown != "":
        stdout().print(comparison_text(comparison))
    if comparison.failing:
        say(failure_line(comparison), typer.colors.RED)
        raise typer.Exit(EXIT_CHECK_FAILED)


def parse_share(text: str) -> float:
    """A share from `5%`, `5 %` or `0.05`. Raises UsageError for other text, and for 5 without %, which is ambiguous."""
    number = text.strip()
    percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100 or (value >= 1 and not percent):
        raise UsageError(f"--fail-above {text!r} is not a share.", "Write 5% or 0.05.")
    return value


@user_paths()
def _is_run(path: Path) -> bool:
    """Whether a path, or a name in the folder runs, is a run."""
    return any((folder / "experiment.toml").is_file() for folder in (path, Path("runs") / path))


@user_paths()
def _read(path: Path) -> BenchReport:
    """Read a report. Raises UsageError if `path` is a run or a folder."""
    from pvg.bench.report import read_report

    if _is_run(path):
        raise UsageError(f"{path} is a run, and the other one is not.", "Give two runs, or two reports of pvg bench.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a benchmark report.", "Give a JSON file of `pvg bench`.")
    return read_report(path)
