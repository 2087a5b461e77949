"""`pvg compare A B`: the differences between two benchmark reports, or two runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from typer import Argument, Option

from pvg.bench.compare import (
    CONFIDENCE,
    LEAST_SAMPLES,
    VERDICTS,
    MetricComparison,
    RatioInterval,
    ReportComparison,
    ReportSide,
    compare_reports,
    word,
)
from pvg.bench.report import BenchReport, read_report
from pvg.errors import EXIT_CHECK_FAILED, UsageError, shortened, user_paths, visible
from pvg.reporting.formats import peak_memory_texts
from pvg.reporting.table import Column, Table, TableCell
from pvg.reporting.terminal import QUIET, section
from pvg_cli import write_utf8
from pvg_cli.bench_tables import number
from pvg_cli.boundary import emit, say
from pvg_cli.options import DebugOption, JsonOption, check_output, parse_share, write_output
from pvg_cli.output import stdout
from pvg_cli.report import opened, place_of_page, show_runs


def compare(
    a: Annotated[Path, Argument(metavar="A", help="A run, or the report before a change (JSON of pvg bench).")],
    b: Annotated[Path, Argument(metavar="B", help="Another run, or the report after the change.")],
    fail_above: Annotated[
        str | None, Option(metavar="5%", help="Exit code 1 if the whole interval of a metric of B is worse by more.")
    ] = None,
    markdown: Annotated[
        str | None, Option(metavar="[FILE]", help="Write as Markdown. Without FILE: to stdout.")
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


@user_paths()
def _is_run(path: Path) -> bool:
    """Whether a path, or a name in the folder runs, is a run."""
    return any((folder / "experiment.toml").is_file() for folder in (path, Path("runs") / path))


@user_paths()
def _read(path: Path) -> BenchReport:
    """Read a report. Raises UsageError if `path` is a run or a folder."""
    if _is_run(path):
        raise UsageError(f"{path} is a run, and the other one is not.", "Give two runs, or two reports of pvg bench.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a benchmark report.", "Give a JSON file of `pvg bench`.")
    return read_report(path)


STYLES = {"worse": "badge bad", "better": "badge good", "too few samples": "badge warn", "no difference seen": ""}
MOST_CHARACTERS = 44  # per value
MARKDOWN_MARK = b"# pvg compare:"  # how the Markdown begins
CODE = ("pvg", "git_commit", "git_dirty")  # the fields of the environment that describe the code


def comparison_text(comparison: ReportComparison) -> Group:
    """The whole comparison for the terminal."""
    found = {verdict: len(comparison.with_verdict(verdict)) for verdict in VERDICTS}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.items() if count)
    parts: list[RenderableType] = [Text.assemble((comparison.name, "bold"), f"  {counts}")]
    parts += [Text(f"{letter}  {_side(side)}", overflow="fold") for letter, side in _sides(comparison)]
    for title, table in _differences(comparison).items():
        parts += section(title, table)
    parts += [Text(), metrics_table(comparison), Text(), Text(_method(comparison), style=QUIET)]
    return Group(*parts, *map(Text, notes(comparison)))


def markdown_text(comparison: ReportComparison) -> str:
    """The whole comparison as a Markdown document."""
    lines = [f"{MARKDOWN_MARK.decode()} {comparison.name}", ""]
    lines += [f"- {letter}: {_side(side)}, `{side.command}`" for letter, side in _sides(comparison)]
    for title, table in _differences(comparison).items():
        lines += ["", f"{title}:", "", table.to_markdown()]
    lines += ["", metrics_table(comparison).to_markdown(), "", _method(comparison), ""]
    return visible("\n".join([*lines, *(f"- {note}" for note in notes(comparison))]) + "\n")


def _sides(comparison: ReportComparison) -> tuple[tuple[str, ReportSide], ...]:
    return ("A", comparison.a), ("B", comparison.b)


def _side(side: ReportSide) -> str:
    return f"{side.path}, {side.created[:16].replace('T', ' ')}, {side.code}"


def _differences(comparison: ReportComparison) -> dict[str, Table]:
    """Title -> the differences of the machines and packages, and of the settings; without empty tables."""
    found = {"The environments differ": comparison.environment, "The settings differ": comparison.settings}
    columns = [Column("key", wrap=False), Column("A"), Column("B")]
    return {
        title: Table(columns, [(each.key, _short(each.a), _short(each.b)) for each in differences], narrow=True)
        for title, differences in found.items()
        if differences
    }


def _short(value: object) -> str:
    return shortened(word(value), MOST_CHARACTERS)


def metrics_table(comparison: ReportComparison) -> Table:
    """All metrics, by verdict."""
    varied = any(metric.variant for metric in comparison.metrics)
    table = Table(
        [
            Column("verdict", once=True, max_width=12),
            Column("metric"),
            *([Column("variant", style="quiet")] if varied else []),
            Column("A", "right", wrap=False),
            Column("B", "right", wrap=False),
            Column("unit", style="quiet", wrap=False),
            Column("B/A", "right", "strong", wrap=False),
            Column("interval", wrap=False),
            Column("p", "right", on="pages"),  # in Markdown only: no room at 80 columns
        ],
        narrow=True,
    )
    for metric in comparison.metrics:
        table.add(
            _verdict(metric, comparison.fail_above),
            metric.name,
            *([metric.variant] if varied else []),
            number(metric.median_a),
            number(metric.median_b),
            "" if metric.unit == "1" else metric.unit,
            "" if metric.ratio is None else _bound(metric.ratio.ratio),
            interval(metric.ratio),
            "<0.001" if metric.p < 0.001 else f"{metric.p:.3f}",
        )
    return table


def _verdict(metric: MetricComparison, fail_above: float | None) -> TableCell:
    """The verdict; of a metric that fails the check, with the threshold."""
    beyond = f", > {share(fail_above)}" if metric.beyond and fail_above is not None else ""
    return TableCell(f"{metric.verdict}{beyond}", STYLES[metric.verdict])


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


def interval(ratio: RatioInterval | None) -> str:
    return "no ratio" if ratio is None else f"{_bound(ratio.low)}–{_bound(ratio.high)}"


def _bound(value: float) -> str:
    if math.isinf(value) or value >= 1e6:
        return "∞" if math.isinf(value) else f"{value:.0e}"
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _method(comparison: ReportComparison) -> str:
    each = f"{100 * comparison.confidence:.4g} % each"
    return (
        "A, B: medians. B/A: their ratio; whether lower or higher is better depends on the metric. Interval: "
        f"bootstrap, {share(CONFIDENCE)} for all {comparison.tested} together ({each}). "
        "p (Markdown and JSON): Mann-Whitney rank test, not adjusted."
    )


def notes(comparison: ReportComparison) -> list[str]:
    """Sentences that a reader needs to interpret this comparison."""
    found = ["A and B are the same report, so nothing differs and every ratio is 1."] if comparison.same else []
    if comparison.failing:
        found.append(failure_line(comparison))
    of_a, of_b = ({name: pair[side] for name, pair in comparison.peak_memory.items()} for side in (0, 1))
    for (what, one), (_, other) in zip(peak_memory_texts(of_a), peak_memory_texts(of_b), strict=True):
        found.append(f"The {what} over the whole call: {one} in A, {other} in B (one value each, so no verdict).")
    if comparison.left_out:
        found.append(f"Left out: {'; '.join(comparison.left_out)}.")
    if any(metric.ratio is None for metric in comparison.metrics):
        found.append(
            "Metrics with a sample of 0 or less have no ratio. The rank test decides, and no threshold applies."
        )
    if comparison.with_verdict("too few samples"):
        found.append(
            f"Too few samples: fewer than {LEAST_SAMPLES} on a side, or fewer than the rank test needs for this many "
            "metrics. Take more samples: pvg bench -s repeats=10."
        )
    if comparison.with_verdict("worse") or comparison.with_verdict("better"):
        if any(each.key not in CODE for each in comparison.environment):
            found.append("The environments differ, so the code need not be the reason for a difference.")
        found.append(
            "The intervals cover the variation within a run. The speed of a machine also changes between runs: measure "
            "A and B again before you rely on a small difference."
        )
    return found


def failure_line(comparison: ReportComparison) -> str:
    """The message of a failed check."""
    assert comparison.fail_above is not None
    names = ", ".join(f"{metric.name} {metric.variant}".strip() for metric in comparison.failing)
    return f"Worse by more than {share(comparison.fail_above)}, with the whole interval: {names}."
