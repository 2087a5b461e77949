"""What each variant of one report bought: how many times better than another its headline measure is.

    for gain in gains(report): print(gain.variant.label, gain.step.ratio)

A ratio above 1 is better for every measure. Variants that did other work have no ratio. If samples were taken in turn,
a ratio is the median of the ratios of the rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pvg.bench.report import BenchReport, Samples, Variant
from pvg.bench.statistics import RatioInterval, least_p_value, median, rank_test, ratio_of_medians, ratio_of_pairs
from pvg.errors import UsageError


@dataclass(frozen=True, slots=True)
class VariantGain:
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


def gains(report: BenchReport) -> list[VariantGain]:
    """Every variant of a sweep or an ablation, in the report's order."""
    headline = headline_of(report)
    alike, in_turn = "by_variant" not in report.work, taken_in_turn(report)
    says = {f"{rung['switch']}={_word(rung['fast'])}": str(rung["says"]) for rung in report.config["profile"]["ladder"]}
    found: list[VariantGain] = []
    first = before = None
    for variant in report.variants:
        own = variant.samples.get(headline)
        found.append(
            VariantGain(
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


# Two benchmark reports of the same work, metric by metric: is B better, worse, or is no difference to be seen?
#
#     comparison = compare_reports(read_report(a), read_report(b), fail_above=0.05)
#     for metric in comparison.metrics: print(metric.name, metric.verdict, metric.ratio)
#
# Many metrics are asked about at once, and each could cry wolf. So every interval is given at 1 - 5 %/m for m metrics
# (Bonferroni, which holds however the metrics depend on each other): in 95 of 100 comparisons all of them hold
# together. Metrics whose samples are all the same number on both sides cannot cry wolf, and do not count; seconds and
# the rates that are made of them rise and fall together, cry wolf together, and count as one.
#
# Better or worse is said only where two things agree:
# - the interval lies wholly on one side of 1;
# - the rank test, which assumes nothing of the samples' distribution, says so too, at 5 %/m, or, where so few samples
#   cannot reach that, by the least p value they can give: all of one side lie below all of the other.
# tests/bench/test_compare.py measures both rates: wolf is cried in below 1 % of comparisons of ten metrics (11 to 15 %
# nothing were adjusted), and a slowdown of 10 % among spreads of 1 to 3 % is found in over 95 %, with 10 samples.

Verdict = Literal["worse", "better", "too few samples", "no difference seen"]
VERDICTS: tuple[Verdict, ...] = ("worse", "better", "too few samples", "no difference seen")  # what matters first

CONFIDENCE = 0.95
LEAST_SAMPLES = 4  # on each side: with 3 against 3 no order of the samples is rarer than 5 %
SHOWN_DIFFERENCES = 6  # in the one line of a refusal
ABSENT = "absent"  # the value of a key that one side does not have


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which the two reports differ, and what each of them says there."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key} is {word(self.a)} in A and {word(self.b)} in B"


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of one variant. `ratio` is B's median by A's, None where a sample is not above 0; `p` is the rank
    test's; `beyond`: it is worse by more than the threshold, with its whole interval."""

    variant: str
    name: str
    unit: str
    better: Literal["lower", "higher"]
    count_a: int
    count_b: int
    median_a: float
    median_b: float
    ratio: RatioInterval | None
    p: float
    verdict: Verdict
    beyond: bool

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ReportSide:
    """Which report this is."""

    path: str
    created: str
    command: str
    code: str

    @staticmethod
    def of(report: BenchReport, path: str) -> ReportSide:
        commit = (report.environment.git_commit or "")[:10]
        dirty = " with uncommitted changes" if report.environment.git_dirty else ""
        return ReportSide(
            path, report.created, report.command, f"pvg {report.environment.pvg} {commit}".strip() + dirty
        )


@dataclass(frozen=True, slots=True)
class ReportComparison:
    """What two reports say of each other; `metrics` has what matters first. `tested` counts those that could differ,
    `confidence` is that of each single interval, and `left_out` says what stands in one report only. `peak_memory`: by
    name, the bytes of A and of B. There is one value per side, so there is no verdict."""

    a: ReportSide
    b: ReportSide
    profile: str
    name: str
    same: bool
    environment: tuple[FieldDifference, ...]
    settings: tuple[FieldDifference, ...]
    metrics: tuple[MetricComparison, ...]
    left_out: tuple[str, ...]
    peak_memory: Mapping[str, tuple[float, float]]
    tested: int
    confidence: float
    fail_above: float | None

    @property
    def failing(self) -> tuple[MetricComparison, ...]:
        return tuple(metric for metric in self.metrics if metric.beyond)

    def with_verdict(self, verdict: Verdict) -> tuple[MetricComparison, ...]:
        return tuple(metric for metric in self.metrics if metric.verdict == verdict)

    def plain(self) -> dict[str, Any]:
        """As JSON data; an endless interval has infinity, which JSON writes as null."""
        counts = {verdict: len(self.with_verdict(verdict)) for verdict in VERDICTS}
        return asdict(self) | {"joint_confidence": CONFIDENCE, "counts": counts, "failed": bool(self.failing)}


def compare_reports(
    a: BenchReport,
    b: BenchReport,
    *,
    paths: tuple[str, str] = ("A", "B"),
    fail_above: float | None = None,
    resamples: int = 10_000,
) -> ReportComparison:
    """Compare every metric that both have, of every variant that both have.

    `fail_above`: the share by which a metric may be worse, 0.05 for 5 %. A metric is *worse by* 5 % when it takes 1.05
    times as much, or, where more is better, when A's is 1.05 times B's: seconds and rates of the same work agree.
    Raises UsageError for reports that cannot be compared: failed ones, of different profiles, or of different work.
    """
    _refuse_failed(a, paths[0])
    _refuse_failed(b, paths[1])
    if a.profile != b.profile:
        raise UsageError(
            f"The reports are of different profiles: A is of {a.profile!r}, B of {b.profile!r}.",
            "Compare two reports of one profile.",
        )
    labels = _common_labels(a, b)
    _refuse_other_work(a, b, labels)
    pairs, left_out = _pairs(a, b, labels)
    tested = len({_quantity(*pair) for pair in pairs if len({*pair[2].values, *pair[3].values}) > 1})
    risk = (1 - CONFIDENCE) / max(1, tested)
    compared = [_compared(label, name, one, other, risk, fail_above, resamples) for label, name, one, other in pairs]
    return ReportComparison(
        a=ReportSide.of(a, paths[0]),
        b=ReportSide.of(b, paths[1]),
        profile=a.profile,
        name=a.name if a.name == b.name else f"{a.name} against {b.name}",
        same=a == b,
        environment=tuple(differences(a.environment.model_dump(), b.environment.model_dump())),
        settings=tuple(_settings(a, b)),
        metrics=tuple(sorted(compared, key=_importance)),
        left_out=tuple(left_out),
        peak_memory={
            name: (most, b.peak_memory[name]) for name, most in a.peak_memory.items() if name in b.peak_memory
        },
        tested=tested,
        confidence=1 - risk,
        fail_above=fail_above,
    )


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[FieldDifference]:
    """Where two nested tables of JSON data differ, keys dotted; one that is on one side only is ABSENT on the other."""
    for key in dict.fromkeys([*a, *b]):
        one, other = a.get(key, ABSENT), b.get(key, ABSENT)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield FieldDifference(f"{prefix}{key}", one, other)


def word(value: Any) -> str:
    """A value of a configuration or an environment, as people write it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- what cannot be compared -----------------------------------------------------------------------------------------


def _refuse_failed(report: BenchReport, path: str) -> None:
    if report.status == "failed":
        raise UsageError(f"The benchmark of {path} failed: {report.reason}", "A failed one is not compared: repeat it.")


def _common_labels(a: BenchReport, b: BenchReport) -> list[str]:
    theirs = {variant.label for variant in b.variants}
    common = [variant.label for variant in a.variants if variant.label in theirs]
    if not common:
        raise UsageError(
            f"The reports have no variant in common: A is a {a.kind} with {_named(a)}, B a {b.kind} with {_named(b)}.",
            "Compare a sweep with a sweep over the same values, and a plain benchmark with a plain one.",
        )
    return common


def _named(report: BenchReport) -> str:
    labels = [variant.label for variant in report.variants if variant.label]
    return _listed(labels) if labels else "one variant"


def _listed(words: list[str]) -> str:
    rest = len(words) - SHOWN_DIFFERENCES
    return ", ".join(words[:SHOWN_DIFFERENCES]) + (f" and {rest} more" if rest > 0 else "")


def _refuse_other_work(a: BenchReport, b: BenchReport, labels: list[str]) -> None:
    found: dict[str, FieldDifference] = {}
    for label in labels:
        for difference in differences(_work(a, label), _work(b, label)):
            found.setdefault(str(difference), difference)
    if found:
        raise UsageError(
            f"The reports are of different work: {_listed(list(found))}.",
            "Repeat one of them with the settings of the other.",
        )


def _work(report: BenchReport, label: str) -> dict[str, Any]:
    """What the samples of one variant did: the common part, and what a sweep over the amount of work changed."""
    own = report.work.get("by_variant", {})
    return {key: value for key, value in report.work.items() if key != "by_variant"} | dict(own.get(label, {}))


# --- what can --------------------------------------------------------------------------------------------------------


def _pairs(
    a: BenchReport, b: BenchReport, labels: list[str]
) -> tuple[list[tuple[str, str, Samples, Samples]], list[str]]:
    """(variant, metric, A's samples, B's samples) for what both have, and a line for everything else."""
    variants_a = {variant.label: variant for variant in a.variants}
    variants_b = {variant.label: variant for variant in b.variants}
    left_out = [f"the variant {label}: only in A" for label in variants_a if label not in variants_b]
    left_out += [f"the variant {label}: only in B" for label in variants_b if label not in variants_a]
    pairs = []
    for label in labels:
        at = f" of {label}" if label else ""
        ours, theirs = variants_a[label].samples, variants_b[label].samples
        left_out += [f"{name}{at}: only in A" for name in ours if name not in theirs]
        left_out += [f"{name}{at}: only in B" for name in theirs if name not in ours]
        for name, one in ours.items():
            other = theirs.get(name)
            if other is None:
                continue
            if (one.unit, one.better) == (other.unit, other.better):
                pairs.append((label, name, one, other))
            else:
                left_out.append(
                    f"{name}{at}: in {one.unit}, {one.better} is better, in A; in {other.unit}, {other.better}, in B"
                )
    if not pairs:
        raise UsageError(f"The reports have no metric in common: {_listed(left_out)}.", "Repeat one with this pvg.")
    return pairs, left_out


def _quantity(label: str, name: str, a: Samples, b: Samples) -> tuple[str, tuple[int, ...]]:
    """What tells a metric from another by its samples alone: the order of all of them, the best one first. Two metrics
    of one variant with one order are two names of one quantity: a time, and a rate that is work by that time."""
    sign = 1 if a.better == "lower" else -1
    signed = [sign * value for value in (*a.values, *b.values)]
    levels = {value: rank for rank, value in enumerate(sorted(set(signed)))}
    return label, tuple(levels[value] for value in signed)


def _settings(a: BenchReport, b: BenchReport) -> Iterator[FieldDifference]:
    """The settings in which the benchmarks differ: mostly what the comparison is about."""
    for difference in differences(a.config, b.config):
        yield FieldDifference(difference.key.removeprefix("experiment."), difference.a, difference.b)


def _compared(
    label: str, name: str, a: Samples, b: Samples, risk: float, fail_above: float | None, resamples: int
) -> MetricComparison:
    ratio = None
    if min(*a.values, *b.values) > 0:
        ratio = ratio_of_medians(a.values, b.values, confidence=1 - risk, resamples=resamples)
    p = rank_test(a.values, b.values)
    medians = median(a.values), median(b.values)
    verdict = _verdict(a, b, ratio, p, risk)
    return MetricComparison(
        variant=label,
        name=name,
        unit=a.unit,
        better=a.better,
        count_a=len(a.values),
        count_b=len(b.values),
        median_a=medians[0],
        median_b=medians[1],
        ratio=ratio,
        p=p,
        verdict=verdict,
        beyond=fail_above is not None and verdict == "worse" and _least_cost(a, b, ratio) > 1 + fail_above,
    )


def _least_cost(a: Samples, b: Samples, ratio: RatioInterval | None) -> float:
    """How many times worse B is at least, as far as its interval goes; where a sample is 0 there is none, and the
    medians have to do (from nothing to something is infinitely more)."""
    if ratio is not None:
        return ratio.low if a.better == "lower" else 1 / ratio.high
    less, more = (median(a.values), median(b.values)) if a.better == "lower" else (median(b.values), median(a.values))
    return more / less if less > 0 else math.inf


def _verdict(a: Samples, b: Samples, ratio: RatioInterval | None, p: float, risk: float) -> Verdict:
    if {*a.values} == {*b.values} and len({*a.values}) == 1:
        return "no difference seen"  # however few they are
    n, m = len(a.values), len(b.values)
    if min(n, m) < LEAST_SAMPLES:
        return "too few samples"
    least = least_p_value(n, m)
    if ratio is None:  # the rank test decides alone
        if least > risk:
            return "too few samples"
        differs, more = p <= risk, median(b.values) > median(a.values)
        differs = differs and median(a.values) != median(b.values)
    else:
        differs = (ratio.low > 1 or ratio.high < 1) and p <= max(risk, least * (1 + 1e-9))
        more = ratio.ratio > 1
    if not differs:
        return "no difference seen"
    return "worse" if more == (a.better == "lower") else "better"


def _importance(metric: MetricComparison) -> tuple[bool, int, float]:
    """Beyond the threshold first, then by verdict, then the larger change; about equal ones as the report has them."""
    change = 0.0 if metric.ratio is None else round(abs(math.log(metric.ratio.ratio)), 3)
    return not metric.beyond, VERDICTS.index(metric.verdict), -change
