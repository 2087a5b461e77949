"""What each variant of one report bought: how many times better than another its headline measure is.

    for gain in gains(report): print(gain.variant.label, gain.step.ratio)

A ratio above 1 is better for every measure. Variants that did other work have no ratio. If samples were taken in turn,
a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.statistics import RatioInterval, ratio_of_medians, ratio_of_pairs


@dataclass(frozen=True, slots=True)
class Gain:
    """One variant against the one before it (`step`) and against the first one (`whole`); None where there is no
    ratio: for the first variant itself, beside a failed one, for other work, for values that are not above 0."""

    variant: Variant
    step: RatioInterval | None
    whole: RatioInterval | None
    says: str = ""

    @property
    def told_apart(self) -> bool:
        """Whether the interval of `step` does not contain 1."""
        return self.step is not None and not self.step.low <= 1.0 <= self.step.high


def taken_in_turn(report: BenchReport) -> bool:
    """Whether sample i of one variant and sample i of another were taken in the same round."""
    return bool(report.config.get("interleave"))


def headline_of(report: BenchReport) -> str:
    """The measure that the profile's tables compare."""
    return str(report.config["profile"]["headline"])


def gains(report: BenchReport) -> list[Gain]:
    """Every variant of a sweep or an ablation, in the report's order."""
    headline = headline_of(report)
    alike, in_turn = "by_variant" not in report.work, taken_in_turn(report)
    says = {f"{rung['switch']}={_word(rung['fast'])}": str(rung["says"]) for rung in report.config["profile"]["ladder"]}
    found: list[Gain] = []
    first = before = None
    for variant in report.variants:
        own = variant.samples.get(headline)
        found.append(
            Gain(
                variant,
                better_by(before, own, in_turn=in_turn) if alike else None,
                better_by(first, own, in_turn=in_turn) if alike else None,
                says.get(variant.label, "") if report.kind == "ablation" else "",
            )
        )
        first, before = (own if len(found) == 1 else first), own
    return found


def better_by(before: Samples | None, after: Samples | None, *, in_turn: bool = False) -> RatioInterval | None:
    """How many times better `after` is than `before`, with the interval at 95 %. `in_turn`: see `taken_in_turn`."""
    if before is None or after is None or min(*before.values, *after.values) <= 0:
        return None
    ratio = ratio_of_pairs if in_turn else ratio_of_medians
    if before.better == "higher":
        return ratio(before.values, after.values)
    return ratio(after.values, before.values)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
