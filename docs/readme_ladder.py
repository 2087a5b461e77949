"""The README's table of the e2e ladder: the part between two comments, written from the report.

text = with_ladder(readme, report)     # used by make_benchmarks.py
"""

from __future__ import annotations

from collections.abc import Iterator

from cli.bench_tables import number
from cli.compare_table import markdown_rows
from pvg.bench.gains import gains
from pvg.bench.report import BenchReport
from pvg.bench.statistics import median
from pvg.errors import UsageError

FILE = "e2e-ablation.json"
BEGIN = "<!-- ladder: python docs/make_benchmarks.py -->"
END = "<!-- end of the ladder -->"
MEASURE = "step_s"


def with_ladder(readme: str, report: BenchReport) -> str:
    """The README with the ladder of `report` between its two marks. Raises UsageError where they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"The README lacks {BEGIN if not begin else END!r}.")
    return "\n".join([before + begin, "", *ladder_lines(report), "", end + after])


def ladder_lines(report: BenchReport) -> Iterator[str]:
    rows = []
    for gain in gains(report):
        label = gain.variant.label
        seconds = number(median(gain.variant.samples[MEASURE].values))
        rows.append(
            (
                f"`{label}`" if "=" in label else label,
                gain.says,
                seconds,
                f"{gain.whole.ratio:.2f}x" if gain.whole else "",
            )
        )
    yield from markdown_rows(("switch", "what it does", "step, s", "in all"), "llrr", rows)
