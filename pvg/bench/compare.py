"""Compares measured samples: the variants within one report (`gains`), and two reports of the same work.

    for gain in gains(report): print(gain.variant.label, gain.step.ratio)

    comparison = compare_reports(read_report(a), read_report(b), fail_above=0.05)
    for metric in comparison.metrics: print(metric.name, metric.verdict, metric.ratio)

Gains: a ratio above 1 is better for every measure. Variants whose work differs have no ratio. If samples were taken in
turn, a ratio is the median of the ratios of the rounds.

Two reports: many metrics are tested at once, so each interval has confidence 1 - 5 %/m for m metrics (Bonferroni, which
holds for any dependence between metrics). All intervals hold together in 95 of 100 comparisons. Metrics with the same
constant value on both sides cannot give a false alarm and do not count in m. Seconds and the rates derived from them
rise and fall together and count once.

A verdict of better or worse requires two things:
- the interval lies wholly on one side of 1;
- the rank test, which assumes no distribution, has p <= 5 %/m. If there are too few samples to reach that, it must give
  the smallest p value that they can give: all samples of one side lie below all samples of the other.

tests/bench/test_compare.py measures both rates. False alarms occur in below 1 % of comparisons of ten metrics (11 to
15 % without the adjustment). A slowdown of 10 % with a spread of 1 to 3 % is found in over 95 %, with 10 samples.
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
    """One variant compared with the one before it (`step`) and with the first one (`whole`).

    A ratio is None for the first variant, beside a failed one, if the work differs, or if a value is not above 0."""

    variant: Variant
    step: RatioInterval | None
    whole: RatioInterval | None
    says: str = ""


def interleaved(report: BenchReport) -> bool:
    """Whether sample i of every variant was taken in the same round."""
    return bool(report.config.get("interleave"))


def beside_text(report: BenchReport) -> str:
    """What else the machine did: "beside 1 busy process"; "" if the report's profile asked for nothing."""
    busy = report.config["profile"].get("beside", 0)
    return f"beside {busy} busy process{'' if busy == 1 else 'es'}" if busy else ""


def headline_of(report: BenchReport) -> str:
    return str(report.config["profile"]["headline"])


def gains(report: BenchReport) -> list[VariantGain]:
    """One gain per variant of a sweep or an ablation, in the report's order."""
    headline = headline_of(report)
    alike, in_turn = "by_variant" not in report.work, interleaved(report)
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
    """How many times better `after` is than `before`, with its 95 % interval. `in_turn`: see `interleaved`."""
    if before is None or after is None or min(*before.values, *after.values) <= 0:
        return None
    ratio = ratio_of_pairs if in_turn else ratio_of_medians
    if before.better == "higher":
        return ratio(before.values, after.values)
    return ratio(after.values, before.values)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- two reports ------------------------------------------------------------------------------------------------------

Verdict = Literal["worse", "better", "too few samples", "no difference seen"]
VERDICTS: tuple[Verdict, ...] = ("worse", "better", "too few samples", "no difference seen")  # most important first

CONFIDENCE = 0.95
LEAST_SAMPLES = 4  # per side: with 3 against 3, no order of the samples has a probability below 5 %
SHOWN_DIFFERENCES = 6  # in one error message
ABSENT = "absent"  # the value of a key that exists on one side only


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two reports differ, with both values."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key} is {word(self.a)} in A and {word(self.b)} in B"


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of one variant. `ratio`: B's median divided by A's, None if a sample is not above 0. `p`: of the rank
    test. `beyond`: the whole interval is worse than the threshold."""

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
    """The result for two reports; `metrics` has the most important first.

    `tested`: how many metrics could differ. `confidence`: of each single interval. `left_out`: what exists in one
    report only. `peak_memory`: bytes of A and of B by name; one value per side, so there is no verdict."""

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
        """As JSON data. An unbounded interval holds infinity, which JSON writes as null."""
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
    """Compare every metric that both reports have, of every variant that both have.

    `fail_above`: the share by which a metric may be worse, 0.05 for 5 %. A metric is 5 % worse if B takes 1.05 times as
    much as A or, where more is better, if A has 1.05 times B's value. So seconds and rates of the same work agree.
    Raises UsageError for reports that cannot be compared: failed, of different profiles, or of different work.
    """
    _refuse_failed(a, paths[0])
    _refuse_failed(b, paths[1])
    if a.profile != b.profile:
        raise UsageError(
            f"The reports have different profiles: A has {a.profile!r}, B has {b.profile!r}.",
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
    """Every difference between two nested tables of JSON data, with dotted keys. A missing value is ABSENT."""
    for key in dict.fromkeys([*a, *b]):
        one, other = a.get(key, ABSENT), b.get(key, ABSENT)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{prefix}{key}.")
        elif one != other:
            yield FieldDifference(f"{prefix}{key}", one, other)


def word(value: Any) -> str:
    """A value of a configuration or an environment, as text for people."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- checks: which reports can be compared ----------------------------------------------------------------------------


def _refuse_failed(report: BenchReport, path: str) -> None:
    if report.status == "failed":
        raise UsageError(f"The benchmark of {path} failed: {report.reason}", "Repeat it, then compare.")


def _common_labels(a: BenchReport, b: BenchReport) -> list[str]:
    theirs = {variant.label for variant in b.variants}
    common = [variant.label for variant in a.variants if variant.label in theirs]
    if not common:
        raise UsageError(
            f"The reports have no variant in common: A is a {a.kind} with {_named(a)}, B a {b.kind} with {_named(b)}.",
            "Compare a sweep with a sweep over the same values, or a plain benchmark with a plain one.",
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
            f"The reports measured different work: {_listed(list(found))}.",
            "Repeat one benchmark with the settings of the other.",
        )


def _work(report: BenchReport, label: str) -> dict[str, Any]:
    """What one sample of the variant did: the common part, and the part that differs between variants."""
    own = report.work.get("by_variant", {})
    return {key: value for key, value in report.work.items() if key != "by_variant"} | dict(own.get(label, {}))


# --- the metrics ------------------------------------------------------------------------------------------------------


def _pairs(
    a: BenchReport, b: BenchReport, labels: list[str]
) -> tuple[list[tuple[str, str, Samples, Samples]], list[str]]:
    """(variant, metric, A's samples, B's samples) for what both have, and one line for everything else."""
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
                    f"{name}{at}: A has {one.unit} ({one.better} is better), B has {other.unit} ({other.better})"
                )
    if not pairs:
        raise UsageError(f"The reports have no metric in common: {_listed(left_out)}.", "Repeat both with this pvg.")
    return pairs, left_out


def _quantity(label: str, name: str, a: Samples, b: Samples) -> tuple[str, tuple[int, ...]]:
    """Identifies a metric by the order of all its samples, best first. Two metrics of one variant with the same order
    measure one quantity, such as a time and the rate that is work divided by that time."""
    sign = 1 if a.better == "lower" else -1
    signed = [sign * value for value in (*a.values, *b.values)]
    levels = {value: rank for rank, value in enumerate(sorted(set(signed)))}
    return label, tuple(levels[value] for value in signed)


def _settings(a: BenchReport, b: BenchReport) -> Iterator[FieldDifference]:
    """The settings in which the two benchmarks differ, usually what the comparison is about."""
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
    """B's cost as a multiple of A's, at the favourable end of the interval. If a sample is 0 there is no interval, and
    the medians are compared (a change from 0 to more is infinite)."""
    if ratio is not None:
        return ratio.low if a.better == "lower" else 1 / ratio.high
    less, more = (median(a.values), median(b.values)) if a.better == "lower" else (median(b.values), median(a.values))
    return more / less if less > 0 else math.inf


def _verdict(a: Samples, b: Samples, ratio: RatioInterval | None, p: float, risk: float) -> Verdict:
    if {*a.values} == {*b.values} and len({*a.values}) == 1:
        return "no difference seen"  # for any number of samples
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
    """Sort key: beyond the threshold first, then by verdict, then the larger change. Ties keep the report's order."""
    change = 0.0 if metric.ratio is None else round(abs(math.log(metric.ratio.ratio)), 3)
    return not metric.beyond, VERDICTS.index(metric.verdict), -change
