"""Numbers as text."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

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
)
from pvg.telemetry.spans import total_seconds

WRITTEN: list[tuple[Callable[[float], str], str]] = [
    (compact, "0: 0, 7: 7, 7.25: 7.2, 123.4: 123, 999.4: 999, 999.9: 1.0k, 2.5e6: 2.5M, -1500: -1.5k, inf: ∞"),
    (duration, "0.42: 0.4 s, 9.96: 10 s, 59.6: 1 min 00 s, 947: 15 min 47 s, 3599.6: 1 h 00 min, 7500: 2 h 05 min"),
    (short_seconds, "0: 0 s, 12e-6: 12 µs, 0.0123: 12.3 ms, 0.9996: 1.0 s, 4.2: 4.2 s, 53.19: 53 s, 84: 1 min 24 s"),
    (sample_seconds, "0.0123: 12.3 ms, 0.9996: 1.00 s, 4.2: 4.20 s, 9.996: 10.0 s, 53.19: 53.2 s, 59.96: 1 min 00 s"),
    (byte_size, "0: 0 B, 1023: 1023 B, 1536: 1.5 KiB, 1048156569.6: 1000 MiB, 1072693248: 1023 MiB, 1073741824: 1 GiB"),
    (percent, "0.8431: 84.3 %, 1: 100 %, 0.9999: 100 %"),
]


@pytest.mark.parametrize(("write", "table"), WRITTEN, ids=[write.__name__ for write, _ in WRITTEN])
def test_numbers_are_short_and_keep_the_digits_that_matter(write: Callable[[float], str], table: str) -> None:
    pairs = [pair.split(": ") for pair in table.split(", ")]
    assert [write(float(value)) for value, _ in pairs] == [text for _, text in pairs]


def test_metrics_have_their_own_format_and_absent_values_a_dash() -> None:
    assert metric_text("helpful_accuracy", None) == metric_text("loss", math.nan) == duration(math.nan) == "–"
    found = {"verifier_auc": 0.95, "score_gap": 1.234, "tokens_per_s": 12_432.0, "some_new_metric": 0.000123}
    assert [metric_text(name, value) for name, value in found.items()] == ["0.950", "1.23", "12.4k", "0.000123"]


def test_a_sparkline_climbs_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6], 10) == BARS
    assert sparkline([5, 5, 5], 10) == BARS[0] * 3
    assert sparkline([], 10) == sparkline([math.nan], 10) == ""
    assert sparkline([0.0, math.nan, 1.0], 10) == f"{BARS[0]} {BARS[-1]}"
    assert sparkline([0] * 50 + [1] * 50, 2) == BARS[0] + BARS[-1]
    assert set(sparkline([0.50, 0.51, 0.50], 10, least_span=0.1)) == {BARS[0]}


def test_total_seconds_adds_up_in_order() -> None:
    total = total_seconds([{"a": 1.0, "unaccounted": 9.0}, {"a": 0.5, "b": 2.0}])
    assert list(total.items()) == [("b", 2.0), ("a", 1.5), ("unaccounted", 9.0)]
