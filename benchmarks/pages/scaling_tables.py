"""The page's part on how a step's cost grows: the figures by size, and the exponents of time and of work.

lines = scaling_lines(report)     # of a profile on the `scaling` workload; used by make_benchmarks

A part grows faster than its work if the whole interval of its exponent is above the work's exponent. If only the
exponent is above, the row says "within the noise": more samples would decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pvg.bench.report import BenchReport, Variant
from pvg.bench.statistics import MedianContrast, contrast_of_medians, median
from pvg.reporting.table import markdown_lines
from pvg_cli.bench_tables import number

PROFILE = "scaling"
WHOLE = "whole step"
OPERATIONS, READS = "operations", "numbers read"
COUNTED = {"dispatch": "tokens", "rest": "tokens", "optimizer": "parameters", "sync": "parameters"}
CHANCE = 0.025  # how often an interval lies above the truth


@dataclass(frozen=True)
class Growth:
    """Growth of one part with the size: its time, and its work by what is counted. `share`: of the step, at the largest
    size; `amounts`: of the work that grows most, at each size."""

    part: str
    share: float
    time: MedianContrast
    work: Mapping[str, float]
    amounts: Sequence[float]

    @property
    def excess(self) -> float:
        """Of the time's exponent over that of the work that grows most."""
        return self.time.value - max(self.work.values())

    @property
    def faster(self) -> bool:
        """Whether the time grows faster than the work: its whole interval lies above."""
        return self.time.low > max(self.work.values())


def scaling_lines(report: BenchReport) -> Iterator[str]:
    """The figures of each size, the exponents, and a sentence that names the parts that grow faster than their work."""
    axis = axis_of(report)
    yield f"Medians of the seconds by part, the tokens and the work of a step. By {axis}:"
    yield ""
    yield from figure_rows(report)
    yield ""
    sizes = upper_range([size_of(report, variant) for variant in report.variants])
    yield (
        f"The cost of each part grows as a power of {axis}. The exponents, fitted from {number(sizes[0])} to "
        f"{number(sizes[-1])}, with the exponents of its work:"
    )
    yield ""
    found = growths(report)
    rows = [
        (
            growth.part.replace("_", " "),
            f"{100 * growth.share:.0f} %",
            f"{growth.time.value:.2f} ({growth.time.low:.2f}–{growth.time.high:.2f})",
            ", ".join(f"{exponent:.2f} ({what})" for what, exponent in growth.work.items()),
            "**faster**" if growth.faster else "no faster" if growth.excess <= 0 else "within the noise",
        )
        for growth in found
    ]
    header = ("part", "of the step at the largest", "time", "its work", "than its work")
    yield from markdown_lines(header, "lrrll", rows)
    yield ""
    yield verdict(found)


def figure_rows(report: BenchReport) -> list[str]:
    parts = parts_of(report)
    rows = [
        (
            number(size_of(report, variant)),
            *(number(median(variant.samples[name].values)) for name in ("step_s", *(f"{part}_s" for part in parts))),
            number(variant.derived["tokens"]),
            number(variant.derived["flops"] / 1e9),
            number(median(variant.samples["peak_memory_mb"].values)),
        )
        for variant in report.variants
    ]
    names = [part.replace("_", " ") for part in parts]
    header = (axis_of(report), "step, s", *names, "tokens", "10^9 operations", "peak memory, MB")
    return markdown_lines(header, "r" * len(header), rows)


def growths(report: BenchReport) -> list[Growth]:
    """The whole step first, then its parts in their order; a part that takes no time at some size has no exponent."""
    sizes = upper_range([size_of(report, variant) for variant in report.variants])
    by_size = {size_of(report, variant): variant for variant in report.variants}
    chosen = [by_size[size] for size in sizes]
    parts = [
        growth_of(part, sizes, chosen)
        for part in parts_of(report)
        if all(min(variant.samples[f"{part}_s"].values) > 0 for variant in chosen)
    ]
    return [whole_step(sizes, chosen, parts), *parts]


def growth_of(part: str, sizes: Sequence[float], chosen: Sequence[Variant]) -> Growth:
    counted = {COUNTED.get(part, OPERATIONS): [variant.derived[f"work_{part}"] for variant in chosen]}
    if f"reads_{part}" in chosen[0].derived:
        counted[READS] = [variant.derived[f"reads_{part}"] for variant in chosen]
    work = {what: exponent_of(sizes, [[amount] for amount in amounts]).value for what, amounts in counted.items()}
    most = counted[max(work, key=lambda what: work[what])]
    return Growth(part, *share_and_time(f"{part}_s", sizes, chosen), work, most)


def whole_step(sizes: Sequence[float], chosen: Sequence[Variant], parts: Sequence[Growth]) -> Growth:
    """Growth of the whole step. Its work is the time that the step would take if each part grew like its work."""
    seconds = [median(chosen[0].samples[f"{growth.part}_s"].values) for growth in parts]
    amounts = [
        sum(s * growth.amounts[place] / growth.amounts[0] for s, growth in zip(seconds, parts, strict=True))
        for place in range(len(sizes))
    ]
    exponent = exponent_of(sizes, [[amount] for amount in amounts]).value
    return Growth(WHOLE, *share_and_time("step_s", sizes, chosen), {"its parts'": exponent}, amounts)


def share_and_time(measure: str, sizes: Sequence[float], chosen: Sequence[Variant]) -> tuple[float, MedianContrast]:
    seconds = [variant.samples[measure].values for variant in chosen]
    share = median(seconds[-1]) / median(chosen[-1].samples["step_s"].values)
    return share, exponent_of(sizes, seconds)


def verdict(found: Sequence[Growth]) -> str:
    faster = [growth for growth in found if growth.faster]
    chance = f"By chance, {CHANCE * len(found):.1f} of {len(found)} intervals are above the true value."
    if not faster:
        return f"No part grows significantly faster than its work. {chance}"
    told = [
        f"{growth.part.replace('_', ' ')} (by {growth.excess:.2f}, {100 * growth.share:.0f} %)" for growth in faster
    ]
    faster_text = f"These parts grow faster than their work: {', '.join(told)}"
    return f"{faster_text}. In parentheses: difference of the exponents, share of the largest step. {chance}"


def parts_of(report: BenchReport) -> list[str]:
    return [name.removeprefix("work_") for name in report.variants[0].derived if name.startswith("work_")]


def size_of(report: BenchReport, variant: Variant) -> float:
    return variant.derived[str(report.config["profile"]["workload"]["axis"])]


def axis_of(report: BenchReport) -> str:
    return str(report.config["profile"]["workload"]["axis"]).replace("_", " ")


# --- exponents --------------------------------------------------------------------------------------------------------


def upper_range(sizes: Sequence[float]) -> list[float]:
    """The sizes from the geometric middle of the range on; small sizes have mostly constant costs. Raises ValueError
    with fewer than two sizes."""
    if len(set(sizes)) < 2:
        raise ValueError(f"an exponent cannot be fitted to the sizes {list(sizes)}")
    middle = math.sqrt(min(sizes) * max(sizes))
    return sorted(size for size in sizes if size >= middle * (1 - 1e-9))


def exponent_of(sizes: Sequence[float], samples: Sequence[Sequence[float]]) -> MedianContrast:
    """The exponent p of cost = c x^p with its 95 % interval; `samples[i]` were taken at `sizes[i]`.

    p is the slope of a least-squares line through the logs of the medians. The interval reflects the spread of the
    samples, not how well a power law fits. With a single exact value per size (a count of work) it is infinite and only
    the value has a meaning. Raises ValueError for fewer than two sizes, and for sizes or samples that are not above 0.
    """
    if len(set(sizes)) < 2 or min(sizes) <= 0:
        raise ValueError(f"an exponent cannot be fitted to the sizes {list(sizes)}")
    logs = [math.log(size) for size in sizes]
    mean = sum(logs) / len(logs)
    square = sum((log - mean) ** 2 for log in logs)
    return contrast_of_medians(samples, [(log - mean) / square for log in logs])
