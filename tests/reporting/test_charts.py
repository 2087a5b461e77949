"""The data that charts give to uPlot: values, gaps, means, intervals and axes; and what a browser makes of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given
from hypothesis import strategies as st
from page_checks import Page
from run_samples import telemetered

from pvg.reporting.charts import (
    MOST_POINTS,
    ChartLine,
    ReferenceLine,
    XAxis,
    budget_marks,
    line_chart,
    mirrored_histogram,
    spark,
)
from pvg.reporting.run_page import collect, run_page
from pvg.reporting.run_summary import read_run

ACROSS = XAxis(0.0, 4.0)


def test_a_chart_without_values_is_empty() -> None:
    assert line_chart("nothing", [ChartLine("a", [], "ink")], ACROSS, "share") == ""
    assert spark([1.0], "ink") == spark([math.nan, 2.0], "ink") == ""


def test_a_line_has_its_values_a_gap_between_its_pieces_and_its_intervals() -> None:
    line = ChartLine(
        "a",
        [[(1.0, 0.25), (2.0, 0.5)], [(3.0, 1.0)]],
        "ink",
        "dashed",
        spread=[(1.0, 0.2, 0.3)],
        whiskers=[(3, 0.9, 1)],
    )
    (chart,) = Page(line_chart("t", [line], ACROSS, "share", references=[ReferenceLine(0.5, "chance")])).charts
    (series,) = chart["series"]
    assert (series["x"], series["y"]) == ([1.0, 2.0, 2.5, 3.0], [0.25, 0.5, None, 1.0])
    assert (series["name"], series["dash"]) == ("a", "dashed")
    assert [(one["kind"], one["x"], one["low"], one["high"]) for one in chart["intervals"]] == [
        ("band", [1.0], [0.2], [0.3]),
        ("whiskers", [3.0], [0.9], [1.0]),
    ]
    assert chart["references"] == [[0.5, "chance"]]
    assert chart["y"]["range"] == [0, 1]
    (free,) = Page(line_chart("t", [line], ACROSS, "share", whole=False)).charts
    assert free["y"]["range"] is None


def test_a_long_line_is_smoothed_or_only_its_mean_is_drawn() -> None:
    piece = [(float(n), float(n % 2)) for n in range(20)]
    (both,) = Page(line_chart("t", [ChartLine("a", [piece], "ink", smooth=True)], ACROSS, "number")).charts
    (bare,) = Page(line_chart("t", [ChartLine("a", [piece], "ink", smooth=True, bare=True)], ACROSS, "number")).charts
    assert [one["look"] for one in both["series"]] == ["faint", ""]
    assert bare["series"] == both["series"][1:]
    assert bare["series"][0]["y"][10] == pytest.approx(0.4)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3 * MOST_POINTS))
def test_thinning_keeps_mean_and_extremes(values: list[float]) -> None:
    line = ChartLine("a", [[(float(n), value) for n, value in enumerate(values)]], "ink")
    (chart,) = Page(line_chart("t", [line], ACROSS, "number")).charts
    (series,) = chart["series"]
    assert len(series["y"]) == min(MOST_POINTS, len(values))
    assert all(a < b for a, b in zip(series["x"], series["x"][1:], strict=False))
    for ranges in chart["intervals"]:
        assert min(ranges["low"]) == pytest.approx(min(values), rel=1e-4)
        assert max(ranges["high"]) == pytest.approx(max(values), rel=1e-4)


def test_marks_of_a_budget_fill_their_share_of_the_row() -> None:
    marks = budget_marks({"rollout": 1.0, "mystery": 2.0, "unaccounted": 1.0}, 8.0)
    assert [(mark.left, mark.width) for mark in marks] == [(0, 1 / 8), (1 / 8, 1 / 4), (3 / 8, 1 / 8)]


def test_a_histogram_has_one_role_above_and_one_below_the_axis() -> None:
    kinds = {"helpful correct": [4, 0], "helpful wrong": [0, 0], "sneaky flaw": [0, 3], "sneaky correct": [0, 0]}
    counts = {kind: np.array(found) for kind, found in kinds.items()}
    (chart,) = Page(mirrored_histogram("t", [0.0, 1.0, 2.0], counts, threshold=1.0, most=16, note="")).charts
    assert [one["y"] for one in chart["series"]] == [[4, 0], [0, 0], [0, -3], [0, 0]]
    assert [place for place, _ in chart["x"]["marks"]] == [1.0]
    assert chart["y"]["range"] == [-16, 16]


@needs_browser
def test_a_browser_draws_every_chart_and_tells_the_values_under_the_pointer(tmp_path: Path) -> None:
    run, page = telemetered(tmp_path), tmp_path / "page.html"
    page.write_text(run_page(collect(run, read_run(run), 2)))
    with Browser(tmp_path) as browser:
        browser.open(page.as_uri())
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
        drawn = "[...document.querySelectorAll('[data-chart]')].every(one => one.querySelector('canvas')?.width)"
        assert browser.run(f"new Promise(done => setTimeout(() => done({drawn}), 300))")
        hover = "document.querySelector('#learning [data-chart]').plot.setCursor({left: 400, top: 9})"
        assert "50.0 %" in browser.run(f"{hover}, document.querySelector('#learning .u-legend').textContent")
        browser.run("document.getElementById('theme').click()")
        assert browser.run(f"document.documentElement.dataset.theme === 'dark' && {drawn}")
        assert browser.errors == []
