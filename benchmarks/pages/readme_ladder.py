"""The table of the e2e ladder in docs/measuring.md: the part between two comments, written from the report.

text = with_ladder(guide, report)     # used by make_benchmarks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pvg.bench.compare import VariantGain, gains
from pvg.bench.report import BenchReport
from pvg.bench.statistics import RatioInterval, median
from pvg.errors import UsageError
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import number
from pvg_cli.compare_table import interval

FILE = "e2e-ablation.json"
BEGIN = "<!-- ladder: python -m benchmarks.pages.make_benchmarks -->"
END = "<!-- end of the ladder -->"
MEASURE = "step_s"


def with_ladder(guide: str, report: BenchReport) -> str:
    """The guide with the ladder of `report` between its two marks. Raises UsageError where they are missing."""
    before, begin, rest = guide.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"The guide lacks {BEGIN if not begin else END!r}.")
    return "\n".join([before + begin, "", *ladder_lines(report), "", end + after])


def ladder_lines(report: BenchReport) -> Iterator[str]:
    found = gains(report)
    if report.environment.git_dirty:
        yield from (dirty_text(report), "")
    yield from markdown_lines(
        ("switch", "what it does", "step, s", "against the row above", "against all slow"),
        "llrrr",
        [
            (
                label_of(gain),
                gain.says,
                number(median(gain.variant.samples[MEASURE].values)),
                ratio_text(gain.step, excludes_one(gain)),
                ratio_text(gain.whole),
            )
            for gain in found
        ],
    )
    yield from ("", significance_text(found))


def label_of(gain: VariantGain) -> str:
    label = gain.variant.label
    return f"`{label}`" if "=" in label else label


def ratio_text(ratio: RatioInterval | None, marked: bool = False) -> str:
    """A ratio with its interval; in bold if it is `marked`."""
    if ratio is None:
        return ""
    times = f"{ratio.ratio:.2f}x"
    return f"{f'**{times}**' if marked else times} ({interval(ratio)})"


def excludes_one(gain: VariantGain) -> bool:
    """Whether the variant differs significantly from the one before it."""
    return gain.step is not None and not gain.step.low <= 1.0 <= gain.step.high


def significance_text(found: Sequence[VariantGain]) -> str:
    """Which rungs are faster or slower than the one before, and which do not differ significantly from it."""
    rungs = [gain for gain in found if gain.step is not None]
    unclear = [label_of(gain) for gain in rungs if not excludes_one(gain)]
    slower = [label_of(gain) for gain in rungs if excludes_one(gain) and gain.step is not None and gain.step.high < 1]
    text = "Intervals are at 95 %."
    if len(unclear) < len(rungs):
        text += " In bold: a gain whose interval excludes 1."
    if slower:
        text += f" Slower than the row above: {', '.join(slower)}."
    if unclear:
        text += f" No significant difference in this report ({len(unclear)} of {len(rungs)}): {', '.join(unclear)}."
    return text


def dirty_text(report: BenchReport) -> str:
    return f"**Measured with uncommitted changes: no commit gives these figures. Repeat `{report.command}`.**"
