"""Verdicts that can be believed: no wolf among many metrics, real slowdowns found, other work refused."""

from __future__ import annotations

import itertools

import numpy as np
import orjson
import pytest
from made_reports import ENVIRONMENT, PROFILE, WORK, failed_report, higher, lower, made_report, noisy, variant

from pvg.bench.compare import FieldDifference, MetricComparison, ReportComparison, compare_reports
from pvg.bench.report import BenchReport, Samples
from pvg.errors import UsageError

METRICS = 10
RESAMPLES = 1000  # a tenth of the real number: what is measured here are rates


def ten_metrics(random: np.random.Generator, count: int, slowdown: float = 1.0) -> BenchReport:
    """Ten metrics as benchmarks have them: spreads of 1 to 3 %, a tail, strays, ties, a rate beside its time. The
    first, of 2 % spread, is slowed down."""
    wall = noisy(random, slowdown, count, 0.02)
    return made_report(
        variant(
            {
                "wall_s": lower(wall),
                "tokens_per_s": higher([9000 / seconds for seconds in wall]),  # wholly dependent on another metric
                **{f"spread{place}": lower(noisy(random, 3.0, count, 0.01 * place)) for place in (1, 2, 3)},
                "tail": lower([1 + 0.03 * float(value) for value in random.exponential(size=count)]),
                "stray": lower([1.3 if random.random() < 0.1 else value for value in noisy(random, 1, count)]),
                "clusters": lower(
                    [value * (1.05 if random.random() < 0.4 else 1) for value in noisy(random, 1, count)]
                ),
                "ties": lower([round(value) for value in noisy(random, 50, count, 0.03)], "rows"),
                "wide": lower(noisy(random, 0.004, count, 0.4)),
            }
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [5])
def test_two_reports_of_one_distribution_cry_wolf_at_most_at_the_nominal_rate(count: int) -> None:
    random, trials = np.random.default_rng(count), 100
    wolves = 0
    for _ in range(trials):
        comparison = compare_reports(
            ten_metrics(random, count), ten_metrics(random, count), fail_above=0.0, resamples=RESAMPLES
        )
        assert len(comparison.metrics) == METRICS
        assert comparison.tested == METRICS - 1  # a time and its rate are one quantity
        wolves += any(metric.verdict in ("worse", "better") for metric in comparison.metrics)
    assert wolves <= 0.05 * trials


@pytest.mark.slow
def test_a_planted_slowdown_of_ten_percent_is_found() -> None:
    random, trials = np.random.default_rng(11), 40
    found = failed = others = 0
    for _ in range(trials):
        comparison = compare_reports(
            ten_metrics(random, 10), ten_metrics(random, 10, slowdown=1.1), fail_above=0.02, resamples=RESAMPLES
        )
        verdicts = {metric.name: metric.verdict for metric in comparison.metrics}
        found += verdicts.pop("wall_s") == verdicts.pop("tokens_per_s") == "worse"
        failed += {metric.name for metric in comparison.failing} >= {"wall_s", "tokens_per_s"}
        others += set(verdicts.values()) != {"no difference seen"}
    assert found >= 0.99 * trials
    assert failed >= 0.9 * trials
    assert others <= 0.05 * trials


# --- one comparison, looked at closely -------------------------------------------------------------------------------

BASE = [1.00, 1.01, 0.99, 1.02, 0.98, 1.005]


def times(factor: float, values: list[float] = BASE) -> list[float]:
    return [factor * value for value in values]


def of(comparison: ReportComparison, name: str, label: str = "") -> MetricComparison:
    (found,) = [metric for metric in comparison.metrics if (metric.name, metric.variant) == (name, label)]
    return found


def compared(
    a: dict[str, Samples], b: dict[str, Samples], fail_above: float | None = None, resamples: int = 2000
) -> ReportComparison:
    return compare_reports(made_report(variant(a)), made_report(variant(b)), fail_above=fail_above, resamples=resamples)


def test_the_threshold_is_the_same_for_a_time_and_for_its_rate() -> None:
    """Constant samples have no interval, so the border is exact: 1.25 times the time is worse by 25 %."""
    a = {"s": lower([1.0] * 5), "rate": higher([8.0] * 5)}
    b = {"s": lower([1.25] * 5), "rate": higher([6.4] * 5)}
    assert {metric.name for metric in compared(a, b, fail_above=0.249).failing} == {"s", "rate"}
    for kept in (compared(a, b, fail_above=0.25), compared(b, a, fail_above=0.0), compared(a, b)):
        assert not kept.failing
    assert orjson.loads(orjson.dumps(compared(a, b).plain()))["counts"]["worse"] == 2
    assert len(compared(b, a).with_verdict("better")) == 2


def test_three_samples_are_too_few_whatever_they_say() -> None:
    comparison = compared({"s": lower(BASE[:3])}, {"s": lower(times(5, BASE[:3]))}, fail_above=0.0)
    assert of(comparison, "s").verdict == "too few samples"
    assert not comparison.failing
    five = made_report(variant({"s": lower(times(5, BASE[:5]))}))
    assert of(compare_reports(made_report(variant({"s": lower(BASE[:3])})), five), "s").verdict == "too few samples"


def test_five_samples_find_a_large_difference_among_many_metrics() -> None:
    """Though no rank test of 5 against 5 reaches 5 % over 20."""
    names = [f"m{place}" for place in range(20)]
    a = {name: lower(BASE[:5]) for name in names}
    comparison = compared(a, {name: lower(times(1 + (name == "m7"), BASE[:5])) for name in names})
    assert of(comparison, "m7").verdict == "worse"
    assert len(comparison.with_verdict("no difference seen")) == 19


def crowd(count: int, values: list[float]) -> dict[str, Samples]:
    """Metrics of the same values, each in another order."""
    orders = itertools.islice(itertools.permutations(values), 1, count + 1)
    return {f"n{place}": lower(list(order)) for place, order in enumerate(orders)}


def test_the_interval_is_adjusted_for_the_metrics_that_could_differ() -> None:
    one = compared({"s": lower(BASE)}, {"s": lower(times(1.01))})
    constant = {f"c{place}": lower([2.0] * 6) for place in range(5)}
    with_constants = compared({"s": lower(BASE)} | constant, {"s": lower(times(1.01))} | constant)
    assert (one.tested, one.confidence) == (1, 0.95)
    assert with_constants.tested == 1
    assert of(with_constants, "s") == of(one, "s")
    many = crowd(9, BASE)
    adjusted = compared({"s": lower(BASE)} | many, {"s": lower(times(1.01))} | many)
    assert adjusted.confidence == pytest.approx(0.995)
    wide, narrow = of(adjusted, "s").ratio, of(one, "s").ratio
    assert wide is not None
    assert narrow is not None
    assert wide.low < narrow.low < narrow.high < wide.high


def test_an_interval_beside_one_does_not_suffice_without_the_rank_test() -> None:
    """Two clusters: the medians fall into different ones, and their bootstrap says that they are sure of it."""
    a = {"s": lower([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.0])}
    b = {"s": lower([1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])}
    assert of(compared(a, b), "s").verdict == "no difference seen"


def test_samples_of_zero_have_no_ratio_and_the_rank_test_decides() -> None:
    zeros = [0.0] * 8
    comparison = compared(
        {"lag": lower(zeros), "same": lower(zeros)},
        {"lag": lower([1.0 + v for v in range(8)]), "same": lower(zeros)},
        0,
    )
    lag, same = of(comparison, "lag"), of(comparison, "same")
    assert (lag.ratio, lag.verdict, lag.beyond) == (None, "worse", True)  # infinitely worse
    assert (same.ratio, same.verdict) == (None, "no difference seen")
    few = compared({"lag": lower([0.0] * 4)}, {"lag": lower([1.0, 2.0, 3.0, 4.0])})
    assert of(few, "lag").verdict == "worse"  # 2/70 is below 5 %
    others = crowd(9, BASE[:4])
    few = compared({"lag": lower([0.0] * 4)} | others, {"lag": lower([1.0, 2.0, 3.0, 4.0])} | others)
    assert of(few, "lag").verdict == "too few samples"  # but not below 0.5 %


# --- what differs around the samples ---------------------------------------------------------------------------------


def test_environments_and_settings_are_named_field_by_field() -> None:
    a = made_report(variant({"s": lower(BASE)}))
    b = made_report(
        variant({"s": lower(BASE)}),
        environment=ENVIRONMENT.model_copy(update={"torch": "2.14.0", "gpu": "H200"}),
        config={
            "profile": {**PROFILE, "repeats": 6},
            "experiment": {"rollout": {"engine": {"max_rows": 8}, "new": True}},
        },
    )
    comparison = compare_reports(a, b)
    assert comparison.environment == (
        FieldDifference("torch", "2.13.0", "2.14.0"),
        FieldDifference("gpu", None, "H200"),
    )
    assert [str(each) for each in comparison.settings] == [
        "profile.repeats is 5 in A and 6 in B",
        "rollout.engine.max_rows is 256 in A and 8 in B",
        "rollout.new is absent in A and true in B",
    ]
    assert not compare_reports(a, a).environment


def test_a_sweep_against_a_sweep_matches_by_label_and_names_the_rest() -> None:
    a = made_report(*[variant({"s": lower(BASE)}, f"k={value}") for value in (1, 2, 3)])
    slow = made_report(
        *[variant({"s": lower(times(1 + (value == 2)))}, f"k={value}") for value in (3, 2, 4)], command="another"
    )
    comparison = compare_reports(a, slow)
    assert {(metric.variant, metric.verdict) for metric in comparison.metrics} == {
        ("k=2", "worse"),
        ("k=3", "no difference seen"),
    }
    assert comparison.tested == 2
    assert comparison.left_out == ("the variant k=1: only in A", "the variant k=4: only in B")


def refused(a: BenchReport, b: BenchReport) -> str:
    with pytest.raises(UsageError) as caught:
        compare_reports(a, b, paths=("a.json", "b.json"))
    return caught.value.message


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    good = made_report(variant({"s": lower(BASE)}))
    sweep = made_report(*[variant({"s": lower(BASE)}, f"k={value}") for value in (1, 2)])
    assert refused(good, failed_report()) == "The benchmark of b.json failed: No model of that name."
    assert "a.json failed" in refused(failed_report(), good)
    assert "A has 'rollout', B has 'trainer'" in refused(good, made_report(*good.variants, profile="trainer"))
    assert "no variant in common" in refused(good, sweep)
    assert "no metric in common: s: only in A, t: only in B" in refused(good, made_report(variant({"t": lower(BASE)})))


def test_other_work_is_refused_key_by_key() -> None:
    good = made_report(variant({"s": lower(BASE)}))
    other = made_report(*good.variants, work={**WORK, "rollouts": 128, "lengths": {"prompt": 37}, "seed": None})
    message = refused(good, other)
    assert "rollouts is 256 in A and 128 in B" in message
    assert "lengths.completion is 48 in A and absent in B" in message
    assert "seed is absent in A and none in B" in message
    assert "prompt" not in message
    assert "model" not in message
