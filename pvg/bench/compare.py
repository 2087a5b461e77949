"""Compares measured samples: the variants within one report (`gains`), and two reports of the same work.

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

tests/bench/test_compare.py measures the rates of false alarms and of slowdowns that are found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pvg.bench.report import BenchReport, Samples, Variant
from pvg.config.load import leaves
from pvg.errors import UsageError

# --- statistics for few samples -------------------------------------------------------------------------------------

EXACT_UP_TO = 30  # samples per side; above it the normal approximation is close enough


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """median(b) / median(a) with its interval; 1.1 means ten percent more."""

    ratio: float
    low: float
    high: float


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle. Raises ValueError without values."""
    if not len(values):
        raise ValueError("the median of no values")
    return float(np.median(values))


def ratio_of_medians(
    a: Sequence[float], b: Sequence[float], *, seed: int = 0, resamples: int = 10_000, confidence: float = 0.95
) -> RatioInterval:
    """The ratio of `b`'s median to `a`'s, with an interval at `confidence`; deterministic given the seed.

    A single sample on a side says nothing about noise, so the interval is then 0 to infinity. Raises ValueError without
    samples, and for values that are not finite and above 0, because they have no logarithm.
    """
    groups = [(-1, _logs(a)), (1, _logs(b))]
    ratio = median(b) / median(a)  # not exp(log), which would add a rounding error
    return _with_interval(ratio, groups, seed, resamples, confidence)


def ratio_of_pairs(a: Sequence[float], b: Sequence[float], *, resamples: int = 10_000) -> RatioInterval:
    """The median of b[i] / a[i] with its 95 % interval, for samples that were taken in turn, round by round.

    A slow round does not change its ratio, so the interval is narrower than that of `ratio_of_medians` if the machine's
    speed drifts. Raises ValueError as `ratio_of_medians` does, and if `a` and `b` differ in length.
    """
    ratios = [late / early for early, late in zip(a, b, strict=True)]
    return _with_interval(median(ratios), [(1, _logs(ratios))], 0, resamples, 0.95)


def _with_interval(
    ratio: float, groups: Sequence[tuple[int, NDArray[np.float64]]], seed: int, resamples: int, confidence: float
) -> RatioInterval:
    """The interval of exp(sum of sign x median) over the groups (sign, logs). It combines two bootstrap intervals; each
    end is the wider of the two:
    - the *percentile* interval, which cannot reach beyond the samples, and misses too often with few of them;
    - the *studentised* interval: difference ± Student's t × the bootstrap's standard error, with Welch's degrees of
      freedom (Efron and Tibshirani, An Introduction to the Bootstrap, chapters 12 and 13). It misses too often if
      values fall into two clusters, because a median is then far from normal.
    Neither keeps its rate alone; the wider of both does (tests/bench/test_bench_statistics.py). The price: with very
    few samples it is wider than needed.
    """
    if min(len(logs) for _, logs in groups) < 2:
        return RatioInterval(ratio, 0.0, math.inf)
    random = np.random.default_rng(seed)
    drawn = [sign * _resampled(logs, resamples, random) for sign, logs in groups]
    if all(medians.min() == medians.max() for medians in drawn):
        return RatioInterval(ratio, ratio, ratio)  # no spread anywhere, as for a count of bytes
    middle = sum(sign * float(np.median(logs)) for sign, logs in groups)
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.sum(drawn, axis=0), [tail, 1 - tail])
    reach = _reach(drawn, [len(logs) for _, logs in groups], confidence)
    # The median of logs is the log of the median, except for an even count, where they differ in the second order.
    shift = math.log(ratio) - middle
    return RatioInterval(
        ratio, _exp(min(float(low), middle - reach) + shift), _exp(max(float(high), middle + reach) + shift)
    )


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """The two-sided p value of the Mann-Whitney U test: the probability of ranks at least as unequal by chance.

    Exact with at most EXACT_UP_TO samples each and no ties, or if all of one side lie below the other; otherwise the
    normal approximation with corrections for ties and continuity.
    """
    from scipy.stats import mannwhitneyu

    if max(a) < min(b) or max(b) < min(a):
        return least_p_value(len(a), len(b))
    if len({*a, *b}) == 1:
        return 1.0
    exact = max(len(a), len(b)) <= EXACT_UP_TO and len({*a, *b}) == len(a) + len(b)
    return float(mannwhitneyu(a, b, method="exact" if exact else "asymptotic").pvalue)


def least_p_value(n: int, m: int) -> float:
    """The smallest p value of `rank_test` for n and m samples without ties: all of one side lie below the other."""
    return min(1.0, 2 / math.comb(n + m, n))


def _logs(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if not array.size:
        raise ValueError("a ratio of medians without samples")
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError("a ratio of medians needs values above 0")
    logs: NDArray[np.float64] = np.log(array)
    return logs


def _resampled(values: NDArray[np.float64], resamples: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Medians of `resamples` bootstrap draws, each with as many values as `values` has.

    A draw is n uniform numbers, each of which selects a value. The draw's median is the value that the middle number
    selects, and this number is Beta distributed. So one or two random numbers per draw suffice, without sorting.
    """
    ordered, n, half = np.sort(values), values.size, values.size // 2
    upper = random.beta(half + 1, n - half, resamples)
    medians: NDArray[np.float64] = ordered[_place(upper, n)]
    if n % 2 == 0:  # the number below the upper middle one is the largest of `half` uniform ones up to it
        lower = upper * random.beta(half, 1, resamples)
        medians = (medians + ordered[_place(lower, n)]) / 2
    return medians


def _place(uniform: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    places: NDArray[np.int64] = np.minimum((uniform * n).astype(np.int64), n - 1)
    return places


def _reach(drawn: Sequence[NDArray[np.float64]], counts: Sequence[int], confidence: float) -> float:
    """Half the studentised interval: t times the standard error of the resampled, weighted medians."""
    from scipy.special import stdtrit

    variances = [float(medians.var()) for medians in drawn]
    spread = sum(variances)
    # Degrees of freedom by Welch and Satterthwaite.
    degrees = spread**2 / sum(variance**2 / (n - 1) for variance, n in zip(variances, counts, strict=True))
    return float(stdtrit(max(1, int(degrees + 1e-9)), (1 + confidence) / 2)) * math.sqrt(spread)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


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
    says = {f"{rung['switch']}={word(rung['fast'])}": str(rung["says"]) for rung in report.config["profile"]["ladder"]}
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
        settings=tuple(  # usually what the comparison is about
            replace(found, key=found.key.removeprefix("experiment.")) for found in differences(a.config, b.config)
        ),
        metrics=tuple(sorted(compared, key=_importance)),
        left_out=tuple(left_out),
        peak_memory={
            name: (most, b.peak_memory[name]) for name, most in a.peak_memory.items() if name in b.peak_memory
        },
        tested=tested,
        confidence=1 - risk,
        fail_above=fail_above,
    )


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[FieldDifference]:
    """Every difference between two nested tables of JSON data, with dotted keys. A missing value is ABSENT."""
    one, other = dict(leaves(a)), dict(leaves(b))
    found = (FieldDifference(key, one.get(key, ABSENT), other.get(key, ABSENT)) for key in one | other)
    return [each for each in found if each.a != each.b]


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
    common = [variant.label for variant in a.variants if variant.label in {variant.label for variant in b.variants}]
    if not common:
        raise UsageError(
            "The reports have no variant in common.",
            "Compare a sweep with a sweep over the same values, or a plain benchmark with a plain one.",
        )
    return common


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
    in_a, in_b = ({variant.label: variant for variant in report.variants} for report in (a, b))
    left_out = _only_in_one(in_a, in_b, "the variant {}")
    pairs = []
    for label in labels:
        ours, theirs = in_a[label].samples, in_b[label].samples
        left_out += _only_in_one(ours, theirs, f"{{}} of {label}" if label else "{}")
        for name, one in ours.items():
            if (other := theirs.get(name)) is None:
                continue
            if (one.unit, one.better) == (other.unit, other.better):
                pairs.append((label, name, one, other))
            else:
                left_out.append(f"{name}: A has {one.unit}, {one.better}; B has {other.unit}, {other.better}")
    if not pairs:
        raise UsageError(f"The reports have no metric in common: {_listed(left_out)}.", "Repeat both with this pvg.")
    return pairs, left_out


def _only_in_one(a: Mapping[str, Any], b: Mapping[str, Any], text: str) -> list[str]:
    found = [f"{text.format(name)}: only in A" for name in a if name not in b]
    return found + [f"{text.format(name)}: only in B" for name in b if name not in a]


def _quantity(label: str, name: str, a: Samples, b: Samples) -> tuple[str, tuple[int, ...]]:
    """Identifies a metric by the order of all its samples, best first. Two metrics of one variant with the same order
    measure one quantity, such as a time and the rate that is work divided by that time."""
    sign = 1 if a.better == "lower" else -1
    signed = [sign * value for value in (*a.values, *b.values)]
    levels = {value: rank for rank, value in enumerate(sorted(set(signed)))}
    return label, tuple(levels[value] for value in signed)


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
