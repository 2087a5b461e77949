"""Charts: lines, stacked bars over steps and in rows, mirrored histograms, strips of dots, sparklines.

Every function computes what is drawn where; templates/charts.html.j2 writes the markup. A chart is complete without
JavaScript: `data-*` attributes carry the values that the script shows under the pointer. A chart with nothing to show
is empty markup.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pvg.bench.statistics import median
from pvg.reporting.axes import (
    FULL_NAMES,
    MOST_NAMES,
    MOST_POINTS,
    NARROW,
    SMOOTHED_FROM,
    SPAN,
    ChartLine,
    MergedPoints,
    Point,
    ValueAxis,
    XAxis,
    moving_mean,
    nice_axis,
    share_axis,
    thinned,
)
from pvg.reporting.budget_parts import in_order
from pvg.reporting.formats import NumberStyle, percent, value_text
from pvg.reporting.table import LegendKey, chart, number

Label = tuple[str, str, str]  # text, class, and style of a text over a drawing

CROWDED = 7  # more labels than these on the x axis: every other one is left out where it is narrow
HEIGHT = 168  # pixels of a small chart's drawing
FULL_BANDS = 3  # more bands around lines than these are drawn fainter, or they would hide everything else
WINDOW = 5  # steps of the moving mean
MOST_BARS = 120
LEAST_POINTS = 12  # of one piece of a line, even if the line has many pieces


@dataclass(frozen=True, slots=True)
class ReferenceLine:
    """A horizontal line at a special value, such as a chance level."""

    value: float
    label: str


def plot(
    shapes: Sequence[Markup],
    y: ValueAxis,
    x: XAxis,
    *,
    height: int,
    label: str,
    texts: Sequence[Label] = (),
    above: bool = False,
) -> Markup:
    """A drawing with its axes, bands and `texts`. `label` describes it to screen readers. `above`: some of the texts
    stand above the drawing and need room there."""
    labels = y.labels()
    grid = [
        chart.shape("path", d=f"M0 {number(SPAN * (1 - share))}H{number(SPAN)}", class_="grid") for share, _ in labels
    ]
    names = _band_names(x)
    return chart.plot(
        area=chart.drawing([*_bands(x), *grid, *shapes], label),
        names=[*names, *texts],
        banded=bool(names) or above,
        ys=labels,
        xs=chart.ticks([(x.x(at) / SPAN, written) for at, written in x.ticks], x.label, CROWDED),
        height=height,
        margin=max((len(written) for _, written in labels), default=1),
    )


def _bands(x: XAxis) -> list[Markup]:
    """A tint for every other band."""
    return [
        chart.shape("rect", x=x.x(band.start), y=0, width=x.x(band.end) - x.x(band.start), height=SPAN, class_="band")
        for place, band in enumerate(x.bands)
        if place % 2
    ]


def _band_names(x: XAxis) -> list[Label]:
    """Names of bands: only numbers if there are many, only some if there are very many, none for narrow bands."""
    many = len(x.bands) > FULL_NAMES
    every = -(-len(x.bands) // MOST_NAMES)
    return [
        (
            band.label.split()[-1] if many else band.label,
            "band-name",
            f"left:{number(x.x((band.start + band.end) / 2) / 10)}%",
        )
        for place, band in enumerate(x.bands)
        if place % every == 0 and x.x(band.end) - x.x(band.start) > NARROW
    ]


def _read_by_script(cross: str, style: NumberStyle, x: XAxis) -> dict[str, str | None]:
    """What the script needs to show values at the pointer: the kind of marker, formats, and the bands."""
    bands = ";".join(f"{number(band.start)},{number(band.end)},{band.label}" for band in x.bands)
    return {
        "data_cross": cross,
        "data_x": f"{number(x.low)} {number(x.high)}",
        "data_format": style,
        "data_xformat": x.style if cross == "line" else None,
        "data_xname": x.counts or x.label,
        "data_bands": bands or None,
    }


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    x: XAxis,
    style: NumberStyle,
    *,
    unit: str = "",
    zero: bool = False,
    log: bool = False,
    references: Sequence[ReferenceLine] = (),
    height: int = HEIGHT,
    keyed: bool = True,
    note: str = "",
    whole: bool = True,
) -> Markup:
    """Lines over a common x axis; empty if no line has a value. The axis of shares runs from 0 to 100 %; without
    `whole` it ends above the largest value. `keyed` adds a legend."""
    lines = [line for line in lines if line.values]
    if not lines:
        return Markup()
    values = [value for line in lines for value in line.values]
    around = [end for line in lines for ends in (line.spread, line.whiskers) for _, *pair in ends for end in pair]
    within = [value for value in values if 0 <= value <= 1]
    full = whole and style == "share" and len(within) == len(values)
    y = (
        share_axis()
        if full
        else nice_axis([*values, *around, *(r.value for r in references)], style, zero=zero, log=log)
    )
    shapes = [
        *(chart.shape("path", d=f"M0 {number(y.y(r.value))}H{number(SPAN)}", class_="reference") for r in references),
        *_bands_around(lines, x, y),
        *(_drawn(line, x, y) for line in lines),
    ]
    texts = [(r.label, "reference-name", f"bottom:{number(100 * y.share(r.value))}%") for r in references]
    keys = [LegendKey(line.name, line.style, line.dash) for line in lines] if keyed and len(lines) > 1 else []
    label = f"{title}: " + ", ".join(f"{line.name} ends at {value_text(style, line.values[-1])}" for line in lines)
    most = max(point.count for line in lines for bins in _binned(line) for point in bins)
    if most > 1 and not note:
        note = f"Each point is the mean of up to {most} values; the band is their range."
    return chart.figure(
        title,
        plot(shapes, y, x, height=height, label=label, texts=texts),
        unit=unit,
        keys=keys,
        note=note,
        data=_read_by_script("line", style, x),
    )


def _drawn(line: ChartLine, x: XAxis, y: ValueAxis) -> Markup:
    """The values of a line, or faint values with a strong moving mean. Merged points also show their range."""
    drawn: list[Markup] = []
    if line.whiskers:
        ends = "".join(f"M{number(x.x(at))} {number(y.y(a))}V{number(y.y(b))}" for at, a, b in line.whiskers)
        drawn.append(chart.shape("path", d=ends, class_=f"whisker {line.style}"))
    points: list[MergedPoints] = []
    for bins in _binned(line):
        points += bins
        places = [x.x(point.x) for point in bins]
        if any(point.count > 1 for point in bins):
            upper = [f"{number(place)} {number(y.y(point.high))}" for place, point in zip(places, bins, strict=True)]
            lower = [f"{number(place)} {number(y.y(point.low))}" for place, point in zip(places, bins, strict=True)]
            drawn.append(
                chart.shape("path", d=f"M{'L'.join([*upper, *reversed(lower)])}Z", class_=f"range {line.style}")
            )
        heights = [y.y(point.mean) for point in bins]
        smooth = line.smooth and len(bins) >= SMOOTHED_FROM
        kind = "line faint" if smooth else "line"
        if not (smooth and line.bare):
            drawn.append(
                chart.shape("path", d=_path(places, heights), class_=f"{kind} {line.style} {line.dash}".rstrip())
            )
        if smooth:
            means = [y.y(mean) for mean in moving_mean([point.mean for point in bins], WINDOW)]
            drawn.append(chart.shape("path", d=_path(places, means), class_=f"line {line.style} {line.dash}".rstrip()))
        if line.dots or len(bins) == 1:
            dots = "".join(f"M{number(a)} {number(b)}h0" for a, b in zip(places, heights, strict=True))
            drawn.append(chart.shape("path", d=dots, class_=f"dot {line.style}"))
    return chart.group(drawn, **_values(line.name, line.style, [(b.x, b.mean) for b in points]))


def _bands_around(lines: Sequence[ChartLine], x: XAxis, y: ValueAxis) -> list[Markup]:
    """The bands around the lines, below all lines. More bands are drawn fainter."""
    drawn = []
    for line in lines:
        upper = [f"{number(x.x(place))} {number(y.y(high))}" for place, _, high in line.spread]
        lower = [f"{number(x.x(place))} {number(y.y(low))}" for place, low, _ in reversed(line.spread)]
        if upper:
            drawn.append(chart.shape("path", d=f"M{'L'.join([*upper, *lower])}Z", class_=f"range {line.style}"))
    return [chart.group(drawn, style=f"opacity:{number(min(1.0, FULL_BANDS / len(drawn)))}")] if drawn else []


def _binned(line: ChartLine) -> list[list[MergedPoints]]:
    """Every piece thinned in proportion to its length, to MOST_POINTS in total."""
    count = len(line.values)
    return [thinned(piece, max(LEAST_POINTS, MOST_POINTS * len(piece) // count)) for piece in line.pieces if piece]


def _values(name: str, style: str, points: Sequence[Point]) -> dict[str, str]:
    """What the script shows at the pointer: name, colour, places and values."""
    return {
        "data_name": name,
        "data_style": style,
        "data_xs": ",".join(f"{x:.6g}" for x, _ in points),
        "data_ys": ",".join(f"{y:.4g}" for _, y in points),
    }


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in zip(xs, ys, strict=True))


# --- stacked bars ------------------------------------------------------------------------------------------------


def stacked_chart(title: str, columns: Sequence[tuple[float, Mapping[str, float]]], x: XAxis, *, unit: str) -> Markup:
    """One stacked bar per step (place, seconds by part). In long runs a bar is the mean of neighbouring steps."""
    if not columns:
        return Markup()
    bars, most = averaged(columns, [band.end for band in x.bands])
    parts = in_order({part for bar in bars for part in bar.seconds})
    tops = [sum(max(0.0, value) for value in bar.seconds.values()) for bar in bars]
    y = nice_axis(tops, "seconds", zero=True)
    step = SPAN / (x.high - x.low)
    below = [0.0] * len(bars)
    drawn = []
    for part in parts:
        path = []
        for place, bar in enumerate(bars):
            value = max(0.0, bar.seconds.get(part.name, 0.0))
            if value:
                top, bottom = y.y(below[place] + value), y.y(below[place])
                width = step * bar.count
                left = x.x(bar.at) - width / 2
                path.append(f"M{number(left)} {number(bottom)}V{number(top)}h{number(width)}V{number(bottom)}z")
                below[place] += value
        points = [(bar.at, bar.seconds.get(part.name, 0.0)) for bar in bars]
        values = _values(part.label, part.style, points)
        drawn.append(chart.shape("path", d="".join(path), class_=f"fill {part.style}", **values))
    whole = [(bar.at, top) for bar, top in zip(bars, tops, strict=True)]
    drawn.append(chart.group((), **_values("whole step", "total", whole)))
    keys = [LegendKey(part.label, part.style, shape="box") for part in parts]
    note = f"Each bar is the mean of up to {most} steps." if most > 1 else ""
    return chart.figure(
        title,
        plot(drawn, y, x, height=220, label=f"{title}: {value_text('seconds', sum(tops) / len(tops))} on average"),
        unit=unit,
        keys=keys,
        note=note,
        look="wide",
        data=_read_by_script("bar", "seconds", x),
    )


@dataclass(frozen=True, slots=True)
class StepBar:
    """The mean seconds by part of `count` neighbouring steps around `at`."""

    at: float
    count: int
    seconds: dict[str, float]


def averaged(
    columns: Sequence[tuple[float, Mapping[str, float]]], ends: Sequence[float] = ()
) -> tuple[list[StepBar], int]:
    """The columns as bars, and the largest number of columns per bar. With more than MOST_BARS columns, a bar is the
    mean of neighbours.

    No bar spans one of `ends`, where a round ends. So the last bar of a round may have fewer columns.
    """
    most = -(-len(columns) // MOST_BARS)
    groups: list[list[tuple[float, Mapping[str, float]]]] = []
    for place, column in enumerate(columns):
        before = columns[place - 1][0] if place else 0.0
        crossed = any(before < end <= column[0] for end in ends)
        if not place or len(groups[-1]) == most or crossed:
            groups.append([])
        groups[-1].append(column)
    bars = []
    for group in groups:
        sums: dict[str, float] = {}
        for _, seconds in group:
            for part, value in seconds.items():
                sums[part] = sums.get(part, 0.0) + value
        count = len(group)
        bars.append(StepBar(sum(at for at, _ in group) / count, count, {part: s / count for part, s in sums.items()}))
    return bars, most


def stacked_row(budget: Mapping[str, float], whole: float, label: str = "") -> Markup:
    """Seconds by part as one horizontal bar. The full width stands for `whole` seconds."""
    drawn, left = [], 0.0
    for part in in_order(budget):
        seconds = max(0.0, budget[part.name])
        width = SPAN * seconds / whole if whole > 0 else 0.0
        if width > 0:
            hint = f"{part.label}: {value_text('seconds', seconds)}, {percent(seconds / sum(budget.values()))}"
            drawn.append(chart.shape("rect", hint, x=left, y=0, width=width, height=SPAN, class_=f"fill {part.style}"))
        left += width
    return chart.bar(chart.drawing(drawn, label))


# --- distributions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """One kind of solutions in a histogram: its counts by bin. Kinds `above` the axis are drawn upwards, the others
    downwards."""

    name: str
    style: str
    counts: Sequence[int]
    above: bool


def mirrored_histogram(
    title: str, edges: Sequence[float], kinds: Sequence[HistogramKind], *, threshold: float | None, most: int, note: str
) -> Markup:
    """Counts by score: helpful solutions above the axis, sneaky ones below. `most` is the count of a full half.

    Heights are square roots of counts (Tukey's rootogram). A verifier that is sure of most solutions puts nearly all of
    them into one bar. With linear heights the other bars would be invisible.
    """
    x = XAxis(edges[0], edges[-1], "score", _score_ticks(edges[0], edges[-1]), style="score")
    drawn = [
        shape
        for above in (True, False)
        for shape in _half([kind for kind in kinds if kind.above is above], edges, x, most, above)
    ]
    drawn.append(chart.shape("path", d=f"M0 {number(SPAN / 2)}H{number(SPAN)}", class_="zero"))
    texts = [("helpful", "side up", ""), ("sneaky", "side down", "")]
    if threshold is not None and edges[0] <= threshold <= edges[-1]:
        share = x.x(threshold) / SPAN
        path = f"M{number(SPAN * share)} 0V{number(SPAN)}"
        drawn.append(chart.shape("path", d=path, class_="line verifier threshold"))
        left = share > 0.75  # no room on the right
        side = "← refused" if left else "accepted →"
        place = f"right:{number(100 * (1 - share))}%" if left else f"left:{number(100 * share)}%"
        texts.append((side, "threshold-name", place))
    ticks = tuple(sign * root * math.sqrt(most) for sign, root in ((-1, 1.0), (-1, 0.5), (1, 0.0), (1, 0.5), (1, 1.0)))
    y = _Counts(-math.sqrt(most), math.sqrt(most), ticks)
    counts_text = ", ".join(f"{sum(kind.counts)} {kind.name}" for kind in kinds)
    body = plot(drawn, y, x, height=190, label=f"{title}: {counts_text}", texts=texts, above=len(texts) > 2)
    return chart.figure(title, body, unit="solutions per bar, square-root scale", note=note, look="histogram")


def _half(kinds: Sequence[HistogramKind], edges: Sequence[float], x: XAxis, most: int, above: bool) -> list[Markup]:
    """The kinds of one role, stacked away from the axis. The height of a bar is the square root of its sum."""
    bars: dict[str, list[Markup]] = {kind.name: [] for kind in kinds}
    for place in range(len(edges) - 1):
        total = sum(kind.counts[place] for kind in kinds)
        left, right = x.x(edges[place]), x.x(edges[place + 1])
        gap, base = (right - left) * 0.06, 0.0
        for kind in kinds:
            count = kind.counts[place]
            if not count:
                continue
            height = SPAN / 2 * math.sqrt(total / most) * count / total
            top = SPAN / 2 - base - height if above else SPAN / 2 + base
            hint = f"{count} × {kind.name}, score {edges[place]:.3g} to {edges[place + 1]:.3g}"
            width = right - left - 2 * gap
            bars[kind.name].append(chart.shape("rect", hint, x=left + gap, y=top, width=width, height=height))
            base += height
    return [chart.group(bars[kind.name], class_=f"fill {kind.style}") for kind in kinds]


class _Counts(ValueAxis):
    """Square roots of counts, from the middle in both directions. Labels show the counts."""

    def labels(self) -> list[tuple[float, str]]:
        return [(self.share(tick), f"{tick * tick:.0f}") for tick in self.ticks]


def _score_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    axis = nice_axis([low, high], "number", most_ticks=6)
    return tuple((at, label) for at, (_, label) in zip(axis.ticks, axis.labels(), strict=True) if low <= at <= high)


def dot_strips(
    title: str, rows: Sequence[tuple[str, Sequence[float], str]], style: NumberStyle, *, unit: str, note: str = ""
) -> Markup:
    """Raw samples, one strip per row (label, values, colour's class), with the median as a mark."""
    x = nice_axis([value for _, values, _ in rows for value in values], style, most_ticks=6)
    grid = [chart.shape("path", d=f"M{number(x.x(tick))} 0V{number(SPAN)}", class_="grid") for tick in x.ticks]
    strips = []
    for label, values, colour in rows:
        # Neighbours get different heights in a fixed pattern, because equal samples would hide each other.
        heights = [SPAN * (0.5 + 0.22 * ((place * 2) % 5 - 2) / 2) for place in range(len(values))]
        dots = [
            chart.shape(
                "path", value_text(style, value), d=f"M{number(x.x(value))} {number(height)}h0", class_=f"dot {colour}"
            )
            for value, height in zip(values, heights, strict=True)
        ]
        middle = median(values)
        mark = chart.shape("path", d=f"M{number(x.x(middle))} 80V920", class_=f"median {colour}")
        drawing = chart.drawing([*grid, *dots, mark], f"{label}: median {value_text(style, middle)}")
        strips.append((label, drawing, value_text(style, middle)))
    body = chart.strips(strips, chart.ticks(x.labels()), "median")
    return chart.figure(title, body, unit=unit, note=note, look="wide")


def spark(values: Sequence[float], style: str) -> Markup:
    """A small line without axes; a dot marks its last value. Empty for fewer than two values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup()
    bins = thinned(list(enumerate(finite)), 60)
    low, high = min(point.mean for point in bins), max(point.mean for point in bins)
    places = [SPAN * place / (len(bins) - 1) for place in range(len(bins))]
    heights = [SPAN * (0.9 - 0.8 * (point.mean - low) / ((high - low) or 1.0)) for point in bins]
    shapes = [
        chart.shape("path", d=f"{_path(places, heights)}V{number(SPAN)}H0Z", class_=f"range {style}"),
        chart.shape("path", d=_path(places, heights), class_=f"line {style}"),
        chart.shape("path", d=f"M{number(places[-1])} {number(heights[-1])}h0", class_=f"dot {style}"),
    ]
    return chart.spark(chart.drawing(shapes))
