"""Charts of a page: series, axes and intervals as JSON, which templates/charts.js draws with uPlot.

uPlot (templates/uplot, MIT licence) has the axes, the legend and the values under the pointer. Rows of bars are
plain HTML (`Mark`). A chart with nothing to show is empty markup.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson
from markupsafe import Markup
from numpy.typing import NDArray

from pvg.reporting.formats import NumberStyle, in_order, percent, value_text
from pvg.reporting.run_summary import StepRecord, base_metrics
from pvg.reporting.table import chart

MOST_POINTS = 400  # of a line; longer lines show the mean and the range of neighbours
LEAST_POINTS = 12  # of one piece of a line
WINDOW = 5  # points of the moving mean
SMOOTHED_FROM = 12  # points; a shorter line gets no moving mean
PROVER, VERIFIER = "train_prover", "train_verifier"
COUNTED = {PROVER: "prover step", VERIFIER: "verifier step", "mint": "rollout", "init": "rollout"}

Point = tuple[float, float]
Interval = tuple[float, float, float]  # place, low, high


class ReferenceLine(NamedTuple):
    """A horizontal line at a special value, such as a chance level."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class XAxis:
    """The x axis: its ends and its label. `ticks`: (place, label); empty: round numbers. `bands`: (start, end, name) of
    named ranges, such as rounds. `marks`: (place, label) of vertical lines. `style`: of its numbers."""

    low: float
    high: float
    label: str = ""
    ticks: Sequence[tuple[float, str]] = ()
    bands: Sequence[tuple[float, float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    style: NumberStyle = "number"


def round_axis(numbers: Sequence[int], *, base: bool = False, margin: float = 0.25) -> XAxis:
    """The x axis of charts by round. `base`: the base prover comes before the first round."""
    numbers = sorted(numbers) or [0]
    ticks = [(float(n), str(n)) for n in numbers]
    if base:
        ticks.insert(0, (numbers[0] - 1.0, "base"))
    return XAxis(ticks[0][0] - margin, numbers[-1] + margin, "round", ticks)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line with a gap between its `pieces`, each a list of (x, y) with rising x.

    `smooth` draws the moving mean strongly and the values faintly; with `bare` the values are not drawn. `dots` marks
    the points. `spread` is a band around the line; `whiskers` are intervals of single points.
    """

    name: str
    pieces: Sequence[Sequence[Point]]
    style: str
    dash: str = ""
    smooth: bool = False
    dots: bool = False
    bare: bool = False
    spread: Sequence[Interval] = ()
    whiskers: Sequence[Interval] = ()

    @property
    def values(self) -> list[float]:
        return [y for piece in self.pieces for _, y in piece]


class RoundAxis:
    """Metrics by round along an x axis. The base prover comes first if a round measured it."""

    def __init__(self, rounds: Mapping[int, Mapping[str, float]]) -> None:
        self.rounds = rounds
        self.base = base_metrics(rounds)

    def across(self) -> XAxis:
        return round_axis(list(self.rounds), base=bool(self.base))

    def line(self, metric: str, name: str, style: str, dash: str = "") -> ChartLine:
        points = [(float(n), self.rounds[n][metric]) for n in sorted(self.rounds) if metric in self.rounds[n]]
        if metric in self.base:
            points.insert(0, (min(self.rounds) - 1.0, self.base[metric]))
        return ChartLine(name, [points], style, dash, dots=True)


class StepAxis:
    """The steps of `phase` along an x axis, one round after the other. `longest`: the length of each round if several
    runs share the axis."""

    def __init__(self, steps: Sequence[StepRecord], phase: str, longest: dict[int, int] | None = None) -> None:
        self.phase = phase
        self.rounds: dict[int, list[StepRecord]] = {}
        for step in steps:
            if step.phase == phase:
                self.rounds.setdefault(step.round, []).append(step)
        self.lengths = longest or {round_: max(s.step for s in found) for round_, found in self.rounds.items()}
        self.offsets: dict[int, int] = {}
        self.total = 0
        for round_ in sorted(self.lengths):
            self.offsets[round_], self.total = self.total, self.total + self.lengths[round_]

    def __bool__(self) -> bool:
        return bool(self.rounds)

    def across(self) -> XAxis:
        """The axis; with several rounds each has a band, and a tick where it begins."""
        label = f"{COUNTED.get(self.phase, 'step')}s"
        if len(self.offsets) < 2:
            return XAxis(0.0, float(self.total), label)
        bands = [(float(at), float(at + self.lengths[r]), f"round {r}") for r, at in self.offsets.items()]
        ticks = [(at, name) for at, _, name in bands]
        return XAxis(0.0, float(self.total), label, ticks, bands)

    def place(self, step: StepRecord) -> float:
        return float(self.offsets[step.round] + step.step)

    def line(
        self, metric: str, name: str, style: str, dash: str = "", *, smooth: bool = True, bare: bool = False
    ) -> ChartLine:
        """One piece per round, without the steps that have no value."""
        pieces = [
            [(self.place(step), step.metrics[metric]) for step in self.rounds[round_] if metric in step.metrics]
            for round_ in sorted(self.rounds)
        ]
        return ChartLine(name, [piece for piece in pieces if piece], style, dash, smooth=smooth, bare=bare)

    def level(self, values: Mapping[int, float], name: str, style: str) -> ChartLine:
        """One constant value per round, dotted."""
        pieces = [
            [(at + 0.5, values[round_]), (at + self.lengths[round_] + 0.0, values[round_])]
            for round_, at in self.offsets.items()
            if round_ in values
        ]
        return ChartLine(name, pieces, style, "dotted")


def _number(value: float | None) -> float | None:
    """Five digits, so that long runs make small pages."""
    return None if value is None else float(f"{value:.5g}")


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x: XAxis,
    style: NumberStyle,
    *,
    unit: str = "",
    zero: bool = False,
    references: Sequence[ReferenceLine] = (),
    note: str = "",
    whole: bool = True,
) -> Markup:
    """Lines over a common x axis; empty if no line has a value. The axis of shares runs from 0 to 100 %; without
    `whole` it ends above the largest value. `zero`: the axis contains 0."""
    lines = [line for line in lines if line.values]
    if not lines:
        return Markup()
    series, intervals = [], []
    for line in lines:
        for found, kind in ((line.spread, "band"), (line.whiskers, "whiskers")):
            if found:
                xs, lows, highs = zip(*found, strict=True)
                intervals.append(_interval(kind, line.style, xs, lows, highs))
        more_series, more_intervals = _drawn(line)
        series += more_series
        intervals += more_intervals
        if more_intervals and not note:
            note = "Each point is the mean of neighbouring values; the band is their range."
    shares = style == "share" and whole and all(0 <= value <= 1 for line in lines for value in line.values)
    y = {"style": style, "zero": zero, "range": [0, 1] if shares else None}
    ends = ", ".join(f"{line.name} ends at {value_text(style, line.values[-1])}" for line in lines)
    return _figure(title, x, y, series, unit, note, ends, intervals=intervals, references=list(map(list, references)))


def _drawn(line: ChartLine) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The series of a line, and the ranges of merged points."""
    xs: list[float] = []
    ys: list[float | None] = []
    means: list[float | None] = []
    ranges = []
    count = len(line.values)
    smooth = line.smooth and any(len(piece) >= SMOOTHED_FROM for piece in line.pieces)
    for piece in filter(None, line.pieces):
        points = np.array(piece, dtype=np.float64)
        parts = np.array_split(points, min(len(points), max(LEAST_POINTS, MOST_POINTS * len(points) // count)))
        at = np.array([part[:, 0].mean() for part in parts])
        value = np.array([part[:, 1].mean() for part in parts])
        if len(parts) < len(points):
            lows, highs = ([float(pick(part[:, 1])) for part in parts] for pick in (np.min, np.max))
            ranges.append(_interval("band", line.style, at.tolist(), lows, highs))
        if xs:  # a gap
            xs, ys, means = [*xs, (xs[-1] + float(at[0])) / 2], [*ys, None], [*means, None]
        xs += at.tolist()
        ys += value.tolist()
        means += (moving_mean(value) if len(value) >= SMOOTHED_FROM else value).tolist()
    looks = (("", means),) if smooth and line.bare else (("faint", ys), ("", means)) if smooth else (("", ys),)
    return [
        {
            "name": line.name,
            "style": line.style,
            "dash": line.dash,
            "look": "dots" if line.dots else look,
            "x": [_number(x) for x in _rising(xs)],
            "y": [_number(y) for y in values],
        }
        for look, values in looks
    ], ranges


def _rising(xs: Sequence[float]) -> list[float]:
    """uPlot shows one value per place, so equal places move apart a little."""
    found: list[float] = []
    least = 1e-4 * ((max(xs) - min(xs)) or 1.0) if xs else 0.0
    for x in xs:
        found.append(x if not found or x > found[-1] else found[-1] + least)
    return found


def moving_mean(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean over WINDOW values around each value, over fewer at both ends."""
    ones = np.ones(WINDOW)
    return np.convolve(values_N, ones, "same") / np.convolve(np.ones(len(values_N)), ones, "same")


def _interval(
    kind: str, style: str, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float]
) -> dict[str, Any]:
    found = {name: [_number(value) for value in values] for name, values in (("x", xs), ("low", lows), ("high", highs))}
    return {"kind": kind, "style": style, **found}


def _figure(
    title: str,
    x: XAxis,
    y: Mapping[str, Any],
    series: Sequence[Mapping[str, Any]],
    unit: str,
    note: str,
    says: str,
    **more: Any,
) -> Markup:
    spec = orjson.dumps({"x": x, "y": y, "series": series, **more}).decode()
    return chart.figure(title, chart.plot(spec, f"{title}: {says}"), unit=unit, note=note)


Ints = NDArray[np.int64]
# Kinds of solutions in a histogram: helpful ones above the axis, sneaky ones below, the second of each light.
HALVES = {"helpful": ("helpful correct", "helpful wrong"), "sneaky": ("sneaky flaw", "sneaky correct")}


def mirrored_histogram(
    title: str, edges: Sequence[float], counts: Mapping[str, Ints], *, threshold: float | None, most: int, note: str
) -> Markup:
    """Counts by score of each kind in HALVES. `most`: the count of a full half."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
    marks = [] if threshold is None else [(threshold, "accepted →")]
    x = XAxis(edges[0], edges[-1], "score", marks=marks)
    series = [
        {
            "name": name,
            "style": f"{role} light" if place else role,
            "x": middles,
            "y": (counts[name] if role == "helpful" else -counts[name]).tolist(),
        }
        for role, half in HALVES.items()
        for place, name in enumerate(half)
    ]
    y = {"style": "count", "range": [-most, most]}
    says = ", ".join(f"{counts[name].sum()} {name}" for half in HALVES.values() for name in half)
    return _figure(title, x, y, series, "solutions per bar; helpful above, sneaky below", note, says, stacked=True)


# --- heat maps --------------------------------------------------------------------------------------------------------


class HeatCell(NamedTuple):
    """A cell of `chart.heat`. `style` is the class of the colour and `strength` (0 to 1) how strong it is. The pointer
    shows `hint`."""

    text: str
    style: str
    strength: float
    hint: str
    outlined: bool = False


# --- rows of bars ------------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A part of a row: `style` is its class, `left` and `width` are shares of the row's length."""

    style: str
    left: float
    width: float
    hint: str


def budget_marks(budget: Mapping[str, float], whole: float) -> list[Mark]:
    """Seconds by part, one behind the other. The full length stands for `whole` seconds."""
    marks, left, total = [], 0.0, sum(budget.values())
    for part in in_order(budget):
        seconds = max(0.0, budget[part.name])
        if seconds and whole > 0:
            hint = f"{part.label}: {value_text('seconds', seconds)}, {percent(seconds / total)}"
            marks.append(Mark(part.style, left, seconds / whole, hint))
            left += seconds / whole
    return marks


def spark(values: Sequence[float], style: str) -> Markup:
    """A small line without axes. Empty for fewer than two values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup()
    means = [float(part.mean()) for part in np.array_split(np.array(finite), min(len(finite), 60))]
    low, span = min(means), (max(means) - min(means)) or 1.0
    places = [(100 * n / (len(means) - 1), 30 - 28 * (mean - low) / span) for n, mean in enumerate(means)]
    return chart.spark(" ".join(f"{x:.1f},{y:.1f}" for x, y in places), style)
