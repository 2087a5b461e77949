"""Axes that hold their values and end on round numbers; thinning that neither invents nor loses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_checks import Page

from pvg.reporting.axes import SPAN, ChartLine, XAxis, moving_mean, nice_axis, thinned, tick_labels, without_gaps
from pvg.reporting.charts import HistogramKind, averaged, line_chart, mirrored_histogram, spark, stacked_row
from pvg.reporting.formats import NumberStyle

REAL = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 1e-9)
STYLES: list[NumberStyle] = ["share", "number", "score", "rate", "seconds"]


@given(st.lists(REAL, min_size=1, max_size=20), st.sampled_from(STYLES), st.booleans())
def test_an_axis_holds_its_values_between_few_ticks(values: list[float], style: NumberStyle, zero: bool) -> None:
    axis = nice_axis(values, style, zero=zero)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values)
    assert max(values) <= axis.high + slack
    assert not zero or axis.low <= 0 <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    assert all(0 <= axis.share(value) <= 1 for value in values)


@pytest.mark.parametrize(
    ("values", "style", "labels"),
    [
        ([0.0, 0.93], "number", ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.0, 12_400.0], "rate", ["0", "2.5k", "5.0k", "7.5k", "10.0k", "12.5k"]),
        ([0.0, 0.004], "seconds", ["0 s", "1 ms", "2 ms", "3 ms", "4 ms"]),
        ([0.0, 3 * 2.0**30], "bytes", ["0", "1 GiB", "2 GiB", "3 GiB"]),
        ([-0.3, 0.1], "score", ["-0.3", "-0.2", "-0.1", "0.0", "0.1"]),
    ],
)
def test_labels_are_short_and_alike(values: list[float], style: NumberStyle, labels: list[str]) -> None:
    assert tick_labels(nice_axis(values, style)) == labels


def test_a_logarithmic_axis_spans_whole_powers_of_ten() -> None:
    axis = nice_axis([0.003, 0.7], "seconds", log=True)
    assert (axis.low, axis.high) == (pytest.approx(0.001), pytest.approx(1.0))
    assert axis.share(0.03162277) == pytest.approx(0.5, abs=1e-4)
    assert tick_labels(axis) == ["1 ms", "10 ms", "100 ms", "1 s"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 60))
def test_thinning_keeps_mean_and_extremes(values: list[float], most: int) -> None:
    bins = thinned([(float(place), value) for place, value in enumerate(values)], most)
    assert len(bins) == min(most, len(values))
    assert sum(b.count for b in bins) == len(values)
    assert min(b.low for b in bins) == min(values)
    assert max(b.high for b in bins) == max(values)
    assert sum(b.mean * b.count for b in bins) == pytest.approx(sum(values), abs=1e-3)


def test_the_moving_mean_shortens_its_window_at_the_ends() -> None:
    assert moving_mean([1.0, 2.0, 3.0, 4.0, 10.0], 3) == pytest.approx([1.5, 2.0, 3.0, 17 / 3, 7.0])


def test_pauses_are_left_out_and_told() -> None:
    places, breaks = without_gaps([0.0, 5.0, 10.0, 9_010.0, 9_015.0], 60.0)
    assert places == [0.0, 5.0, 10.0, 70.0, 75.0]
    assert breaks == [3]


@given(st.integers(1, 1000), st.integers(1, 999))
def test_averaged_bars_keep_the_whole_time_and_the_rounds_apart(count: int, end: int) -> None:
    columns = [(place + 0.5, {"rollout": float(place % 7), f"p{place % 2}": 1.0}) for place in range(count)]
    bars, most = averaged(columns, [float(end)])
    assert len(bars) <= 121
    assert most == -(-count // 120)
    assert sum(bar.count for bar in bars) == count
    for part in ("rollout", "p0", "p1"):
        whole = sum(seconds.get(part, 0.0) for _, seconds in columns)
        assert sum(bar.seconds.get(part, 0.0) * bar.count for bar in bars) == pytest.approx(whole)
    assert all(not bar.at - bar.count / 2 < end < bar.at + bar.count / 2 for bar in bars)


def test_a_chart_without_values_is_empty() -> None:
    assert line_chart("nothing", [ChartLine("a", [], "ink")], XAxis(0, 1), "share") == ""
    assert spark([1.0], "ink") == ""
    assert spark([math.nan, 2.0], "ink") == ""


def test_a_line_tells_its_values_and_is_broken_between_its_pieces() -> None:
    chart = line_chart("t", [ChartLine("a", [[(1.0, 0.25), (2.0, 0.5)], [(3.0, 1.0)]], "ink")], XAxis(0, 4), "share")
    page = Page(chart)
    (told,) = [attributes for _, attributes in page.tags if "data-ys" in attributes]
    assert (told["data-xs"], told["data-ys"]) == ("1,2,3", "0.25,0.5,1")
    paths = [str(a["d"]) for _, a in page.tags if str(a.get("class", "")).startswith("line")]
    assert paths == ["M250 750L500 500", "M750 0"]  # shares from 0 to 1: half is in the middle


@pytest.mark.parametrize(("arms", "opacity"), [(2, "1"), (6, "0.5")])
def test_bands_lie_beneath_all_lines_and_are_fainter_where_there_are_many(arms: int, opacity: str) -> None:
    points = [(0.0, 0.2), (1.0, 0.4)]
    lines = [
        ChartLine(f"arm {n}", [points], "ink", spread=[(x, y - 0.1, y + 0.1) for x, y in points]) for n in range(arms)
    ]
    drawn = str(line_chart("t", lines, XAxis(0, 1), "share"))
    band, line = 'class="range ink"', 'class="line ink"/></g>'
    assert drawn.count(band) == drawn.count(line) == arms
    assert drawn.rindex(band) < drawn.index(line)
    assert f'style="opacity:{opacity}"' in drawn


def test_the_axis_of_small_shares_can_follow_them() -> None:
    lines = [ChartLine("a", [[(0.0, 0.01), (1.0, 0.05)]], "ink")]
    for whole, top in ((True, "100 %"), (False, "5 %")):
        text = Page(line_chart("t", lines, XAxis(0, 1), "share", zero=True, whole=whole)).text
        assert [label for label in ("5 %", "100 %") if f" {label}" in text] == [top], text


def test_a_row_of_parts_fills_its_share_of_the_width() -> None:
    page = Page(stacked_row({"rollout": 1.0, "mystery": 2.0, "unaccounted": 1.0}, 8.0))
    widths = [float(str(a["width"])) for name, a in page.tags if name == "rect"]
    assert widths == [SPAN / 8, SPAN / 4, SPAN / 8]


def test_a_histogram_stacks_roots_of_counts_away_from_the_axis() -> None:
    kinds = [
        HistogramKind("right", "helpful", [4, 0], above=True),
        HistogramKind("wrong", "helpful light", [12, 0], above=True),
        HistogramKind("flaw", "sneaky", [0, 4], above=False),
    ]
    page = Page(mirrored_histogram("Round 0", [0.0, 1.0, 2.0], kinds, threshold=1.0, most=16, note=""))
    boxes = [(float(str(a["y"])), float(str(a["height"]))) for name, a in page.tags if name == "rect"]
    # 16 above fill their half (500), divided 4 to 12; 4 below are half as high as 16.
    assert boxes == [(375, 125), (0, 375), (500, 250)]
    assert "4 × right, score 0 to 1" in page.text
