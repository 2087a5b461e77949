"""What each variant of one report bought: how many times better than another its headline measure is.

    for gain in gains(report): print(gain.variant.label, gain.step.ratio)

A ratio above 1 is always better, whichever way the measure points. Variants that did other work have no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.statistics import RatioInterval, ratio_of_medians


@dataclass(frozen=True, slots=True)
class Gain:
    """One variant against the one before it (`step`) and against the first one (`whole`); None where there is no
    ratio: for the first variant itself, beside a failed one, for other work, for values that are not above 0."""

    variant: Variant
    step: RatioInterval | None
    whole: RatioInterval | None
    says: str = ""


def headline_of(report: BenchReport) -> str:
    """The measure that the profile's tables compare."""
    return str(report.config["profile"]["headline"])


def gains(report: BenchReport) -> list[Gain]:
    """Every variant of a sweep or an ablation, in the report's order."""
    headline = headline_of(report)
    alike = "by_variant" not in report.work
    says = {f"{rung['switch']}={_word(rung['fast'])}": str(rung["says"]) for rung in report.config["profile"]["ladder"]}
    found: list[Gain] = []
    first = before = None
    for variant in report.variants:
        own = variant.samples.get(headline)
        found.append(
            Gain(
                variant,
                better_by(before, own) if alike else None,
                better_by(first, own) if alike else None,
                says.get(variant.label, "") if report.kind == "ablation" else "",
            )
        )
        first, before = (own if len(found) == 1 else first), own
    return found


def better_by(before: Samples | None, after: Samples | None) -> RatioInterval | None:
    """How many times better `after` is than `before`, with the interval at 95 %."""
    if before is None or after is None or min(*before.values, *after.values) <= 0:
        return None
    if before.better == "higher":
        return ratio_of_medians(before.values, after.values)
    return ratio_of_medians(after.values, before.values)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
