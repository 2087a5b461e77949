"""Numbers as text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pvg.reporting.formats import (
    BARS,
    byte_size,
    compact,
    duration,
    metric_text,
    percent,
    sample_seconds,
    short_seconds,
    sparkline,
    total_budget,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (7.25, "7.2"),
        (123.4, "123"),
        (999.4, "999"),
        (999.9, "1.0k"),
        (12_432, "12.4k"),
        (2_500_000, "2.5M"),
        (-1500, "-1.5k"),
        (math.inf, "∞"),
    ],
)
def test_compact(value: float, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4 s"),
        (5.5, "5.5 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (947, "15 min 47 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (None, "–"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12e-6, "12 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.0 s"),
        (4.2, "4.2 s"),
        (53.19, "53 s"),
        (84, "1 min 24 s"),
    ],
)
def test_a_measured_time_has_the_one_format_from_a_second_on(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text
    assert seconds < 0.9995 or text == duration(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (4.2, "4.20 s"),
        (9.996, "10.0 s"),
        (53.19, "53.2 s"),
        (59.96, "1 min 00 s"),
        (84, "1 min 24 s"),
    ],
)
def test_a_sample_has_three_digits_so_that_samples_can_be_compared(seconds: float, text: str) -> None:
    assert sample_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (999.6 * 2**20, "1000 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_byte_size(count: float, text: str) -> None:
    assert byte_size(count) == text


def test_percent_and_absent_values() -> None:
    assert (percent(0.8431), percent(1.0), percent(0.9999)) == ("84.3 %", "100 %", "100 %")
    assert metric_text("helpful_accuracy", None) == metric_text("loss", math.nan) == "–"
    assert (
        metric_text("verifier_auc", 0.95),
        metric_text("score_gap", 1.234),
        metric_text("tokens_per_s", 12_432.0),
    ) == (
        "0.950",
        "1.23",
        "12.4k",
    )
    assert metric_text("some_new_metric", 0.000123) == "0.000123"


def test_a_sparkline_climbs_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6], 10) == BARS
    assert sparkline([5, 5, 5], 10) == BARS[0] * 3
    assert sparkline([], 10) == sparkline([math.nan], 10) == ""
    assert sparkline([0.0, math.nan, 1.0], 10) == f"{BARS[0]} {BARS[-1]}"


def test_small_noise_does_not_fill_the_height() -> None:
    assert set(sparkline([0.50, 0.51, 0.50], 10, least_span=0.1)) == {BARS[0]}
    assert BARS[-1] in sparkline([0.1, 0.9], 10, least_span=0.1)


def test_long_series_are_averaged_bucket_by_bucket() -> None:
    assert sparkline([0] * 50 + [1] * 50, 2) == BARS[0] + BARS[-1]


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80), st.integers(1, 30))
def test_a_sparkline_is_never_wider_than_asked(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= width
    assert set(line) <= set(BARS) | {" "}


def test_total_budget_adds_up_in_order() -> None:
    total = total_budget([{"a": 1.0, "unaccounted": 9.0}, {"a": 0.5, "b": 2.0}])
    assert list(total.items()) == [("b", 2.0), ("a", 1.5), ("unaccounted", 9.0)]
